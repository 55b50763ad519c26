"""How the largest leaves lie on the mesh, as a PNG file."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxscale.config import UserError
from jaxscale.inspection.picture import Panel, color_device, word_devices

_COLUMNS = 3
_PANEL_INCHES = (4.6, 4.1)
_MOST_LABELLED_CELLS = 32
_MOST_LINED_CELLS = 128  # a side: beyond, lines would cover the colours
_MOST_TICKS = 9


def save_png(path: Path, panels: Sequence[Panel], axis_sizes: Mapping[str, int]) -> None:
    """Writes the picture.

    Raises:
      UserError: the file cannot be written.
    """
    # lazily: only a picture needs it, and it takes a second to import
    from matplotlib.figure import Figure

    columns = min(_COLUMNS, len(panels))
    rows = -(-len(panels) // columns)
    height = _PANEL_INCHES[1] * rows + 0.9
    figure = Figure(
        figsize=(max(_PANEL_INCHES[0] * columns, 9.0), height), layout="constrained", facecolor="white"
    )
    used = " × ".join(f"{axis} {size}" for axis, size in axis_sizes.items() if size > 1) or "1"
    device_count = math.prod(axis_sizes.values())
    figure.suptitle(
        f"Parameters as {device_count:,} devices keep them: {used}", fontsize=15, fontweight="bold"
    )
    figure.supxlabel(
        "A part has the colour of the first device that keeps it; outlined: what device 0 keeps. "
        "Numbers in a part are devices, those beside it positions along the axes.",
        fontsize=10,
        color="0.35",
    )
    for at, panel in enumerate(panels):
        _draw_panel(figure.add_subplot(rows, columns, at + 1), panel, device_count)
    try:
        figure.savefig(path, format="png", dpi=130)
    except OSError as error:
        raise UserError(
            f"--png {path}: cannot be written ({error.strerror}); name a file in a folder that exists"
        ) from None


def _draw_panel(axes: Any, panel: Panel, device_count: int) -> None:
    """One rectangle; `axes` is matplotlib's word for a drawing area."""
    first = np.array([[cell[0] for cell in row] for row in panel.holders])
    colors = np.array([[color_device(device, device_count) for device in row] for row in first], np.uint8)
    axes.imshow(colors, aspect="auto", interpolation="nearest")
    axes.set_title(f"{panel.title}\n", fontsize=11, fontweight="bold", loc="left")
    axes.text(0, 1.02, panel.shape, transform=axes.transAxes, fontsize=9.5, color="0.3")
    axes.set_xlabel(f"{panel.columns}\n{panel.caption}", fontsize=9.5)
    axes.set_ylabel(str(panel.rows) if panel.rows else "", fontsize=9.5)
    _set_ticks(axes.set_xticks, len(panel.holders[0]))
    _set_ticks(axes.set_yticks, len(panel.holders))
    _draw_lines(axes, *first.shape)
    _draw_labels(axes, panel, device_count)
    _outline(axes, panel)


def _set_ticks(set_ticks: Any, count: int) -> None:
    """Labels coordinates along the axis; none where the side is not cut."""
    step = -(-count // _MOST_TICKS)
    step = 1 << (step - 1).bit_length()
    set_ticks(list(range(0, count, step)) if count > 1 else [])


def _draw_lines(axes: Any, rows: int, columns: int) -> None:
    for draw, count, length in ((axes.hlines, rows, columns), (axes.vlines, columns, rows)):
        if count <= _MOST_LINED_CELLS:
            width = 1.5 if count <= 16 else 0.5
            draw(np.arange(count + 1) - 0.5, -0.5, length - 0.5, color="white", linewidth=width)
    for side in axes.spines.values():
        side.set_visible(False)
    axes.tick_params(length=0, labelsize=8.5)


def _draw_labels(axes: Any, panel: Panel, device_count: int) -> None:
    rows, columns = len(panel.holders), len(panel.holders[0])
    if rows * columns > _MOST_LABELLED_CELLS or max(rows, columns) > 16:
        return
    most = max(2, 16 // columns)
    for i, row in enumerate(panel.holders):
        for j, devices in enumerate(row):
            axes.text(j, i, word_devices(devices, device_count, most), ha="center", va="center", fontsize=9.5)


def _outline(axes: Any, panel: Panel) -> None:
    from matplotlib.patches import Rectangle

    for i, row in enumerate(panel.holders):
        for j, devices in enumerate(row):
            if 0 in devices:
                corner = (j - 0.5, i - 0.5)
                axes.add_patch(Rectangle(corner, 1, 1, fill=False, linewidth=1.8, zorder=5, clip_on=False))
