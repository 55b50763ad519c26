"""fp8 in the step: magnitudes of all microbatches and shards, delayed scales, skips, resume, parity."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxscale.config import UserError, parse_config
from jaxscale.mesh import make_mesh
from jaxscale.numerics.draw import make_key
from jaxscale.numerics.fp8 import E4M3, E5M2, find_scale
from jaxscale.training.fp8_scaling import make_fp8_weights
from jaxscale.training.loop import train
from jaxscale.training.setup import Setup, make_setup
from jaxscale.training.state import TrainState
from tests.test_layout_check import make_own_model
from tests.test_training import corpus, make_run, read_metrics  # noqa: F401
from tests.tiny import TREE, Trace, make_batch, make_config, make_tiny_setup, relative_errors, run_steps

MESH = {"data": 2, "fsdp": 2, "tensor": 2}
QUERY = "layers/attention/query/kernel"
HISTORY = 4
FP8 = {"precision": "fp8", "fp8": {"history": HISTORY}}


@pytest.fixture(scope="module")
def sharded() -> tuple[Setup, Any]:
    setup = make_tiny_setup(make_config(mesh=MESH, batch={"microbatches": 4}, **FP8))
    return setup, setup.compile_step()


@pytest.fixture(scope="module")
def whole() -> tuple[Setup, Any]:
    setup = make_tiny_setup(make_config(**FP8))
    return setup, setup.compile_step()


def start(setup: Setup) -> TrainState:
    return setup.compile_init()(make_key(0))


def put(value: np.ndarray, like: jax.Array) -> jax.Array:
    return jax.device_put(value.astype(like.dtype), like.sharding)


def copy_history(state: TrainState) -> dict[str, np.ndarray]:
    return {path: np.array(history) for path, history in state.fp8.items()}


@pytest.mark.smoke
@pytest.mark.parametrize("sequence", [1, 30])
def test_the_largest_activation_of_one_sequence_is_the_steps(sharded: tuple, sequence: int) -> None:
    """A token whose embedding is a single channel, which a norm makes sqrt(D), stands in one place only."""
    setup, step = sharded
    state = start(setup)
    table = np.array(state.params["embed"]["table"])
    table[7] = 0
    table[7, 5] = 1
    params = {**state.params, "embed": {"table": put(table, state.params["embed"]["table"])}}
    batch = make_batch(setup, 0)
    tokens = np.array(batch["tokens"])
    tokens[tokens == 7] = 8
    shape = tokens.shape
    tokens = tokens.reshape(-1, shape[-1])
    others = np.abs(table[tokens]).max(-1) / np.sqrt(np.square(table[tokens]).mean(-1) + 1e-5)
    tokens[sequence, 3] = 7
    batch["tokens"] = put(tokens.reshape(shape), batch["tokens"])
    state, _ = step(replace(state, params=params), batch)
    seen = np.array(state.fp8[QUERY])[0, 0]
    assert seen[0] == pytest.approx(np.sqrt(32), rel=1e-2)
    assert others.max() < 0.9 * np.sqrt(32)
    np.testing.assert_array_equal(seen[1:], 0)


@pytest.mark.parametrize("sequence", [2, 29])
def test_the_largest_gradient_of_one_sequence_is_the_steps(
    sharded: tuple, whole: tuple, sequence: int
) -> None:
    """Where one sequence alone has labels, only its shard and its microbatch have gradients."""
    histories = []
    for setup, step in (sharded, whole):
        batch = make_batch(setup, 0)
        weights = np.zeros(batch["weights"].shape, np.float32)
        weights.reshape(-1, weights.shape[-1])[sequence] = 1
        batch["weights"] = put(weights, batch["weights"])
        state, _ = step(start(setup), batch)
        histories.append(copy_history(state))
    for path, ours in histories[0].items():
        assert np.all(ours[:, 1, 0] > 0)
        np.testing.assert_allclose(ours[..., 0], histories[1][path][..., 0], rtol=0.15, err_msg=path)


def test_scales_follow_from_the_largest_of_the_history(sharded: tuple) -> None:
    setup, step = sharded
    state = start(setup)
    for number in range(HISTORY + 2):
        state, _ = step(state, make_batch(setup, number))
    history = copy_history(state)
    rng = np.random.default_rng(0)
    history = {path: h * rng.permuted([1, 0.1, 8, 3]).astype(np.float32) for path, h in history.items()}
    assert all(h.shape[1:] == (2, HISTORY) and np.all(h > 0) for h in history.values())
    query = state.params["layers"]["attention"]["query"]
    query["kernel"] = put(np.array(query["kernel"]) * np.array([1, 0.1]).reshape(2, 1, 1, 1), query["kernel"])
    config = replace(setup.config.fp8, margin=1)
    with setup.ambient():
        fp8 = jax.jit(
            lambda params, history: make_fp8_weights(params, history, setup.model, setup.layouts, config)
        )(state.params, history)
    for path, scales in fp8.scales.items():
        largest = history[path].max(-1)
        np.testing.assert_array_equal(scales[:, 1], find_scale(jnp.array(largest[:, 0]), E4M3, 1))
        np.testing.assert_array_equal(scales[:, 2], find_scale(jnp.array(largest[:, 1]), E5M2, 1))
    kernel = np.array(state.params["layers"]["attention"]["query"]["kernel"])
    amax = np.abs(kernel).max((1, 2, 3))
    np.testing.assert_array_equal(fp8.scales[QUERY][:, 0], find_scale(jnp.array(amax), E4M3))
    back = (
        np.asarray(fp8.kernels[QUERY]).astype(np.float32) / np.asarray(fp8.scales[QUERY])[:, :1, None, None]
    )
    assert np.all(np.abs(back - kernel).max((1, 2, 3)) < 0.07 * amax)


def test_the_newest_step_stands_first_and_the_oldest_leaves(sharded: tuple) -> None:
    setup, step = sharded
    state, past = start(setup), []
    for number in range(HISTORY + 1):
        state, _ = step(state, make_batch(setup, number))
        past.append(copy_history(state)[QUERY])
    np.testing.assert_array_equal(past[-1][..., 1:], past[-2][..., :-1])
    np.testing.assert_array_equal(past[-1][..., -1], past[1][..., 0])


@pytest.mark.smoke
def test_infinity_that_fp8_would_clip_is_a_skip_that_changes_nothing(sharded: tuple) -> None:
    setup, step = sharded
    state, _ = step(start(setup), make_batch(setup, 0))
    before = jax.tree.map(np.array, state)
    bad = jax.tree.map(lambda leaf: leaf, state.params)
    # Gate and up are finite, their product is not; nothing flows back through it.
    for name, factor in (("gate", 1e21), ("up", 1e21), ("down", 0)):
        kernel = bad["layers"]["mlp"][name]["kernel"]
        bad["layers"]["mlp"][name]["kernel"] = put(np.array(kernel) * factor, kernel)
    state, metrics = step(replace(state, params=bad), make_batch(setup, 1))
    assert bool(metrics["skipped"])
    for path, history in before.fp8.items():
        np.testing.assert_array_equal(np.array(state.fp8[path]), history)
    assert int(state.updates) == int(before.updates)
    for ours, theirs in zip(jax.tree.leaves(state.moments), jax.tree.leaves(before.moments), strict=True):
        np.testing.assert_array_equal(np.array(ours), theirs)


@cache
def trace_on_one_device(precision: str, scaling: str = "delayed") -> Trace:
    return run_steps(make_config(precision=precision, **choose_scaling(precision, scaling)), 3)


def choose_scaling(precision: str, scaling: str) -> dict[str, Any]:
    return {"fp8": {"scaling": scaling}} if precision == "fp8" else {}


MESHES = [{"data": 8}, MESH, {"fsdp": 4, "tensor": 2}]


@pytest.mark.parametrize(
    ("precision", "scaling", "mesh"),
    [
        pytest.param(precision, scaling, mesh, marks=() if mesh is MESH else pytest.mark.full)
        for precision, scaling in (("bf16", ""), ("fp8", "delayed"), ("fp8", "dynamic"))
        for mesh in MESHES
    ],
    ids=str,
)
def test_a_policy_repeats_itself_on_every_mesh(precision: str, scaling: str, mesh: dict[str, int]) -> None:
    """Against the same policy on one device, with one microbatch; and it is that policy."""
    reference = trace_on_one_device(precision, scaling)
    options = choose_scaling(precision, scaling)
    trace = run_steps(make_config(mesh=mesh, batch={"microbatches": 4}, precision=precision, **options), 3)
    np.testing.assert_allclose(trace.losses, reference.losses, rtol=2e-3)
    np.testing.assert_allclose(trace.grad_norms, reference.grad_norms, rtol=2e-2)
    assert max(relative_errors(trace.params, reference.params).values()) < 2e-2
    np.testing.assert_allclose(trace.losses, trace_on_one_device("fp32").losses, rtol=5e-3)
    norms = {name: trace_on_one_device(name).grad_norms for name in ("fp32", "bf16")}
    distance = {name: np.abs(trace.grad_norms / each - 1).max() for name, each in norms.items()}
    assert (distance["bf16"] < 5e-3) == (precision == "bf16")
    assert distance["fp32"] > 1e-4


def test_the_history_is_saved_and_the_run_goes_on_bit_for_bit(tmp_path: Path, corpus: Path) -> None:  # noqa: F811
    results = []
    for name, stops in (("whole", (None,)), ("broken", (3, None))):
        for stop in stops:
            config = make_run(tmp_path / name, corpus, eval={"every_steps": 0}, **FP8)
            results.append(train(replace(config, stop_after_steps=stop)))
    assert read_metrics(results[0].run_dir) == read_metrics(results[-1].run_dir)


def test_what_fp8_does_not_go_with_is_refused() -> None:
    config = make_config(**FP8)
    with pytest.raises(UserError, match="bf16"):
        make_setup(config, make_mesh(config.mesh), 64, make_own_model(36))
    with pytest.raises(UserError, match=r"fp8 is for fp8 compute and precision\.compute is fp32"):
        parse_config({**TREE, "fp8": {"history": 16}}, origin="test")
