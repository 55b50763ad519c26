"""Training, inspection and verification from Python, for a model of your own or a decoder."""

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxscale.config import Config, MeshConfig, UserError, check_origin, load_config
from jaxscale.mesh import count_asked, simulate_devices

if TYPE_CHECKING:
    import jax
    import optax

    from jaxscale.inspection.report import Inspection
    from jaxscale.models.model import Model
    from jaxscale.training.loop import Result
    from jaxscale.verify import Verification

VERIFY_DEVICES = 8


class Trainer:
    """A model and a configuration, and what can be done with them.

    Make it before anything of JAX runs: where there is no accelerator, devices are simulated on the CPU, as
    many as the mesh needs (8 at least, for `verify`).

    Args:
      model: from `from_nnx`, `from_linen` or `from_functions`; None: the one that `config` describes.
      config: a YAML file, or a `Config`. The file needs no `model` section where a model is given.
      overrides: such as `["mesh.fsdp=4", "steps=1000"]`.
      optimizer: any of optax, for `optimizer.name: python`. Its updates are multiplied by the run's learning
        rate, which is 1 unless the configuration says otherwise, and added (docs/optimizers.md).

    Raises:
      UserError: the configuration is wrong, it and the caller both bring a model, or only one of them says
        that the optimizer comes from Python.
    """

    def __init__(
        self,
        model: "Model | None",
        config: str | Path | Config,
        overrides: Sequence[str] = (),
        *,
        optimizer: "optax.GradientTransformation | None" = None,
    ):
        if isinstance(config, Config):
            if overrides:
                raise UserError(f"overrides {list(overrides)} are for a file; change the Config itself")
        else:
            config = load_config(config, overrides, needs_model=model is None)
        if model is not None and config.model is not None:
            raise UserError(
                "model: the configuration describes a model, and another one comes from Python; leave out one"
            )
        check_origin(config.optimizer, is_given=optimizer is not None)
        self.model, self.config, self.optimizer = model, config, optimizer
        simulate_devices(MeshConfig(data=max(count_asked(config.mesh), VERIFY_DEVICES)))

    def fit(self, *, quiet: bool = False) -> "Result":
        """Runs the configuration to its end, from wherever its run directory left off (`jaxscale train`)."""
        from jaxscale.metrics import open_console
        from jaxscale.training.loop import train

        console = None if quiet else open_console()
        return train(
            self.config, console, model=self.model, optimizer=self.optimizer, devices=self._find_devices()
        )

    def inspect(self) -> "Inspection":
        """What lies where and what the compiled step sends; prints the tables (`jaxscale inspect`)."""
        from rich.console import Console

        from jaxscale.data.dataset import find_vocab
        from jaxscale.inspection.inspect import inspect_setup
        from jaxscale.inspection.tables import render_tables
        from jaxscale.training.setup import find_mesh, make_setup

        config, mesh = find_mesh(self.config, self._find_devices())
        inspection = inspect_setup(make_setup(config, mesh, find_vocab(config), self.model, self.optimizer))
        Console(highlight=False).print(render_tables(inspection))
        return inspection

    def verify(self, *, quiet: bool = False, **options: Any) -> "Verification":
        """The sharded step against one device; prints a table (`jaxscale verify`).

        Args:
          options: of `jaxscale.verify.verify_model`, such as `fp64=True`.
        """
        import sys

        from jaxscale.verify import verify_model
        from jaxscale.verify.tables import print_verification, show_progress

        with nullcontext() if quiet else show_progress(sys.stderr) as tell:
            verification = verify_model(
                self.config, self.model, optimizer=self.optimizer, tell=tell, **options
            )
        if not quiet:
            print_verification(verification, sys.stdout)
        return verification

    def _find_devices(self) -> "list[jax.Device]":
        """All accelerators; of simulated devices as many as the mesh asks for."""
        import jax

        devices = jax.devices()
        return devices[: count_asked(self.config.mesh)] if devices[0].platform == "cpu" else devices
