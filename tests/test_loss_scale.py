"""Dynamic loss scaling of fp16: one overflow anywhere skips the whole step, and gradients know no scale."""

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxscale.checkpoint import Checkpoints
from jaxscale.config import LossScaleConfig, UserError, dump_config, parse_config
from jaxscale.models.attention import resolve_implementation
from jaxscale.models.losses import token_cross_entropy
from jaxscale.models.model import Model
from jaxscale.numerics.draw import make_key
from jaxscale.parallel.vocab import sum_token_losses
from jaxscale.training.loss_scale import CEILING, FLOOR, LossScale, move_loss_scale
from jaxscale.training.setup import Compiled, Setup, make_setup
from jaxscale.training.state import TrainState
from tests.tiny import (
    TREE,
    VOCAB,
    Trace,
    make_batch,
    make_config,
    make_tiny_setup,
    relative_errors,
    run_steps,
)

MESH = {"data": 2, "fsdp": 2, "tensor": 2}
GROWTH_STEPS = 2


@dataclass(frozen=True)
class Programs:
    """A setup with its two programs, compiled once for all tests here."""

    setup: Setup
    init: Compiled
    step: Compiled

    def make_state(self, scale: float = 2.0**16, streak: int = 0) -> TrainState:
        state, whole = self.init(make_key(0)), self.setup.layouts.replicated
        loss_scale = LossScale(np.float32(scale), np.uint32(streak))
        return replace(state, loss_scale=jax.device_put(loss_scale, whole))


def make_plain_model() -> Model:
    """A model of one's own, whose gradients wait in groups."""

    def init(key: jax.Array) -> Any:
        names = jax.random.split(key, 2)
        return {
            "table": jax.random.normal(names[0], (256, 32)),
            "head": jax.random.normal(names[1], (32, 256)),
        }

    def sum_losses(params: Any, batch: Any, keys: Any) -> tuple[jax.Array, jax.Array]:
        x_BTD = params["table"][batch["tokens"] % 256]
        logits_BTV = jnp.tanh(x_BTD) @ params["head"]
        return token_cross_entropy(logits_BTV, batch["labels"] % 256, batch["weights"])

    shapes = jax.eval_shape(init, jax.random.key(0))
    rules = {"table": ("vocab", "embed"), "head": ("embed", "vocab")}
    return Model(shapes=shapes, rules=rules, init=init, sum_losses=sum_losses)


@pytest.fixture(scope="module", params=["region", "groups"])
def programs(request: pytest.FixtureRequest) -> Programs:
    scale = {"growth_steps": GROWTH_STEPS}
    config = make_config(mesh=MESH, batch={"microbatches": 4}, precision="fp16", loss_scale=scale)
    setup = make_tiny_setup(config)
    if request.param == "groups":
        setup = make_setup(replace(config, model=None), setup.mesh, VOCAB, make_plain_model())
    return Programs(setup, setup.compile_init(), setup.compile_step())


def plant_overflow(setup: Setup, batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """One token of the third microbatch, in the last shard of the batch, whose gradient exceeds fp16."""
    weights = np.asarray(batch["weights"]).copy()
    weights[2, -1] = 0
    weights[2, -1, 5] = 1e6  # a loss of finite size: fp32 counts it, fp16 cannot carry its gradient
    return {**batch, "weights": jax.device_put(weights, batch["weights"].sharding)}


def as_bytes(tree: Any) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def test_an_overflow_in_one_shard_of_one_microbatch_skips_the_step_exactly(programs: Programs) -> None:
    state, metrics = programs.step(programs.make_state(), make_batch(programs.setup, 0))
    assert not bool(metrics["skipped"])
    before = jax.tree.map(np.asarray, state)
    state, metrics = programs.step(state, plant_overflow(programs.setup, make_batch(programs.setup, 1)))
    after = jax.tree.map(np.asarray, state)
    assert bool(metrics["skipped"])
    assert np.isfinite(float(metrics["loss"])), "the fault is in the gradients alone"
    assert np.asarray(metrics["nonfinite"]).any()
    for name in ("params", "moments", "updates", "trained_sequences"):
        assert as_bytes(getattr(after, name)) == as_bytes(getattr(before, name)), name
    assert after.sequences == before.sequences + 32
    assert (after.skips, after.skips_in_row) == (1, 1)
    assert float(metrics["loss_scale"]) == 2.0**16
    assert (after.loss_scale.scale, after.loss_scale.streak) == (2.0**15, 0)
    rate = float(metrics["lr"])
    state, metrics = programs.step(state, make_batch(programs.setup, 2))
    assert not bool(metrics["skipped"])
    assert float(metrics["lr"]) == rate, "a skipped step does not move the clock"
    assert int(state.updates) == 2


def test_clean_steps_double_the_scale_and_an_empty_one_moves_nothing(programs: Programs) -> None:
    state = programs.make_state(1024.0)
    state, _ = programs.step(state, make_batch(programs.setup, 0))
    empty = make_batch(programs.setup, 1)
    empty["weights"] = empty["weights"] * 0
    state, metrics = programs.step(state, empty)
    assert bool(metrics["skipped"])
    assert (float(state.loss_scale.scale), int(state.loss_scale.streak)) == (1024.0, 1)
    state, _ = programs.step(state, make_batch(programs.setup, 2))
    assert (float(state.loss_scale.scale), int(state.loss_scale.streak)) == (2048.0, 0)


def test_the_gradient_norm_and_the_loss_know_no_scale(programs: Programs) -> None:
    figures = []
    for exponent in (0, 4, 8, 12, 16):
        _, metrics = programs.step(programs.make_state(2.0**exponent), make_batch(programs.setup, 0))
        figures.append((float(metrics["loss"]), float(metrics["grad_norm"])))
    losses, norms = np.array(figures).T
    print("norms by scale:", norms)
    assert len(set(losses)) == 1
    np.testing.assert_allclose(norms, norms[-1], rtol=1e-3)


def test_scale_and_streak_survive_a_resume(programs: Programs, tmp_path: Path) -> None:
    state, _ = programs.step(programs.make_state(512.0), make_batch(programs.setup, 0))
    with_checkpoints = Checkpoints(tmp_path / "checkpoints", keep=1)
    with_checkpoints.save(1, state, wait=True)
    restored = with_checkpoints.restore(1, programs.setup.abstract_state)
    with_checkpoints.close()
    assert (float(restored.loss_scale.scale), int(restored.loss_scale.streak)) == (512.0, 1)
    assert as_bytes(restored) == as_bytes(state)
    ours, _ = programs.step(restored, make_batch(programs.setup, 1))
    theirs, _ = programs.step(state, make_batch(programs.setup, 1))
    assert as_bytes(ours) == as_bytes(theirs)


@pytest.mark.smoke
def test_the_published_constants() -> None:
    config = LossScaleConfig()
    good = jax.jit(lambda before: move_loss_scale(before, config, finite=True, applied=True))
    bad = jax.jit(lambda before: move_loss_scale(before, config, finite=False, applied=False))
    each = LossScale(jnp.float32(config.initial), jnp.uint32(0))
    assert float(each.scale) == 2.0**16
    for _ in range(1999):
        each = good(each)
    assert (float(each.scale), int(each.streak)) == (2.0**16, 1999)
    each = good(each)
    assert (float(each.scale), int(each.streak)) == (2.0**17, 0)
    each = bad(replace(each, streak=jnp.uint32(7)))
    assert (float(each.scale), int(each.streak)) == (2.0**16, 0)
    assert float(bad(LossScale(jnp.float32(FLOOR), jnp.uint32(3))).scale) == 1.0
    top = good(LossScale(jnp.float32(CEILING), jnp.uint32(1999)))
    assert (float(top.scale), int(top.streak)) == (2.0**24, 0)


@cache
def one_device() -> Trace:
    return run_steps(make_config(precision="fp16"), 5)


@pytest.mark.parametrize("mesh", [MESH, {"fsdp": 8}], ids=str)
def test_any_mesh_equals_one_device_in_fp16(mesh: dict[str, int]) -> None:
    trace = run_steps(make_config(mesh=mesh, batch={"microbatches": 4}, precision="fp16"), 5)
    loss = np.abs(trace.losses / one_device().losses - 1).max()
    norm = np.abs(trace.grad_norms / one_device().grad_norms - 1).max()
    worst = max(relative_errors(trace.params, one_device().params).values())
    print(f"{mesh}: loss {loss:.1e}, gradient norm {norm:.1e}, parameters {worst:.1e}")
    assert loss <= 2e-4
    assert norm <= 1e-3
    assert worst <= 1e-3


def test_gradients_of_rare_tokens_outlive_fp16() -> None:
    """Probabilities around e^-19, below fp16's smallest number, and a loss scaled by 2^16."""
    rng = np.random.default_rng(0)
    x, table = rng.normal(size=(2, 8, 16)), rng.normal(size=(256, 16)) / 4
    x[..., 0], table[:, 0], table[7, 0] = 8.0, 0.0, 2.5
    labels, weights = jnp.full((2, 8), 7), jnp.ones((2, 8), jnp.float32)

    def loss(x: jax.Array, table: jax.Array) -> jax.Array:
        return sum_token_losses(x, table, labels, weights, 256) * 2.0**16

    halves = jnp.asarray(x, jnp.float16), jnp.asarray(table, jnp.float16)
    with jax.set_mesh(jax.make_mesh((1,) * 5, ("pipe", "data", "fsdp", "expert", "tensor"))):
        ours = jax.jit(jax.grad(loss, (0, 1)))(*halves)
        theirs = jax.jit(jax.grad(loss, (0, 1)))(*(half.astype(jnp.float32) for half in halves))
    for mine, right in zip(ours, theirs, strict=True):
        assert mine.dtype == jnp.float16
        error = jnp.linalg.norm(mine.astype(jnp.float32) - right) / jnp.linalg.norm(right)
        assert float(error) < 5e-3


@pytest.mark.smoke
def test_the_scale_belongs_to_fp16_compute() -> None:
    assert make_config(precision="bf16").loss_scale is None
    config = make_config(precision="fp16")
    assert config.loss_scale == LossScaleConfig(initial=65536.0, growth_steps=2000)
    assert "growth_steps: 2000" in dump_config(config)
    with pytest.raises(UserError, match=r"remove the section, or set precision\.compute to fp16"):
        make_config(precision="bf16", loss_scale={"growth_steps": 5})
    for part in ("params", "accumulate", "moments"):
        with pytest.raises(UserError, match="fp16 is for compute only"):
            parse_config({**TREE, "precision": {"compute": "fp16", part: "fp16"}}, origin="test")


@pytest.mark.smoke
def test_kernels_in_fp16() -> None:
    shape: dict[str, Any] = {"dtype": jnp.float16, "length": 128, "head": 64}
    assert resolve_implementation("auto", platform="tpu", **shape) == "xla"
    assert resolve_implementation("auto", platform="gpu", **shape) == "cudnn"
    with pytest.raises(UserError, match=r"set precision\.compute to bf16"):
        resolve_implementation("splash", platform="tpu", **shape)
