"""A run from configuration to run directory: metrics, resume, stop, one compilation, bad numbers."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxscale.config import Config, UserError, load_config, parse_config
from jaxscale.metrics import SilentConsole, StepRecord
from jaxscale.training.loop import Outcome, train
from jaxscale.training.run_dir import RunDir

STEPS = 6
TIMES = ("step_seconds", "tokens_per_second", "mfu")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents of many lengths, some longer than a window, some of a few bytes."""
    folder = tmp_path_factory.mktemp("corpus")
    rng = np.random.default_rng(0)
    for number in range(200):
        words = rng.choice(["alpha", "beta", "gamma", "delta"], rng.integers(1, 120))
        (folder / f"{number:03}.txt").write_text(" ".join(words))
    return folder


def make_run(run_dir: Path, corpus: Path, **sections: Any) -> Config:
    tree = {
        "run_dir": str(run_dir),
        "steps": STEPS,
        "mesh": {"data": 2, "fsdp": 2, "tensor": 2},
        "batch": {"sequences": 8, "microbatches": 2, "length": 32},
        "model": {
            "family": "llama",
            "layers": 2,
            "embed": 32,
            "heads": 4,
            "kv_heads": 2,
            "mlp": 64,
            "tied": True,
        },
        "data": {
            "source": "text",
            "paths": [str(corpus / "*.txt")],
            "cache_dir": str(corpus.parent / "cache"),
        },
        "optimizer": {"peak_lr": 1e-3, "warmup_tokens": 512},
        "checkpoint": {"every_steps": 2, "keep": 2},
        "eval": {"every_steps": 3, "sequences": 13},
    }
    return parse_config({**tree, **sections}, origin="test")


def read_metrics(run_dir: RunDir) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in run_dir.metrics.read_text().splitlines()]
    return [{name: value for name, value in line.items() if name not in TIMES} for line in lines]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> RunDir:
    run_dir = tmp_path_factory.mktemp("unbroken") / "run"
    result = train(make_run(run_dir, corpus))
    assert result.outcome is Outcome.DONE
    assert result.step == STEPS
    return result.run_dir


@pytest.mark.smoke
def test_a_run_directory_holds_the_run(unbroken: RunDir) -> None:
    lines = [json.loads(line) for line in unbroken.metrics.read_text().splitlines()]
    steps = [line for line in lines if line["kind"] == "step"]
    assert [line["step"] for line in steps] == list(range(1, STEPS + 1))
    assert set(steps[0]) == {
        "kind", "step", "sequences", "tokens", "loss", "grad_norm", "lr", "step_seconds", "tokens_per_second",
        "mfu", "loss_scale", "skipped", "balance", "router_z", "router_entropy", "drop_fraction", "load_max",
        "load_min", "bias_min", "bias_max",
    }  # fmt: skip
    assert {line["balance"] for line in steps} == {None}  # as all that only experts have
    assert steps[-1]["sequences"] == STEPS * 8
    assert steps[-1]["tokens"] == STEPS * 8 * 32
    assert [line["step"] for line in lines if line["kind"] == "eval"] == [0, 3, 6]
    # Two updates of warm-up to 1e-3, then a cosine over the four others down to a tenth.
    cosine = [1e-4 + 9e-4 * (1 + math.cos(math.pi * done / 4)) / 2 for done in range(1, 5)]
    assert [line["lr"] for line in steps] == pytest.approx([5e-4, 1e-3, *cosine])
    assert load_config(unbroken.config).mesh.data == 2
    assert list(unbroken.tensorboard.iterdir())
    assert sorted(int(path.name) for path in unbroken.checkpoints.iterdir()) == [4, 6]


@pytest.mark.parametrize("stops", [(1,), (3,), (4, 5)], ids=str)
def test_metrics_are_bit_equal_whether_or_not_the_run_was_interrupted(
    tmp_path: Path, corpus: Path, unbroken: RunDir, stops: tuple[int, ...]
) -> None:
    for stop in stops:
        result = train(make_run(tmp_path / "run", corpus, stop_after_steps=stop))
        assert result.outcome is Outcome.STOPPED
        assert result.step == stop
    result = train(make_run(tmp_path / "run", corpus))
    assert result.outcome is Outcome.DONE
    assert read_metrics(result.run_dir) == read_metrics(unbroken)


def test_a_run_goes_on_with_another_mesh_and_accumulation(
    tmp_path: Path, corpus: Path, unbroken: RunDir
) -> None:
    train(make_run(tmp_path / "run", corpus, stop_after_steps=3))
    other = {"mesh": {"fsdp": 8}, "batch": {"sequences": 8, "microbatches": 1, "length": 32}}
    result = train(make_run(tmp_path / "run", corpus, **other))
    for ours, theirs in zip(read_metrics(result.run_dir), read_metrics(unbroken), strict=True):
        assert ours["kind"] == theirs["kind"]
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=2e-6)


def test_a_stop_request_saves_and_a_finished_run_stays(tmp_path: Path, corpus: Path) -> None:
    result = train(make_run(tmp_path / "run", corpus), is_stop_requested=lambda: True)
    assert (result.outcome, result.step) == (Outcome.STOPPED, 1)
    assert train(make_run(tmp_path / "run", corpus)).outcome is Outcome.DONE
    before = result.run_dir.metrics.read_bytes()
    assert train(make_run(tmp_path / "run", corpus)).outcome is Outcome.DONE
    assert result.run_dir.metrics.read_bytes() == before


def test_other_mathematics_are_refused_with_their_fields(
    tmp_path: Path, corpus: Path, unbroken: RunDir
) -> None:
    changed = make_run(unbroken.path, corpus, seed=1, optimizer={"peak_lr": 2e-3})
    with pytest.raises(UserError) as error:
        train(changed)
    for words in (
        "seed: the run has 0, asked is 1",
        "optimizer.peak_lr",
        "optimizer.warmup_tokens",
        "run_dir",
    ):
        assert words in str(error.value)


def test_nothing_compiles_after_the_first_step(tmp_path: Path, corpus: Path) -> None:
    """One compilation in a run: not a single program, of whatever size, is compiled once steps come back."""
    compiled: list[str] = []

    class Listener(SilentConsole):
        is_listening = False

        def step(self, record: StepRecord) -> None:
            self.is_listening = True

    listener = Listener()

    def note(event: str, duration: float, **_: Any) -> None:
        if listener.is_listening and event == "/jax/core/compile/backend_compile_duration":
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        train(make_run(tmp_path / "run", corpus), listener)
        listener.is_listening, before = True, len(compiled)
        jax.jit(lambda x: x * 3 + len(compiled))(np.ones(7))
        assert len(compiled) == before + 1, "the listener hears compilations"
    finally:
        listener.is_listening = False
        jax.monitoring.unregister_event_duration_listener(note)
    assert compiled[:-1] == []


def test_numbers_gone_bad_end_the_run_with_exit_code_3(tmp_path: Path, corpus: Path) -> None:
    config = make_run(
        tmp_path / "run",
        corpus,
        optimizer={"peak_lr": 1e30, "clip_norm": None},
        nonfinite={"limit": 2},
        steps=40,
    )
    result = train(config)
    assert result.outcome is Outcome.NUMBERS_WENT_BAD
    assert int(result.outcome) == 3
    assert result.step < 40


def test_the_commands_train_evaluate_and_generate(tmp_path: Path, corpus: Path) -> None:
    config = make_run(tmp_path / "run", corpus)
    from jaxscale.config import dump_config

    (tmp_path / "run.yaml").write_text(dump_config(config))

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
        return subprocess.run(
            [sys.executable, "-m", "jaxscale.cli.main", *arguments],
            capture_output=True,
            text=True,
            env=environment,
        )

    stopped = run("train", str(tmp_path / "run.yaml"), "stop_after_steps=2", "--json")
    assert stopped.returncode == 75, stopped.stderr
    assert json.loads(stopped.stdout)["step"] == 2
    done = run("train", str(tmp_path / "run.yaml"))
    assert done.returncode == 0, done.stderr
    assert "simulating 8 devices" in done.stderr
    assert "after step 2" in done.stderr
    # Overrides may stand before and after options.
    evaluated = run("eval", str(tmp_path / "run"), "--json", "mesh.data=1")
    assert evaluated.returncode == 0, evaluated.stderr
    loss = json.loads(evaluated.stdout)["loss"]
    assert run("eval", str(tmp_path / "run"), "mesh.tensor=1", "batch.microbatches=1", "--json").stdout
    assert 0 < loss < 6
    written = run(
        "generate", str(tmp_path / "run"), "--prompt", "alpha ", "--tokens", "5", "--json", "mesh.tensor=2"
    )
    assert written.returncode == 0, written.stderr
    assert json.loads(written.stdout)["step"] == STEPS
