"""Where optimizer state lies: derived from the parameter a leaf belongs to, for any optax optimizer."""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import optax
from jax.sharding import NamedSharding, PartitionSpec

from jaxscale.config import UserError
from jaxscale.sharding.rules import iterate_leaves
from jaxscale.sharding.zero import Layouts

HOST_MEMORY = "pinned_host"
SMALL_ELEMENTS = 1024  # counters, schedules, polynomial coefficients: whole on every device


@dataclass(frozen=True)
class StateLeaf:
    """A leaf of the optimizer state and the parameter it belongs to."""

    path: str
    shape: tuple[int, ...]
    dtype: Any
    parameter: str | None
    """Path of the parameter; None for what belongs to none (counters)."""
    sharding: NamedSharding


def describe_optimizer(
    optimizer: optax.GradientTransformation, shapes: Any, layouts: Layouts
) -> tuple[list[StateLeaf], Any]:
    """Each leaf of the optimizer state with its layout, and the structure to build the tree again.

    A leaf belongs to the parameter whose path ends its own (`.../mu/layers/mlp/up/kernel`). One of the same
    shape lies like it; one with some of its dims, the others dropped or of size 1 (factored moments), takes
    those dims' layout; a placeholder is whole.

    Raises:
      UserError: leaves of more than SMALL_ELEMENTS elements that follow no parameter: nothing says how they
        would be laid, and nothing is replicated without a word.
    """
    parameters = dict(iterate_leaves(layouts.moments))
    state = jax.eval_shape(optimizer.init, shapes)
    leaves, homeless = [], []
    for path, leaf in iterate_leaves(state):
        owner = find_owner(path, parameters)
        spec = _follow(leaf.shape, layouts.leaves[owner].shape, parameters[owner].spec) if owner else None
        if spec is None:
            spec = PartitionSpec()
            if leaf.size > SMALL_ELEMENTS:
                homeless.append(f"{path} {leaf.shape}" + (f", beside {owner}" if owner else ""))
        leaves.append(StateLeaf(path, leaf.shape, leaf.dtype, owner, NamedSharding(layouts.mesh, spec)))
    if homeless:
        raise UserError(
            "the optimizer keeps state that follows no parameter in shape, so no layout can be derived:\n  "
            + "\n  ".join(homeless)
            + "\n  use an optimizer whose state is shaped like the parameters, or has some of their dims"
        )
    return leaves, jax.tree.structure(state)


def lay_optimizer(
    optimizer: optax.GradientTransformation, shapes: Any, layouts: Layouts, *, on_host: bool = False
) -> Any:
    """Sharding of each leaf of the optimizer state, as a tree of its structure.

    With `on_host`, leaves that belong to a parameter lie in the host's pinned memory.

    Left to itself `jit(optimizer.init)` puts all moments on one device, since zeros depend on no input.
    """
    leaves, structure = describe_optimizer(optimizer, shapes, layouts)
    return structure.unflatten(
        leaf.sharding.with_memory_kind(HOST_MEMORY) if on_host and leaf.parameter else leaf.sharding
        for leaf in leaves
    )


def find_owner(path: str, parameters: Mapping[str, Any]) -> str | None:
    """The parameter whose path is the longest end of a state leaf's path."""
    parts = path.split("/")
    ends = ("/".join(parts[start:]) for start in range(len(parts)))
    return next((end for end in ends if end in parameters), None)


def _follow(shape: tuple[int, ...], owner: tuple[int, ...], spec: PartitionSpec) -> PartitionSpec | None:
    """The layout of a state leaf that has the parameter's dims, or some of them in order; None for neither.

    Dims that were averaged over may be dropped or have size 1. Where several choices of dims have the same
    sizes, any is legal: the one laid over most axes is taken.
    """
    entries = (*spec, *(None,) * (len(owner) - len(spec)))
    if len(shape) == len(owner) and all(size in (1, full) for size, full in zip(shape, owner, strict=True)):
        kept = (size == full for size, full in zip(shape, owner, strict=True))
        return PartitionSpec(*(entry if keep else None for entry, keep in zip(entries, kept, strict=True)))
    choices = [
        PartitionSpec(*(entries[dim] for dim in dims))
        for dims in itertools.combinations(range(len(owner)), len(shape))
        if tuple(owner[dim] for dim in dims) == shape
    ]
    return max(choices, key=lambda choice: sum(entry is not None for entry in choice), default=None)
