"""What a person sees of a run: one live line on a terminal, a few plain lines anywhere else."""

import math
import os
import sys
import time
from typing import Any, Protocol, TextIO

from jaxscale.metrics.records import EvalRecord, StepRecord
from jaxscale.metrics.summary import Summary, word_drops, word_duration, word_loads, word_loss, word_rate


class Console(Protocol):
    """Tells a person how a run goes: start, then steps, evaluations and notes in any order, then finish."""

    def start(self, *, steps: int, first_step: int = 0) -> None:
        """Begins a session of a run of `steps` updates, `first_step` of them made before."""
        ...

    def step(self, record: StepRecord) -> None:
        """Takes one step; cheap enough for every step."""
        ...

    def eval(self, record: EvalRecord) -> None:
        """Shows one evaluation."""
        ...

    def note(self, message: str) -> None:
        """Shows one line."""
        ...

    def finish(self) -> None:
        """Ends the session with a summary; nothing where none began. Call it also when the run fails: it
        gives the terminal back."""
        ...


def open_console(stream: TextIO | None = None) -> Console:
    """The console that suits a stream (standard error by default): live on a terminal, else plain."""
    stream = stream or sys.stderr
    return (
        LiveConsole(stream) if stream.isatty() and os.environ.get("TERM") != "dumb" else PlainConsole(stream)
    )


class SilentConsole:
    """Shows nothing: for every process but the first, and where a program reads the output."""

    def start(self, *, steps: int, first_step: int = 0) -> None:
        """Shows nothing."""

    def step(self, record: StepRecord) -> None:
        """Shows nothing."""

    def eval(self, record: EvalRecord) -> None:
        """Shows nothing."""

    def note(self, message: str) -> None:
        """Shows nothing."""

    def finish(self) -> None:
        """Shows nothing."""


class PlainConsole:
    """Plain lines for logs: the first and last step and one every few seconds, evaluations, notes, a
    summary."""

    def __init__(self, stream: TextIO, *, every_seconds: float = 5.0, every_steps: int | None = None) -> None:
        """A step is shown once `every_seconds` have passed since the last one shown, or each `every_steps`
        steps."""
        self._stream = stream
        self._every_seconds = every_seconds
        self._every_steps = every_steps
        self._shown_at_seconds: float | None = None
        self._summary: Summary | None = None

    def start(self, *, steps: int, first_step: int = 0) -> None:
        """Begins a session."""
        self._summary = Summary(steps=steps, first_step=first_step)
        self._shown_at_seconds = None

    def step(self, record: StepRecord) -> None:
        """Takes one step; shows it if it is its turn, or if it was skipped."""
        assert self._summary is not None, "step before start"
        self._summary.add_step(record)
        if record.skipped:
            self.note(_word_skip(record))
        elif self._is_due(record.step, self._summary.steps):
            self._shown_at_seconds = time.monotonic()
            self.note(_word_step(record, self._summary))

    def eval(self, record: EvalRecord) -> None:
        """Shows one evaluation."""
        assert self._summary is not None, "eval before start"
        self._summary.add_eval(record)
        self.note(_word_eval(record))

    def note(self, message: str) -> None:
        """Shows one line."""
        print(message, file=self._stream, flush=True)

    def finish(self) -> None:
        """Shows the summary, labels and values aligned."""
        if self._summary is None:
            return
        rows, self._summary = self._summary.to_rows(), None
        width = max(len(label) for label, _ in rows)
        self.note("\n" + "\n".join(f"{label:<{width}}  {value}" for label, value in rows))

    def _is_due(self, step: int, steps: int) -> bool:
        if self._shown_at_seconds is None or step == steps:
            return True
        if self._every_steps is not None:
            return step % self._every_steps == 0
        return time.monotonic() - self._shown_at_seconds >= self._every_seconds


class LiveConsole:
    """One line that is redrawn four times a second; evaluations, notes and anything printed appear above
    it."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._rich: Any = None
        self._progress: Any = None
        self._task: Any = None
        self._summary: Summary | None = None

    def start(self, *, steps: int, first_step: int = 0) -> None:
        """Begins a session and draws the line."""
        # lazily, here and below: commands that draw nothing start without rich
        from rich.progress import BarColumn, Progress, TextColumn
        from rich.table import Column

        self._summary = Summary(steps=steps, first_step=first_step)
        self._progress = Progress(
            TextColumn("step {task.completed:,}/{task.total:,}", table_column=Column(no_wrap=True)),
            BarColumn(bar_width=None, table_column=Column(ratio=1, min_width=4)),
            TextColumn("{task.fields[status]}", table_column=Column(no_wrap=True), markup=False),
            console=self._open(),
            refresh_per_second=4,
            transient=True,
            expand=True,
        )
        self._task = self._progress.add_task("", total=steps, completed=first_step, status="compiling")
        self._progress.start()

    def step(self, record: StepRecord) -> None:
        """Takes one step; the line shows it when it is next drawn."""
        assert self._summary is not None, "step before start"
        self._summary.add_step(record)
        seconds_left = self._summary.estimate_seconds_left()
        status = f"loss {word_loss(record.loss)}  {word_rate(record.tokens_per_second)} tokens/s"
        if record.load_max is not None:
            status += f"  load {word_loads(record)}"
        if seconds_left is not None:
            status += f"  {word_duration(seconds_left)} left"
        self._progress.update(self._task, completed=record.step, status=status)
        if record.skipped:
            self.note(_word_skip(record))

    def eval(self, record: EvalRecord) -> None:
        """Shows one evaluation above the line."""
        assert self._summary is not None, "eval before start"
        self._summary.add_eval(record)
        self.note(_word_eval(record))

    def note(self, message: str) -> None:
        """Shows one line above the live one."""
        if self._progress is not None:
            self._progress.refresh()  # else the line is drawn again as it was up to 250 ms ago
        self._open().print(message, markup=False)

    def finish(self) -> None:
        """Removes the line and shows the summary."""
        if self._summary is None:
            return
        from rich.table import Table

        self._progress.stop()
        self._progress = None
        table = Table(show_header=False, box=None, pad_edge=False, padding=(0, 2, 0, 0))
        table.add_column(style="dim")
        for label, value in self._summary.to_rows():
            table.add_row(label, value)
        self._summary = None
        self._open().print()
        self._open().print(table)

    def _open(self) -> Any:
        """rich's console on the stream."""
        if self._rich is None:
            from rich.console import Console as RichConsole

            self._rich = RichConsole(file=self._stream, highlight=False)
        return self._rich


def _word_step(record: StepRecord, summary: Summary) -> str:
    line = (
        f"step {record.step:,}/{summary.steps:,}  loss {word_loss(record.loss)}  "
        f"grad norm {record.grad_norm:.3g}  lr {record.lr:.3g}  "
        f"{word_rate(record.tokens_per_second)} tokens/s"
    )
    if record.mfu is not None:
        line += f"  MFU {record.mfu:.1%}"
    if record.loss_scale is not None:
        line += f"  loss scale {record.loss_scale:,.0f}"
    if record.load_max is not None:
        line += f"  load {word_loads(record)}  dropped {word_drops(record)}"
    seconds_left = summary.estimate_seconds_left()
    return line if seconds_left is None else f"{line}  {word_duration(seconds_left)} left"


def _word_eval(record: EvalRecord) -> str:
    return (
        f"eval at step {record.step:,}  loss {word_loss(record.loss)}  perplexity {record.perplexity:.2f}  "
        f"over {record.counted_tokens:,} tokens"
    )


def _word_skip(record: StepRecord) -> str:
    finite = math.isfinite(record.loss) and math.isfinite(record.grad_norm)
    line = (
        f"step {record.step:,} skipped: loss {word_loss(record.loss)}, gradient norm {record.grad_norm:.3g}; "
        + ("no token counted" if finite else "a number is not finite")
    )
    return line if record.loss_scale is None else f"{line}, at a loss scale of {record.loss_scale:,.0f}"
