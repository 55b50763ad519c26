"""fp16: the scale's arithmetic, an overflow in one shard of one microbatch, resume, parity."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxscale as js
from jaxscale.config import Config, UserError, parse_config
from jaxscale.mesh import make_mesh
from jaxscale.models.model import Model
from jaxscale.numerics.draw import make_key
from jaxscale.training.loop import train
from jaxscale.training.loss_scale import CEILING, FLOOR, LossScale, adapt_loss_scale
from jaxscale.training.setup import Setup, make_setup
from tests.test_training import corpus, make_run, read_metrics  # noqa: F401
from tests.tiny import TREE, VOCAB, make_batch, make_config, make_tiny_setup, relative_errors, run_steps

MESH = {"data": 2, "fsdp": 2, "tensor": 2}


def run_scale(state: LossScale, good: list[bool], growth_steps: int = 2000) -> LossScale:
    adapt = jax.jit(adapt_loss_scale, static_argnums=2)
    for each in good:
        state = adapt(state, jnp.bool(each), growth_steps)
    return state


def make_state(scale: float, good_steps: int = 0) -> LossScale:
    return LossScale(jnp.float32(scale), jnp.uint32(good_steps))


@pytest.mark.smoke
def test_2000_good_steps_double_the_scale_and_a_bad_one_halves_it_and_counts_anew() -> None:
    state = run_scale(make_state(2.0**16), [True] * 1999)
    assert (float(state.scale), int(state.good_steps)) == (2.0**16, 1999)
    doubled = run_scale(state, [True])
    assert (float(doubled.scale), int(doubled.good_steps)) == (2.0**17, 0)
    halved = run_scale(state, [False])
    assert (float(halved.scale), int(halved.good_steps)) == (2.0**15, 0)
    assert float(run_scale(halved, [True] * 1999).scale) == 2.0**15
    assert float(run_scale(halved, [True] * 2000).scale) == 2.0**16


@pytest.mark.smoke
def test_the_scale_has_a_floor_and_a_ceiling() -> None:
    assert float(run_scale(make_state(FLOOR), [False] * 3).scale) == FLOOR == 1
    assert float(run_scale(make_state(CEILING), [True] * 3, 1).scale) == CEILING == 2.0**24


def make_planted_model() -> Model:
    """Gradients of an embedding row are as large as the row's token asks: ids over 200 overflow fp16."""

    def init(key: jax.Array) -> Any:
        return {"table": jnp.full((VOCAB + 7, 32), 1e-2), "up": jnp.full((32, 48), 1e-2)}

    def loss(params: Any, batch: Any, _: Any) -> tuple[jax.Array, jax.Array]:
        x_BTF = params["table"][batch["tokens"]] @ params["up"]
        factor_BT = jnp.where(batch["tokens"] > 200, 6e4, 1.0).astype(x_BTF.dtype)
        x_BT = (x_BTF.sum(-1) * factor_BT).astype(jnp.float32)
        return (x_BT * batch["weights"]).sum(), batch["weights"].sum()

    rules = js.Rules({"table": ("vocab", "embed"), "up": ("embed", "mlp")})
    return js.from_functions(init, loss, rules=rules)


def make_planted(precision: str, **sections: Any) -> tuple[Setup, Any]:
    config = make_config(mesh=MESH, batch={"microbatches": 4}, precision=precision, **sections)
    setup = make_setup(config, make_mesh(config.mesh), VOCAB, make_planted_model())
    return setup, setup.compile_step()


def make_planted_batch(setup: Setup, sequence: int | None) -> dict[str, jax.Array]:
    """Harmless tokens, but for one of one sequence, which overflows."""
    batch = make_batch(setup, 0)
    tokens = np.array(batch["tokens"]) % 200
    if sequence is not None:
        tokens.reshape(-1, tokens.shape[-1])[sequence, 5] = 250
    weights = np.ones(tokens.shape, np.float32)
    return {
        **batch,
        "tokens": jax.device_put(tokens, batch["tokens"].sharding),
        "weights": jax.device_put(weights, batch["weights"].sharding),
    }


@pytest.fixture(scope="module")
def planted() -> tuple[Setup, Any]:
    return make_planted("fp16", loss_scale={"initial": 2**20, "growth_steps": 3})


def start(setup: Setup) -> Any:
    return setup.compile_init()(make_key(0))


@pytest.mark.smoke
@pytest.mark.parametrize("sequence", [0, 13, 31])
def test_an_overflow_in_one_shard_of_one_microbatch_is_an_exact_skip(planted: tuple, sequence: int) -> None:
    setup, step = planted
    state, metrics = step(start(setup), make_planted_batch(setup, None))
    assert not bool(metrics["skipped"])
    before = jax.tree.map(np.array, state)
    state, metrics = step(state, make_planted_batch(setup, sequence))
    after = jax.tree.map(np.array, state)
    assert bool(metrics["skipped"])
    assert np.isfinite(metrics["loss"]), "the loss alone says nothing of it"
    for name in ("params", "moments", "updates", "trained_sequences"):
        chex.assert_trees_all_equal(getattr(after, name), getattr(before, name))
    assert (after.sequences - before.sequences, after.skips, after.skips_in_row) == (32, 1, 1)
    assert (before.loss_scale.scale, before.loss_scale.good_steps) == (2**20, 1)
    assert (after.loss_scale.scale, after.loss_scale.good_steps) == (2**19, 0)
    assert metrics["loss_scale"] == 2**20, "the scale that the step used"
    counts = dict(zip(setup.layouts.leaves, metrics["nonfinite"].tolist(), strict=True))
    assert counts["table"] > 0
    state, metrics = step(state, make_planted_batch(setup, None))
    assert (int(state.updates), int(state.skips_in_row), float(metrics["lr"])) == (2, 0, float(metrics["lr"]))


def test_clean_steps_double_the_scale_in_the_step_itself(planted: tuple) -> None:
    setup, step = planted
    state, scales = start(setup), []
    for _ in range(7):
        state, _ = step(state, make_planted_batch(setup, None))
        scales.append(float(state.loss_scale.scale))
    assert [scale / 2**20 for scale in scales] == [1, 1, 2, 2, 2, 4, 4]


def test_a_step_without_a_counted_token_says_nothing_of_the_scale(planted: tuple) -> None:
    setup, step = planted
    batch = make_planted_batch(setup, None)
    batch["weights"] = batch["weights"] * 0
    state, metrics = step(start(setup), batch)
    assert bool(metrics["skipped"])
    assert float(state.loss_scale.scale) == 2**20


@pytest.mark.parametrize("mesh", [{}, MESH], ids=str)
def test_gradients_do_not_depend_on_the_scale(mesh: dict[str, int]) -> None:
    norms, scales = [], (1.0, 2.0**6, 2.0**12, 2.0**16)
    setup = make_tiny_setup(make_config(precision="fp16", mesh=mesh, batch={"microbatches": 4}))
    step = setup.compile_step()
    for scale in scales:
        state = start(setup)
        like = state.loss_scale.scale
        planted = replace(state.loss_scale, scale=jax.device_put(np.float32(scale), like.sharding))
        state, metrics = step(replace(state, loss_scale=planted), make_batch(setup, 0))
        assert not bool(metrics["skipped"])
        norms.append(float(metrics["grad_norm"]))
    np.testing.assert_allclose(norms, norms[-1], rtol=1e-3)
    reference = run_steps(make_config(), 1).grad_norms[0]
    np.testing.assert_allclose(norms, reference, rtol=2e-3)


@pytest.mark.parametrize(
    "mesh",
    [MESH, *(pytest.param(mesh, marks=pytest.mark.full) for mesh in ({"data": 8}, {"fsdp": 8}))],
    ids=str,
)
def test_fp16_repeats_itself_on_every_mesh(mesh: dict[str, int]) -> None:
    options = {"precision": "fp16"}
    reference = run_steps(make_config(**options), 3)
    trace = run_steps(make_config(mesh=mesh, batch={"microbatches": 4}, **options), 3)
    np.testing.assert_allclose(trace.losses, reference.losses, rtol=1e-3)
    np.testing.assert_allclose(trace.grad_norms, reference.grad_norms, rtol=2e-3)
    assert max(relative_errors(trace.params, reference.params).values()) < 2e-3


def test_the_scale_and_its_streak_survive_a_resume(tmp_path: Path, corpus: Path) -> None:  # noqa: F811
    def make(name: str) -> Config:
        scale = {"initial": 2**24, "growth_steps": 2}  # starts with a few skips
        return make_run(
            tmp_path / name, corpus, precision="fp16", loss_scale=scale, steps=10, eval={"every_steps": 0}
        )

    whole = train(make("whole"))
    train(replace(make("broken"), stop_after_steps=7))
    broken = train(make("broken"))
    lines = read_metrics(whole.run_dir)
    assert lines == read_metrics(broken.run_dir)
    assert any(line["skipped"] for line in lines)
    scales = [line["loss_scale"] for line in lines]
    assert any(later > earlier for earlier, later in pairwise(scales)), "it grew again"


def test_other_formats_have_no_scale_and_refuse_its_settings() -> None:
    assert make_tiny_setup(make_config()).abstract_state.loss_scale is None
    config = parse_config({**TREE, "loss_scale": {"initial": 16}}, origin="test")
    with pytest.raises(UserError, match=r"loss_scale.*precision\.compute=fp32"):
        make_tiny_setup(config)
