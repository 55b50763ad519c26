"""The demo keeps its word: validation loss at least 30 % below the unigram entropy of the same text."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.full
def test_demo_learns_generates_and_says_what_to_try_next(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    done = subprocess.run(
        [sys.executable, "scripts/demo.py", f"run_dir={tmp_path / 'demo'}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    entropy, first, last = (
        float(re.search(rf"{name} +([\d.]+)", done.stdout)[1])  # type: ignore[index]
        for name in ("unigram entropy of the text", "first validation loss", "last validation loss")
    )
    assert first > entropy, "nothing was learnt before the first step"
    assert last <= 0.7 * entropy
    assert "What the model writes after 'def '" in done.stdout
    assert len(done.stdout.split("What the model writes")[1]) > 200
    assert done.stdout.count(f"jaxscale generate {tmp_path / 'demo'}") == 1
    assert f"jaxscale eval {tmp_path / 'demo'}" in done.stdout
