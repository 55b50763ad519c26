"""Devices for a command: real ones where there are any, else as many simulated ones as the mesh needs."""

from jaxscale.config import MeshConfig, UserError


def prepare_devices(mesh: MeshConfig) -> str | None:
    """Call before anything of JAX runs; returns what to tell the user, if anything.

    Raises:
      UserError: JAX cannot start a backend.
    """
    from jaxscale.mesh import simulate_devices

    simulate_devices(mesh)
    import jax

    try:
        platform, count = jax.default_backend(), jax.device_count()
    except RuntimeError as error:
        raise UserError(
            f"JAX cannot start: {error}. Unset JAX_PLATFORMS, or install the extra for this machine's "
            "devices (pip install 'jaxscale[cuda13]' or 'jaxscale[tpu]')"
        ) from None
    if platform == "cpu" and count > 1:
        return f"no accelerator found: simulating {count} devices on this machine's CPU"
    return None
