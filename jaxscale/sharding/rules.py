"""Partition rules: parameter path -> dim names, dim name -> mesh axes.

A *rule table* stands beside a model and names the dims of each parameter; a *strategy* says over which mesh
axes each dim lies. Both fail closed: there is no catch-all, replication is asked for by name, and everything
that does not fit is said at once (`jaxscale.sharding.rule_forms`, `jaxscale.sharding.rule_problems`).

Dim letters used for array suffixes everywhere (`q_BTNH`):
  B batch, T position, S key position, D embed, F mlp, N query heads, K key/value heads, H head dim,
  V vocab, L layer, E expert, C capacity, M microbatch.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from jaxscale.config import UserError
from jaxscale.sharding import rule_problems
from jaxscale.sharding.rule_forms import (
    find_axes_problems,
    find_dims_problems,
    find_pattern_problems,
    find_regex_problem,
)
from jaxscale.sharding.rule_problems import Problems, show_rule

Axes = tuple[str, ...]


class Replicated(tuple[str, ...]):
    """Replication, asked for by name.

    As a rule: every dim of the array, whatever its rank, is whole on every device. In a strategy: the dim
    lies over no axis. A plain `()` as the rule of an array with dims is a rank mismatch.
    """

    __slots__ = ()

    def __repr__(self) -> str:
        return "REPLICATED"


REPLICATED = Replicated()

# Dims of parameters. The ZeRO stage may still take the `fsdp` axis out (`jaxscale.sharding.zero`).
PARAMETER_STRATEGY: Mapping[str, Axes] = {
    "vocab": ("tensor",),
    "positions": ("tensor",),
    "embed": ("fsdp",),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "mlp": ("tensor",),
    "experts": ("expert",),
    "router": REPLICATED,
    "layers": ("pipe",),
    "head": REPLICATED,
    "norm": REPLICATED,
}


class Rules(Mapping[str, tuple[str, ...]]):
    """A rule table: path pattern -> one dim name for each dim, or `REPLICATED`.

    A pattern is a path such as `layers/mlp/up/kernel`, in which `*` stands for one segment or a part of one;
    no other character is special. The form is checked at once, and what is wrong is kept for `lay_leaves` to
    say together with all else.

    Raises:
      UserError: `table` is no table.
    """

    problems: tuple[tuple[object, str], ...]
    """(Pattern, what is wrong with the form of its rule)."""
    dims: dict[str, tuple[str, ...]]
    """Pattern -> dims, tidied where the form is wrong, so that the rest can be checked too."""

    def __init__(self, table: Mapping[str, tuple[str, ...]]) -> None:
        if not isinstance(table, Mapping):
            raise UserError(
                f"rules are a table {{'path/of/parameter': ('dim', ...)}}, not {type(table).__name__}"
            )
        self._table = dict(table)
        self._regexes: dict[str, re.Pattern[str]] = {}
        self.dims = {}
        problems: list[tuple[object, str]] = []
        for pattern, dims in table.items():
            found = find_pattern_problems(pattern) + find_dims_problems(dims)
            problems += [(pattern, f"rule {show_rule(pattern, dims)}: {problem}") for problem in found]
            if isinstance(pattern, str):
                self.dims[pattern] = _tidy_dims(dims)
                self._regexes[pattern] = re.compile(re.escape(pattern).replace(r"\*", "[^/]*"))
        self.problems = tuple(problems)

    def __getitem__(self, pattern: str) -> tuple[str, ...]:
        return self._table[pattern]

    def __iter__(self) -> Iterator[str]:
        return iter(self._table)

    def __len__(self) -> int:
        return len(self._table)

    def __repr__(self) -> str:
        return f"Rules({self._table!r})"

    def show(self, pattern: str) -> str:
        """A rule as the user wrote it."""
        return show_rule(pattern, self._table[pattern])

    def find_matches(self, path: str) -> list[str]:
        """The patterns that match a path."""
        return [pattern for pattern, regex in self._regexes.items() if regex.fullmatch(path)]


def _tidy_dims(dims: Any) -> tuple[str, ...]:
    """The dims as a tuple; of malformed ones, for which a problem stands, what leads to fewest others."""
    if isinstance(dims, Replicated):
        return dims
    if isinstance(dims, str):
        return (dims,)
    if not isinstance(dims, tuple | list):
        return REPLICATED
    return tuple(dim if isinstance(dim, str) else None for dim in dims)  # type: ignore[misc]


@dataclass(frozen=True)
class Leaf:
    """A parameter, the rule that names its dims, and its full layout."""

    path: str
    """As `layers/mlp/up/kernel`."""
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    rule: str
    """The pattern of its rule."""
    dims: tuple[str, ...]
    """One name for each dim; `replicated` for each under a rule that is `REPLICATED`."""
    spec: PartitionSpec
    """One entry for each dim, axes of size 1 included; no ZeRO stage takes anything out."""

    @property
    def is_exempt(self) -> bool:
        """Of a norm, or replicated by its rule: exempt from weight decay."""
        return not {"norm", "replicated"}.isdisjoint(self.dims)

    @property
    def keeps_format(self) -> bool:
        """Exempt from the compute format: of a norm or a router, or replicated by its rule."""
        return self.is_exempt or "router" in self.dims


def iterate_leaves(tree: Any) -> Iterator[tuple[str, Any]]:
    """Yields (path, leaf) of nested dicts, path as `layers/attention/query/kernel`."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        yield jax.tree_util.keystr(path, simple=True, separator="/"), leaf


def map_leaves(change: Callable[..., Any], tree: Any, *others: Any) -> Any:
    """A tree like the first, of `change(path, leaf, *leaves of others)`; paths as in `iterate_leaves`."""
    leaves = zip(iterate_leaves(tree), *map(jax.tree.leaves, others), strict=True)
    changed = [change(path, leaf, *more) for (path, leaf), *more in leaves]
    return jax.tree.unflatten(jax.tree.structure(tree), changed)


def nest_by_name(named: Mapping[str, Any]) -> dict[str, Any]:
    """The same leaves as nested dicts: {"a/b": x} becomes {"a": {"b": x}}."""
    nested: dict[str, Any] = {}
    for name, leaf in named.items():
        *parents, last = name.split("/")
        inner = nested
        for key in parents:
            inner = inner.setdefault(key, {})
        inner[last] = leaf
    return nested


def lay_leaves(
    shapes: Any,
    rules: Mapping[str, tuple[str, ...]],
    axis_sizes: Mapping[str, int],
    strategy: Mapping[str, Axes] = PARAMETER_STRATEGY,
) -> tuple[dict[str, Leaf], list[str]]:
    """The full layout of each parameter, and everything that is wrong, as one text a problem.

    Args:
      shapes: parameters as nested dicts of things with `.shape` and `.dtype`.
      rules: a `Rules`, or the table for one.
      axis_sizes: mesh axis -> devices along it, every axis of the mesh.
      strategy: dim name -> mesh axes, laid in order.

    Returns:
      The leaves by path, in tree order, without those that have a problem; and the problems. Only without any
      problem do the leaves make a legal layout: give the problems to `raise_problems`.
    """
    table = rules if isinstance(rules, Rules) else Rules(rules)
    problems = Problems()
    arrays = _collect_arrays(shapes, problems)
    matches = {path: table.find_matches(path) for path in arrays}
    asked = _Asked(arrays, matches, table, axis_sizes, strategy)
    _check_form(asked, problems)
    legal = _check_strategy(asked, problems)
    _check_matches(asked, problems)
    laid = (_lay_leaf(asked, path, legal, problems) for path in arrays if len(matches[path]) == 1)
    return {leaf.path: leaf for leaf in laid if leaf}, problems.texts()


def raise_problems(problems: Sequence[str]) -> None:
    """Says everything that is wrong in one error: what `lay_leaves` found, and what else does not fit.

    Raises:
      UserError: there is a problem.
    """
    if problems:
        blocks = "".join("\n  " + problem.replace("\n", "\n  ") for problem in problems)
        raise UserError(f"the model, its rules and the mesh have {len(problems)} problem(s){blocks}")


@dataclass(frozen=True)
class _Asked:
    """What `lay_leaves` was asked to bring together."""

    arrays: Mapping[str, Any]
    matches: Mapping[str, list[str]]
    """Path -> the patterns that match it."""
    rules: Rules
    axis_sizes: Mapping[str, int]
    strategy: Mapping[str, Axes]

    def show(self, path: str) -> str:
        """A parameter as a line of a problem, with its rule if it has one and only one."""
        array, patterns = self.arrays[path], self.matches[path]
        rule = f", rule {self.rules.show(patterns[0])}" if len(patterns) == 1 else ""
        return f"{path} {tuple(array.shape)} {np.dtype(array.dtype)}{rule}"

    def guess_dims(self, shape: tuple[int, ...], wished: Sequence[str]) -> str:
        """Names for the dims of an array by the sizes that names have elsewhere, wished ones first; or ""."""
        names: dict[int, dict[str, None]] = {}
        for path, patterns in self.matches.items():
            dims = self.rules.dims[patterns[0]] if len(patterns) == 1 else ()
            if len(dims) == len(self.arrays[path].shape):
                for size, dim in zip(self.arrays[path].shape, dims, strict=True):
                    names.setdefault(size, {})[dim] = None
        guess: list[str] = []
        for size in shape:
            known = [dim for dim in names.get(size, ()) if dim in self.strategy and dim not in guess]
            if not known:
                return ""
            guess.append(next((dim for dim in wished if dim in known), known[0]))
        return repr(tuple(guess))


def _collect_arrays(shapes: Any, problems: Problems) -> dict[str, Any]:
    arrays: dict[str, Any] = {}
    for path, array in iterate_leaves(shapes):
        if path in arrays:
            problems.add(f"two parameters have the path {path!r}; rename the one whose name holds a '/'")
        arrays[path] = array
    return arrays


def _check_form(asked: _Asked, problems: Problems) -> None:
    for pattern, text in asked.rules.problems:
        problems.add(text, *(asked.show(path) for path in asked.arrays if pattern in asked.matches[path]))


def _check_strategy(asked: _Asked, problems: Problems) -> dict[str, Axes]:
    """The entries of the strategy in which nothing is wrong."""
    legal = {}
    users: dict[str, list[str]] = {}
    for path, patterns in asked.matches.items():
        for dim in dict.fromkeys(dim for pattern in patterns for dim in asked.rules.dims[pattern]):
            users.setdefault(dim, []).append(asked.show(path))
    named = {dim for dims in asked.rules.dims.values() for dim in dims if isinstance(dim, str)}
    for dim, axes in asked.strategy.items():
        found = find_axes_problems(axes, asked.axis_sizes)
        if dim not in named and dim not in PARAMETER_STRATEGY:
            found.append(rule_problems.describe_idle_dim(axes, dim, named))
        for problem in found:
            problems.add(f"strategy.{dim}: {problem}", *users.get(dim, ()))
        if not found:
            legal[dim] = tuple(axes)
    return legal


def _check_matches(asked: _Asked, problems: Problems) -> None:
    """Exactly one rule for a parameter, and at least one parameter for a rule."""
    used = {pattern for patterns in asked.matches.values() for pattern in patterns}
    idle = [pattern for pattern in asked.rules.dims if pattern not in used]
    bare = [path for path, patterns in asked.matches.items() if not patterns]
    owners = {path: patterns[0] for path, patterns in asked.matches.items() if patterns}
    for pattern in idle:
        if not find_pattern_problems(pattern):
            why = find_regex_problem(pattern) or rule_problems.describe_idle_rule(pattern, bare, owners)
            problems.add(f"rule {asked.rules.show(pattern)} {why}")
    shown = {pattern: asked.rules.show(pattern) for pattern in asked.rules.dims}
    for path in bare:
        array = asked.arrays[path]
        size_bytes = math.prod(array.shape) * np.dtype(array.dtype).itemsize
        guess = asked.guess_dims(array.shape, ())
        hint = rule_problems.describe_missing_rule(path, size_bytes, shown, idle, guess, asked.axis_sizes)
        problems.add(f"{asked.show(path)} has no rule; {hint}")
    for path, patterns in asked.matches.items():
        if len(patterns) > 1:
            rivals = [shown[pattern] for pattern in patterns]
            problems.add(rule_problems.describe_rivals(rivals), asked.show(path))


def _lay_leaf(asked: _Asked, path: str, legal: Mapping[str, Axes], problems: Problems) -> Leaf | None:
    """The layout of a parameter that has one rule; None if it has none that is legal."""
    (pattern,) = asked.matches[path]
    shape, dims = tuple(asked.arrays[path].shape), asked.rules.dims[pattern]
    dtype = np.dtype(asked.arrays[path].dtype)
    if isinstance(dims, Replicated):
        whole = PartitionSpec(*(None for _ in shape))
        return Leaf(path, shape, dtype, pattern, ("replicated",) * len(shape), whole)
    if len(dims) != len(shape):
        guess = asked.guess_dims(shape, dims)
        rule = asked.rules.show(pattern)
        found = [rule_problems.describe_rank(rule, len(dims), len(shape), guess, asked.axis_sizes)]
    else:
        found = _find_dim_problems(asked, shape, dims, legal)
    for problem in found:
        problems.add(problem, asked.show(path))
    if found or not all(dim in legal for dim in dims):
        return None
    return Leaf(path, shape, dtype, pattern, dims, PartitionSpec(*(legal[dim] or None for dim in dims)))


def _find_dim_problems(
    asked: _Asked, shape: tuple[int, ...], dims: tuple[str, ...], legal: Mapping[str, Axes]
) -> list[str]:
    """Unknown dims, dims that compete for an axis and dims that do not divide.

    What is no name, and what the strategy has no legal entry for, is said elsewhere.
    """
    sizes = asked.axis_sizes
    found = [
        rule_problems.describe_unknown_dim(dim, asked.strategy, sizes)
        for dim in dims
        if isinstance(dim, str) and dim and dim not in asked.strategy
    ]
    placed = [(dim, size, legal[dim]) for dim, size in zip(dims, shape, strict=True) if dim in legal]
    taken = [axis for _, _, axes in placed for axis in axes]
    for (first, _, axes), (second, size, others) in combinations(placed, 2):
        if shared := [axis for axis in axes if axis in others]:
            found.append(rule_problems.describe_rival_dims(first, second, size, shared, taken, sizes))
    for dim, size, axes in placed:
        if size % math.prod(sizes[axis] for axis in axes):
            found.append(rule_problems.describe_indivisible(dim, size, axes, sizes))
    return found
