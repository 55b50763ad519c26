"""Each optimizer in the real step and loop: meshes, skips, bytes, resume, learning; and one from Python."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxscale as js
from jaxscale.config import Config, UserError
from jaxscale.inspection.weigh import weigh_leaves
from jaxscale.numerics.draw import make_key
from jaxscale.training.loop import Outcome, train
from jaxscale.training.optimizer_layout import describe_optimizer
from tests.test_trainer import make_model, write_files
from tests.test_training import corpus, make_run, read_metrics  # noqa: F401 (a fixture)
from tests.tiny import make_batch, make_config, make_tiny_setup, relative_errors, run_steps

CUBE = {"data": 2, "fsdp": 2, "tensor": 2}
FIELDS: dict[str, dict[str, Any]] = {
    "muon": {},
    "adafactor": {"min_factored": 16, "beta1": 0.9, "peak_lr": 1e-2},
    "adamw": {},
    "lion": {"peak_lr": 1e-4},
    "sgd": {"nesterov": True, "peak_lr": 1e-2},
}
LEARNING_RATES = {"muon": 1e-2, "adafactor": 3e-2, "adamw": 1e-2, "lion": 1e-3, "sgd": 0.3}


def full_unless(*names: str) -> list[Any]:
    return [name if name in names else pytest.param(name, marks=pytest.mark.full) for name in FIELDS]


def make_optimizer_config(name: str, **sections: Any) -> Config:
    optimizer = {"name": name, **FIELDS[name], **sections.pop("optimizer", {})}
    return make_config(optimizer=optimizer, **sections)


@pytest.mark.parametrize("name", full_unless("muon", "adafactor"))
def test_a_mesh_equals_one_device_and_a_skip_changes_no_bit(name: str) -> None:
    setup = make_tiny_setup(make_optimizer_config(name, mesh=CUBE, batch={"microbatches": 4}))
    state, step = setup.compile_init()(make_key(0)), setup.compile_step()
    losses = []
    for number in range(3):
        state, metrics = step(state, make_batch(setup, number))
        losses.append(float(metrics["loss"]))
    reference = run_steps(make_optimizer_config(name), 3)
    np.testing.assert_allclose(losses, reference.losses, rtol=2e-6)
    errors = relative_errors(jax.tree.map(np.asarray, state.params), reference.params)
    worst = max(errors, key=errors.__getitem__)
    assert errors[worst] <= 1e-5, f"{worst}: {errors[worst]:.1e}"

    leaves, _ = describe_optimizer(setup.optimizer, setup.model.shapes, setup.layouts)
    reports, counters = weigh_leaves(setup.layouts, leaves, setup.config.precision)
    masters = sum(
        4 * math.prod(kept.shard_shape(shape.shape))
        for shape, kept, used in zip(
            *map(jax.tree.leaves, (setup.model.shapes, setup.layouts.params, setup.layouts.weights)),
            strict=True,
        )
        if not kept.is_equivalent_to(used, len(shape.shape))
    )
    held = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(state.moments))
    assert sum(each.bytes_per_device.optimizer for each in reports) - masters + counters == held

    before = jax.tree.map(np.asarray, state)
    batch = make_batch(setup, 3)
    state, metrics = step(state, {**batch, "weights": batch["weights"] * 0})
    assert bool(metrics["skipped"])
    after = jax.tree.map(np.asarray, state)
    for part in ("params", "moments", "updates", "trained_sequences"):
        chex.assert_trees_all_equal(getattr(after, part), getattr(before, part))


@pytest.mark.full
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("mesh", [{"fsdp": 8}, {"tensor": 4, "data": 2}, {"data": 8}, CUBE], ids=str)
@pytest.mark.parametrize("name", ["muon", "adafactor"])
def test_every_mesh_and_stage_equals_one_device(name: str, mesh: dict[str, int], stage: int) -> None:
    """3 layers, which divide by no mesh."""
    model = {"layers": 3}
    trace = run_steps(make_optimizer_config(name, mesh=mesh, zero={"stage": stage}, model=model), 3)
    reference = run_steps(make_optimizer_config(name, model=model), 3)
    np.testing.assert_allclose(trace.losses, reference.losses, rtol=2e-6)
    assert max(relative_errors(trace.params, reference.params).values()) <= 1e-5


@pytest.mark.full
@pytest.mark.parametrize("name", FIELDS)
def test_each_optimizer_learns_and_moments_in_bf16_learn_as_well(name: str) -> None:
    """On one batch, again and again."""
    fp32, bf16 = (learn(name, moments) for moments in ("fp32", "bf16"))
    print(name, fp32[::8], bf16[::8])
    assert fp32[-1] < fp32[0] - 0.5
    np.testing.assert_allclose(bf16, fp32, rtol=0.02)
    assert fp32 != bf16


def learn(name: str, moments: str) -> list[float]:
    """Losses of 40 steps."""
    config = make_optimizer_config(
        name,
        mesh=CUBE,
        precision={"moments": moments},
        optimizer={"peak_lr": LEARNING_RATES[name], "warmup_tokens": 0, "schedule": "constant"},
    )
    setup = make_tiny_setup(config)
    state, step = setup.compile_init()(make_key(0)), setup.compile_step()
    batch, losses = make_batch(setup, 0), []
    for _ in range(40):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    return losses


@pytest.mark.parametrize("name", full_unless("muon"))
def test_an_interrupted_run_repeats_every_bit(name: str, tmp_path: Path, corpus: Path) -> None:  # noqa: F811
    """Moments in bf16, whose rounding has to go on where it was."""
    sections: dict[str, Any] = {
        "optimizer": {"name": name, **FIELDS[name], "warmup_tokens": 512},
        "precision": {"moments": "bf16"},
        "eval": {"every_steps": 0},
        "steps": 4,
    }
    whole = train(make_run(tmp_path / "whole", corpus, **sections))
    train(make_run(tmp_path / "broken", corpus, **sections, stop_after_steps=2))
    rest = train(make_run(tmp_path / "broken", corpus, **sections))
    assert (whole.outcome, rest.outcome) == (Outcome.DONE, Outcome.DONE)
    assert read_metrics(rest.run_dir) == read_metrics(whole.run_dir)
    assert read_metrics(whole.run_dir)[-1]["step"] == 4


# --- From Python --------------------------------------------------------------------------------------------


def test_an_optimizer_from_python_is_fitted_resumed_and_inspected(tmp_path: Path, capsys: Any) -> None:
    """optax.sgd(1.0) at the run's rate is what `optimizer.name: sgd` is."""
    path = write_files(tmp_path)
    shared = ["optimizer.peak_lr=0.1", "optimizer.warmup_tokens=0"]
    named = [*shared, "optimizer.name=sgd", "optimizer.weight_decay=0", f"run_dir={tmp_path}/named"]
    js.Trainer(make_model(), path, named).fit(quiet=True)

    mine = [*shared, "optimizer.name=python", "optimizer.schedule=cosine"]
    optimizer = optax.sgd(1.0, momentum=0.9)
    js.Trainer(make_model(), path, [*mine, "stop_after_steps=2"], optimizer=optimizer).fit(quiet=True)
    with pytest.raises(UserError, match="not stored, needed"):  # another optimizer's state
        js.Trainer(make_model(), path, mine, optimizer=optax.adam(1.0)).fit(quiet=True)
    trainer = js.Trainer(make_model(), path, mine, optimizer=optimizer)
    result = trainer.fit(quiet=True)
    assert result.step == 3

    losses = [
        [line["loss"] for line in read_metrics(replace(result.run_dir, path=tmp_path / name))]
        for name in ("named", "run")
    ]
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-6)
    inspection = trainer.inspect()
    assert not inspection.errors
    assert "table" in capsys.readouterr().out


@pytest.mark.full
def test_an_optimizer_from_python_is_verified(tmp_path: Path) -> None:
    trainer = js.Trainer(
        make_model(),
        write_files(tmp_path),
        ["optimizer={name: python}", "mesh={fsdp: 8}"],
        optimizer=optax.chain(optax.scale_by_adam(), optax.scale(-1e-2)),
    )
    assert trainer.verify(quiet=True).ok


def test_an_optimizer_and_its_configuration_are_refused_one_without_the_other(tmp_path: Path) -> None:
    path = write_files(tmp_path)
    with pytest.raises(js.UserError, match="no optimizer comes from Python"):
        js.Trainer(make_model(), path, ["optimizer={name: python}"])
    with pytest.raises(js.UserError, match=r"optimizer\.name is adamw, and another"):
        js.Trainer(make_model(), path, optimizer=optax.sgd(jnp.float32(1.0)))
