"""The leaves of a tree by name: what a checkpoint says it holds, and how that differs from what is wanted.

A name is the path of the leaf, `params/layers/mlp/up/kernel`. It is the same for a dataclass field, a dict
key and a sequence index, so a state may change its Python types without losing its checkpoints.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax

_SHOWN_DIFFERENCES = 20


@dataclass(frozen=True)
class LeafType:
    """Shape and dtype of one leaf, as a checkpoint stores them."""

    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


def name_leaves(tree: Any) -> dict[str, Any]:
    """The leaves of any pytree by name, in the tree's own order."""
    named: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        name = "/".join(jax.tree_util.keystr((key,), simple=True) for key in path)
        assert name, "a checkpoint holds a tree of named leaves, not a bare array"
        assert name not in named, f"two leaves are named {name}"
        named[name] = leaf
    return named


def describe_leaves(named: Mapping[str, Any]) -> dict[str, LeafType]:
    """Shape and dtype of each leaf: arrays or ShapeDtypeStructs."""
    return {name: LeafType(tuple(leaf.shape), str(leaf.dtype)) for name, leaf in named.items()}


def describe_differences(stored: Mapping[str, LeafType], wanted: Mapping[str, LeafType]) -> str:
    """One line for each leaf that differs, with both values; empty where nothing does."""
    lines = [
        f"{name}: stored {stored[name]}, needed {wanted[name]}"
        for name in wanted
        if name in stored and stored[name] != wanted[name]
    ]
    lines += [f"{name}: not stored, needed {wanted[name]}" for name in wanted if name not in stored]
    lines += [f"{name}: stored {stored[name]}, not needed" for name in stored if name not in wanted]
    if len(lines) > _SHOWN_DIFFERENCES:
        lines[_SHOWN_DIFFERENCES:] = [f"and {len(lines) - _SHOWN_DIFFERENCES} more"]
    return "\n".join(f"  {line}" for line in lines)
