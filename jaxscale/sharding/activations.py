"""Layout of activations: dim name -> mesh axes, applied to the ambient mesh.

Model code says `constrain(x_BTD, "batch", "length", "embed")` and knows no mesh. The ambient mesh
(`jax.set_mesh`) decides; axes that an enclosing `shard_map` made manual are already split and stay out.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import AxisType, PartitionSpec, get_abstract_mesh

from jaxscale.mesh import BATCH_AXES
from jaxscale.sharding.rules import REPLICATED, Axes

ACTIVATION_STRATEGY: Mapping[str, Axes] = {
    "batch": BATCH_AXES,
    "length": REPLICATED,
    "embed": REPLICATED,
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "head": REPLICATED,
    "mlp": ("tensor",),
    "vocab": ("tensor",),
}


def automatic_axes() -> Axes:
    """Axes of the ambient mesh that the compiler still splits by itself, those of size 1 too."""
    mesh = get_abstract_mesh()
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return tuple(name for name, kind in kinds if kind == AxisType.Auto)


def activation_axes(dim: str) -> Axes:
    """The automatic axes larger than 1 that an activation dim lies over."""
    automatic, sizes = automatic_axes(), get_abstract_mesh().shape
    return tuple(axis for axis in ACTIVATION_STRATEGY[dim] if axis in automatic and sizes[axis] > 1)


def count_shards(axes: Axes) -> int:
    """Shards that these axes of the ambient mesh make."""
    return math.prod(get_abstract_mesh().shape[axis] for axis in axes)


def activation_spec(*dims: str) -> PartitionSpec:
    return PartitionSpec(*(activation_axes(dim) or None for dim in dims))


def constrain(x: jax.Array, *dims: str) -> jax.Array:
    """Pins the layout of an activation, one dim name for each of its dims; no effect on one device.

    A dim that does not divide would be replicated by the compiler without a word, so it is refused.
    """
    if not automatic_axes():
        return x
    for dim, size in zip(dims, x.shape, strict=True):
        axes = activation_axes(dim)
        assert size % count_shards(axes) == 0, f"{dim}={size} does not divide by {axes}: validation missed it"
    return jax.lax.with_sharding_constraint(x, activation_spec(*dims))


def run_per_shard(function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """An inner region: `function` sees its shard over every automatic axis, and schedules its own traffic.

    Axes of size 1 are made manual too: Pallas kernels refuse to lower beside any automatic axis. Gradients
    are never taken through a reduction inside (`check_vma=False` would get them wrong): functions that reduce
    bring their own derivative.
    """
    axes = automatic_axes()
    if not axes:
        return function
    return jax.shard_map(
        function, in_specs=in_specs, out_specs=out_specs, axis_names=set(axes), check_vma=False
    )
