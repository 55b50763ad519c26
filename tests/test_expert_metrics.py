"""What a run with experts reports of them, and that looking changes nothing."""

import io
import json
from pathlib import Path
from typing import Any

import pytest

from jaxscale.metrics import JsonlSink, LoadRecord, PlainConsole
from jaxscale.metrics.load_map import choose_records, read_loads, save_load_map
from jaxscale.training.loop import train
from jaxscale.training.run_dir import RunDir
from tests.test_metrics import make_step, read_lines
from tests.test_training import STEPS, corpus, make_run, read_metrics  # noqa: F401  (a fixture)

MOE = {
    "experts": 4,
    "top_k": 2,
    "mlp": 16,
    "router": "sigmoid",
    "balance": "loss+bias",
    "exchange": "capacity",
    "capacity_factor": 1.0,
}
SECTIONS: dict[str, Any] = {"mesh": {"expert": 2, "data": 2, "tensor": 2}, "moe": MOE}
FIGURES = {
    "kind": "step",
    "balance": 1.0,
    "router_z": 2.5,
    "router_entropy": 1.2,
    "drop_fraction": 0.034,
    "load_max": 1.75,
    "load_min": 0.25,
    "bias_min": -0.01,
    "bias_max": 0.01,
}


def read_steps(run_dir: RunDir) -> list[dict[str, Any]]:
    return [line for line in read_metrics(run_dir) if line["kind"] == "step"]


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> RunDir:  # noqa: F811
    """Evaluated after every step."""
    config = make_run(tmp_path_factory.mktemp("watched") / "run", corpus, **SECTIONS, eval={"every_steps": 1})
    return train(config).run_dir


@pytest.fixture(scope="module")
def unwatched(tmp_path_factory: pytest.TempPathFactory, corpus: Path, watched: RunDir) -> RunDir:  # noqa: F811
    """Never evaluated, saved after every step, killed in the fourth and run again."""
    run_dir = tmp_path_factory.mktemp("unwatched") / "run"
    often: dict[str, Any] = {**SECTIONS, "checkpoint": {"every_steps": 1, "keep": 1}}
    stopped = train(make_run(run_dir, corpus, stop_after_steps=3, **often)).run_dir
    with stopped.expert_load.open("a") as file:
        later = watched.expert_load.read_text().splitlines(keepends=True)[3]
        file.write(later + later[:40])
    return train(make_run(run_dir, corpus, **often)).run_dir


def test_a_run_evaluated_at_every_step_is_bit_equal_to_one_that_never_is(
    watched: RunDir, unwatched: RunDir
) -> None:
    steps = read_steps(watched)
    assert steps == read_steps(unwatched)
    assert steps[-1]["bias_max"] > steps[0]["bias_max"] == pytest.approx(1e-3), "the bias has moved"
    for step in steps:
        assert 0 < step["drop_fraction"] < 1
        assert 0 <= step["load_min"] < 1 < step["load_max"] <= 2
        assert step["balance"] >= 0.9
        assert 0 < step["router_entropy"] <= 1.3863 + 1e-3  # of four experts, at most log 4


def test_loads_are_a_file_of_their_own_with_each_step_once(watched: RunDir, unwatched: RunDir) -> None:
    assert watched.expert_load.read_bytes() == unwatched.expert_load.read_bytes()
    lines = read_lines(watched.expert_load)
    assert [(line["kind"], line["step"]) for line in lines] == [
        ("load", step) for step in range(1, STEPS + 1)
    ]
    assert [line["tokens"] for line in lines] == [8 * 32 * step for step in range(1, STEPS + 1)]
    for line, step in zip(lines, read_steps(watched), strict=True):
        for layer in line["load"]:
            assert sum(layer) == pytest.approx(4, abs=3e-4)  # an even share each, in four decimals
        shares = [share for layer in line["load"] for share in layer]
        assert max(shares) == pytest.approx(step["load_max"], abs=6e-5)
        assert min(shares) == pytest.approx(step["load_min"], abs=6e-5)
    assert '"load"' not in watched.metrics.read_text()


@pytest.mark.smoke
def test_a_line_of_loads_is_short_and_goes_to_its_file_alone(tmp_path: Path) -> None:
    record = LoadRecord(step=7, tokens=700, load=[[1 / 3, 5 / 3], [0.0, 2.0]])
    metrics = JsonlSink(tmp_path / "metrics.jsonl", resume_step=0)
    loads = JsonlSink(tmp_path / "expert_load.jsonl", resume_step=0, takes=(LoadRecord,))
    for sink in (metrics, loads):
        sink.write(record)
        sink.write(make_step(7))
        sink.close()
    assert [line["kind"] for line in read_lines(tmp_path / "metrics.jsonl")] == ["step"]
    assert json.loads((tmp_path / "expert_load.jsonl").read_text()) == {
        "kind": "load",
        "step": 7,
        "tokens": 700,
        "load": [[0.3333, 1.6667], [0.0, 2.0]],
    }


@pytest.mark.smoke
def test_the_console_tells_loads_and_drops_of_experts_alone() -> None:
    def show(**figures: float) -> str:
        stream = io.StringIO()
        console = PlainConsole(stream)
        console.start(steps=1)
        console.step(make_step(1, **figures))
        console.finish()
        return stream.getvalue()

    with_experts = show(**{name: value for name, value in FIGURES.items() if name != "kind"})
    assert "load 0.25-1.8  dropped 3.4%" in with_experts
    table = dict(line.split("  ", 1) for line in with_experts.splitlines() if "  " in line)
    assert table["load of experts"].strip() == "0.25-1.8 of an even share"
    assert table["dropped choices"].strip() == "3.4%"
    assert "load" not in show()


@pytest.mark.smoke
def test_the_heat_map_shows_layers_by_experts_at_the_first_and_last_step(tmp_path: Path) -> None:
    records = [
        LoadRecord(step=step, tokens=step, load=[[0.0, 2.0, 1.0], [8.0, 0.5, 1.0]]) for step in range(1, 8)
    ]
    path = tmp_path / "expert_load.jsonl"
    path.write_text("".join(record.to_json() + "\n" for record in records) + '{"kind": "lo')
    assert read_loads(path) == records
    assert [record.step for record in choose_records(records, 3)] == [1, 4, 7]
    assert [record.step for record in choose_records(records, 1)] == [7]
    assert choose_records(records, 9) == records
    save_load_map(tmp_path / "load.png", choose_records(records, 3))

    from matplotlib.image import imread

    assert len(imread(tmp_path / "load.png").reshape(-1, 4)) > 100_000
