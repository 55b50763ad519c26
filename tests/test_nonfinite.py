"""Runs whose numbers go bad: how long they go on, and what they say at the end."""

from pathlib import Path
from typing import Any

import pytest

from jaxscale.config import NonfiniteConfig
from jaxscale.metrics import SilentConsole
from jaxscale.training.loop import Outcome, train
from jaxscale.training.nonfinite import allowed_skips, word_give_up
from tests.test_training import corpus, make_run, read_metrics  # noqa: F401


class Notes(SilentConsole):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, message: str) -> None:
        self.notes.append(message)


def run_bad(tmp_path: Path, corpus: Path, **nonfinite: Any) -> tuple[Any, list[dict[str, Any]], str]:  # noqa: F811
    """A rate that makes the weights infinite after some steps, at which a checkpoint is made."""
    console = Notes()
    config = make_run(
        tmp_path / "run",
        corpus,
        optimizer={"peak_lr": 1e30, "clip_norm": None},
        nonfinite=nonfinite,
        checkpoint={"every_steps": 1, "keep": 1},
        eval={"every_steps": 0},
        steps=40,
    )
    result = train(config, console)
    return result, read_metrics(result.run_dir), console.notes[-1]


@pytest.mark.parametrize("nonfinite", [{"limit": 3}, {"policy": "stop", "limit": 3}], ids=str)
def test_more_than_the_limit_in_a_row_end_the_run(tmp_path: Path, corpus: Path, nonfinite: dict) -> None:  # noqa: F811
    result, lines, note = run_bad(tmp_path, corpus, **nonfinite)
    assert result.outcome is Outcome.NUMBERS_WENT_BAD == 3
    skips = [line["skipped"] for line in lines]
    survived = 0 if nonfinite.get("policy") == "stop" else 3
    assert skips[-survived - 1 :] == [True] * (survived + 1)
    assert sum(skips) == survived + 1
    assert all(line["loss_scale"] is None for line in lines)
    assert f"stopped at step {result.step}" in note
    assert f"checkpoint is of step {result.step - 1}" in note, "skipped steps leave the weights as they are"
    assert "layers/mlp/down/kernel" in note, "the leaves that went bad"


def test_the_policy_stop_survives_no_skip() -> None:
    assert allowed_skips(NonfiniteConfig(limit=7)) == 7
    assert allowed_skips(NonfiniteConfig(policy="stop", limit=7)) == 0


def test_the_message_names_leaves_scale_and_checkpoint() -> None:
    bad = {f"layers/{number}": number + 1 for number in range(12)}
    text = word_give_up(9, 3, None, bad, 1.0)
    assert text.startswith("3 steps in a row")
    assert "12  layers/11" in text
    assert "and 2 more leaves" in text
    assert "loss scale was 1." in text
    assert "There is no checkpoint" in text
    assert (
        word_give_up(9, 1, 8, {}, None).splitlines()[-1].startswith("The last good checkpoint is of step 8")
    )
