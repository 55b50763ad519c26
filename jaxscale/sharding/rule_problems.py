"""What is wrong between rules and parameters, in words: each problem with the nearest legal choice."""

import difflib
import heapq
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

MOST_CHOICES = 6  # sizes, or names, that a message offers
MOST_COMPARED = 32


class Problems:
    """Problems in the order in which they were found; the parameters that share one are listed under it."""

    def __init__(self) -> None:
        self._places: dict[str, dict[str, None]] = {}

    def add(self, problem: str, *places: str) -> None:
        self._places.setdefault(problem, {}).update(dict.fromkeys(places))

    def texts(self) -> list[str]:
        return ["\n    ".join([problem, *places]) for problem, places in self._places.items()]


def show_rule(pattern: object, dims: object) -> str:
    """A rule as its line in the table."""
    return f"{pattern!r}: {dims!r}"


def show_sizes(axis_sizes: Mapping[str, int]) -> str:
    return " ".join(f"{axis}={size}" for axis, size in axis_sizes.items())


def show_devices(axis_sizes: Mapping[str, int]) -> str:
    count, split = math.prod(axis_sizes.values()), {axis: n for axis, n in axis_sizes.items() if n > 1}
    return f"each of {count} devices ({show_sizes(split)})" if split else "the one device"


def join_words(words: Iterable[Any], last: str) -> str:
    *head, tail = map(str, words)
    return f"{', '.join(head)} {last} {tail}" if head else tail


def suggest(name: object, names: Iterable[str], cutoff: float = 0.6) -> str:
    near = find_nearest(name, names, cutoff)
    return f"; did you mean {near!r}?" if near else ""


def find_nearest(name: object, names: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The most similar name. Only those that share most segments are compared by letter: difflib is slow."""
    text = str(name)
    segments = set(text.split("/"))

    def differ(other: str) -> tuple[int, int]:
        return -len(segments.intersection(other.split("/"))), abs(len(other) - len(text))

    candidates = heapq.nsmallest(MOST_COMPARED, names, key=differ)
    near = difflib.get_close_matches(text, candidates, n=1, cutoff=cutoff)
    return near[0] if near else None


def describe_missing_rule(
    path: str,
    size_bytes: int,
    shown: Mapping[str, str],
    idle: Sequence[str],
    guess: str,
    axis_sizes: Mapping[str, int],
) -> str:
    """A parameter without a rule.

    Args:
      shown: pattern -> the rule as the user wrote it, of all rules.
      idle: patterns that match nothing; a near one is probably this parameter's, mistyped.
      guess: dims whose sizes elsewhere are those of this array, or "".
    """
    mistyped = find_nearest(path, idle)
    nearest = mistyped or find_nearest(path, shown, cutoff=0)
    if mistyped:
        hint = f"did you mean {shown[mistyped]} for it?"
    else:
        hint = f"add one{f', by its sizes perhaps {path!r}: {guess}' if guess else ''}"
        hint += f"; the nearest is {shown[nearest]}." if nearest else "."
    return f"{hint} As REPLICATED it would take {size_bytes:,} bytes on {show_devices(axis_sizes)}"


def describe_idle_rule(pattern: str, bare: Sequence[str], owners: Mapping[str, str]) -> str:
    """A rule that matches no parameter.

    Args:
      bare: paths of parameters without a rule.
      owners: path -> a rule that matches it, of the parameters that have one.
    """
    most = max((path.count("/") + 1 for path in [*bare, *owners]), default=0)
    segments = pattern.count("/") + 1
    if segments > most:
        why = f"can never match: it has {segments} segments, and no parameter has more than {most}"
    else:
        why = "matches no parameter"
    near = find_nearest(pattern, bare)
    taken = None if near else find_nearest(pattern, owners)
    if near:
        hint = f"did you mean {near!r}?"
    elif taken:
        hint = f"the nearest parameter {taken!r} has the rule {owners[taken]!r}; remove this one"
    else:
        others = f", or mean one of those without a rule: {_list_some(bare)}" if bare else ""
        hint = f"remove it{others}"
    return f"{why}; {hint}"


def describe_rivals(rules: Sequence[str]) -> str:
    return (
        f"{len(rules)} rules match one parameter, where exactly one may: {join_words(rules, 'and')}; remove "
        "all but one, or narrow their patterns"
    )


def describe_rank(rule: str, dim_count: int, rank: int, guess: str, axis_sizes: Mapping[str, int]) -> str:
    perhaps = f", by the sizes perhaps {guess}" if guess else ""
    return (
        f"rule {rule} names {dim_count} dim(s) for an array of rank {rank}; name {rank}{perhaps}, or write "
        f"REPLICATED to hold it whole on {show_devices(axis_sizes)}"
    )


def describe_unknown_dim(dim: str, strategy: Iterable[str], axis_sizes: Mapping[str, int]) -> str:
    near = suggest(dim, strategy) or f"; its dims are {', '.join(strategy)}."
    return (
        f"dim {dim!r} is not in the strategy{near} A new dim needs a line there: strategy.{dim}=replicated, "
        f"or axes of {show_sizes(axis_sizes)}"
    )


def describe_idle_dim(axes: object, dim: str, dims: Iterable[str]) -> str:
    return f"no rule has a dim {dim!r}, so {axes!r} lays nothing{suggest(dim, dims) or '; remove it'}"


def describe_rival_dims(
    first: str,
    second: str,
    second_size: int,
    axes: Sequence[str],
    taken: Iterable[str],
    axis_sizes: Mapping[str, int],
) -> str:
    """Two dims of an array that lie over the same axes; `taken` are all axes that the array lies over."""
    which = join_words((f"{axis}={axis_sizes[axis]}" for axis in axes), "and")
    untaken = {axis: ways for axis, ways in axis_sizes.items() if axis not in set(taken)}
    free = {axis: ways for axis, ways in untaken.items() if ways > 1 and second_size % ways == 0}
    others = f", or lay it over a free axis ({show_sizes(free)})" if free else ""
    if first == second:
        return (
            f"dim {first!r} stands twice in one rule, and both lie over axis {which}; give one of them "
            f"another name and say strategy.NAME=replicated{others}"
        )
    return (
        f"dims {first!r} and {second!r} of one array both lie over axis {which}; say "
        f"strategy.{second}=replicated{others}"
    )


def describe_indivisible(dim: str, size: int, axes: Sequence[str], axis_sizes: Mapping[str, int]) -> str:
    ways = math.prod(axis_sizes[axis] for axis in axes)
    asked = " × ".join(f"{axis}={axis_sizes[axis]}" for axis in axes)
    below, above = size // ways * ways, (size // ways + 1) * ways
    sizes = f"{below} and {above} do" if below else f"{above} does"
    values = join_words(_nearest_divisors(size, ways), "or")
    return f"{dim}={size} does not divide by {asked}; {sizes}, or {' × '.join(axes)} may be {values}"


def _list_some(names: Sequence[str]) -> str:
    return ", ".join(names[:MOST_CHOICES]) + (", …" if len(names) > MOST_CHOICES else "")


def _nearest_divisors(size: int, wanted: int) -> list[int]:
    small = [n for n in range(1, math.isqrt(size) + 1) if size % n == 0]
    divisors = {*small, *(size // n for n in small)}
    return sorted(sorted(divisors, key=lambda n: abs(n - wanted))[:MOST_CHOICES])
