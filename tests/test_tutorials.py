"""The tutorials: their text is the files' text, and what they say to run runs, through the real command."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NAMES = ("nnx", "linen", "functions")
COMMANDS = ("inspect", "verify", "train")
HANG_SECONDS = 900


def _read_blocks(name: str, language: str) -> list[str]:
    """The text of a tutorial's code blocks in one language."""
    text = (ROOT / "docs" / "tutorials" / f"{name}.md").read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)


def _read_example(name: str, suffix: str) -> str:
    return (ROOT / "examples" / f"{name}_model.{suffix}").read_text(encoding="utf-8")


def test_every_tutorial_and_every_example_is_tested():
    assert {path.stem for path in (ROOT / "docs" / "tutorials").iterdir()} == set(NAMES)
    assert {path.name for path in (ROOT / "examples").iterdir() if path.is_file()} == {
        f"{name}_model.{suffix}" for name in NAMES for suffix in ("py", "yaml")
    }


@pytest.mark.parametrize("name", NAMES)
def test_the_python_of_a_tutorial_is_its_example_piece_by_piece(name):
    pieces, text = _read_blocks(name, "python"), _read_example(name, "py")
    assert len(pieces) > 1
    for piece in pieces:
        assert piece in text
    docstring, _, rest = text.partition("\n\n")
    assert docstring.startswith('"""')
    assert f"docs/tutorials/{name}.md" in docstring
    assert "\n\n\n".join(piece.strip() for piece in pieces) == rest.strip()


@pytest.mark.parametrize("name", NAMES)
def test_the_configuration_of_a_tutorial_is_its_examples(name):
    assert _read_blocks(name, "yaml") == [_read_example(name, "yaml")]


@pytest.mark.parametrize("name", NAMES)
def test_a_tutorial_shows_the_commands_that_are_tested(name):
    shown = "".join(_read_blocks(name, "sh"))
    for command in COMMANDS:
        assert f"jaxscale {command} examples/{name}_model.yaml\n" in shown


def _run_command(folder: Path, *arguments: str) -> dict:
    """Runs `jaxscale` as a shell would where nobody has touched JAX; what it prints with --json."""
    shutil.copytree(ROOT / "examples", folder / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "corpus.txt").write_text("All happy families are alike. " * 2000, encoding="utf-8")
    kept = ("JAX_COMPILATION_CACHE_DIR", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS")
    environment = {
        name: value
        for name, value in os.environ.items()
        if name in kept or not name.startswith(("JAX_", "XLA_"))
    }
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    ended = subprocess.run(
        [sys.executable, "-m", "jaxscale.cli.main", *arguments, "--json"],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
    )
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


@pytest.mark.parametrize("name", NAMES)
def test_a_tutorials_model_trains_on_eight_simulated_devices(name, tmp_path):
    corpus = ("data.source=text", "data.paths=[corpus.txt]")
    result = _run_command(
        tmp_path, "train", f"examples/{name}_model.yaml", "steps=3", "eval.every_steps=3", *corpus
    )
    assert (result["outcome"], result["step"]) == ("done", 3)
    assert result["last_eval"]["loss"] < result["first_eval"]["loss"]
    lines = (tmp_path / "runs" / f"{name}_model" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    steps = [record for record in map(json.loads, lines) if "grad_norm" in record]
    assert [record["step"] for record in steps] == [1, 2, 3]
    assert not any(record["skipped"] for record in steps)


@pytest.mark.parametrize("name", NAMES)
def test_inspect_shows_every_parameter_of_a_tutorials_model(name, tmp_path):
    shown = _run_command(tmp_path, "inspect", f"examples/{name}_model.yaml")
    assert shown["mesh"] == {"pipe": 1, "data": 2, "fsdp": 2, "expert": 1, "tensor": 2}
    rules = {leaf["path"]: leaf["rule"] for leaf in shown["leaves"]}
    table = {"nnx": "backbone/embedder/embedding", "linen": "tokens/embedding", "functions": "table"}[name]
    assert rules[table] == table
    assert all(f'"{rule}": ' in _read_example(name, "py") for rule in rules.values())
    assert shown["bytes_per_device"]["total"] > 0


@pytest.mark.full
@pytest.mark.parametrize("name", NAMES)
def test_verify_holds_a_tutorials_model_against_one_device(name, tmp_path):
    shown = _run_command(tmp_path, "verify", f"examples/{name}_model.yaml")
    assert shown["ok"], [case for case in shown["cases"] if case["grad_error"] > 1e-5]
    assert len(shown["cases"]) > 8
    assert {case["zero"] for case in shown["cases"]} == {0, 1, 2, 3}
