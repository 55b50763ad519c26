"""ZeRO stages as placements (Rajbhandari 2020): one algorithm, four layouts.

| stage | optimizer state | gradient accumulators | parameters |
|-------|-----------------|-----------------------|------------|
| 0     | whole           | whole                 | whole      |
| 1     | over `fsdp`     | whole                 | whole      |
| 2     | over `fsdp`     | over `fsdp`           | whole      |
| 3     | over `fsdp`     | over `fsdp`           | over `fsdp`|

"Whole" is on `fsdp` alone: `tensor`, `expert` and `pipe` shard a leaf in every stage.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxscale.mesh import BATCH_AXES
from jaxscale.sharding.rules import PARAMETER_STRATEGY, Axes, Rules, make_specs

ZERO_AXIS = "fsdp"


@dataclass(frozen=True)
class Layouts:
    """Where the trees of a run lie: three trees of `NamedSharding`, shaped like the parameters."""

    params: Any
    gradients: Any
    moments: Any
    mesh: Mesh

    @property
    def replicated(self) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec())

    @property
    def reduction_axes(self) -> Axes:
        """Batch axes, larger than 1, over which no gradient is laid.

        The step is manual over them, so that gradients are reduced over them once, after the microbatches.
        Axes of size 1 stay out: reducing over one beside automatic axes dies in XLA's partitioner.
        """
        laid = {axis for sharding in jax.tree.leaves(self.gradients) for axis in spec_axes(sharding.spec)}
        return tuple(axis for axis in BATCH_AXES if self.mesh.shape[axis] > 1 and axis not in laid)


def spec_axes(spec: PartitionSpec) -> Axes:
    """All mesh axes of a spec, in order."""
    return tuple(axis for entry in spec for axis in _entry_axes(entry))


def plan_layouts(
    shapes: Any, rules: Rules, mesh: Mesh, stage: int, strategy: Mapping[str, Axes] = PARAMETER_STRATEGY
) -> Layouts:
    """Lays parameters, gradient accumulators and optimizer moments by rules and ZeRO stage.

    Args:
      shapes: parameters as nested dicts of `ShapeDtypeStruct`.

    Raises:
      UserError: the rules do not fit the parameters or the mesh; every problem is listed.
    """
    full = make_specs(shapes, rules, dict(mesh.shape), strategy)
    whole = {path: _without_axis(spec, ZERO_AXIS) for path, spec in full.items()}

    def shard(sharded: bool) -> Any:
        specs = full if sharded else whole
        return jax.tree_util.tree_map_with_path(
            lambda path, _: NamedSharding(
                mesh, specs[jax.tree_util.keystr(path, simple=True, separator="/")]
            ),
            shapes,
        )

    return Layouts(
        params=shard(stage >= 3), gradients=shard(stage >= 2), moments=shard(stage >= 1), mesh=mesh
    )


def _without_axis(spec: PartitionSpec, dropped: str) -> PartitionSpec:
    kept = [tuple(axis for axis in _entry_axes(entry) if axis != dropped) or None for entry in spec]
    return PartitionSpec(*kept)


def _entry_axes(entry: str | Axes | None) -> Axes:
    """`PartitionSpec` keeps a single axis as a string."""
    return (entry,) if isinstance(entry, str) else entry or ()
