"""Memory in closed form against the compilers' own accounts, and what it costs to ask."""

import math
import time
from dataclasses import replace

import jax
import pytest

from jaxscale.config import UserError, load_config
from jaxscale.mesh import AXES
from jaxscale.planning.buffers import KINDS
from jaxscale.planning.draft import Drafter, draft_setup
from jaxscale.planning.memory import predict_memory
from jaxscale.training.step import describe_batch
from tests.plan_memory import BARS, CONFIGS, CPU_CASES, TPU_CASES, Case, compile_case, predict_case
from tests.tiny import make_config, make_tiny_setup

QUICK = ("zero 3, fsdp=8, full", "experts, capacity, fsdp=2 expert=4, full")
MOST_MILLISECONDS = 2.0


def pick(names: tuple[str, ...], *, others: bool) -> list[Case]:
    return [case for case in CPU_CASES if (case.name in names) != others]


def check_case(case: Case, bar: float) -> None:
    predicted, compiled = predict_case(case), compile_case(case)
    sizes = [compiled.arguments + size for size in (compiled.alive, compiled.allocated)]
    print(case.name, predicted.moment.name, [f"{predicted.total / size - 1:+.1%}" for size in sizes])
    assert predicted.arguments == pytest.approx(compiled.arguments, rel=0.005)
    for size in sizes:
        assert predicted.total == pytest.approx(size, rel=bar)


@pytest.mark.parametrize("case", pick(QUICK, others=False), ids=lambda case: case.name)
def test_a_forecast_is_within_a_tenth_of_what_the_cpu_compiler_says(case: Case) -> None:
    check_case(case, BARS["cpu"])


@pytest.mark.full
@pytest.mark.parametrize("case", pick(QUICK, others=True), ids=lambda case: case.name)
def test_every_forecast_is_within_a_tenth_of_what_the_cpu_compiler_says(case: Case) -> None:
    check_case(case, BARS["cpu"])


@pytest.mark.chips
@pytest.mark.parametrize("case", TPU_CASES, ids=lambda case: case.name)
def test_a_forecast_is_near_what_the_tpu_compiler_says(case: Case) -> None:
    check_case(case, BARS["tpu"])


@pytest.mark.parametrize(
    "sections",
    [
        {"mesh": {"data": 8}, "zero": {"stage": 0}},
        {"mesh": {"data": 2, "fsdp": 4}, "zero": {"stage": 1}},
        {"mesh": {"data": 2, "fsdp": 2, "tensor": 2}, "precision": {"compute": "bf16", "moments": "bf16"}},
        {"mesh": {"fsdp": 2, "expert": 4}, "moe": {"experts": 8, "top_k": 2, "mlp": 16, "balance": "bias"}},
        {"mesh": {"fsdp": 8}, "optimizer": {"name": "adafactor"}, "precision": "fp16"},
        {"mesh": {"fsdp": 8}, "precision": "fp8", "optimizer": {"name": "muon"}},
    ],
)
def test_arguments_are_the_bytes_of_the_state_and_the_batch(sections: dict) -> None:
    setup = make_tiny_setup(make_config(**sections))
    leaves = jax.tree.leaves((setup.abstract_state, describe_batch(setup.config, setup.layouts)))
    laid = sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)
    assert predict_memory(setup).arguments == laid


def test_a_mesh_that_is_not_here_gives_the_forecast_of_one_that_is() -> None:
    config = make_config(mesh={"data": 2, "fsdp": 2, "tensor": 2}, precision="bf16", remat="attention")
    setup = make_tiny_setup(config)
    drafted = Drafter(config, vocab=setup.vocab, platform="cpu").draft(config, dict(setup.mesh.shape))
    assert predict_memory(drafted) == predict_memory(draft_setup(setup))


def test_what_lies_on_the_host_is_not_on_the_device() -> None:
    config = load_config(CONFIGS / "llama3_8b.yaml", ["mesh.fsdp=64"])
    drafter = Drafter(config, vocab=128256, platform="tpu")
    sizes = dict.fromkeys(AXES, 1) | {"fsdp": 64}
    off = predict_memory(drafter.draft(config, sizes))
    offload = replace(config.offload, optimizer_state=True, master_weights=True)
    on = predict_memory(drafter.draft(replace(config, offload=offload), sizes))
    assert off.host == 0
    assert on.arguments + on.host == off.arguments
    assert on.arguments < 0.01 * off.arguments


def test_kinds_add_up_and_shards_and_recomputation_save_memory() -> None:
    config = load_config(CONFIGS / "llama3_8b.yaml", ["mesh.fsdp=64", "batch.sequences=64"])
    drafter = Drafter(config, vocab=128256, platform="tpu")

    def predict(**sizes: int) -> int:
        forecast = predict_memory(drafter.draft(config, dict.fromkeys(AXES, 1) | sizes))
        assert sum(forecast.by_kind.values()) == forecast.total
        assert set(forecast.by_kind) <= set(KINDS)
        return forecast.total

    assert predict(fsdp=32, data=2) > predict(fsdp=64)
    assert predict(fsdp=64) > predict(fsdp=64, tensor=4)
    by_policy = []
    for policy in ("full", "attention", "matmuls", "none"):
        candidate = replace(config, remat=replace(config.remat, policy=policy))
        draft = drafter.draft(candidate, dict.fromkeys(AXES, 1) | {"fsdp": 64})
        by_policy.append(predict_memory(draft).total)
    assert by_policy == sorted(by_policy)
    assert len(set(by_policy)) == len(by_policy)


def test_a_thousand_forecasts_take_two_seconds() -> None:
    config = load_config(CONFIGS / "mixtral_8x7b.yaml", ["mesh.fsdp=64", "mesh.expert=8"])
    drafter = Drafter(config, vocab=32000, platform="tpu")
    candidates = [
        (
            replace(
                config, zero=replace(config.zero, stage=stage), remat=replace(config.remat, policy=policy)
            ),
            mesh,
        )
        for stage in range(4)
        for policy in ("full", "attention", "matmuls", "none")
        for mesh in (
            {"fsdp": 64, "expert": 8},
            {"fsdp": 16, "expert": 8, "tensor": 4},
            {"data": 64, "expert": 8},
        )
    ]
    start = time.process_time()
    for candidate, mesh in candidates:
        predict_memory(drafter.draft(candidate, dict.fromkeys(AXES, 1) | mesh))
    milliseconds = 1000 * (time.process_time() - start) / len(candidates)
    print(f"{milliseconds:.2f} ms a candidate")
    assert milliseconds < MOST_MILLISECONDS


def test_a_model_of_ones_own_has_no_closed_form() -> None:
    setup = replace(make_tiny_setup(make_config(mesh={"data": 1})), shape=None)
    with pytest.raises(UserError, match="decoders only"):
        predict_memory(setup)
