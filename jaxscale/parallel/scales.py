"""Scales of fp8 for a region of our own: every device's own copy, and one maximum of what comes back.

What flows back to a scale are the largest magnitudes that its matmul saw (`jaxscale.numerics.fp8`). Those of
an input that is whole in a `shard_map` would be summed over its axes.
"""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxscale.sharding.activations import automatic_axes, count_shards


def scales_spec() -> PartitionSpec:
    """Layout of what `copy_scales` returns."""
    return PartitionSpec(automatic_axes() or None)


@jax.custom_vjp
def copy_scales(scales: jax.Array) -> jax.Array:
    """[copies, ...]: a copy for each device of a region, laid as `scales_spec`.

    Its derivative is the largest of what comes back from each device.
    """
    copies = jnp.broadcast_to(scales, (count_shards(automatic_axes()), *scales.shape))
    return jax.lax.with_sharding_constraint(copies, scales_spec()) if automatic_axes() else copies


def _copy(scales: jax.Array) -> tuple[jax.Array, None]:
    return copy_scales(scales), None


def _join(_: None, amaxes: jax.Array) -> tuple[jax.Array]:
    return (amaxes.max(0),)


copy_scales.defvjp(_copy, _join)
