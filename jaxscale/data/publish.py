"""Folders that are complete or absent: built aside, checked, and put in place by one rename."""

import errno
import json
import os
import shutil
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxscale.config.errors import UserError
from jaxscale.disk import sync_to_disk

_META_NAME = "meta.json"
_SAMPLED_BLOCKS = 64
_BLOCK_BYTES = 4096
# One builds; more only where another process replaces the folder in between, or the disk loses writes.
_ATTEMPTS = 3


def open_or_build(folder: Path, build: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
    """Returns the description of `folder`, building it first where it is missing or damaged.

    `build(temporary_folder)` writes the files and returns a JSON-able description. A folder counts as intact
    when every file has its recorded size and checksum (of 64 blocks of 4 KiB, evenly spaced, for a large
    file), so opening a large one stays cheap. Processes may race: each builds aside and the first to rename
    wins. Raises UserError where the folder cannot be written.
    """
    for _ in range(_ATTEMPTS):
        description = read_if_intact(folder)
        if description is not None:
            return description
        try:
            _build_and_publish(folder, build)
        except OSError as error:
            raise UserError(
                f"cannot write {folder}: {error}; free some space or set data.cache_dir to another folder"
            ) from error
    raise UserError(
        f"{folder} is damaged again after {_ATTEMPTS} builds: the disk does not keep what is written; "
        "set data.cache_dir to a folder on another disk"
    )


def read_if_intact(folder: Path) -> dict[str, Any] | None:
    """The description of a published folder; None where it is missing, partial or damaged."""
    try:
        meta = json.loads((folder / _META_NAME).read_text(encoding="utf-8"))
        files, description = meta["files"], meta["description"]
        intact = all(_checksum_file(folder / name) == recorded for name, recorded in files.items())
    except (FileNotFoundError, NotADirectoryError, KeyError, TypeError, AttributeError, ValueError):
        return None  # not a folder we completed: it is built anew
    return description if intact else None


def _build_and_publish(folder: Path, build: Callable[[Path], dict[str, Any]]) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.partial-", dir=folder.parent))
    try:
        description = build(temporary)
        files = {path.name: _checksum_file(path) for path in sorted(temporary.iterdir())}
        meta = json.dumps({"files": files, "description": description}, indent=1)
        (temporary / _META_NAME).write_text(meta, encoding="utf-8")
        for path in [*temporary.iterdir(), temporary]:
            sync_to_disk(path)
        _rename_into_place(temporary, folder)
        sync_to_disk(folder.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)  # nothing is left of it after the rename


def _rename_into_place(temporary: Path, folder: Path) -> None:
    temporary.chmod(0o755)  # mkdtemp is private; a cache may be shared
    while True:
        try:
            os.rename(temporary, folder)
            return
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
                raise
        if read_if_intact(folder) is not None:
            return  # another process was first
        aside = Path(tempfile.mkdtemp(prefix=f".{folder.name}.damaged-", dir=folder.parent))
        try:
            os.rename(folder, aside / "was")
        except FileNotFoundError:
            pass  # another process has just moved it aside
        finally:
            shutil.rmtree(aside, ignore_errors=True)


def _checksum_file(path: Path) -> list[int]:
    """[size in bytes, CRC-32 of evenly spaced blocks, the first and the last among them]."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size <= _SAMPLED_BLOCKS * _BLOCK_BYTES:
            return [size, zlib.crc32(file.read())]
        checksum = 0
        for block in range(_SAMPLED_BLOCKS):
            file.seek((size - _BLOCK_BYTES) * block // (_SAMPLED_BLOCKS - 1))
            checksum = zlib.crc32(file.read(_BLOCK_BYTES), checksum)
    return [size, checksum]
