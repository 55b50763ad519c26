"""An inspection as tables: aligned, units in the headers, readable at 100 columns and without colour."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from jaxscale.inspection.report import (
    ActivationReport,
    ExpectedRow,
    ExpertsReport,
    Inspection,
    LeafReport,
    StateBytes,
    TrafficRow,
    join_axes,
    sum_bytes,
)
from jaxscale.sharding.rules import Axes

KINDS = ("parameters", "gradients", "optimizer")
_MOST_REPLICATED = 12
_LONGEST_PATH = 40  # characters
_UNITS = (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


@dataclass(frozen=True)
class Unit:
    """A binary unit that a whole column is written in, so that its numbers can be compared by eye."""

    name: str
    bytes: int

    def word(self, count: int | None) -> str:
        """`1,234.56`; `?` for an unknown number, and a bare 0 for nothing."""
        if count is None:
            return "?"
        if count == 0 or self.bytes == 1:
            return f"{count:,}"
        return f"{count / self.bytes:,.2f}" if count / self.bytes >= 0.005 else "<0.01"


def choose_unit(largest: int) -> Unit:
    """The largest unit in which the largest number is at least 10, so that smaller ones keep their digits."""
    return next((Unit(name, size) for name, size in _UNITS if largest >= 10 * size), Unit("bytes", 1))


def render_tables(inspection: Inspection) -> RenderableType:
    """All sections, one below the other."""
    sections = [_render_mesh(inspection)]
    if inspection.experts is not None:
        sections.append(_render_experts(inspection.experts))
    sections += [_render_leaves(inspection), _render_replicated(inspection)]
    if inspection.collectives is not None and inspection.activations is not None:
        sections.append(_render_traffic(inspection.collectives, inspection.expected_collectives))
        sections.append(_render_activations(inspection.activations))
    sections += [_render_memory(inspection), _render_warnings(inspection.warnings)]
    return Group(*(Padding(section, (0, 0, 1, 0), expand=False) for section in sections))


def _render_mesh(inspection: Inspection) -> RenderableType:
    sizes = inspection.mesh
    devices = math.prod(sizes.values())
    used = " × ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1) or "one device"
    count = f"{devices:,} device{'s' if devices > 1 else ''}"
    return Text(
        f"mesh  {used} = {count} ({inspection.platform}), ZeRO stage {inspection.zero_stage}", style="bold"
    )


def _render_experts(experts: ExpertsReport) -> RenderableType:
    shared = f" beside {experts.shared_experts} shared" if experts.shared_experts else ""
    layers = f"{experts.layers} layer{'s' if experts.layers > 1 else ''}"
    return Text(
        f"experts  {experts.experts} in each of {layers}, {experts.experts_per_device} of them on a device; "
        f"a token takes {experts.top_k}{shared}\n"
        f"parameters  {experts.parameters:,} in all, {experts.active_parameters:,} active (used by one token)"
    )


def _render_leaves(inspection: Inspection) -> RenderableType:
    """A leaf a line."""
    total = inspection.state_bytes
    kinds = (*KINDS, "host") if total.host else KINDS
    unit = choose_unit(max((leaf.bytes_per_device.total for leaf in inspection.leaves), default=0))
    table = _make_leaf_table(
        f"Parameters, {unit.name} a device", "dims, /axes that cut them", leaves=inspection.leaves
    )
    shows_rules = any(leaf.rule != leaf.path for leaf in inspection.leaves)
    if shows_rules:
        table.add_column("rule", overflow="fold")
    for name in kinds:
        table.add_column(name, justify="right", no_wrap=True)
    for leaf in inspection.leaves:
        rule = ["same" if leaf.rule == leaf.path else leaf.rule] if shows_rules else []
        table.add_row(leaf.path, word_dims(leaf), *rule, *_word_bytes(leaf.bytes_per_device, unit, kinds))
    blank = [""] if shows_rules else []
    counters = _word_bytes(StateBytes(optimizer=inspection.counter_bytes), unit, kinds)
    table.add_row("(counters)", "", *blank, *counters, end_section=True)
    table.add_row("total", "", *blank, *_word_bytes(total, unit, kinds), style="bold")
    return table


def word_dims(leaf: LeafReport) -> str:
    """`layers=80 embed=8192/fsdp mlp=28672/tensor`, and the dtype if it is not float32."""
    dims = [
        f"{dim}={size}" + (f"/{join_axes(axes)}" if axes else "")
        for (dim, axes), size in zip(leaf.dims, leaf.shape, strict=True)
    ]
    words = dims or ["scalar"]
    return " ".join(words if leaf.dtype == "float32" else [*words, leaf.dtype])


def _render_replicated(inspection: Inspection) -> RenderableType:
    """What every device along an axis has whole, and the bytes that would go if it were split over it."""
    leaves = sorted(
        (leaf for leaf in inspection.leaves if leaf.replicated_over), key=lambda leaf: -leaf.replication.total
    )
    if not leaves:
        return Text("Nothing is replicated: every leaf lies over every axis.")
    total = sum_bytes(leaf.replication for leaf in leaves)
    unit = choose_unit(max(leaf.replication.total for leaf in leaves))
    table = _make_leaf_table(
        f"Replicated, and what that costs in {unit.name} a device", "whole on *", leaves=leaves
    )
    for name in (*KINDS, "sum"):
        table.add_column(name, justify="right", no_wrap=True)
    for leaf in leaves[:_MOST_REPLICATED]:
        table.add_row(
            leaf.path,
            _word_whole(leaf),
            *_word_bytes(leaf.replication, unit),
            unit.word(leaf.replication.total),
        )
    if rest := leaves[_MOST_REPLICATED:]:
        cost = sum_bytes(leaf.replication for leaf in rest)
        table.add_row(f"({len(rest)} more leaves)", "", *_word_bytes(cost, unit), unit.word(cost.total))
    table.rows[-1].end_section = True
    table.add_row("total", "", *_word_bytes(total, unit), unit.word(total.total), style="bold")
    host = ", H state on the host" if inspection.host_traffic else ""
    note = f"* of P parameters, G gradients, O optimizer{host}; all where none is named"
    return Group(table, Text(note))


def _word_whole(leaf: LeafReport) -> str:
    """`data+fsdp`; by kind where they differ, such as `PG data+fsdp`."""
    by_axes: dict[Axes, str] = {}
    for kind, axes in leaf.whole_on.items():
        by_axes[axes] = by_axes.get(axes, "") + kind[0].upper()
    if len(by_axes) == 1:
        return join_axes(leaf.replicated_over)
    return ", ".join(f"{kinds} {join_axes(axes)}" for axes, kinds in by_axes.items() if axes)


def _render_traffic(rows: Sequence[TrafficRow], expected: Sequence[ExpectedRow]) -> RenderableType:
    by_key = {(row.axes, row.kind): row for row in expected}
    unsent = [row for key, row in by_key.items() if key not in {(each.axes, each.kind) for each in rows}]
    if not rows and not unsent:
        return Text("Collectives: none; a single device sends nothing.")
    unit = choose_unit(max([0, *(row.bytes or 0 for row in rows), *(row.bytes for row in expected)]))
    table = make_table("Collectives of the compiled step, sent by a device a step", "axis", "kind")
    for name in ("calls", "elements", "expected", "off by", unit.name, f"expected {unit.name}"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        match = by_key.get((row.axes, row.kind))
        table.add_row(
            join_axes(row.axes),
            row.kind,
            _word_count(row.count),
            _word_count(row.elements),
            "" if match is None else f"{match.elements:,}",
            _word_difference(row.elements, match),
            unit.word(row.bytes),
            "" if match is None else unit.word(match.bytes),
        )
    for each in unsent:
        difference = _word_difference(0, each)
        table.add_row(
            join_axes(each.axes),
            each.kind,
            "0",
            "0",
            f"{each.elements:,}",
            difference,
            "0",
            unit.word(each.bytes),
        )
    return table


def _word_count(count: int | None) -> str:
    return "?" if count is None else f"{count:,}"


def _word_difference(elements: int | None, expected: ExpectedRow | None) -> str:
    if expected is None or elements is None:
        return ""
    return f"{elements / expected.elements - 1:+.1%}" if expected.elements else ""


def _render_activations(activations: Sequence[ActivationReport]) -> RenderableType:
    if not activations:
        return Text(
            "Activations: no layout is asked for, or JAX cannot read any: the step is manual over an axis "
            "that stands behind one that is not."
        )
    as_asked = sum(each.is_as_asked for each in activations)
    return Text(f"Activations that the model lays: {len(activations)}, of which {as_asked} lie as asked.")


def _render_memory(inspection: Inspection) -> RenderableType:
    state, memory = inspection.state_bytes, inspection.memory
    rows = [(name, getattr(state, name)) for name in KINDS]
    if memory is not None:
        rows.append(("temporaries", inspection.temporary_bytes or 0))
    unit = choose_unit(inspection.total_bytes)
    table = make_table("Memory of a device", "")
    table.add_column(unit.name, justify="right")
    for name, count in rows:
        table.add_row(name, unit.word(count))
    table.rows[-1].end_section = True
    table.add_row("total", unit.word(inspection.total_bytes), style="bold")
    notes = _list_host_notes(inspection, unit)
    if memory is None:
        return Group(table, *notes, Text("temporaries are not known without a compile"))
    account = (
        f"the compiler's account ({inspection.platform}): arguments {unit.word(memory.arguments)} + "
        f"temporaries {unit.word(memory.temporaries)} + outputs {unit.word(memory.outputs)} = "
        f"{unit.word(memory.peak)} {unit.name}; "
        "its temporaries hold the weights in the compute format and the accumulators"
    )
    if inspection.platform == "cpu":
        account += (
            "; attention is XLA's plain one, which holds all scores of a layer: the kernels that TPUs and "
            "GPUs get do not, and need far less"
        )
    return Group(table, *notes, Text(account))


def _list_host_notes(inspection: Inspection, unit: Unit) -> list[Text]:
    traffic = inspection.host_traffic
    if traffic is None:
        return []
    held, down, up = (unit.word(count) for count in (traffic.held, traffic.to_device, traffic.to_host))
    line = (
        f"offload: {held} {unit.name} of state lie in the host's memory instead; a step brings {down} "
        f"{unit.name} to the device and {up} {unit.name} back"
    )
    if moves := inspection.host_moves:
        down, up = unit.word(moves.to_device), unit.word(moves.to_host)
        line += f"; the compiled step moves {down} and {up} {unit.name}"
    if inspection.platform == "cpu":
        line += "; a CPU has one memory, so its compiler counts them as the device's"
    return [Text(line)]


def _render_warnings(warnings: Iterable[str]) -> RenderableType:
    listed = list(warnings)
    if not listed:
        return Text("No warnings.")
    title = Text(f"{len(listed)} warning{'s' if len(listed) > 1 else ''}", style="bold yellow")
    return Group(title, *(Text(f"• {warning}") for warning in listed))


def make_table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD)
    table.show_edge, table.padding = False, (0, 1, 0, 0)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _make_leaf_table(title: str, *columns: str, leaves: Iterable[LeafReport]) -> Table:
    """A table whose first column is paths, which stay in one piece unless they take too much of the line."""
    table = make_table(title, "leaf", *columns)
    table.columns[0].no_wrap = max(len(leaf.path) for leaf in leaves) <= _LONGEST_PATH
    return table


def _word_bytes(counts: StateBytes, unit: Unit, kinds: Sequence[str] = KINDS) -> list[str]:
    return [unit.word(getattr(counts, kind)) for kind in kinds]
