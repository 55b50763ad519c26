"""A kernel that regions of our own use: every device's own copy, and its gradient brought together again.

A region takes a kernel whole over the batch axes. Left to `shard_map`, its gradient would be all-reduced
there and cut afterwards; here it is scattered at once to where the kernel lies.
"""

from functools import partial
from typing import NamedTuple

import jax
from jax import lax
from jax.sharding import PartitionSpec

from jaxscale.sharding.activations import activation_axes, run_per_shard, weight_axes
from jaxscale.sharding.rules import Axes


class _Split(NamedTuple):
    """How a kernel lies at rest, and as copies; over automatic axes larger than 1."""

    at_rest: tuple[Axes, ...]
    gathered: tuple[Axes, ...]
    """Of each dim, the batch axes that a copy is whole over."""
    kept: tuple[Axes, ...]
    """Of each dim, the axes that a copy still lies over."""
    copies: Axes
    """Axes over which devices have copies of their own."""

    @classmethod
    def read(cls, dims: tuple[str, ...]) -> "_Split":
        batch = activation_axes("batch")
        at_rest = tuple(weight_axes(dim) for dim in dims)
        kept = tuple(
            tuple(axis for axis in axes if axis not in batch or dim == "experts")
            for axes, dim in zip(at_rest, dims, strict=True)
        )
        gathered = tuple(
            tuple(axis for axis in axes if axis not in stay) for axes, stay in zip(at_rest, kept, strict=True)
        )
        laid = {axis for axes in kept for axis in axes}
        return cls(at_rest, gathered, kept, tuple(axis for axis in batch if axis not in laid))


def copies_spec(dims: tuple[str, ...]) -> PartitionSpec:
    """Layout of what `copy_kernel` returns."""
    split = _Split.read(dims)
    return PartitionSpec(split.copies or None, *_entries(split.kept))


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def copy_kernel(kernel: jax.Array, dims: tuple[str, ...]) -> jax.Array:
    """Every device's copy of a kernel, gathered over the batch axes; experts stay where they lie.

    Args:
      kernel: laid in any way; `dims` names its dims as its rule does, without `layers`.

    Returns:
      [copies, ...] that lies as `copies_spec`: one copy on each device.
    """
    return _copy(kernel, dims)[0]


def _copy(kernel: jax.Array, dims: tuple[str, ...]) -> tuple[jax.Array, None]:
    split = _Split.read(dims)
    copy = run_per_shard(
        lambda kernel: kernel[None],
        in_specs=PartitionSpec(*_entries(split.kept)),
        out_specs=copies_spec(dims),
    )
    return copy(kernel), None


def _scatter(dims: tuple[str, ...], _: None, d_copies: jax.Array) -> tuple[jax.Array]:
    split = _Split.read(dims)
    scattered = {axis for axes in split.gathered for axis in axes}
    others = tuple(axis for axis in split.copies if axis not in scattered)

    def reduce(d_copy: jax.Array) -> jax.Array:
        d_kernel = d_copy[0]
        for dim, axes in enumerate(split.gathered):
            if axes:
                d_kernel = lax.psum_scatter(d_kernel, axes, scatter_dimension=dim, tiled=True)
        return lax.psum(d_kernel, others) if others else d_kernel

    return (
        run_per_shard(reduce, in_specs=copies_spec(dims), out_specs=PartitionSpec(*_entries(split.at_rest)))(
            d_copies
        ),
    )


copy_kernel.defvjp(_copy, _scatter)


def _entries(dims: tuple[Axes, ...]) -> list[Axes | None]:
    return [axes or None for axes in dims]
