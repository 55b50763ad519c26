"""Experts against a plain dense reading: every token through its experts, no exchange, on one device.

Limits in fp32: loss 2e-6 relative, every gradient leaf 1e-5 (relative norm).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxscale.config import Config
from jaxscale.models.build import build_decoder, complete_shape
from jaxscale.models.experts import Experts
from jaxscale.models.model import RouterInputs
from jaxscale.models.router import Scores, count_choices, sum_balance
from jaxscale.numerics.draw import make_key
from jaxscale.sharding.rules import iterate_leaves
from jaxscale.training.routers import RouterState
from jaxscale.training.state import TrainState
from jaxscale.verify.oracle import place_batch
from tests.tiny import VOCAB, make_config, make_tiny_setup

MOE = {
    "experts": 8,
    "top_k": 2,
    "mlp": 32,
    "balance_coef": 0.1,  # large, so that its gradient shows
    "z_coef": 0.01,
    "capacity_factor": 4.0,  # room for all: 32 slots of 32 tokens
    "eval_capacity_factor": 4.0,
}
STEP = 3


def make_moe_config(moe: dict[str, Any], **sections: Any) -> Config:
    return make_config(moe={**MOE, **moe}, **sections)


def make_arrays(config: Config, seed: int = STEP) -> dict[str, np.ndarray]:
    """Random tokens; masks from empty to full; sequences that are padding in part or altogether."""
    batch, rng = config.batch, np.random.default_rng(seed)
    shape = (batch.sequences, batch.length)
    text = rng.integers(0, VOCAB, (batch.sequences, batch.length + 1))
    lengths = rng.integers(1, batch.length + 1, (batch.sequences, 1))
    lengths[rng.integers(0, batch.sequences, 6)] = 0
    lengths[:4] = 0  # a whole shard of data=8
    lengths[4] = batch.length
    is_text = np.arange(batch.length) < lengths
    counted = is_text & (rng.random(shape) < rng.random((batch.sequences, 1)) ** 2)
    return {
        "tokens": text[:, :-1].astype(np.int32),
        "labels": text[:, 1:].astype(np.int32),
        "positions": np.broadcast_to(np.arange(batch.length, dtype=np.int32), shape).copy(),
        "segments": is_text.astype(np.int32),
        "weights": counted.astype(np.float32),
    }


# The plain reading


def read_experts(layer: Experts, x_BTD: jax.Array, is_routed_BT: jax.Array, bias_E: Any) -> tuple:
    """What a layer of experts adds, and (logits, probabilities, choices) of each token [B, T, E]."""
    shape = layer.shape.router
    logits_BTE = jnp.einsum("BTD,DE->BTE", x_BTD, layer.router.kernel[...], precision="highest")
    softmax_BTE = jnp.exp(logits_BTE) / jnp.exp(logits_BTE).sum(-1, keepdims=True)
    sigmoid_BTE = 1 / (1 + jnp.exp(-logits_BTE))
    affinity_BTE = sigmoid_BTE if shape.kind == "sigmoid" else softmax_BTE
    score_BTE = affinity_BTE if bias_E is None else affinity_BTE + bias_E
    if shape.groups > 1:
        size = shape.experts // shape.groups
        groups = [score_BTE[..., g * size : (g + 1) * size] for g in range(shape.groups)]
        worth_BTG = jnp.stack([jnp.sort(group)[..., -2:].sum(-1) for group in groups], -1)
        least = jnp.sort(worth_BTG)[..., -shape.groups_kept, None]
        score_BTE = jnp.where(jnp.repeat(worth_BTG >= least, size, -1), score_BTE, -jnp.inf)
    least = jnp.sort(score_BTE)[..., -shape.top_k, None]
    chosen_BTE = ((score_BTE >= least) & is_routed_BT[..., None]).astype(x_BTD.dtype)
    weight_BTE = affinity_BTE * chosen_BTE
    if shape.kind != "softmax":
        total = weight_BTE.sum(-1, keepdims=True)
        weight_BTE = weight_BTE / jnp.where(total > 0, total, 1)
    y_BTD = jnp.zeros_like(x_BTD)
    for expert in range(shape.experts):
        up = x_BTD @ layer.up.kernel[...][expert]
        if layer.gate is None:
            hidden = jax.nn.gelu(up, approximate=True)
        else:
            gate = x_BTD @ layer.gate.kernel[...][expert]
            hidden = gate / (1 + jnp.exp(-gate)) * up
        part = hidden @ layer.down.kernel[...][expert]
        y_BTD += shape.weight_scale * weight_BTE[..., expert, None] * part
    if layer.shared is not None:
        y_BTD += layer.shared(x_BTD)
    probability_BTE = affinity_BTE / affinity_BTE.sum(-1, keepdims=True)
    return y_BTD, (logits_BTE, probability_BTE, chosen_BTE)


def sum_plain_balance(probability: jax.Array, chosen: jax.Array, is_routed: jax.Array) -> jax.Array:
    """E · sum of f · P over the tokens at hand, times their number (Switch, equations 4 to 6)."""
    tokens = jnp.maximum(is_routed.sum(), 1)
    fraction_E = chosen.sum((0, 1)) / jnp.maximum(chosen.sum(), 1)
    mean_E = (probability * is_routed[..., None]).sum((0, 1)) / tokens
    return chosen.shape[-1] * (fraction_E * mean_E).sum() * tokens


@contextmanager
def plain_experts() -> Iterator[None]:
    """Within it, models are traced with the plain reading of a layer, which returns what it decided."""

    def call(layer: Experts, x: jax.Array, is_routed: jax.Array, inputs: RouterInputs, *_: Any, **__: Any):
        return read_experts(layer, x, is_routed, inputs.bias)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Experts, "__call__", call)
        yield


@dataclass(frozen=True)
class Reading:
    """What the plain reading of a step comes to."""

    initial: Any
    figures: tuple
    """Loss, balance and z, means over tokens, summed over layers."""
    gradients: dict[str, np.ndarray]
    chosen_LBTE: np.ndarray


_readings: dict[str, Reading] = {}


def read_step(config: Config, bias: Any = None) -> Reading:
    """The plain reading of the step, made once for all meshes."""
    assert config.moe is not None
    is_cut = config.moe.balance_scope == "microbatch"
    alike = replace(config, batch=replace(config.batch, microbatches=config.batch.microbatches * is_cut or 1))
    # Both exchanges read alike: there is room for all.
    key = repr((replace(config.moe, exchange="capacity"), config.model, alike.batch, bias is None))
    if key not in _readings:
        _readings[key] = _read_step(alike, make_arrays(config), bias)
    return _readings[key]


def _read_step(config: Config, arrays: dict[str, np.ndarray], bias: Any) -> Reading:
    moe = config.moe
    assert moe is not None
    model = build_decoder(complete_shape(config, vocab=VOCAB, platform="cpu"))
    params = jax.jit(model.init)(make_key(config.seed))
    is_routed = jnp.asarray(arrays["segments"] > 0)
    rows, count = config.batch.sequences, config.batch.microbatches
    scopes = {
        "sequence": [slice(row, row + 1) for row in range(rows)],
        "microbatch": [slice(start, start + rows // count) for start in range(0, rows, rows // count)],
        "step": [slice(None)],
    }[moe.balance_scope]

    def objective(params: Any) -> tuple:
        loss, weight, (logits, probability, chosen) = model.sum_losses(
            params, arrays, None, routers=RouterInputs(bias)
        )
        tokens = is_routed.sum()
        balance = sum(
            sum_plain_balance(p[scope], c[scope], is_routed[scope])
            for p, c in zip(probability, chosen, strict=True)
            for scope in scopes
        )
        z = (jax.nn.logsumexp(logits, axis=-1) ** 2 * is_routed).sum()
        whole = loss / weight
        if moe.has_loss:
            whole += moe.balance_coef * balance / tokens
        whole += moe.z_coef * z / tokens
        return whole, ((loss / weight, balance / tokens, z / tokens), chosen)

    with plain_experts():
        gradients, (figures, chosen) = jax.jit(jax.grad(objective, has_aux=True))(params)
    collected = {path: np.asarray(leaf) for path, leaf in iterate_leaves(gradients)}
    return Reading(jax.tree.map(np.asarray, params), figures, collected, np.asarray(chosen))


@dataclass(frozen=True)
class Step:
    """One real step: parameters before it, gradients of the mean loss, by path."""

    initial: Any
    state: TrainState
    metrics: dict[str, Any]
    gradients: dict[str, np.ndarray]


def run_step(config: Config, arrays: dict[str, np.ndarray], bias: Any = None) -> Step:
    setup = make_tiny_setup(config)
    state = setup.compile_init()(make_key(0))
    if bias is not None:
        placed = jax.device_put(bias, setup.shardings.routers.bias)
        state = replace(state, routers=RouterState(placed))
    initial = jax.tree.map(np.asarray, state.params)
    step = setup.compile_step(with_gradients=True)
    state, metrics, gradients = step(state, place_batch(setup, arrays))
    gradients = {path: np.asarray(leaf) for path, leaf in iterate_leaves(gradients)}
    return Step(initial, state, jax.device_get(metrics), gradients)


def find_errors(gradients: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> dict[str, float]:
    assert gradients.keys() == expected.keys()
    return {
        path: float(np.linalg.norm(gradients[path] - leaf) / (np.linalg.norm(leaf) or 1.0))
        for path, leaf in expected.items()
    }


def check_step(config: Config, bias: Any = None) -> Step:
    step, reading = run_step(config, make_arrays(config), bias), read_step(config, bias)
    jax.tree.map(np.testing.assert_array_equal, step.initial, reading.initial)
    (loss, balance, z), chosen = reading.figures, reading.chosen_LBTE
    metrics, layers = step.metrics, len(chosen)
    np.testing.assert_allclose(metrics["loss"], loss, rtol=2e-6)
    balance_coef = config.moe.balance_coef if config.moe.has_loss else 0
    np.testing.assert_allclose(metrics["balance"], balance / layers * bool(balance_coef), rtol=1e-5)
    np.testing.assert_allclose(metrics["router_z"], z / layers, rtol=1e-5)
    even = chosen.sum((1, 2, 3))[:, None] / chosen.shape[-1]
    np.testing.assert_allclose(metrics["load"], chosen.sum((1, 2)) / even, rtol=1e-6)
    assert metrics["drop_fraction"] == 0
    errors = find_errors(step.gradients, reading.gradients)
    if config.model.family == "gpt2":  # softmax takes a key's bias out again: its gradient is rounding
        errors = {path: error for path, error in errors.items() if not path.endswith("key/bias")}
    worst = max(errors, key=errors.__getitem__)
    assert errors[worst] <= 1e-5, f"{worst}: {errors[worst]:.1e}"
    return step


def check_parity(
    moe: dict[str, Any], mesh: dict[str, int], microbatches: int, remat: str = "none", **sections: Any
) -> None:
    batch = {"microbatches": microbatches}
    check_step(make_moe_config(moe, mesh=mesh, batch=batch, remat=remat, **sections))


EXCHANGES = ("capacity", "dropless")
MESHES: dict[str, dict[str, int]] = {
    "one": {},
    "expert2_data2_tensor2": {"expert": 2, "data": 2, "tensor": 2},
    "expert4_fsdp2": {"expert": 4, "fsdp": 2},
    "expert8": {"expert": 8},
    "expert2_fsdp2_tensor2": {"expert": 2, "fsdp": 2, "tensor": 2},
    "fsdp8": {"fsdp": 8},
}
SHORT = {
    "one": (1, "none"),
    "expert4_fsdp2": (4, "full"),
    "expert2_data2_tensor2": (4, "none"),
    "expert8": (1, "full"),
}


@pytest.mark.smoke
@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("mesh", SHORT)
def test_a_step_equals_the_plain_reading(mesh: str, exchange: str) -> None:
    microbatches, remat = SHORT[mesh]
    check_parity({"exchange": exchange}, MESHES[mesh], microbatches, remat)


@pytest.mark.full
@pytest.mark.parametrize("remat", ["none", "full", "matmuls"])
@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("mesh", MESHES)
def test_a_step_equals_the_plain_reading_everywhere(
    mesh: str, exchange: str, microbatches: int, remat: str
) -> None:
    check_parity({"exchange": exchange}, MESHES[mesh], microbatches, remat)


@pytest.mark.full
@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("mesh", ["expert4_fsdp2", "expert2_data2_tensor2"])
def test_every_stage_equals_the_plain_reading(mesh: str, stage: int) -> None:
    check_parity({"exchange": "capacity"}, MESHES[mesh], 4, zero={"stage": stage})


KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "switch": ({"router": "softmax", "top_k": 1}, {}),
    "deepseek": (
        {
            "router": "sigmoid",
            "groups": 4,
            "groups_kept": 2,
            "weight_scale": 2.5,
            "shared_experts": 1,
            "first_dense": 1,
            "balance": "loss+bias",
        },
        {"layers": 3},
    ),
    "gelu, every other layer": ({"every": 2}, {"family": "gpt2", "kv_heads": 8, "layers": 4}),
    "dense first, then every other": ({"first_dense": 1, "every": 2}, {"layers": 3}),
    "wide choice": ({"top_k": 5}, {}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_routers_and_layers_of_every_kind_equal_the_plain_reading(kind: str) -> None:
    moe, model = KINDS[kind]
    moe = {"exchange": "capacity", "capacity_factor": 8.0, **moe}
    check_parity(moe, MESHES["expert2_fsdp2_tensor2"], 4, model=model)


# The balance loss

SCOPES = ("sequence", "microbatch", "step")
ROUTER = "expert_layers/experts/router/kernel"


def check_balance(scope: str, mesh: str, microbatches: int, remat: str = "none") -> None:
    """Of a coefficient so large that the router's gradient is the balance loss's."""
    moe = {"exchange": "capacity", "balance_scope": scope, "balance_coef": 1000.0}
    check_parity(moe, MESHES[mesh], microbatches, remat, model={"layers": 1})


@pytest.mark.parametrize("scope", SCOPES)
def test_the_balance_loss_reaches_the_router_alike_on_a_mesh(scope: str) -> None:
    check_balance(scope, "expert2_data2_tensor2", 4, "full")


@pytest.mark.full
@pytest.mark.parametrize("remat", ["none", "full"])
@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("scope", SCOPES)
def test_the_balance_loss_reaches_the_router_alike_everywhere(
    scope: str, mesh: str, microbatches: int, remat: str
) -> None:
    check_balance(scope, mesh, microbatches, remat)


def test_the_scope_of_a_microbatch_alone_depends_on_their_number() -> None:
    def read(scope: str, count: int) -> np.ndarray:
        moe = {"exchange": "capacity", "balance_scope": scope, "balance_coef": 1000.0}
        config = make_moe_config(moe, batch={"microbatches": count}, model={"layers": 1})
        return read_step(config).gradients[ROUTER]

    def find_change(scope: str) -> float:
        one, four = read(scope, 1), read(scope, 4)
        return float(np.linalg.norm(four - one) / np.linalg.norm(one))

    assert find_change("sequence") == find_change("step") == 0
    assert find_change("microbatch") > 0.01


@pytest.mark.parametrize("scope", SCOPES)
def test_an_even_load_costs_the_coefficient_and_one_expert_for_all_as_many_times_as_there_are(
    scope: str,
) -> None:
    experts, tokens = 4, 8

    def find_balance(logits_TE: jax.Array, choice_TK: jax.Array) -> jax.Array:
        scores = Scores(logits_TE[None], *[jax.nn.softmax(logits_TE)[None]] * 2)
        is_routed = jnp.ones((1, tokens), bool)
        load = count_choices(choice_TK[None], is_routed, experts)
        return sum_balance(scores, is_routed, load, load.sum(-1)) / tokens

    everyone = jnp.arange(tokens)[:, None] + jnp.arange(2)
    np.testing.assert_allclose(find_balance(jnp.zeros((tokens, experts)), everyone % experts), 1, rtol=1e-6)
    sure = jnp.where(jnp.arange(experts) == 2, 100.0, 0.0) * jnp.ones((tokens, 1))
    np.testing.assert_allclose(find_balance(sure, jnp.full((tokens, 1), 2)), experts, rtol=1e-6)


# Routers of a run


def make_bias(config: Config) -> np.ndarray:
    moe = config.moe
    assert moe is not None
    shape = (config.model.layers - moe.first_dense, moe.experts)
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def test_a_bias_moves_the_choice_and_follows_the_load_of_the_whole_step() -> None:
    moe = {"router": "sigmoid", "balance": "bias", "bias_rate": 0.25, "exchange": "capacity"}
    config = make_moe_config(
        {**moe, "capacity_factor": 8.0}, mesh=MESHES["expert2_data2_tensor2"], batch={"microbatches": 4}
    )
    bias = make_bias(config)
    step = check_step(config, bias)  # also that balance "bias" adds no loss
    load = read_step(config, bias).chosen_LBTE.sum((1, 2))
    expected = bias + 0.25 * np.sign(load.mean(-1, keepdims=True) - load)
    np.testing.assert_array_equal(np.asarray(step.state.routers.bias), expected.astype(np.float32))
    assert (read_step(config).chosen_LBTE != read_step(config, bias).chosen_LBTE).any()
