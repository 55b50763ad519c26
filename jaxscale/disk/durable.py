"""Durable writing: a kill or a crash at any moment leaves the old file or the new one, never a part."""

import os
from pathlib import Path


def write_whole(path: Path, content: str | bytes) -> None:
    """Writes a file aside and renames it into place; durable on return. Text is written as UTF-8.

    Raises:
      OSError: as the file system says; `path` is then as it was.
    """
    unfinished = path.with_name(f".{path.name}.partial-{os.getpid()}")
    try:
        unfinished.write_bytes(content.encode("utf-8") if isinstance(content, str) else content)
        sync_to_disk(unfinished)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    sync_to_disk(path.parent)


def sync_to_disk(path: Path) -> None:
    """Waits until a file, or the entries of a folder, have reached the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
