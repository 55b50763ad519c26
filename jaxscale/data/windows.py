"""Fixed windows of tokens over a stream of documents, with labels, positions, segments and weights."""

import math
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from jaxscale.data.cache import TokenisedCorpus

Window = dict[str, np.ndarray]
_COUNTING_LENGTH = 1 << 20


class WindowSource(Protocol):
    """Windows by index, of one split of one or several corpora."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Window: ...

    def with_length(self, length: int) -> "WindowSource":
        """The same tokens in windows of another length."""
        ...


class DocumentStream:
    """The documents of a corpus one after another, in a pseudo-random order that is the same each time."""

    def __init__(self, corpus: TokenisedCorpus) -> None:
        lengths = np.diff(corpus.offsets)
        order = np.argsort(_splitmix64(np.arange(lengths.size, dtype=np.uint64)), kind="stable")
        self._tokens = corpus.tokens
        # Document k of the stream covers its positions [bounds[k], bounds[k + 1]).
        self.bounds = np.concatenate([[0], np.cumsum(lengths[order])]).astype(np.int64)
        self._shifts = (
            corpus.offsets[:-1][order] - self.bounds[:-1]
        )  # from stream position to place in the file

    def __len__(self) -> int:
        return int(self.bounds[-1])

    def read(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens of the stream positions [start, stop), int32, and the document of each, int64."""
        first = int(np.searchsorted(self.bounds, start, side="right")) - 1
        last = int(np.searchsorted(self.bounds, stop, side="left"))
        counts: np.ndarray = np.diff(np.clip(self.bounds[first : last + 1], start, stop))
        documents: np.ndarray = np.repeat(np.arange(first, last), counts)
        return self._tokens[np.arange(start, stop) + self._shifts[documents]].astype(np.int32), documents


@dataclass(frozen=True)
class Windows:
    """Windows of `length` tokens over the positions [start, stop) of a stream.

    Window w reads stream[start + w*T : start + w*T + T + 1], T tokens and the same shifted by one as labels,
    so that each token but the first is predicted once and nothing at or after `stop` is ever read. A window
    is a dict of arrays of shape [T]: `tokens`, `labels`, `positions`, `segments` int32 and `weights` float32.

    - `segments` numbers the documents in the window from 1; 0 is padding, in the last window only. With
      `cross_documents` all real tokens are segment 1.
    - `positions` restart at 0 where a document starts, if `restart_positions`; else they are 0..T-1.
    - `weights` is 0 where the label belongs to another document than the token, or is padding; else 1.
      Masking goes by place, never by token id: the end token of a document counts, whatever id pads.
    """

    stream: DocumentStream
    start: int
    stop: int
    length: int
    cross_documents: bool = False
    restart_positions: bool = True

    def __len__(self) -> int:
        return max(0, -(-(self.stop - self.start - 1) // self.length))

    def __getitem__(self, index: int) -> Window:
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        begin = self.start + index * self.length
        tokens, documents = self.stream.read(begin, min(begin + self.length + 1, self.stop))
        real = min(tokens.size, self.length)
        document_starts = np.maximum(self.stream.bounds[documents[:real]] - begin, 0)
        window: Window = {
            "tokens": tokens[:real],
            "labels": tokens[1:],
            "positions": np.arange(real) - document_starts,
            "segments": documents[:real] - documents[0] + 1,
        }
        if self.cross_documents:
            window["segments"] = np.ones(real)
        window = {name: _pad(array, self.length, np.int32) for name, array in window.items()}
        if not self.restart_positions:
            window["positions"] = np.arange(self.length, dtype=np.int32)
        window["weights"] = _pad(documents[1:] == documents[:-1], self.length, np.float32)
        return window

    def with_length(self, length: int) -> "Windows":
        """The same tokens in windows of another length."""
        return replace(self, length=length)


class JoinedWindows:
    """The windows of several splits, one split after another."""

    def __init__(self, parts: tuple[WindowSource, ...]) -> None:
        self._parts = parts
        self._bounds = np.cumsum([0, *map(len, parts)])

    def __len__(self) -> int:
        return int(self._bounds[-1])

    def __getitem__(self, index: int) -> Window:
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        part = int(np.searchsorted(self._bounds, index, side="right")) - 1
        return self._parts[part][index - int(self._bounds[part])]

    def with_length(self, length: int) -> "JoinedWindows":
        """The same tokens in windows of another length."""
        return JoinedWindows(tuple(part.with_length(length) for part in self._parts))


def split_at(stream: DocumentStream, validation_fraction: float) -> int:
    """The stream position where validation begins: exactly the last fraction of the tokens, rounded down."""
    return len(stream) - math.floor(len(stream) * validation_fraction)


def make_empty_window(length: int) -> Window:
    """A window of padding: no segment, every weight 0."""
    names = ("tokens", "labels", "positions", "segments")
    return {name: np.zeros(length, np.int32) for name in names} | {"weights": np.zeros(length, np.float32)}


def unigram_entropy_nats(windows: WindowSource) -> float:
    """Entropy of the counted labels' frequencies, in nats a token: the loss of the best context-free guess.

    Raises ValueError where no label counts.
    """
    counts = np.zeros(0, np.int64)
    long_windows = windows.with_length(_COUNTING_LENGTH)  # which labels count does not depend on the length
    for index in range(len(long_windows)):
        window = long_windows[index]
        found = np.bincount(window["labels"][window["weights"] > 0], minlength=counts.size)
        found[: counts.size] += counts
        counts = found
    counts = counts[counts > 0]
    if not counts.size:
        raise ValueError("no label counts, so there is no frequency to take the entropy of")
    shares = counts / counts.sum()
    return float(-(shares * np.log(shares)).sum())


def _pad(array: np.ndarray, length: int, dtype: type) -> np.ndarray:
    padded: np.ndarray = np.zeros(length, dtype)
    padded[: array.size] = array
    return padded


def _splitmix64(values: np.ndarray) -> np.ndarray:
    """Steele, Lea and Flood 2014: a bijection of 64-bit integers, so no two documents tie."""
    z = (values + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
