"""Tokenised corpora on disk: all tokens in one flat file, and where each document starts."""

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from jaxscale.config.errors import UserError
from jaxscale.data.publish import open_or_build
from jaxscale.data.sources import Document, Source
from jaxscale.data.tokenizer import Tokenizer

_FORMAT = 1
_TOKENS_NAME = "tokens.bin"
_OFFSETS_NAME = "offsets.bin"
_BATCH_CHARACTERS = 1 << 22
_BATCH_DOCUMENTS = 4096
_CHUNK_TOKENS = 1 << 22
_LARGEST_UINT16_VOCAB = 1 << 16


@dataclass(frozen=True)
class TokenisedCorpus:
    """The tokens of a corpus, document after document, each ended by the end token where one is known.

    `tokens` is a read-only memory map, uint16 or uint32; document d is tokens[offsets[d] : offsets[d + 1]],
    `offsets` int64. No document is empty.
    """

    tokens: np.ndarray
    offsets: np.ndarray


def find_cache_dir(configured: str | None) -> Path:
    """The folder of tokenised corpora: data.cache_dir, or jaxscale in the user's cache folder."""
    if configured is not None:
        return Path(configured).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxscale"


def open_tokenised(source: Source, content: str, tokenizer: Tokenizer, cache_dir: Path) -> TokenisedCorpus:
    """Opens the tokenised form of a source, building it the first time.

    `content` is `source.hash_content()`: with the tokenizer's identity it names the cache folder, so another
    text or another tokenizer never finds this one. Raises UserError for an empty corpus, for text that cannot
    be read, and for an id outside [0, tokenizer.vocab_size), naming file, offset and id.
    """
    identity = json.dumps([_FORMAT, content, tokenizer.identity])
    folder = cache_dir / "corpora" / hashlib.blake2b(identity.encode(), digest_size=20).hexdigest()
    description = open_or_build(folder, partial(_build, source=source, content=content, tokenizer=tokenizer))
    dtype = np.dtype(description["dtype"])
    return TokenisedCorpus(
        tokens=np.memmap(folder / _TOKENS_NAME, dtype, mode="r", shape=(description["tokens"],)),
        offsets=np.fromfile(folder / _OFFSETS_NAME, np.int64),
    )


def choose_dtype(vocab_size: int) -> np.dtype:
    """The smallest storage that holds every id: uint16 would wrap 70,000 to 4,464 without a word."""
    return np.dtype(np.uint16 if vocab_size <= _LARGEST_UINT16_VOCAB else np.uint32)


class _CorpusWriter:
    """Appends documents to the flat token file and keeps their lengths."""

    def __init__(self, file: BinaryIO, dtype: np.dtype) -> None:
        self._file = file
        self._dtype = dtype
        self._lengths = [np.zeros(1, np.int64)]

    def append(self, tokens: np.ndarray, lengths: np.ndarray) -> None:
        self._file.write(tokens.astype(self._dtype).tobytes())
        self._lengths.append(lengths)

    def offsets(self) -> np.ndarray:
        return np.cumsum(np.concatenate(self._lengths), dtype=np.int64)


def _build(folder: Path, *, source: Source, content: str, tokenizer: Tokenizer) -> dict[str, Any]:
    dtype = choose_dtype(tokenizer.vocab_size)
    before = source.stat_files()
    with (folder / _TOKENS_NAME).open("wb") as file:
        writer = _CorpusWriter(file, dtype)
        if source.kind == "tokens":
            _copy_token_files(source, tokenizer, writer)
        else:
            _tokenise_documents(source, tokenizer, writer)
    if source.stat_files() != before:
        raise UserError(
            "data.paths: a file changed while it was being tokenised; run again when it is complete"
        )
    offsets = writer.offsets()
    if offsets[-1] == 0:
        raise UserError(
            f"the corpus is empty: {len(source.files)} files, the first {source.files[0]}, hold 0 tokens; "
            "point data.paths at files with text"
        )
    offsets.tofile(folder / _OFFSETS_NAME)
    return {
        "format": _FORMAT,
        "content": content,
        "tokenizer": tokenizer.identity,
        "dtype": dtype.name,
        "tokens": int(offsets[-1]),
        "documents": len(offsets) - 1,
    }


def _tokenise_documents(source: Source, tokenizer: Tokenizer, writer: _CorpusWriter) -> None:
    end = np.array([] if tokenizer.end_id is None else [tokenizer.end_id], np.uint32)
    for documents in _batch_documents(source.read_documents()):
        ids = tokenizer.encode_batch([document.text for document in documents])
        for document, document_ids in zip(documents, ids, strict=True):
            _check_ids(document_ids, tokenizer.vocab_size, document.place, 0)
        lengths = np.array([document_ids.size + end.size for document_ids in ids], np.int64)
        writer.append(np.concatenate([part for document_ids in ids for part in (document_ids, end)]), lengths)


def _batch_documents(documents: Iterator[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    characters = 0
    for document in documents:
        batch.append(document)
        characters += len(document.text)
        if characters >= _BATCH_CHARACTERS or len(batch) == _BATCH_DOCUMENTS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _copy_token_files(source: Source, tokenizer: Tokenizer, writer: _CorpusWriter) -> None:
    """Documents end after each end token and at the end of a file, which gets an end token if it has none."""
    for place, tokens in source.read_token_files():
        open_tokens = 0  # of the document that reaches into the next chunk
        for start in range(0, tokens.size, _CHUNK_TOKENS):
            chunk = np.asarray(tokens[start : start + _CHUNK_TOKENS])
            _check_ids(chunk, tokenizer.vocab_size, place, start)
            ends = (
                np.flatnonzero(chunk == tokenizer.end_id) + 1 if tokenizer.end_id is not None else chunk[:0]
            )
            bounds = np.concatenate([[-open_tokens], ends]).astype(np.int64)
            writer.append(chunk, np.diff(bounds))
            open_tokens = chunk.size - int(bounds[-1])
        if open_tokens and tokenizer.end_id is not None:
            writer.append(np.array([tokenizer.end_id], np.uint32), np.array([open_tokens + 1]))
        elif open_tokens:
            writer.append(np.array([], np.uint32), np.array([open_tokens]))


def _check_ids(ids: np.ndarray, vocab_size: int, place: str, start: int) -> None:
    if not ids.size or (int(ids.min()) >= 0 and int(ids.max()) < vocab_size):
        return
    offset = int(np.flatnonzero((ids < 0) | (ids >= vocab_size))[0])
    raise UserError(
        f"{place}: token id {int(ids[offset])} at offset {start + offset} is outside the vocabulary "
        f"[0, {vocab_size}); set data.tokenizer to the tokenizer that wrote the file "
        "(or none, with model.vocab), or mend the file"
    )
