"""Where records go: a file of JSON lines, TensorBoard, or several at once. Only the first process of a run
opens any.

A run that goes on from step k may have written records of later steps before it was killed. They will come
again, so opening with `resume_step=k` drops them: every step is there exactly once. `resume_step=0` starts
afresh.
"""

import json
import math
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from jaxscale.config.errors import UserError
from jaxscale.disk import write_whole
from jaxscale.metrics.records import EvalRecord, LoadRecord, Record, StepRecord


class Sink(Protocol):
    """Takes the records of a run, in order."""

    def write(self, record: Record) -> None:
        """Takes one record, or passes over it."""
        ...

    def close(self) -> None:
        """Makes sure that everything written has reached its place."""
        ...


class JsonlSink:
    """A file with one line of JSON a record, flushed line by line: a kill loses at most the line being
    written."""

    def __init__(
        self, path: str | Path, *, resume_step: int, takes: tuple[type, ...] = (StepRecord, EvalRecord)
    ) -> None:
        """Opens or creates the file for a run at `resume_step`, and drops records of later steps.

        `takes`: kinds of records that belong into the file; others are passed over.
        Raises UserError if a line other than the last is not a JSON object.
        """
        self._path = Path(path)
        self._takes = takes
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if self._path.exists():
            _drop_later_records(self._path, resume_step)
        self._file = self._path.open("a", encoding="utf-8")

    def write(self, record: Record) -> None:
        """Appends one line."""
        if not isinstance(record, self._takes):
            return
        self._file.write(record.to_json() + "\n")
        self._file.flush()

    def close(self) -> None:
        """Closes the file; its lines survive a crash of the machine from here on."""
        if not self._file.closed:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()


class TensorBoardSink:
    """Scalars for TensorBoard over the step, `train/...` and `eval/...`; a thread of tensorboardX writes
    them.

    A record travels as one event: measured on CPU, eight events a step cost it four times as much.
    """

    def __init__(self, folder: str | Path, *, resume_step: int) -> None:
        """Opens a new event file in `folder`, which tells TensorBoard to hide what earlier ones say of
        steps after `resume_step`."""
        # lazily: a run without TensorBoard needs no protobuf
        from tensorboardX import SummaryWriter
        from tensorboardX.proto.summary_pb2 import Summary

        self._summary: Any = Summary
        # max_queue: a step waits only once so many records stand before the disk
        self._writer: Any = SummaryWriter(
            str(folder), purge_step=resume_step + 1, max_queue=1000, flush_secs=10
        )

    def write(self, record: Record) -> None:
        """Hands the record's numbers to the writing thread; loads are a table and no scalars."""
        if isinstance(record, LoadRecord):
            return
        group = "train" if isinstance(record, StepRecord) else "eval"
        values = [
            self._summary.Value(tag=f"{group}/{name}", simple_value=float(value))
            for name, value in asdict(record).items()
            if name not in ("kind", "step") and value is not None
        ]
        self._writer.file_writer.add_summary(self._summary(value=values), record.step)

    def close(self) -> None:
        """Writes what is left and closes the file."""
        self._writer.close()


class Sinks:
    """Several sinks as one."""

    def __init__(self, *sinks: Sink) -> None:
        self._sinks = sinks

    def write(self, record: Record) -> None:
        """Hands the record to each sink."""
        for sink in self._sinks:
            sink.write(record)

    def close(self) -> None:
        """Closes each sink, also where one before it fails; raises what failed, as a group where several
        did."""
        failures: list[OSError] = []
        for sink in self._sinks:
            try:
                sink.close()
            except OSError as error:
                failures.append(error)
        if len(failures) == 1:
            raise failures[0]
        if failures:
            raise ExceptionGroup("several metric files could not be closed", failures)


def _drop_later_records(path: Path, resume_step: int) -> None:
    """Rewrites the file without half-written and later records, in one atomic replacement; untouched if
    none."""
    kept: list[bytes] = []
    lines = path.read_bytes().splitlines(keepends=True)
    for number, line in enumerate(lines, start=1):
        step = _read_step(line)
        if step is None:
            if number < len(lines):
                raise UserError(
                    f"line {number} of {path} is not a metrics record: {line.strip()[:60]!r}; only the last "
                    "line may be cut short. Delete that line, or move the file away to start a new one"
                )
            continue
        if resume_step > 0 and step <= resume_step:
            kept.append(line)
    if len(kept) == len(lines):
        return
    write_whole(path, b"".join(kept))


def _read_step(line: bytes) -> float | None:
    """The step of a line: minus infinity where its record belongs to none; None where it is not a whole
    record."""
    if not line.endswith(b"\n"):
        return None
    try:
        record = json.loads(line)
    except (json.JSONDecodeError, UnicodeDecodeError):
        return None
    return record.get("step", -math.inf) if isinstance(record, dict) else None
