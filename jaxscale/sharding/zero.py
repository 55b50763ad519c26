"""ZeRO stages as placements (Rajbhandari 2020): one algorithm, four layouts.

| stage | kept parameters and optimizer state | gradient accumulators | weights in use                       |
|-------|-------------------------------------|-----------------------|--------------------------------------|
| 0     | whole                               | whole                 | whole                                |
| 1     | over `fsdp`, `data`, `expert`       | whole                 | whole, gathered once a step          |
| 2     | over `fsdp`, `data`, `expert`       | over `fsdp`           | whole, gathered once a step          |
| 3     | over `fsdp`, `data`, `expert`       | over `fsdp`           | over `fsdp`, gathered layer by layer |

The parameters that a run keeps are the optimizer's: ZeRO's fp32 master weights. The *weights in use* are
their copy in the compute format, made once a step, gathered after the cast. With `keep_gathered`, stage 3
gathers them once a step too. "Whole" is on the ZeRO axes alone: what a strategy lays over `tensor`, or
experts over `expert`, stays so in every stage. What a rule or a strategy replicates by name is never laid.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jaxscale.mesh import BATCH_AXES
from jaxscale.sharding.rules import Axes, Leaf, iterate_leaves

ZERO_AXIS = "fsdp"
STATE_AXES = ("data", "expert")  # join `fsdp` for what the optimizer keeps


@dataclass(frozen=True)
class Layouts:
    """Where the trees of a run lie: trees of `NamedSharding`, shaped like the parameters."""

    leaves: Mapping[str, Leaf]
    """The rule behind each parameter, by path."""
    params: Any
    """Parameters as the run keeps them."""
    weights: Any
    """Weights in use during a step."""
    gradients: Any
    """Gradient accumulators."""
    mesh: Mesh | AbstractMesh
    split_dims: frozenset[str] = frozenset()
    """Dims of parameters that the model itself takes apart over devices (`Model.split_dims`)."""

    @property
    def moments(self) -> Any:
        """Optimizer state that is shaped like its parameter lies like it."""
        return self.params

    @property
    def replicated(self) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec())

    @property
    def reduction_axes(self) -> Axes:
        """Batch axes, larger than 1, over which no gradient is laid that has to be gathered for use.

        Gradients are reduced over them once, after the microbatches. Axes of size 1 stay out: reducing over
        one beside automatic axes dies in XLA's partitioner. Dims that the model takes apart by itself
        (`split_dims`) do not count: each device keeps the gradient of its own part.
        """
        laid = {
            axis
            for leaf, sharding in zip(self.leaves.values(), jax.tree.leaves(self.gradients), strict=True)
            for name, axes in zip(leaf.dims, dim_axes(sharding.spec, len(leaf.shape)), strict=True)
            for axis in axes
            if name not in self.split_dims
        }
        return tuple(axis for axis in BATCH_AXES if self.mesh.shape[axis] > 1 and axis not in laid)

    def restrict(self, spec: PartitionSpec, *, to_reduction: bool) -> PartitionSpec:
        """A spec with the reduction axes alone, or without them."""
        axes = set(self.reduction_axes)
        kept = [
            tuple(axis for axis in each if (axis in axes) == to_reduction) or None
            for each in dim_axes(spec, len(spec))
        ]
        return PartitionSpec(*kept)


def spec_axes(spec: PartitionSpec) -> Axes:
    """All mesh axes of a spec, in order."""
    return tuple(axis for axes in dim_axes(spec, len(spec)) for axis in axes)


def dim_axes(spec: PartitionSpec, rank: int) -> list[Axes]:
    """Mesh axes of each dim of an array; a `PartitionSpec` may be shorter, and keeps one axis as text.

    A dim that a user's own constraint leaves to the compiler (`UNCONSTRAINED`) is asked over no axis.
    """
    asked = (None if entry is PartitionSpec.UNCONSTRAINED else entry for entry in spec)
    entries = [(entry,) if isinstance(entry, str) else tuple(entry or ()) for entry in asked]
    return [*entries, *[()] * (rank - len(entries))]


def lay_stages(
    leaves: Mapping[str, Leaf],
    shapes: Any,
    mesh: Mesh | AbstractMesh,
    stage: int,
    *,
    keep_gathered: bool,
    split_dims: frozenset[str] = frozenset(),
) -> Layouts:
    """The layouts of a ZeRO stage, from leaves whose full specs are known to be legal."""
    structure = jax.tree.structure(shapes)
    paths = [path for path, _ in iterate_leaves(shapes)]

    def lay(choose: Callable[[Leaf], PartitionSpec]) -> Any:
        return jax.tree.unflatten(structure, [NamedSharding(mesh, choose(leaves[path])) for path in paths])

    def whole(leaf: Leaf) -> PartitionSpec:
        return _without_axis(leaf.spec, ZERO_AXIS)

    def over_fsdp(leaf: Leaf) -> PartitionSpec:
        return leaf.spec

    gradient = over_fsdp if stage >= 2 else whole

    def over_all(leaf: Leaf) -> PartitionSpec:
        return _spread(leaf, gradient(leaf), mesh.shape)

    return Layouts(
        leaves=leaves,
        params=lay(over_all if stage >= 1 else whole),
        weights=lay(over_fsdp if stage >= 3 and not keep_gathered else whole),
        gradients=lay(gradient),
        mesh=mesh,
        split_dims=split_dims,
    )


def _spread(leaf: Leaf, gradient: PartitionSpec, axis_sizes: Mapping[str, int]) -> PartitionSpec:
    """A leaf's full layout with `data` and `expert` added where the size divides: beside `fsdp` if it can be,
    else on another dim that is laid, but for layers, which `pipe` alone takes apart.

    On a dim, the axes that the gradient lies over come first, so that each device's part lies within the
    gradient that it holds; the others follow in the order of the mesh, so that XLA sees one reduce-scatter.
    """
    entries = dim_axes(leaf.spec, len(leaf.shape))
    for axis in STATE_AXES:
        if axis in spec_axes(leaf.spec):
            continue
        dims = sorted(
            (dim for dim, axes in enumerate(entries) if axes and "pipe" not in axes),
            key=lambda dim: ZERO_AXIS not in entries[dim],
        )
        for dim in dims:
            axes = (*entries[dim], axis)
            if leaf.shape[dim] % math.prod(axis_sizes[each] for each in axes) == 0:
                entries[dim] = axes
                break
    kept = dim_axes(gradient, len(leaf.shape))
    ordered = [
        (*first, *sorted(set(axes) - set(first), key=list(axis_sizes).index))
        for axes, first in zip(entries, kept, strict=True)
    ]
    return PartitionSpec(*(axes or None for axes in ordered))


def _without_axis(spec: PartitionSpec, dropped: str) -> PartitionSpec:
    kept = [tuple(axis for axis in axes if axis != dropped) or None for axes in dim_axes(spec, len(spec))]
    return PartitionSpec(*kept)
