"""A folder of checkpoints on disk: which steps are complete, and when one becomes so.

    checkpoints/
        50/complete.json     our marker: written last, after everything below is on disk
        50/state/...         orbax's files
        100.orbax-checkpoint-tmp, 50.deleting     left by a kill; removed by the next run that saves

A step counts as stored only if its marker is there and reads well: neither an empty folder named like a
step nor one whose writing was cut short is ever taken for a checkpoint. The marker also lists every leaf
with its shape and dtype, so a checkpoint can be looked into without devices and without orbax.
"""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxscale.checkpoint.leaves import LeafType
from jaxscale.config.errors import UserError
from jaxscale.disk import sync_to_disk, write_whole

MARKER = "complete.json"
_FORMAT = 1
_DELETING = ".deleting"
_ORBAX_UNFINISHED = ".orbax-checkpoint-tmp"


def list_complete_steps(folder: Path) -> list[int]:
    """Steps with a good marker, oldest first."""
    return [step for step in _list_step_folders(folder) if _read_marker(folder / str(step)) is not None]


def list_incomplete_steps(folder: Path) -> list[int]:
    """Steps that have a folder but no good marker: cut short, emptied by hand, or written by another tool."""
    return [step for step in _list_step_folders(folder) if _read_marker(folder / str(step)) is None]


def read_leaves(folder: Path, step: int) -> dict[str, LeafType]:
    """What the checkpoint of a step holds, by leaf name.

    Raises UserError where the step has no complete checkpoint.
    """
    marker = _read_marker(folder / str(step))
    if marker is None:
        stored = ", ".join(map(str, list_complete_steps(folder))) or "none"
        why = "was never finished" if (folder / str(step)).is_dir() else "does not exist"
        raise UserError(
            f"the checkpoint of step {step} in {folder} {why}; choose one of the complete steps: {stored}"
        )
    return {name: LeafType(tuple(leaf["shape"]), leaf["dtype"]) for name, leaf in marker["leaves"].items()}


def mark_complete(folder: Path, step: int, leaves: Mapping[str, LeafType]) -> None:
    """Makes everything in the step's folder durable, then writes its marker; atomic, and durable on
    return."""
    step_folder = folder / str(step)
    _sync_tree(step_folder)
    sync_to_disk(folder)
    marker = {
        "format": _FORMAT,
        "step": step,
        "leaves": {name: {"shape": list(leaf.shape), "dtype": leaf.dtype} for name, leaf in leaves.items()},
    }
    write_whole(step_folder / MARKER, json.dumps(marker, indent=1))


def delete_all_but_newest(folder: Path, keep: int) -> None:
    """Deletes complete checkpoints beyond the newest `keep`; leaves folders it cannot vouch for alone."""
    for step in list_complete_steps(folder)[:-keep]:
        # Renamed first: a kill half-way must not leave a marker over missing files.
        doomed = (folder / str(step)).rename(folder / f"{step}{_DELETING}")
        shutil.rmtree(doomed)


def delete_leftovers(folder: Path) -> None:
    """Deletes what a killed run left half written or half deleted. Only for the one run that writes here."""
    for suffix in (_ORBAX_UNFINISHED, _DELETING):
        for leftover in folder.glob(f"*{suffix}"):
            shutil.rmtree(leftover)


def _list_step_folders(folder: Path) -> list[int]:
    if not folder.is_dir():
        return []
    names = [entry.name for entry in folder.iterdir() if entry.is_dir()]
    return sorted(int(name) for name in names if name.isdecimal() and name == str(int(name)))


def _read_marker(step_folder: Path) -> dict[str, Any] | None:
    """The marker; None where it is missing or is not one of ours for this step."""
    try:
        text = (step_folder / MARKER).read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    try:
        marker = json.loads(text)
    except json.JSONDecodeError:
        return None
    good = isinstance(marker, dict) and str(marker.get("step")) == step_folder.name and "leaves" in marker
    if not good:
        return None
    if marker.get("format") != _FORMAT:
        raise UserError(
            f"{step_folder / MARKER} has format {marker.get('format')}; this version reads format {_FORMAT}: "
            "use the jaxscale version that wrote it"
        )
    return marker


def _sync_tree(folder: Path) -> None:
    for parent, _, files in os.walk(folder):
        for file in files:
            sync_to_disk(Path(parent, file))
        sync_to_disk(Path(parent))
