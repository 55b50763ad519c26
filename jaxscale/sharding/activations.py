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

from jaxscale.config import UserError
from jaxscale.mesh import BATCH_AXES
from jaxscale.sharding.rules import PARAMETER_STRATEGY, Axes

_strategy: ContextVar[Mapping[str, Axes]] = ContextVar("strategy", default=PARAMETER_STRATEGY)
_taken: ContextVar[Axes] = ContextVar("taken", default=())
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
def take_axes(axes: Axes) -> Iterator[None]:
    """Within it, these axes are already split by an enclosing `vmap` and stay out of activations."""
    token = _taken.set(axes)
    try:
        yield
    finally:
        _taken.reset(token)


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
    mesh, taken = get_abstract_mesh(), _taken.get()
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return tuple(name for name, kind in kinds if kind == AxisType.Auto and name not in taken)


def activation_axes(dim: str) -> Axes:
    """The automatic axes larger than 1 that an activation dim lies over."""
    automatic, sizes = automatic_axes(), get_abstract_mesh().shape
    return tuple(axis for axis in _axes_of_dim(dim) if axis in automatic and sizes[axis] > 1)


def weight_axes(dim: str) -> Axes:
    """The automatic axes larger than 1 that a parameter's dim lies over, in ZeRO stage 3."""
    automatic, sizes = automatic_axes(), get_abstract_mesh().shape
    return tuple(axis for axis in _strategy.get()[dim] if axis in automatic and sizes[axis] > 1)


def region_axes(dim: str) -> Axes:
    """The axes larger than 1 that a dim lies over, manual or not: what a region names in its own traffic.

    Batch axes count for `batch` and for `experts`, which tokens travel to along one.
    """
    sizes = get_abstract_mesh().shape
    axes = BATCH_AXES if dim == "batch" else _strategy.get()[dim]
    return tuple(axis for axis in axes if sizes.get(axis, 1) > 1)


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
    """Pins the layout of an activation, as `constrain(x_BTD, "batch", "length", "embed")`; free on 1 device.

    Args:
      dims: a name for each dim of `x`: `batch`, `length`, or one of the strategy.

    Raises:
      UserError: another number of names than dims, an unknown name, or a dim that does not divide, which the
        compiler would replicate without a word.
    """
    if len(dims) != x.ndim:
        raise UserError(f"constrain names {len(dims)} dims {dims} for an activation of shape {x.shape}")
    if not automatic_axes():
        return x
    for dim, size in zip(dims, x.shape, strict=True):
        if dim not in {"batch", "length", *_strategy.get()}:
            raise UserError(
                f"constrain: dim {dim!r} is not known; dims are batch, length, {', '.join(_strategy.get())}. "
                f"Give it axes in the configuration: `strategy: {{{dim}: tensor}}`"
            )
        axes = activation_axes(dim)
        if size % count_shards(axes):
            shown = " × ".join(f"{axis}={get_abstract_mesh().shape[axis]}" for axis in axes)
            raise UserError(
                f"constrain: {dim}={size} of an activation {x.shape} does not divide by {shown}; make it a "
                f"multiple of {count_shards(axes)}, or lay {dim} over fewer axes"
            )
    spec = activation_spec(*dims)
    x = jax.lax.with_sharding_constraint(x, spec)
    if (observations := _watched.get()) is not None and _can_observe():
        note = partial(_observe, dims, x.shape, x.dtype.name, spec, _taken.get())
        # Without a gradient: the primitive that looks has no derivative.
        jax.debug.inspect_array_sharding(
            jax.lax.stop_gradient(x), callback=lambda got: observations.append(note(got))
        )
    return x


def _can_observe() -> bool:
    """Whether JAX reads layouts right: in a region it takes automatic axes for the last ones of the mesh."""
    mesh = get_abstract_mesh()
    kinds = zip(mesh.axis_types, mesh.shape.values(), strict=True)
    automatic = [kind == AxisType.Auto for kind, size in kinds if size > 1]
    return automatic == sorted(automatic)


def _observe(
    dims: tuple[str, ...],
    shape: tuple[int, ...],
    dtype: str,
    asked: PartitionSpec,
    groups: Axes,
    got: Sharding,
) -> Observation:
    """What the compiler made of a constraint; under a `vmap` over groups the array has one dim more."""
    if not groups:
        return Observation(dims, shape, dtype, asked, got)
    assert isinstance(got, NamedSharding), got
    entries = (*asked, *(None,) * (len(shape) - len(asked)))
    count = math.prod(got.mesh.shape[axis] for axis in groups)
    places = [
        Observation(
            (*dims[:place], "groups", *dims[place:]),
            (*shape[:place], count, *shape[place:]),
            dtype,
            PartitionSpec(*entries[:place], groups, *entries[place:]),
            got,
        )
        for place in range(len(shape) + 1)
    ]
    return next((each for each in places if each.is_as_asked), places[0])


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
