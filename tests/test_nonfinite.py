"""Skipped steps: what a run says of them, and when it gives up."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxscale.config import Config, NonfiniteConfig
from jaxscale.metrics import SilentConsole
from jaxscale.models.model import Model
from jaxscale.training import loop
from jaxscale.training.loop import Outcome, train
from jaxscale.training.nonfinite import GiveUp, count_nonfinite, is_too_many, name_nonfinite
from jaxscale.training.optimizer import clip_gradients, find_norm
from jaxscale.training.run_dir import RunDir
from tests.test_training import make_run

STEPS = 12


class Notes(SilentConsole):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def note(self, message: str) -> None:
        self.lines.append(message)


def make_model() -> Model:
    """Two leaves; a token 300 in the batch makes the gradient of one of them infinite."""

    def sum_losses(params: Any, batch: Any, keys: Any) -> tuple[jax.Array, jax.Array]:
        x = params["table"].astype(jnp.float32).sum() * 1e-3
        spoilt = jnp.where((batch["tokens"] == 300).any(), jnp.inf, 0.0)
        # A gradient of its own beside a loss of zero: only the gradients are bad.
        bad = spoilt * (params["bias"][0] - jax.lax.stop_gradient(params["bias"][0]) + 1e-3)
        weight = batch["weights"].sum()
        return (x - 1) ** 2 * weight + jnp.where(spoilt > 0, bad, 0.0), weight

    def init(key: jax.Array) -> Any:
        return {"bias": jnp.zeros(3), "table": jnp.ones((8, 4))}

    return Model(
        shapes=jax.eval_shape(init, jax.random.key(0)),
        rules={"bias": ("embed",), "table": ("vocab", "embed")},
        init=init,
        sum_losses=sum_losses,
    )


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    folder = tmp_path / "corpus"
    folder.mkdir()
    for number in range(20):
        (folder / f"{number}.txt").write_text("alpha beta gamma " * 20)
    return folder


def spoil(monkeypatch: pytest.MonkeyPatch, bad_steps: set[int]) -> None:
    """The batches of these steps carry a token that ruins a gradient."""
    right = loop.BatchLoader.__next__
    seen = [0]

    def give(self: Any) -> Any:
        batch = dict(right(self))
        seen[0] += 1
        if seen[0] in bad_steps:
            tokens = np.asarray(batch["tokens"]).copy()
            tokens[0, 0, 0] = 300
            batch["tokens"] = jax.device_put(tokens, batch["tokens"].sharding)
        return batch

    monkeypatch.setattr(loop.BatchLoader, "__next__", give)


def run(tmp_path: Path, corpus: Path, **sections: Any) -> tuple[Any, Notes, list[dict[str, Any]]]:
    console = Notes()
    config: Config = make_run(
        tmp_path / "run", corpus, model=None, mesh={"data": 2}, steps=STEPS,
        eval={"every_steps": 0}, checkpoint={"every_steps": 2, "keep": 9}, **sections,
    )  # fmt: skip
    result = train(config, console, model=make_model(), devices=jax.devices()[:2])
    lines = [json.loads(line) for line in result.run_dir.metrics.read_text().splitlines()]
    return result, console, [line for line in lines if line["kind"] == "step"]


def stored_steps(run_dir: RunDir) -> Iterator[int]:
    return (int(path.name) for path in run_dir.checkpoints.iterdir())


def test_more_than_limit_in_a_row_end_the_run(tmp_path, corpus, monkeypatch) -> None:
    spoil(monkeypatch, {2, 3, 6, 7, 8})
    result, console, lines = run(tmp_path, corpus, nonfinite={"limit": 2})
    assert (result.outcome, result.step) == (Outcome.NUMBERS_WENT_BAD, 8), "two in a row are survived"
    assert [line["step"] for line in lines if line["skipped"]] == [2, 3, 6, 7, 8]
    assert {line["loss_scale"] for line in lines} == {None}
    said = console.lines[-1]
    assert "3 steps in a row up to 8 were skipped and nonfinite.limit is 2" in said
    assert "The last good checkpoint is of step 6" in said
    assert "bias: 1 elements" in said
    assert "table" not in said
    assert max(stored_steps(result.run_dir)) == 6


@pytest.mark.parametrize("bad_step", [1, 5, 6, STEPS])
def test_policy_stop_ends_the_run_at_the_first(tmp_path, corpus, monkeypatch, bad_step: int) -> None:
    """Whether the step after it is looked at late, saves, or is the last."""
    spoil(monkeypatch, {bad_step})
    result, console, lines = run(tmp_path, corpus, nonfinite={"policy": "stop"})
    assert (int(result.outcome), result.step) == (3, bad_step)
    assert lines[-1]["step"] == bad_step, "nothing is reported of what came after"
    good = (bad_step - 1) // 2 * 2
    said = f"of step {good};" if good else "There is no checkpoint;"
    assert said in console.lines[-1]


def test_a_skip_is_survived_by_default_and_in_fp16_halves_the_scale(tmp_path, corpus, monkeypatch) -> None:
    spoil(monkeypatch, {3})
    result, _, lines = run(tmp_path, corpus, precision="fp16", loss_scale={"initial": 256, "growth_steps": 4})
    assert result.outcome is Outcome.DONE
    assert [line["loss_scale"] for line in lines] == [256] * 3 + [128] * 4 + [256] * 4 + [512]


@pytest.mark.smoke
def test_bad_leaves_are_counted_and_the_list_is_capped() -> None:
    tree = {f"leaf{n:02}": jnp.zeros((4, 4)).at[: n // 4, 0].set(jnp.nan) for n in range(16)}
    tree["scalar"] = jnp.array(jnp.inf)
    named = name_nonfinite(tree, np.asarray(count_nonfinite(tree)))
    assert named["scalar"] == 1
    assert named["leaf15"] == 3
    assert "leaf03" not in named
    said = GiveUp(5, 1, named).word(NonfiniteConfig(policy="stop"), None)
    assert "step 5 was skipped and nonfinite.policy is stop" in said
    assert said.count("elements") == 10
    assert "and 3 more leaves" in said
    assert [is_too_many(n, NonfiniteConfig()) for n in (20, 21)] == [False, True]
    assert [is_too_many(n, NonfiniteConfig(policy="stop")) for n in (0, 1)] == [False, True]


@pytest.mark.smoke
def test_clipping_spreads_no_nan() -> None:
    gradients = {"bad": jnp.array([jnp.nan]), "good": jnp.ones(3)}
    norm = find_norm(gradients)
    clipped = clip_gradients(gradients, norm, 1.0)
    assert not np.isfinite(norm)
    assert name_nonfinite(clipped, np.asarray(count_nonfinite(clipped))) == {"bad": 1}
