"""Collectives of the compiled step beside what the closed forms say."""

import os
from collections.abc import Iterable, Sequence

from jaxscale.inspection.report import ExpectedRow, TrafficRow, join_axes
from jaxscale.sharding.collectives import Collective
from jaxscale.sharding.rules import Axes
from jaxscale.training.traffic import ExpectedTraffic

TOLERANCE = 0.05
NEGLIGIBLE = 0.001  # of all that a step sends: a difference that is not worth a word
_SHOWN_OPERATIONS = 3
_LONGEST_NAME = 70  # characters of an operation's name
_WIRE_FORMATS = {"bf16": "bf16", "fp16": "f16", "fp8": "f8e4m3fn"}  # as HLO names them

Key = tuple[Axes, str]


def count_sent(collective: Collective) -> int:
    """Elements that one call sends from a device, counted as `TrafficRow` says."""
    return collective.elements * _weight(collective)


def tabulate_traffic(collectives: Iterable[Collective]) -> tuple[TrafficRow, ...]:
    """A row for each (axes, kind), the largest first; collectives among a single device send nothing."""
    rows = [_sum_row(key, members) for key, members in _group(collectives).items()]
    return tuple(sorted(rows, key=lambda row: (row.bytes is not None, -(row.bytes or 0), row.axes, row.kind)))


def tabulate_expected(
    expected: Sequence[ExpectedTraffic], rows: Iterable[TrafficRow], compute_bytes: int
) -> tuple[ExpectedRow, ...]:
    """Sums the closed forms by (axes, kind).

    Args:
      compute_bytes: bytes an element in the compute format, for what the program does not send at all.
    """
    widths = {(row.axes, row.kind): row.bytes / row.elements for row in rows if row.elements and row.bytes}
    by_key: dict[Key, list[ExpectedTraffic]] = {}
    for each in expected:
        by_key.setdefault((each.axes, each.kind), []).append(each)
    result = []
    for key, members in by_key.items():
        elements = sum(each.elements for each in members)
        result.append(
            ExpectedRow(
                axes=key[0],
                kind=key[1],
                elements=elements,
                bytes=round(elements * widths.get(key, compute_bytes)),
                what=", ".join(dict.fromkeys(each.what for each in members)),
            )
        )
    return tuple(result)


def compare_traffic(
    collectives: Sequence[Collective],
    rows: Iterable[TrafficRow],
    expected: Iterable[ExpectedRow],
    predicted_axes: Axes,
) -> list[str]:
    """A warning for each row that is more than 5 % from its closed form, in elements, with its operations.

    Traffic that has no closed form at all is one too, where all its axes are among `predicted_axes`: that is
    how an array comes to be moved without anybody's asking. What is less than 0.1 % of the step's traffic is
    left out.
    """
    groups = _group(collectives)
    measured = {(row.axes, row.kind): row.elements for row in rows}
    closed = {(row.axes, row.kind): row for row in expected}
    for key in measured.keys() - closed.keys():
        if set(key[0]) <= set(predicted_axes):
            closed[key] = ExpectedRow(
                axes=key[0], kind=key[1], elements=0, bytes=0, what="none is called for"
            )
    negligible = NEGLIGIBLE * sum(elements or 0 for elements in measured.values())
    warnings = []
    for key, row in closed.items():
        found = measured.get(key, 0)
        if found is None or abs(found - row.elements) > max(TOLERANCE * row.elements, negligible):
            warnings.append(_word_difference(row, found) + _list_operations(groups.get(key, [])))
    return warnings


def warn_of_formats(collectives: Iterable[Collective], compute: str, platform: str) -> list[str]:
    """One warning if nothing travels in the compute format, which is narrower than fp32.

    Args:
      compute: `precision.compute`, such as `bf16`.
    """
    wire = _WIRE_FORMATS.get(compute)
    sent = {dtype for each in collectives if each.axes for dtype in each.dtypes}
    if wire is None or wire in sent or "f32" not in sent:
        return []
    return [
        f"no collective travels in {compute}, the compute format: the compiler for {platform} widens it; "
        "elements are as on any platform, bytes are more than where it is kept"
    ]


def _weight(collective: Collective) -> int:
    match collective.kind:
        case "all-reduce":
            return 2
        case "reduce-scatter":
            return collective.group_size
        case _:
            return 1


def _group(collectives: Iterable[Collective]) -> dict[Key, list[Collective]]:
    groups: dict[Key, list[Collective]] = {}
    for each in collectives:
        if each.axes:
            groups.setdefault((each.axes, each.kind), []).append(each)
    return groups


def _sum_row(key: Key, members: list[Collective]) -> TrafficRow:
    known = [(each, each.trips) for each in members if each.trips is not None]
    complete = len(known) == len(members)
    return TrafficRow(
        axes=key[0],
        kind=key[1],
        count=sum(trips for _, trips in known) if complete else None,
        elements=sum(count_sent(each) * trips for each, trips in known) if complete else None,
        bytes=sum(each.bytes * _weight(each) * trips for each, trips in known) if complete else None,
        dtypes=tuple(dict.fromkeys(dtype for each in members for dtype in each.dtypes)),
    )


def _word_difference(expected: ExpectedRow, found: int | None) -> str:
    said = "an unknown number of" if found is None else f"{found:,}"
    ratio = f" ({found / expected.elements - 1:+.0%})" if found is not None and expected.elements else ""
    return (
        f"{expected.kind} over {join_axes(expected.axes)}: the compiled step sends {said} elements, "
        f"the closed form says {expected.elements:,}{ratio}: {expected.what}"
    )


def _list_operations(members: Iterable[Collective]) -> str:
    """The operations that send most, a line each."""
    order = sorted(members, key=lambda each: -each.bytes * _weight(each) * (each.trips or 1))
    lines = [
        f"\n  {each.name}: {count_sent(each):,} elements of {'+'.join(each.dtypes)}, "
        f"{_word_times(each.trips)}, at {_word_source(each)}"
        for each in order[:_SHOWN_OPERATIONS]
    ]
    if len(order) > _SHOWN_OPERATIONS:
        lines.append(f"\n  and {len(order) - _SHOWN_OPERATIONS} smaller ones")
    return "".join(lines)


def _word_times(trips: int | None) -> str:
    return "an unknown number of times" if trips is None else "once" if trips == 1 else f"{trips:,} times"


def _word_source(collective: Collective) -> str:
    """`jaxscale/models/decoder.py:87 (jit(step)/...)`, the path as short as is clear."""
    name = collective.op_name or "no name"
    name = name if len(name) <= _LONGEST_NAME else "..." + name[-_LONGEST_NAME:]
    if collective.source is None:
        return f"no source line ({name})"
    source = collective.source.rpartition("/site-packages/")[2].removeprefix(f"{os.getcwd()}/")
    return f"{source} ({name})"
