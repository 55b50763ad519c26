"""The form of rules and strategies: what can be wrong with them before any parameter is known.

Each function returns its findings as clauses that end with a remedy; the caller says of which rule or dim.
"""

import re
from collections.abc import Mapping
from typing import Any

from jaxscale.sharding.rule_problems import show_sizes, suggest

_REGEX_SYNTAX = re.compile(r"\.\*|\.\+|\\.|[\^$|()\[\]{}?+]")


def find_pattern_problems(pattern: object) -> list[str]:
    """Patterns that can never match, or not what they seem to: see `Rules` for what a pattern is."""
    if not isinstance(pattern, str):
        return [f"the pattern is {pattern!r}, not text; write a path such as 'embed/table'"]
    if not all(pattern.split("/")):
        tidy = "/".join(filter(None, pattern.split("/")))
        remedy = f"write {tidy!r}" if tidy else "write a path such as 'embed/table'"
        return [f"can never match: a path has no empty segment and no '/' at its ends; {remedy}"]
    if "**" in pattern:
        return [
            "'**' does not stand for several segments; write '*' for each segment, as in 'layers/*/kernel'"
        ]
    return []


def find_regex_problem(pattern: str) -> str | None:
    """Why a pattern that matched nothing never can, if that is because it is a regular expression."""
    syntax = list(dict.fromkeys(_REGEX_SYNTAX.findall(pattern)))
    if not syntax:
        return None
    plain = re.sub(r"\.\*|\.\+", "*", pattern)
    remedy = f"write {plain!r}" if not _REGEX_SYNTAX.search(plain) else "write one rule for each path"
    return (
        f"can never match: this is no regular expression ({' '.join(syntax)}), and the only wildcard is '*', "
        f"for one segment or a part of it; {remedy}"
    )


def find_dims_problems(dims: object) -> list[str]:
    """What is not a tuple of dim names."""
    if isinstance(dims, str):
        return [f"the dims are the text {dims!r}, not a tuple; write ({dims!r},)"]
    if not isinstance(dims, tuple | list):
        return [
            f"the dims are {dims!r}, not a tuple of names; write one name for each dim, or REPLICATED (mesh "
            "axes belong in the strategy)"
        ]
    return [
        f"entry {place} of the dims is {dim!r}, not a name; name the dim, and if it lies over no axis say "
        "strategy.NAME=replicated"
        for place, dim in enumerate(dims)
        if not isinstance(dim, str) or not dim
    ]


def find_axes_problems(axes: object, axis_sizes: Mapping[str, int]) -> list[str]:
    """What is not a tuple of different mesh axes, in a strategy's entry for a dim."""
    if isinstance(axes, str):
        return [f"{axes!r} is text, not a tuple of axes; write ({axes!r},)"]
    if not isinstance(axes, tuple | list):
        return [f"{axes!r} is not a tuple of axes; write one of {show_sizes(axis_sizes)}, or REPLICATED"]
    known = [axis for axis in axes if isinstance(axis, str) and axis in axis_sizes]
    problems = [_describe_unknown_axis(axis, axis_sizes) for axis in axes if axis not in known]
    problems += [
        f"names the axis {axis}={axis_sizes[axis]} twice in {tuple(axes)!r}; name it once"
        for axis in dict.fromkeys(known)
        if known.count(axis) > 1
    ]
    return problems


def _describe_unknown_axis(axis: Any, axis_sizes: Mapping[str, int]) -> str:
    near = suggest(axis, axis_sizes) or "."
    return (
        f"the mesh has no axis {axis!r}{near} Its axes are {show_sizes(axis_sizes)}; replicated is over none"
    )
