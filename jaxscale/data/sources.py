"""Where text comes from: the files of a corpus and the documents inside them."""

import glob
import hashlib
import json
import os
import sysconfig
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxscale.config.errors import UserError

_HASH_CHUNK_BYTES = 1 << 20
_PARQUET_BATCH_ROWS = 1024
# Packages installed by the user are not the standard library, and some distributions leave its tests out.
_STDLIB_SKIPPED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
)


class Document(NamedTuple):
    """One document of text and where it stands: `file`, `file:line` or `file, row n`."""

    place: str
    text: str


class TokenFile(NamedTuple):
    """One pre-tokenised file: a 1-D array of integers, memory-mapped."""

    place: str
    tokens: np.ndarray


@dataclass(frozen=True)
class Source:
    """The files of one corpus, in a fixed order.

    `names` are the files' paths relative to their common folder, so that a corpus keeps its identity when it
    moves; `field` is the JSONL field or Parquet column that holds the text.
    """

    kind: str
    files: tuple[Path, ...]
    names: tuple[str, ...]
    field: str

    def read_documents(self) -> Iterator[Document]:
        """Yields the documents of a text source in file order; documents without any text are left out.

        Raises UserError, naming file and line, for what is not text.
        """
        read = {"jsonl": _read_jsonl, "parquet": _read_parquet}.get(self.kind, _read_text)
        for path in self.files:
            for document in read(path, self.field):
                if document.text:
                    yield document

    def read_token_files(self) -> Iterator[TokenFile]:
        """Yields the arrays of a `tokens` source in file order; UserError for another shape or dtype."""
        for path in self.files:
            yield TokenFile(str(path), _open_token_array(path))

    def hash_content(self) -> str:
        """The blake2b of every file's relative name and bytes, as hexadecimal digits."""
        with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
            digests = list(pool.map(_hash_file, self.files))
        whole = hashlib.blake2b(json.dumps([self.kind, self.field]).encode(), digest_size=20)
        for name, digest in zip(self.names, digests, strict=True):
            whole.update(json.dumps([name, digest]).encode())
        return whole.hexdigest()

    def stat_files(self) -> tuple[tuple[int, int], ...]:
        """Size in bytes and modification time in nanoseconds of each file, which tell that one changed."""
        return tuple((stat.st_size, stat.st_mtime_ns) for stat in map(os.stat, self.files))


def open_source(kind: str, paths: tuple[str, ...], field: str, key: str = "data") -> Source:
    """Finds the files of a source.

    `key` is the configuration section for messages, such as `data` or `data.mixture[1]`. Raises UserError for
    a path that is missing or a folder, and for a pattern that matches no file.
    """
    if kind == "python-stdlib":
        if paths:
            raise UserError(
                f"{key}.paths is {list(paths)} but {key}.source is python-stdlib, which reads no paths: "
                f"set {key}.source to text, jsonl, parquet or tokens, or remove {key}.paths"
            )
        root = Path(sysconfig.get_paths()["stdlib"])
        files = _find_stdlib_files(root)
        return Source(kind, files, tuple(path.relative_to(root).as_posix() for path in files), field)
    if not paths:
        raise UserError(f"{key}.source {kind} needs files: set {key}.paths to files or glob patterns")
    found: dict[Path, None] = {}  # a file that two patterns match counts once
    for pattern in paths:
        found.update(dict.fromkeys(_match_files(pattern, key)))
    files = tuple(found)
    absolute = [os.path.abspath(path) for path in files]
    root = Path(os.path.commonpath([os.path.dirname(path) for path in absolute]))
    return Source(kind, files, tuple(Path(path).relative_to(root).as_posix() for path in absolute), field)


def _find_stdlib_files(root: Path) -> tuple[Path, ...]:
    files = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in _STDLIB_SKIPPED_FOLDERS]
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    if not files:
        raise UserError(
            f"data.source python-stdlib found no .py files in {root}: this Python ships its standard library "
            "without source text; set data.source to text and data.paths to files of your own"
        )
    return tuple(sorted(files, key=lambda path: path.relative_to(root).as_posix()))


def _match_files(pattern: str, key: str) -> list[Path]:
    path = Path(pattern).expanduser()
    if path.is_file():
        return [path]
    if path.is_dir():
        raise UserError(
            f"{key}.paths: {pattern} is a folder; name files or a pattern such as {pattern}/**/*.txt"
        )
    if not glob.has_magic(str(path)):
        raise UserError(f"{key}.paths: there is no file {pattern} (seen from {Path.cwd()}); correct the path")
    matches = sorted(map(Path, glob.glob(str(path), recursive=True)), key=Path.as_posix)
    files = [match for match in matches if match.is_file()]
    if not files:
        raise UserError(
            f"{key}.paths: the pattern {pattern} matches no file (seen from {Path.cwd()}); correct it"
        )
    return files


def _hash_file(path: Path) -> str:
    digest = hashlib.blake2b(digest_size=20)
    try:
        with path.open("rb") as file:
            while chunk := file.read(_HASH_CHUNK_BYTES):
                digest.update(chunk)
    except OSError as error:
        raise UserError(
            f"data.paths: cannot read {path}: {error.strerror}; make the file readable or leave it out"
        ) from error
    return digest.hexdigest()


def _read_text(path: Path, field: str) -> Iterator[Document]:
    yield Document(str(path), path.read_bytes().decode("utf-8", errors="replace"))


def _read_jsonl(path: Path, field: str) -> Iterator[Document]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield _parse_json_line(f"{path}:{number}", line, field)


def _parse_json_line(place: str, line: bytes, field: str) -> Document:
    try:
        record = json.loads(line.decode("utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(
            f"{place}: not JSON in UTF-8 ({error}); a jsonl file holds one object a line"
        ) from None
    if not isinstance(record, dict):
        raise UserError(f"{place}: {type(record).__name__} found; a jsonl file holds one object a line")
    if field not in record:
        names = ", ".join(sorted(record)) or "none"
        raise UserError(
            f"{place}: no field {field!r} (fields: {names}); set data.field to the one with the text"
        )
    text = record[field]
    if not isinstance(text, str):
        raise UserError(
            f"{place}: field {field!r} holds {type(text).__name__}, not text; "
            "set data.field to a field of text or mend the line"
        )
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UserError(
            f"{place}: field {field!r} holds half of a surrogate pair at character {error.start}, "
            "which is no text; mend the line"
        ) from None
    return Document(place, text)


def _read_parquet(path: Path, field: str) -> Iterator[Document]:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.ParquetFile(path)
    except pyarrow.ArrowInvalid as error:
        raise UserError(f"data.paths: {path} is not a Parquet file ({error}); leave it out") from error
    with table:
        schema = table.schema_arrow
        if field not in schema.names:
            raise UserError(
                f"{path}: no column {field!r} (columns: {', '.join(schema.names)}); "
                "set data.field to the one with the text"
            )
        kind = schema.field(field).type
        if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
            raise UserError(
                f"{path}: column {field!r} holds {kind}, not text; set data.field to a column of text"
            )
        row = 0
        for batch in table.iter_batches(batch_size=_PARQUET_BATCH_ROWS, columns=[field]):
            for text in batch.column(0).to_pylist():
                row += 1
                if text is None:
                    raise UserError(f"{path}, row {row}: column {field!r} is null, not text; mend the row")
                yield Document(f"{path}, row {row}", text)


def _open_token_array(path: Path) -> np.ndarray:
    try:
        tokens = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise UserError(
            f"data.paths: {path} is not a .npy file of integers ({error}); write it with numpy.save"
        ) from error
    if not isinstance(tokens, np.ndarray) or tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        found = f"{tokens.dtype} of shape {tokens.shape}" if isinstance(tokens, np.ndarray) else "an archive"
        raise UserError(f"data.paths: {path} holds {found}; a tokens file holds one 1-D array of integers")
    return tokens
