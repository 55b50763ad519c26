"""`verify` of a model with experts: what is right passes, and faults of experts' own kind are caught.

Faults are planted in the real code after the reference was made, as in `tests/test_verify.py`.
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec

from jaxscale.config import MeshConfig
from jaxscale.models import experts as experts_module
from jaxscale.models.build import shape_decoder
from jaxscale.parallel import capacity
from jaxscale.training import gradients, step
from jaxscale.verify import oracle as oracle_module
from jaxscale.verify.cases import Case, list_meshes, plan_cases
from jaxscale.verify.compare import CaseResult
from jaxscale.verify.precision import allow_fp64
from jaxscale.verify.reduce import reduce_config
from jaxscale.verify.verification import Oracle, make_oracle, verify_model
from tests.test_verify import check_caught, never, plant_lax, run_case
from tests.tiny import VOCAB, make_config

MODEL = {"layers": 1, "embed": 16, "heads": 2, "kv_heads": 2, "mlp": 16}
# Everything that adds to the loss or to the state, large enough to be seen.
MOE: dict[str, Any] = {
    "experts": 8,
    "top_k": 2,
    "router": "sigmoid",
    "exchange": "capacity",
    "capacity_factor": 1.0,
    "balance": "loss+bias",
    "balance_coef": 0.1,
    "z_coef": 1e-2,
    "jitter": 0.1,
}
PLANTED = Case(MeshConfig(expert=4, fsdp=2), 3, False, 4, "full", "half")
CUBE = Case(MeshConfig(data=2, expert=2, tensor=2), 1, False, 1, "none", "config")
KINDS: dict[str, dict[str, Any]] = {
    "dropless": {"exchange": "dropless", "router": "softmax_kept", "balance": "loss"},
    "switch": {"top_k": 1, "router": "softmax", "balance": "loss", "priority": "probability"},
    "mixtral": {"router": "softmax_kept", "balance": "loss", "overflow": "reroute", "balance_scope": "step"},
    "deepseek": {
        "groups": 4,
        "groups_kept": 2,
        "shared_experts": 1,
        "first_dense": 1,
        "weight_scale": 2.5,
        "balance_scope": "microbatch",
    },
    "interleaved": {"every": 2, "balance": "bias", "bias_freeze_tokens": 600},
}


def make_moe_config(model: dict[str, Any] = MODEL, mesh: dict[str, int] | None = None, **moe: Any) -> Any:
    mesh = {"data": 2, "fsdp": 2, "expert": 2} if mesh is None else mesh
    return make_config(model=model, batch={"length": 16}, mesh=mesh, moe={**MOE, **moe})


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return make_oracle(make_moe_config(), vocab=VOCAB)


def check_right(result: CaseResult) -> None:
    assert result.ok, result.problems
    assert result.grad_error is not None
    assert result.router_error == 0, "a bias is a sum of whole steps"


def test_experts_over_several_axes_pass(oracle: Oracle) -> None:
    """And both ways of the exchange, with tokens that find no room."""
    check_right(run_case(oracle, PLANTED))
    loads = oracle.traces["config"].loads
    assert loads is not None
    routed = [(batch["segments"] > 0).sum() for batch in oracle.reference.batches]
    assert np.array_equal(loads.sum(2), 2 * np.array(routed)[:, None]), "padding chooses nothing"
    assert 0 < min(routed) < max(routed) < 32 * 16


def test_choices_that_hang_on_rounding_are_noticed(oracle: Oracle, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two experts with one column of the router, and no bias between them."""
    reference = oracle.reference
    monkeypatch.setattr(oracle_module, "DISTURBANCE", 0.0)
    kernel = np.array(reference.initial["expert_layers"]["experts"]["router"]["kernel"])
    kernel[..., 1] = kernel[..., 0]
    tree = jax.tree.map(lambda leaf: leaf, reference.initial)
    tree["expert_layers"]["experts"]["router"]["kernel"] = kernel
    alike = replace(reference, initial=tree)
    with jax.default_device(oracle.devices[0]):
        near = [each.is_near_tie(None, each.trace(None).loads) for each in (reference, alike)]
    assert near == [False, True]


def plant_reduction(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    """Changes the layouts over manual axes that a gradient is taken to have, `expert` where it is split."""
    right = gradients._reduce

    def reduce(sums: Any, specs: Any, manual: Any) -> Any:
        return right(sums, jax.tree.map(change, specs), manual)

    monkeypatch.setattr(gradients, "_reduce", reduce)


def test_experts_reduced_over_expert_are_caught(oracle: Oracle, monkeypatch: pytest.MonkeyPatch) -> None:
    plant_reduction(monkeypatch, lambda spec: PartitionSpec())
    result = check_caught(oracle, PLANTED, "gradient at step 1")
    assert result.worst_leaf is not None
    assert "/experts/" in result.worst_leaf


@pytest.mark.full
def test_dense_leaves_not_reduced_over_expert_are_caught(
    oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant_reduction(monkeypatch, lambda spec: PartitionSpec("expert"))
    check_caught(oracle, PLANTED, "gradient at step 1", "gradient norm")


def test_results_that_come_back_in_another_order_are_caught(
    oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    def all_to_all(x: jax.Array, axes: Any, split: int, join: int, *, tiled: bool) -> jax.Array:
        if split == 0:
            return lax.all_to_all(x, axes, split, join, tiled=tiled)
        rows = x.shape[1] // 4
        return lax.all_to_all(jnp.roll(x, rows, 1), axes, split, join, tiled=tiled)

    plant_lax(monkeypatch, capacity, all_to_all=all_to_all)
    check_caught(oracle, PLANTED, "loss is off")


@pytest.mark.full
def test_a_capacity_of_devices_is_caught(oracle: Oracle, monkeypatch: pytest.MonkeyPatch) -> None:
    """All sequences of a device share the room of one buffer."""
    right_seat, right_run = experts_module.seat_tokens, experts_module.run_capacity
    sequences = []

    def seat(choice_BTK: jax.Array, *arrays: jax.Array, **options: Any) -> Any:
        sequences.append(choice_BTK.shape[0])
        joined = [array.reshape(1, -1, *array.shape[2:]) for array in (choice_BTK, *arrays)]
        return right_seat(*joined, **options)

    def run(x_ND: jax.Array, seats: Any, capacity: int, *rest: Any) -> jax.Array:
        return right_run(x_ND, seats, sequences[-1] * capacity, *rest)

    monkeypatch.setattr(experts_module, "seat_tokens", seat)
    monkeypatch.setattr(experts_module, "run_capacity", run)
    check_caught(oracle, CUBE, "loss is off")


@pytest.mark.full
@pytest.mark.parametrize("fault", ["lost", "mean of means"])
def test_a_balance_loss_that_is_wrong_with_microbatches_is_caught(
    oracle: Oracle, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """Losses and loads are right: the gradient alone is not."""
    right = gradients.sum_penalty
    routed = int((oracle.reference.batches[0]["segments"] > 0).sum())

    def sum_penalty(routers: Any, sums: Any) -> jax.Array:
        if fault == "lost":
            return 0 * right(routers, sums)
        tokens = sums.load.sum() / routers.top_k
        return right(routers, sums) * routed / (4 * 8) / jnp.maximum(tokens, 1)

    monkeypatch.setattr(gradients, "sum_penalty", sum_penalty)
    result = check_caught(oracle, PLANTED, "gradient at step 1")
    assert not any(problem.startswith("loss is off") and "step 1" in problem for problem in result.problems)


@pytest.mark.full
def test_padding_that_is_routed_is_caught(oracle: Oracle, monkeypatch: pytest.MonkeyPatch) -> None:
    right = experts_module.count_choices
    monkeypatch.setattr(
        experts_module,
        "count_choices",
        lambda choice_BTK, is_routed_BT, count: right(choice_BTK, jnp.ones_like(is_routed_BT), count),
    )
    check_caught(oracle, PLANTED, "choices fall on other experts at step 1", "routers: bias is off")


@pytest.mark.full
@pytest.mark.parametrize("times", [0, 4])
def test_a_bias_that_moves_another_number_of_times_is_caught(
    oracle: Oracle, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    """Never, or once a microbatch."""
    right = step.move_bias

    def move(state: Any, *arguments: Any) -> Any:
        for _ in range(times):
            state = right(state, *arguments)
        return state

    monkeypatch.setattr(step, "move_bias", move)
    check_caught(oracle, PLANTED, "routers: bias is off")


@pytest.mark.full
def test_a_bias_that_follows_one_shard_is_caught(oracle: Oracle, monkeypatch: pytest.MonkeyPatch) -> None:
    right = lax.psum

    def psum(tree: Any, axes: Any) -> Any:
        summed = right(tree, axes)
        if not isinstance(tree, gradients.Sums):
            return summed
        assert tree.experts is not None
        return summed._replace(experts=summed.experts._replace(load=tree.experts.load))

    plant_lax(monkeypatch, gradients, psum=psum)
    check_caught(oracle, PLANTED, "choices fall on other experts", "routers: bias is off")


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "axis"),
    list(zip(KINDS, ("fsdp", "tensor", "data", "fsdp", "tensor"), strict=True)),
)
def test_every_kind_of_experts_passes_on_every_mesh_of_two_axes(kind: str, axis: str) -> None:
    config = make_moe_config({**MODEL, "layers": 2}, {axis: 2, "expert": 4}, **KINDS[kind])
    verification = verify_model(config, vocab=VOCAB)
    assert verification.ok, [(result.case.name, result.problems) for result in verification.results]


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_fp64_agrees_to_ten_digits(kind: str) -> None:
    with allow_fp64(fp64=True):
        config = make_moe_config({**MODEL, "layers": 2}, **KINDS[kind])
        # As many as both cases have: to a balance loss of microbatches their number is no matter of choice.
        config = replace(config, batch=replace(config.batch, microbatches=4))
        oracle = make_oracle(config, vocab=VOCAB, fp64=True)
        for result in oracle.run([PLANTED, replace(CUBE, microbatches=4)]):
            assert result.ok, (result.case.name, result.problems)


def test_a_balance_loss_of_microbatches_ties_their_number() -> None:
    config = make_moe_config(balance_scope="microbatch")
    tried = {case.microbatches for case in plan_cases(config, 8, never, whole_product=False)[0]}
    assert tried == {1}
    config = replace(config, batch=replace(config.batch, microbatches=4))
    tried = {case.microbatches for case in plan_cases(config, 8, never, whole_product=False)[0]}
    assert tried == {4}
    free = replace(config, moe=replace(config.moe, balance="bias"))
    tried = {case.microbatches for case in plan_cases(free, 8, never, whole_product=False)[0]}
    assert tried == {1, 4}, "no loss, nothing tied"


def test_expert_is_an_axis_to_try() -> None:
    assert {mesh.expert for mesh in list_meshes(MeshConfig(), 8, has_experts=True)} == {1, 2, 4, 8}
    assert {mesh.expert for mesh in list_meshes(MeshConfig(data=8), 8, has_experts=True)} == {1}
    cases, _ = plan_cases(make_moe_config(mesh={}), 8, never, whole_product=False)
    assert {case.mesh.expert for case in cases} == {1, 2, 4, 8}


@pytest.mark.parametrize(
    "moe",
    [
        {"experts": 256, "top_k": 8, "groups": 8, "groups_kept": 4, "first_dense": 3, "mlp": 2048},
        {"experts": 64, "top_k": 1, "router": "softmax", "every": 2},
        {"experts": 160, "top_k": 6, "groups": 8, "groups_kept": 3, "overflow": "reroute"},
        {"experts": 6, "top_k": 6, "every": 4},
    ],
)
def test_reduced_experts_divide_by_what_the_whole_ones_divide_by(moe: dict[str, Any]) -> None:
    layers = 4 * moe.get("every", 1) + moe.get("first_dense", 0)
    whole = make_moe_config({"layers": layers, "embed": 1024}, **moe)
    small = reduce_config(whole, 8)
    assert small.moe is not None
    for ways in (2, 4, 8):
        assert (small.moe.experts % ways == 0) == (moe["experts"] % ways == 0)
    assert small.moe.experts <= 16
    assert small.model.layers <= 4 + moe.get("every", 1)
    assert bool(small.moe.first_dense) == bool(moe.get("first_dense"))
    assert (small.moe.groups > small.moe.groups_kept) == (moe.get("groups", 1) > moe.get("groups_kept", 1))
    shape_decoder(small, vocab=small.model.vocab, platform="cpu")  # its sizes do not contradict each other
