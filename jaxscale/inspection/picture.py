"""How the largest leaves lie on the mesh, for a terminal: each as a rectangle, cut as the mesh cuts it."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from rich.box import SQUARE
from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.style import Style
from rich.table import Table
from rich.text import Text

from jaxscale.inspection.report import LeafReport, join_axes
from jaxscale.sharding.rules import Axes

MOST_PANELS = 6
_MOST_CELLS = 5  # a side, on a terminal; the middle of a longer one is left out
_MOST_DEVICES = 3  # named in a cell
_CELL_WIDTH = 8

# Pale, so that black text is read on all of them; colours between are mixed.
_PALETTE = ((186, 214, 240), (150, 216, 196), (252, 232, 150), (250, 184, 160), (208, 192, 234))


@dataclass(frozen=True)
class Edge:
    """One side of a rectangle: a dim and the axes that cut it."""

    dim: str
    size: int
    axes: Axes
    ways: int

    def __str__(self) -> str:
        label = f"{self.dim} {self.size:,}"
        return f"{label} over {join_axes(self.axes)} {self.ways}" if self.axes else f"{label}, not cut"


@dataclass(frozen=True)
class Panel:
    """One rectangle: leaves of one shape that lie alike, and who holds which part."""

    paths: tuple[str, ...]
    shape: str
    rows: Edge | None
    """None for an array of one dim."""
    columns: Edge
    holders: tuple[tuple[tuple[int, ...], ...], ...]
    """Devices (positions in the mesh's flattened order) of each part, by row and column."""
    caption: str

    @property
    def title(self) -> str:
        """`layers/mlp/gate/kernel and 1 alike`."""
        return self.paths[0] + (f" and {len(self.paths) - 1} alike" if len(self.paths) > 1 else "")


def choose_panels(leaves: Iterable[LeafReport], axis_sizes: Mapping[str, int]) -> list[Panel]:
    """Panels of the largest leaves; leaves of the same shape that lie alike share one."""
    alike: dict[tuple, list[LeafReport]] = {}
    for leaf in sorted(leaves, key=lambda leaf: -math.prod(leaf.shape)):
        if leaf.shape:
            alike.setdefault((leaf.shape, leaf.dims), []).append(leaf)
    return [_draw(members, axis_sizes) for members in list(alike.values())[:MOST_PANELS]]


def color_device(device: int, count: int) -> tuple[int, int, int]:
    """RGB of a device, 0 to 255; a part has the colour of the first device that holds it."""
    place = device / max(1, count - 1) * (len(_PALETTE) - 1)
    low = min(int(place), len(_PALETTE) - 2)
    mixed = [a + (b - a) * (place - low) for a, b in zip(_PALETTE[low], _PALETTE[low + 1], strict=True)]
    return round(mixed[0]), round(mixed[1]), round(mixed[2])


def render_picture(panels: Sequence[Panel], device_count: int) -> RenderableType:
    """The panels for a terminal, side by side where they fit."""
    title = Text("How the largest parameters lie: each cell is a part, with the devices that keep it", "bold")
    drawn = [Padding(_render_panel(panel, device_count), (0, 2, 1, 0)) for panel in panels]
    return Group(title, Columns(drawn))


def word_devices(devices: Sequence[int], device_count: int, most: int = _MOST_DEVICES) -> str:
    """`0 4`; of many the first few, `0 4 ...`; `all`."""
    if len(devices) == device_count > 1:
        return "all"
    shown = devices if len(devices) <= most else [*devices[: most - 1], "..."]
    return " ".join(map(str, shown))


def _draw(alike: list[LeafReport], axis_sizes: Mapping[str, int]) -> Panel:
    leaf = alike[0]
    edges = [
        Edge(dim, size, axes, math.prod(axis_sizes[axis] for axis in axes))
        for (dim, axes), size in zip(leaf.dims, leaf.shape, strict=True)
    ]
    order = sorted(range(len(edges)), key=lambda at: (edges[at].ways == 1, -edges[at].size))
    shown = [edges[at] for at in sorted(order[:2])]
    rows, columns = (shown[0] if len(shown) == 2 else None), shown[-1]
    hidden = [edges[at] for at in order[2:] if edges[at].ways > 1]
    return Panel(
        paths=tuple(each.path for each in alike),
        shape=" × ".join(f"{edge.dim} {edge.size:,}" for edge in edges),
        rows=rows,
        columns=columns,
        holders=_find_holders(rows.axes if rows else (), columns.axes, axis_sizes),
        caption=_caption(edges, hidden, math.prod(axis_sizes.values())),
    )


def _caption(edges: list[Edge], hidden: list[Edge], device_count: int) -> str:
    ways = math.prod(edge.ways for edge in edges)
    copies = device_count // ways
    if ways == 1:
        return "every device has all of it" if copies > 1 else "one device has all of it"
    share = f"a device has 1/{ways}, " + (
        f"each part is on {copies:,} devices" if copies > 1 else "no copies"
    )
    return share + "".join(f"; cut along {edge} too" for edge in hidden)


def _find_holders(
    row_axes: Axes, column_axes: Axes, axis_sizes: Mapping[str, int]
) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Devices by row and column of a rectangle whose sides are cut by these axes, the first one slowest."""
    sizes = tuple(axis_sizes.values())
    coordinates = dict(zip(axis_sizes, np.unravel_index(np.arange(math.prod(sizes)), sizes), strict=True))

    def place(axes: Axes) -> np.ndarray:
        index = np.zeros(math.prod(sizes), np.int64)
        for axis in axes:
            index = index * axis_sizes[axis] + coordinates[axis]
        return index

    row, column = place(row_axes), place(column_axes)
    return tuple(
        tuple(tuple(np.flatnonzero((row == i) & (column == j)).tolist()) for j in range(column.max() + 1))
        for i in range(row.max() + 1)
    )


def _render_panel(panel: Panel, device_count: int) -> RenderableType:
    rows, columns = _thin(len(panel.holders)), _thin(len(panel.holders[0]))
    table = Table(box=SQUARE, show_header=False, padding=0)
    for _ in columns:
        table.add_column(no_wrap=True)
    for row in rows:
        cells = [
            _render_gap() if row is None or at is None else _render_cell(panel.holders[row][at], device_count)
            for at in columns
        ]
        table.add_row(*cells)
    sides = ([f"down: {panel.rows}"] if panel.rows else []) + [f"across: {panel.columns}"]
    return Group(Text(panel.title, "bold"), *map(Text, sides), table, Text(panel.caption))


def _render_cell(devices: Sequence[int], device_count: int) -> Text:
    red, green, blue = color_device(devices[0], device_count)
    label = word_devices(devices, device_count).center(_CELL_WIDTH)
    return Text(label, Style(color="black", bgcolor=f"rgb({red},{green},{blue})"))


def _render_gap() -> Text:
    return Text("...".center(_CELL_WIDTH), "dim")


def _thin(count: int) -> list[int | None]:
    """The indices that are shown; None stands for those left out."""
    if count <= _MOST_CELLS:
        return list(range(count))
    return [*range(_MOST_CELLS - 2), None, count - 1]
