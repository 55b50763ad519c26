"""From Python: a model of one's own through `Trainer`, and the face of the package."""

import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxscale as js

CONFIG = """\
run_dir: {folder}/run
steps: 3
mesh: {{data: 2, fsdp: 2, tensor: 2}}
batch: {{sequences: 16, microbatches: 2, length: 16}}
data: {{source: text, paths: [{folder}/corpus.txt]}}
optimizer: {{peak_lr: 1.0e-3, warmup_tokens: 10k}}
"""


def make_model() -> js.Model:
    def init(key: jax.Array) -> dict:
        keys = jax.random.split(key, 3)
        return {
            "table": jax.random.normal(keys[0], (320, 32)) / 6,
            "up": jax.random.normal(keys[1], (32, 64)) / 6,
            "down": jax.random.normal(keys[2], (64, 32)) / 8,
        }

    def loss(params: dict, batch: dict, keys_B: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        x_BTD = params["table"][batch["tokens"]]
        if keys_B is not None:  # dropout that depends on the sequence alone
            kept = jax.vmap(lambda key: jax.random.bernoulli(key, 0.9, x_BTD.shape[1:]))(keys_B)
            x_BTD = jnp.where(kept, x_BTD / 0.9, 0.0)
        x_BTD = x_BTD + jax.nn.gelu(x_BTD @ params["up"]) @ params["down"]
        return js.token_cross_entropy(x_BTD @ params["table"].T, batch["labels"], batch["weights"])

    rules = js.Rules({"table": ("vocab", "embed"), "up": ("embed", "mlp"), "down": ("mlp", "embed")})
    return js.from_functions(init, loss, rules=rules)


def write_files(folder: Path) -> Path:
    (folder / "corpus.txt").write_text("All happy families are alike. " * 300, encoding="utf-8")
    (folder / "run.yaml").write_text(CONFIG.format(folder=folder), encoding="utf-8")
    return folder / "run.yaml"


def test_a_model_of_ones_own_is_fitted_inspected_and_verified(tmp_path: Path, capsys) -> None:
    path = write_files(tmp_path)
    trainer = js.Trainer(make_model(), path)
    result = trainer.fit(quiet=True)
    assert (result.outcome, result.step) == (0, 3)

    inspection = trainer.inspect()
    assert {leaf.path for leaf in inspection.leaves} == {"table", "up", "down"}
    assert not inspection.errors
    assert "table" in capsys.readouterr().out

    one_case = js.Trainer(make_model(), path, ["mesh={data: 8}", "zero.stage=1"])
    verification = one_case.verify(quiet=True)
    assert verification.ok, verification
    assert len(verification.results) >= 4


def test_fit_goes_on_where_the_run_directory_left_off(tmp_path: Path) -> None:
    path = write_files(tmp_path)
    whole = js.Trainer(make_model(), path, [f"run_dir={tmp_path}/whole"]).fit(quiet=True)
    js.Trainer(make_model(), path, ["stop_after_steps=2"]).fit(quiet=True)
    rest = js.Trainer(make_model(), path, ["mesh={data: 4, fsdp: 2}"]).fit(quiet=True)
    assert (whole.step, rest.step) == (3, 3)

    def read_losses(run_dir: Path) -> list[str]:
        return [
            line.split('"loss"')[1][:12] for line in (run_dir / "metrics.jsonl").open() if "grad_norm" in line
        ]

    np.testing.assert_array_equal(read_losses(tmp_path / "run")[:2], read_losses(tmp_path / "whole")[:2])


def test_two_models_or_none_are_refused(tmp_path: Path) -> None:
    path = write_files(tmp_path)
    with pytest.raises(js.UserError, match="model: is required"):
        js.Trainer(None, path)
    with pytest.raises(js.UserError, match="leave out one"):
        js.Trainer(make_model(), path, ["model={file: model.py}"])


def test_importing_the_package_does_not_import_jax_and_every_name_is_there() -> None:
    code = (
        "import sys, jaxscale as js; assert 'jax' not in sys.modules; "
        "assert all(getattr(js, name) is not None for name in js.__all__); "
        "from jax._src import xla_bridge; assert not xla_bridge.backends_are_initialized()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
