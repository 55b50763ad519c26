"""What each expert of each layer had to do, as a heat map."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxscale.metrics.records import LoadRecord

_PANEL_INCHES = (4.2, 3.2)
_FACTOR = 4.0  # colours end at so many times, and at one part in so many of, an even share
_MOST_NUMBERS = 12  # a side: beyond, numbers in cells would not be read


def draw_load(axes: Any, record: LoadRecord) -> Any:
    """Layers from above, experts from the left, red above an even share and blue below.

    Args:
      axes: matplotlib's word for a drawing area.

    Returns:
      the image, for a colour bar.
    """
    # lazily: only a picture needs it, and it takes a second to import
    from matplotlib.colors import LogNorm

    clipped = [[max(share, 1 / _FACTOR) for share in layer] for layer in record.load]
    norm = LogNorm(1 / _FACTOR, _FACTOR)
    image = axes.imshow(clipped, cmap="RdBu_r", norm=norm, aspect="auto", interpolation="nearest")
    layers, experts = len(record.load), len(record.load[0])
    if max(layers, experts) <= _MOST_NUMBERS:
        for i, layer in enumerate(record.load):
            for j, share in enumerate(layer):
                axes.text(j, i, f"{share:.2f}", ha="center", va="center", fontsize=7.5)
    axes.set_title(f"step {record.step:,}", fontsize=10, loc="left")
    axes.set_xlabel(f"expert, of {experts:,}")
    axes.set_ylabel(f"layer with experts, of {layers:,}")
    axes.locator_params(integer=True)
    axes.tick_params(length=0, labelsize=8)
    for side in axes.spines.values():
        side.set_visible(False)
    return image


def save_load_map(path: Path, records: Sequence[LoadRecord]) -> None:
    """Writes a PNG of some steps beside each other, on one scale."""
    from matplotlib.figure import Figure

    width, height = _PANEL_INCHES
    figure = Figure(figsize=(width * len(records) + 0.8, height), layout="constrained")
    drawn = [
        (axes, draw_load(axes, record))
        for axes, record in zip(figure.subplots(1, len(records), squeeze=False)[0], records, strict=True)
    ]
    ends = (1 / _FACTOR, 1 / 2, 1, 2, _FACTOR)
    bar = figure.colorbar(drawn[-1][1], ax=[axes for axes, _ in drawn], ticks=ends, extend="both")
    bar.ax.set_yticks(ends, [f"{end:g}" for end in ends], minor=False)
    bar.ax.minorticks_off()
    bar.set_label("load, in multiples of an even share")
    figure.savefig(path, format="png", dpi=110)


def choose_records(records: Sequence[LoadRecord], count: int) -> list[LoadRecord]:
    """So many of them, evenly spread, the first and the last among them."""
    if len(records) <= count:
        return list(records)
    if count == 1:
        return [records[-1]]
    return [records[round(i * (len(records) - 1) / (count - 1))] for i in range(count)]


def read_loads(path: Path) -> list[LoadRecord]:
    """The records of a run's `expert_load.jsonl`; a last line that was cut short is passed over."""
    lines = [line for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if line[-1] == "\n"]
    return [
        LoadRecord(step=each["step"], tokens=each["tokens"], load=each["load"])
        for each in map(json.loads, lines)
    ]
