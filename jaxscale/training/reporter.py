"""From a step's metrics on the devices to its record on the host."""

import time
from typing import Any

import jax

from jaxscale.config import Config
from jaxscale.metrics import OPTIONAL_FIGURES, Console, LoadRecord, Sinks, StepRecord
from jaxscale.training.nonfinite import GiveUp, is_too_many, name_nonfinite
from jaxscale.training.throughput import Throughput


class Reporter:
    """Turns a step's metrics into records, one step late, so that the devices never wait for the host."""

    def __init__(self, config: Config, shapes: Any, console: Console, sinks: Sinks, throughput: Throughput):
        """`shapes`: the model's parameters, whose paths name the leaves that went bad."""
        self.config, self.shapes, self.throughput = config, shapes, throughput
        self.console, self.sinks = console, sinks
        self.give_up: GiveUp | None = None
        """Set by the step that was one skip too many; no later step is reported."""
        self._pending: tuple[int, Any] | None = None
        self._clock = time.perf_counter()

    def take(self, step: int, metrics: dict[str, jax.Array]) -> None:
        """Reports the step before, and keeps this one."""
        self.flush()
        self._pending = None if self.give_up else (step, metrics)

    def flush(self, *, with_load: bool = False) -> None:
        """Waits for the step taken last, and reports it; `with_load`: what each expert had to do as well."""
        if self._pending is None:
            return
        (step, metrics), self._pending = self._pending, None
        values = jax.device_get(metrics)
        now = time.perf_counter()
        seconds, self._clock = now - self._clock, now
        batch = self.config.batch
        record = StepRecord(
            step=step,
            sequences=step * batch.sequences,
            tokens=step * batch.sequences * batch.length,
            loss=float(values["loss"]),
            grad_norm=float(values["grad_norm"]),
            lr=float(values["lr"]),
            step_seconds=seconds,
            tokens_per_second=batch.sequences * batch.length / seconds,
            mfu=self.throughput.utilisation(batch.sequences * batch.length / seconds),
            skipped=bool(values["skipped"]),
            **{name: float(values[name]) for name in OPTIONAL_FIGURES if name in values},
        )
        self.console.step(record)
        self.sinks.write(record)
        if with_load and "load" in values:
            load = LoadRecord(step=step, tokens=record.tokens, load=values["load"].tolist())
            self.sinks.write(load)
        skips = int(values["skips_in_row"])
        if is_too_many(skips, self.config.nonfinite):
            self.give_up = GiveUp(step, skips, name_nonfinite(self.shapes, values["nonfinite"]))

    def restart_clock(self) -> None:
        """What was done since the last step (saving, evaluating) is no step's time."""
        self._clock = time.perf_counter()
