"""Layout of activations: dim name -> mesh axes, applied to the ambient mesh.

Model code says `constrain(x_BTD, "batch", "length", "embed")` and knows no mesh. The ambient mesh
(`jax.set_mesh`) and strategy (`use_strategy`) decide. A dim lies over the axes that the strategy gives to
parameters, but for those that the batch takes; axes that an enclosing `shard_map` made manual are already
split and stay out.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec, Sharding, get_abstract_mesh

from jaxscale.mesh import BATCH_AXES
from jaxscale.sharding.rules import PARAMETER_STRATEGY, Axes

_strategy: ContextVar[Mapping[str, Axes]] = ContextVar("strategy", default=PARAMETER_STRATEGY)
_watched: ContextVar["list[Observation] | None"] = ContextVar("watched", default=None)


@dataclass(frozen=True)
class Observation:
    """A constrained activation, as asked and as the compiler laid it."""

    dims: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    asked: PartitionSpec
    got: Sharding

    @property
    def is_as_asked(self) -> bool:
        assert isinstance(self.got, NamedSharding), self.got
        return self.got.is_equivalent_to(NamedSharding(self.got.mesh, self.asked), len(self.shape))


@contextmanager
def use_strategy(strategy: Mapping[str, Axes]) -> Iterator[None]:
    """Within it, programs are traced with this strategy (dim name -> axes)."""
    token = _strategy.set(strategy)
    try:
        yield
    finally:
        _strategy.reset(token)


@contextmanager
def watch_constraints() -> Iterator[list[Observation]]:
    """Programs traced and compiled within it report how the compiler laid each constrained activation.

    The list fills while a program compiles. Such a program carries addresses of this process, so the
    persistent compilation cache cannot serve it: for inspection, not for training.
    """
    observations: list[Observation] = []
    token = _watched.set(observations)
    try:
        yield observations
    finally:
        _watched.reset(token)


def automatic_axes() -> Axes:
    """Axes of the ambient mesh that the compiler still splits by itself, those of size 1 too."""
    mesh = get_abstract_mesh()
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return tuple(name for name, kind in kinds if kind == AxisType.Auto)


def activation_axes(dim: str) -> Axes:
    """The automatic axes larger than 1 that an activation dim lies over."""
    automatic, sizes = automatic_axes(), get_abstract_mesh().shape
    return tuple(axis for axis in _axes_of_dim(dim) if axis in automatic and sizes[axis] > 1)


def weight_axes(dim: str) -> Axes:
    """The automatic axes larger than 1 that a parameter's dim lies over, in ZeRO stage 3."""
    automatic, sizes = automatic_axes(), get_abstract_mesh().shape
    return tuple(axis for axis in _strategy.get()[dim] if axis in automatic and sizes[axis] > 1)


def _axes_of_dim(dim: str) -> Axes:
    if dim == "batch":
        return BATCH_AXES
    if dim == "length":
        return ()
    return tuple(axis for axis in _strategy.get()[dim] if axis not in BATCH_AXES)


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
    spec = activation_spec(*dims)
    x = jax.lax.with_sharding_constraint(x, spec)
    if (observations := _watched.get()) is not None:
        note = partial(Observation, dims, x.shape, x.dtype.name, spec)
        # Without a gradient: the primitive that looks has no derivative.
        jax.debug.inspect_array_sharding(
            jax.lax.stop_gradient(x), callback=lambda got: observations.append(note(got))
        )
    return x


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
