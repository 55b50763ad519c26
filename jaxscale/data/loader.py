"""From windows to batches on the devices, read ahead of the step that needs them."""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from types import TracebackType
from typing import Protocol

import jax
import numpy as np
from jax.sharding import NamedSharding

from jaxscale.config.errors import UserError
from jaxscale.data.windows import Window, WindowSource, make_empty_window

Batch = dict[str, jax.Array]
_BATCHES_AHEAD = 2


class Rows(Protocol):
    """Windows by sequence index."""

    def __getitem__(self, index: int) -> Window: ...


class BatchLoader:
    """Batches of a step, one after another, read ahead in a background thread.

    Iterating yields dicts of global arrays of shape [microbatches, sequences / microbatches, length], laid
    out by `sharding`. Row r of microbatch m in the batch that begins at sequence s is sequence
    s + m * (sequences / microbatches) + r: which sequences a step sees depends on nothing but s and
    `sequences`. Each process reads only the rows of its own shards, and each of those once.

    An exception while reading is raised by `next`, and ends the loader. Call `close`, or use it in `with`.
    """

    def __init__(
        self,
        rows: Rows,
        *,
        sequences: int,
        microbatches: int,
        sharding: NamedSharding,
        start_sequence: int = 0,
    ) -> None:
        self._rows = rows
        self._sequences = sequences
        self._layout = _BatchLayout(sequences, microbatches, sharding)
        self._next_to_read = start_sequence
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="batch-loader")
        self._pending: deque[Future[Batch]] = deque()
        for _ in range(_BATCHES_AHEAD):
            self._read_ahead()

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if not self._pending:
            raise StopIteration  # closed
        try:
            batch = self._pending.popleft().result()
        except BaseException:
            self.close()
            raise
        self._read_ahead()
        return batch

    def __enter__(self) -> "BatchLoader":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stops reading ahead and waits for the thread; afterwards the loader is exhausted."""
        self._pending.clear()
        self._executor.shutdown(wait=True, cancel_futures=True)

    def _read_ahead(self) -> None:
        start = self._next_to_read
        self._next_to_read += self._sequences
        self._pending.append(self._executor.submit(self._read, start))

    def _read(self, start: int) -> Batch:
        return self._layout.place(lambda row: self._rows[start + row])


def evaluation_batches(
    validation: WindowSource, count: int, *, sequences: int, microbatches: int, sharding: NamedSharding
) -> Iterator[Batch]:
    """Yields `count` validation windows, evenly spaced and the same each time, in full batches.

    Fewer windows than `count`: all of them. Each counts exactly once: the last batch is filled up with
    windows of padding, whose weights are 0. Shapes and layout are those of BatchLoader.
    """
    total = len(validation)
    count = min(count, total)
    chosen = [place * total // count for place in range(count)]
    layout = _BatchLayout(sequences, microbatches, sharding)
    length = validation[0]["tokens"].size if total else 0
    for start in range(0, count, sequences):
        part = chosen[start : start + sequences]

        def read(row: int, part: list[int] = part) -> Window:
            return validation[part[row]] if row < len(part) else make_empty_window(length)

        yield layout.place(read)


class _BatchLayout:
    """Places the windows of a batch on the devices."""

    def __init__(self, sequences: int, microbatches: int, sharding: NamedSharding) -> None:
        if sequences % microbatches:
            raise UserError(
                f"batch.sequences {sequences} does not divide into batch.microbatches {microbatches}; "
                "make it a multiple"
            )
        self._microbatches = microbatches
        self._rows = sequences // microbatches
        self._sharding = sharding

    def place(self, read: Callable[[int], Window]) -> Batch:
        """`read(row)` gives the window of a row of the batch, 0 <= row < sequences."""
        read_once: dict[int, Window] = {}

        def window(row: int) -> Window:
            if row not in read_once:
                read_once[row] = read(row)
            return read_once[row]

        def shard(name: str, index: tuple[slice, ...]) -> np.ndarray:
            microbatches = range(self._microbatches)[index[0]]
            rows = range(self._rows)[index[1]]
            windows = [[window(m * self._rows + r)[name][index[2]] for r in rows] for m in microbatches]
            return np.array(windows)

        batch: Batch = {}
        for name, array in window(self._first_local_row()).items():
            shape = (self._microbatches, self._rows, array.size)
            batch[name] = jax.make_array_from_callback(shape, self._sharding, partial(shard, name))
        return batch

    def _first_local_row(self) -> int:
        """A row of this process's own, which gives the names and the length."""
        any_length = self._sharding.num_devices  # divides over whatever axes the last dim has
        shape = (self._microbatches, self._rows, any_length)
        index = next(iter(self._sharding.addressable_devices_indices_map(shape).values()))
        assert index is not None
        return range(self._microbatches)[index[0]][0] * self._rows + range(self._rows)[index[1]][0]
