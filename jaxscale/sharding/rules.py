"""Partition rules: parameter path -> dim names, dim name -> mesh axes.

A *rule table* stands beside a model and names the dims of each parameter; a *strategy* says over which mesh
axes each dim lies. Both fail closed: there is no catch-all, and replication is asked for by name.

Dim letters used for array suffixes everywhere (`q_BTNH`):
  B batch, T position, S key position, D embed, F mlp, N query heads, K key/value heads, H head dim,
  V vocab, L layer, E expert, C capacity, M microbatch.
"""

import math
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

import jax
from jax.sharding import PartitionSpec

from jaxscale.config import UserError

Axes = tuple[str, ...]
REPLICATED: Axes = ()

# Dims of parameters. The ZeRO stage may still take the `fsdp` axis out (`jaxscale.sharding.zero`).
PARAMETER_STRATEGY: Mapping[str, Axes] = {
    "vocab": ("tensor",),
    "positions": ("tensor",),
    "embed": ("fsdp",),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "mlp": ("tensor",),
    "experts": ("expert",),
    "layers": ("pipe",),
    "head": REPLICATED,
    "norm": REPLICATED,
}

Rules = Mapping[str, tuple[str, ...]]


def iterate_leaves(tree: Any) -> Iterator[tuple[str, Any]]:
    """Yields (path, leaf) of nested dicts, path as `layers/attention/query/kernel`."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        yield jax.tree_util.keystr(path, simple=True, separator="/"), leaf


def match_rules(shapes: Any, rules: Rules) -> dict[str, tuple[str, ...]]:
    """The dims of each leaf of a tree of arrays or `ShapeDtypeStruct`s.

    Args:
      shapes: nested dicts of things with a `.shape`.
      rules: path pattern (`*` stands for one path segment or a part of it) -> dim names.

    Raises:
      UserError: lists every leaf without exactly one rule, every rule without a leaf and every rank mismatch.
    """
    problems: list[str] = []
    dims: dict[str, tuple[str, ...]] = {}
    used: set[str] = set()
    for path, leaf in iterate_leaves(shapes):
        matching = [pattern for pattern in rules if _matches(path, pattern)]
        used.update(matching)
        if len(matching) != 1:
            said = " and ".join(repr(pattern) for pattern in matching) or "no rule"
            problems.append(f"{path} {leaf.shape}: matched by {said}; exactly one rule is needed")
        elif len(rules[matching[0]]) != len(leaf.shape):
            problems.append(
                f"{path} {leaf.shape}: rule {matching[0]!r} names {len(rules[matching[0]])} dims "
                f"{rules[matching[0]]} for an array of rank {len(leaf.shape)}"
            )
        else:
            dims[path] = rules[matching[0]]
    problems += [f"rule {pattern!r} matches no parameter" for pattern in rules if pattern not in used]
    _raise_all(problems)
    return dims


def make_specs(
    shapes: Any,
    rules: Rules,
    axis_sizes: Mapping[str, int],
    strategy: Mapping[str, Axes] = PARAMETER_STRATEGY,
) -> dict[str, PartitionSpec]:
    """The full layout (ZeRO stage 3) of each leaf, by path.

    Raises:
      UserError: as `match_rules`, and for unknown dims or axes, an axis used twice in a leaf, and a dim that
        does not divide by its axes; all at once.
    """
    dims_by_path = match_rules(shapes, rules)
    problems: list[str] = []
    specs: dict[str, PartitionSpec] = {}
    for path, leaf in iterate_leaves(shapes):
        entries, leaf_problems = _lay_leaf(leaf.shape, dims_by_path[path], axis_sizes, strategy)
        problems += [f"{path} {leaf.shape}: {problem}" for problem in leaf_problems]
        specs[path] = PartitionSpec(*entries)
    _raise_all(problems)
    return specs


def _lay_leaf(
    shape: tuple[int, ...], dims: tuple[str, ...], axis_sizes: Mapping[str, int], strategy: Mapping[str, Axes]
) -> tuple[list[Axes | None], list[str]]:
    entries: list[Axes | None] = []
    problems: list[str] = []
    used: dict[str, str] = {}
    for dim, size in zip(dims, shape, strict=True):
        if dim not in strategy:
            problems.append(f"dim {dim!r} is not in the strategy; its dims are {', '.join(strategy)}")
            continue
        axes = strategy[dim]
        if unknown := [axis for axis in axes if axis not in axis_sizes]:
            problems.append(
                f"dim {dim!r} lies over {unknown[0]!r}; the mesh axes are {', '.join(axis_sizes)}"
            )
            continue
        problems += [
            f"dims {used[axis]!r} and {dim!r} both lie over axis {axis!r}" for axis in axes if axis in used
        ]
        used |= dict.fromkeys(axes, dim)
        ways = math.prod(axis_sizes[axis] for axis in axes)
        if size % ways:
            shown = " × ".join(f"{axis}={axis_sizes[axis]}" for axis in axes)
            below, above = size // ways * ways, (size // ways + 1) * ways
            nearest = f"{below} and {above} do" if below else f"{above} does"
            problems.append(f"{dim}={size} does not divide by {shown}; {nearest}, or lower the axis")
        entries.append(axes or None)
    return entries, problems


def _matches(path: str, pattern: str) -> bool:
    parts, pattern_parts = path.split("/"), pattern.split("/")
    return len(parts) == len(pattern_parts) and all(map(fnmatchcase, parts, pattern_parts))


def _raise_all(problems: list[str]) -> None:
    if problems:
        unique = list(dict.fromkeys(problems))
        raise UserError(f"the partition rules have {len(unique)} problem(s)\n  " + "\n  ".join(unique))
