"""The training loop, in chapters: open, compile, continue, step, finish."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import jax
import optax

from jaxscale.checkpoint import Checkpoints
from jaxscale.config import Config, UserError
from jaxscale.data.dataset import Data, find_vocab
from jaxscale.data.loader import BatchLoader, evaluation_batches
from jaxscale.metrics import (
    Console,
    EvalRecord,
    JsonlSink,
    LoadRecord,
    SilentConsole,
    Sink,
    Sinks,
    TensorBoardSink,
    has_fp8,
)
from jaxscale.models.model import Model
from jaxscale.numerics.draw import make_key
from jaxscale.training.nonfinite import GiveUp
from jaxscale.training.reporter import Reporter
from jaxscale.training.routers import RouterState
from jaxscale.training.run_dir import RunDir, check_run_dir, open_run_data, write_config
from jaxscale.training.setup import Compiled, Setup, find_mesh, make_setup
from jaxscale.training.state import TrainState
from jaxscale.training.step import batch_sharding
from jaxscale.training.throughput import Throughput


class Outcome(IntEnum):
    """How a session ended; the values are exit codes."""

    DONE = 0
    NUMBERS_WENT_BAD = 3
    STOPPED = 75


@dataclass(frozen=True)
class Result:
    """What a session of training comes to."""

    outcome: Outcome
    run_dir: RunDir
    step: int
    first_eval: EvalRecord | None
    last_eval: EvalRecord | None


def train(
    config: Config,
    console: Console | None = None,
    *,
    model: Model | None = None,
    optimizer: optax.GradientTransformation | None = None,
    devices: Sequence[jax.Device] | None = None,
    is_stop_requested: Callable[[], bool] = lambda: False,
) -> Result:
    """Runs a configuration to its end, from wherever its run directory left off.

    Args:
      model: one that comes from Python; otherwise the configuration says which.
      optimizer: one that comes from Python, for `optimizer.name: python`.
      devices: those of the mesh; None: all.
      is_stop_requested: asked after each step; once true the run is saved and ends as `STOPPED`.

    Raises:
      UserError: whatever the user can mend, before the first compile.
    """
    console = console if console is not None and jax.process_index() == 0 else SilentConsole()
    config, mesh = find_mesh(config, devices)
    run_dir = check_run_dir(config)
    setup = make_setup(config, mesh, find_vocab(config, run_dir.tokenizer), model, optimizer)
    data = open_run_data(config, run_dir)
    assert data.vocab == setup.vocab, "the tokenizer's size is known before its corpus"
    if config.eval.every_steps and not len(data.validation):
        raise UserError(
            f"eval.every_steps={config.eval.every_steps} but data.validation_fraction=0 leaves nothing to "
            "evaluate on; hold some text out, or set eval.every_steps=0"
        )
    if jax.process_index() == 0:
        write_config(run_dir, config)
        data.tokenizer.save(run_dir.tokenizer)
    with ExitStack() as stack:
        checkpoints = Checkpoints(run_dir.checkpoints, keep=config.checkpoint.keep)
        stack.callback(checkpoints.close)
        return _Session(setup, data, run_dir, checkpoints, console, is_stop_requested, stack).run()


class _Session:
    """One process's part of a run, from start or resume to the end or a stop."""

    def __init__(
        self,
        setup: Setup,
        data: Data,
        run_dir: RunDir,
        checkpoints: Checkpoints,
        console: Console,
        is_stop_requested: Callable[[], bool],
        stack: ExitStack,
    ):
        self.setup, self.config, self.data = setup, setup.config, data
        self.run_dir, self.checkpoints, self.console = run_dir, checkpoints, console
        self.is_stop_requested = is_stop_requested
        self.stack = stack
        self.throughput = Throughput(setup)
        self.evaluation: Future[Compiled] | None = None
        self.first_eval: EvalRecord | None = None
        self.last_eval: EvalRecord | None = None

    def run(self) -> Result:
        config = self.config
        resume_step = self.checkpoints.latest_step() or 0
        for step in self.checkpoints.incomplete_steps():
            self.console.note(f"checkpoint of step {step} is not complete and is passed over")
        if resume_step >= config.steps:
            self.console.note(f"{config.run_dir} has all its {config.steps} steps; nothing is left to do")
            return self._result(Outcome.DONE, resume_step)
        last_step = min(config.steps, config.stop_after_steps or config.steps)
        if resume_step >= last_step:
            self.console.note(f"{config.run_dir} is at step {resume_step}, past stop_after_steps={last_step}")
            return self._result(Outcome.STOPPED, resume_step)
        self._note_formats()
        if resume_step:
            self.console.note(f"continuing {config.run_dir} after step {resume_step}")

        self.console.start(steps=config.steps, first_step=resume_step)
        self.stack.callback(self.console.finish)
        sinks = self._open_sinks(resume_step)
        loader = self.stack.enter_context(
            BatchLoader(
                self.data.train,
                sequences=config.batch.sequences,
                microbatches=config.batch.microbatches,
                sharding=batch_sharding(self.setup.layouts),
                start_sequence=resume_step * config.batch.sequences,
            )
        )
        state, step_function = self._compile_and_restore(resume_step)
        assert int(state.sequences) == resume_step * config.batch.sequences, (
            "the data position is the state's"
        )
        if resume_step == 0 and config.eval.every_steps:
            self._evaluate(state, 0, sinks)
        return self._step_to_end(state, step_function, loader, sinks, resume_step + 1, last_step)

    def _note_formats(self) -> None:
        """Says where a number format is not the hardware's own."""
        kind = self.setup.mesh.devices.flat[0].device_kind
        if self.config.precision.compute == "fp8" and has_fp8(kind) is False:
            self.console.note(
                f"fp8 is simulated: {kind} multiplies the same fp8 numbers, exactly, in a wider format"
            )

    def _step_to_end(
        self,
        state: TrainState,
        step_function: Compiled,
        loader: BatchLoader,
        sinks: Sinks,
        first_step: int,
        last_step: int,
    ) -> Result:
        config = self.config
        reporter = Reporter(config, self.setup.model.shapes, self.console, sinks, self.throughput)
        for step in range(first_step, last_step + 1):
            state, metrics = step_function(state, next(loader))
            reporter.take(step, metrics)
            is_last = step >= last_step or self.is_stop_requested()
            if (
                is_last
                or _is_due(step, config.eval.every_steps)
                or _is_due(step, config.checkpoint.every_steps)
            ):
                reporter.flush(with_load=True)
            if reporter.give_up is not None:
                return self._give_up(reporter.give_up)
            if _is_due(step, config.eval.every_steps) or (step == config.steps and config.eval.every_steps):
                self._evaluate(state, step, sinks)
                reporter.restart_clock()
            if is_last or _is_due(step, config.checkpoint.every_steps):
                self.checkpoints.save(step, state, wait=is_last)
                reporter.restart_clock()
            if is_last and step < config.steps:
                self.console.note(f"stopped at step {step}, everything saved; run the same command to go on")
            if is_last:
                return self._result(Outcome.DONE if step >= config.steps else Outcome.STOPPED, step)
        raise AssertionError("the last step always returns")

    def _compile_and_restore(self, resume_step: int) -> tuple[TrainState, Compiled]:
        """Compiles the step while the state is made or read: XLA compiles outside Python's lock."""
        with ThreadPoolExecutor(max_workers=2) as pool:
            step_function = pool.submit(self.setup.compile_step)
            if self.config.eval.every_steps:
                self.evaluation = pool.submit(self.setup.compile_evaluation)
            if resume_step:
                state = self.checkpoints.restore(resume_step, self.setup.abstract_state)
            else:
                state = self.setup.compile_init()(make_key(self.config.seed))
            return state, step_function.result()

    def _evaluate(self, state: TrainState, step: int, sinks: Sinks) -> None:
        assert self.evaluation is not None
        loss, weight = evaluate(self.setup, self.data, self.evaluation.result(), state.params, state.routers)
        record = EvalRecord(
            step=step,
            tokens=step * self.config.batch.sequences * self.config.batch.length,
            loss=loss / max(weight, 1.0),
            counted_tokens=round(weight),
        )
        self.first_eval, self.last_eval = self.first_eval or record, record
        self.console.eval(record)
        sinks.write(record)

    def _open_sinks(self, resume_step: int) -> Sinks:
        if jax.process_index() != 0:
            return Sinks()
        opened: list[Sink] = [
            JsonlSink(self.run_dir.metrics, resume_step=resume_step),
            TensorBoardSink(self.run_dir.tensorboard, resume_step=resume_step),
        ]
        if self.setup.model.routers is not None:
            path = self.run_dir.expert_load
            opened.append(JsonlSink(path, resume_step=resume_step, takes=(LoadRecord,)))
        sinks = Sinks(*opened)
        self.stack.callback(sinks.close)
        return sinks

    def _give_up(self, give_up: GiveUp) -> Result:
        """Nothing is saved; the save under way is waited for, so that it can be named."""
        self.checkpoints.wait()
        self.console.note(give_up.word(self.config.nonfinite, self.checkpoints.latest_step()))
        return self._result(Outcome.NUMBERS_WENT_BAD, give_up.step)

    def _result(self, outcome: Outcome, step: int) -> Result:
        return Result(outcome, self.run_dir, step, self.first_eval, self.last_eval)


def evaluate(
    setup: Setup,
    data: Data,
    evaluation: Compiled,
    params: Any,
    routers: RouterState | None,
    count: int | None = None,
) -> tuple[float, float]:
    """Sum of losses in nats and counted tokens of `count` (None: eval.sequences) validation sequences."""
    batch = setup.evaluation_config.batch
    batches = evaluation_batches(
        data.validation,
        setup.config.eval.sequences if count is None else count,
        sequences=batch.sequences,
        microbatches=1,
        sharding=batch_sharding(setup.layouts),
    )
    sums = [jax.device_get(evaluation(params, routers, each)) for each in batches]
    return sum(float(loss) for loss, _ in sums), sum(float(weight) for _, weight in sums)


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
