"""What the console says at the end of a run, and how it words numbers."""

import time

from jaxscale.metrics.records import EvalRecord, StepRecord


class Summary:
    """Gathers what the table at the end shows, from the records of this session."""

    def __init__(self, *, steps: int, first_step: int) -> None:
        """`steps`: updates of the whole run; `first_step`: those made before this session."""
        self.steps = steps
        self._first_step = first_step
        self._start_seconds = time.monotonic()
        self._first: StepRecord | None = None
        self._first_end_seconds = 0.0
        self._last: StepRecord | None = None
        self._steady_seconds = 0.0
        self._skipped = 0
        self._first_eval: EvalRecord | None = None
        self._last_eval: EvalRecord | None = None

    def add_step(self, record: StepRecord) -> None:
        """Counts one step."""
        if self._first is None:
            self._first = record
            self._first_end_seconds = time.monotonic()
        else:
            self._steady_seconds += record.step_seconds
        self._last = record
        self._skipped += record.skipped

    def add_eval(self, record: EvalRecord) -> None:
        """Counts one evaluation."""
        self._first_eval = self._first_eval or record
        self._last_eval = record

    def estimate_seconds_left(self) -> float | None:
        """Wall time to the last step at the pace so far, evaluations and saves included, the first step's
        compilation not; None before the second step and after the last."""
        if self._first is None or self._last is None:
            return None
        if self._last.step in (self._first.step, self.steps):
            return None
        pace = (time.monotonic() - self._first_end_seconds) / (self._last.step - self._first.step)
        return pace * (self.steps - self._last.step)

    def to_rows(self) -> list[tuple[str, str]]:
        """Label and value of each line of the table."""
        rows = [("steps", f"{self._last.step if self._last else self._first_step:,} of {self.steps:,}")]
        if self._last and self._first_step:
            rows.append(("steps in this session", f"{self._last.step - self._first_step:,}"))
        if self._last:
            rows.append(("tokens", f"{self._last.tokens:,}"))
            rows.append(("final loss", word_loss(self._last.loss)))
        if self._last and self._last.load_max is not None:
            rows.append(("load of experts", f"{word_loads(self._last)} of an even share"))
            rows.append(("dropped choices", word_drops(self._last)))
        if self._last_eval and self._first_eval is self._last_eval:
            rows.append(("validation loss", _word_eval(self._last_eval)))
        elif self._first_eval and self._last_eval:
            rows.append(("first validation loss", _word_eval(self._first_eval)))
            rows.append(("last validation loss", _word_eval(self._last_eval)))
        rows.append(("wall time", word_duration(time.monotonic() - self._start_seconds)))
        if self._first and self._last and self._steady_seconds > 0:
            tokens_per_second = (self._last.tokens - self._first.tokens) / self._steady_seconds
            rows.append(("tokens/s after first step", f"{tokens_per_second:,.0f}"))
        rows.append(("skipped steps", f"{self._skipped:,}"))
        return rows


def _word_eval(record: EvalRecord) -> str:
    return f"{word_loss(record.loss)} at step {record.step:,}"


def word_loss(loss: float) -> str:
    """Four decimals."""
    return f"{loss:.4f}"


def word_loads(record: StepRecord) -> str:
    """Smallest and largest load, in multiples of an even share: 0.41-2.3."""
    return f"{record.load_min:.2g}-{record.load_max:.2g}"


def word_drops(record: StepRecord) -> str:
    """Choices that found no room, per cent."""
    return f"{record.drop_fraction:.1%}"


def word_rate(per_second: float) -> str:
    """Three digits and a multiple: 12.3k."""
    for multiple, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if per_second >= multiple:
            return (
                f"{per_second / multiple:.3g}{letter}" if per_second < 1e3 * multiple else f"{per_second:.3g}"
            )
    return f"{per_second:.0f}"


def word_duration(seconds: float) -> str:
    """h:mm:ss; with one decimal below ten seconds."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    minutes, whole_seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{whole_seconds:02d}"
