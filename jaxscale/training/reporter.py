"""From a step's metrics to records, one step late."""

import time
from collections.abc import Sequence
from typing import Any

import jax

from jaxscale.config import Config
from jaxscale.metrics import Console, Sinks, StepRecord
from jaxscale.training.throughput import Throughput


class Reporter:
    """Turns a step's metrics into records, one step late, so that the devices never wait for the host."""

    def __init__(
        self, config: Config, console: Console, sinks: Sinks, throughput: Throughput, paths: Sequence[str]
    ):
        self.config, self.console, self.sinks, self.throughput = config, console, sinks, throughput
        self.skips_in_row = 0
        self._paths = paths
        self.bad_leaves: dict[str, int] = {}
        self.loss_scale: float | None = None
        self._pending: tuple[int, Any] | None = None
        self._clock = time.perf_counter()

    def take(self, step: int, metrics: dict[str, Any]) -> None:
        self.flush()
        self._pending = (step, metrics)

    def flush(self) -> None:
        """Waits for the step taken last, and reports it."""
        if self._pending is None:
            return
        (step, metrics), self._pending = self._pending, None
        values = jax.device_get(metrics)
        now = time.perf_counter()
        seconds, self._clock = now - self._clock, now
        self.skips_in_row = int(values["skips_in_row"])
        counts = zip(self._paths, values["nonfinite"].tolist(), strict=True)
        self.bad_leaves = {path: count for path, count in counts if count}
        self.loss_scale = float(values["loss_scale"]) if "loss_scale" in values else None
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
            loss_scale=self.loss_scale,
        )
        self.console.step(record)
        self.sinks.write(record)

    def restart_clock(self) -> None:
        """What was done since the last step (saving, evaluating) is no step's time."""
        self._clock = time.perf_counter()
