"""What the compiled step of a model with experts sends, against the closed forms; as `tests/test_traffic.py`.

The default cases hold one of each thing that can be otherwise; the whole product of meshes, ZeRO stages,
microbatches and remat is under `full`.
"""

import itertools
import math
from collections import Counter
from functools import cache
from typing import Any

import pytest

from jaxscale.inspection.traffic import NEGLIGIBLE, TOLERANCE, tabulate_traffic
from jaxscale.sharding.collectives import Collective, read_collectives
from jaxscale.training.setup import Setup, make_setup
from tests.chips import describe_gpu
from tests.test_traffic import VOCAB, Row, check_traffic, expect_traffic, make_cpu_setup, make_traffic_config

MOE: dict[str, Any] = {"experts": 8, "top_k": 2, "mlp": 256, "exchange": "capacity"}
MESHES: dict[str, dict[str, int]] = {
    "expert8": {"expert": 8},
    "expert4_fsdp2": {"expert": 4, "fsdp": 2},
    "data2_expert2_tensor2": {"data": 2, "expert": 2, "tensor": 2},
}
LAYERS, EMBED, TOKENS = 3, 256, 8 * 128  # of a microbatch, on all devices


def make_expert_setup(mesh: str, stage: int, microbatches: int, remat: Any = "none", **moe: Any) -> Setup:
    return make_cpu_setup(
        make_traffic_config(
            MESHES[mesh], stage, microbatches, precision="fp32", remat=remat, moe={**MOE, **moe}
        )
    )


def count_dispatched(mesh: str, exchange: str = "capacity") -> float:
    """Elements that a device sends one way: capacity 1.25 of 2 choices is 2.5 rows a token, and the padded
    exchange sends every token to every device, as often as it has experts that the token may choose."""
    sizes = MESHES[mesh]
    ways = sizes["expert"]
    rows = 2.5 if exchange == "capacity" else ways * min(MOE["top_k"], MOE["experts"] // ways)
    return EMBED * rows * TOKENS / math.prod(size for axis, size in sizes.items() if axis != "tensor")


def list_collectives(setup: Setup) -> list[Collective]:
    """Of the compiled step; LLVM at its least effort, which has no part in collectives."""
    lowered = setup.trace_step()
    with setup.ambient():
        options: Any = {"xla_backend_optimization_level": 0}
        text = lowered.lower().compile(compiler_options=options).as_text()
    assert text is not None
    return read_collectives(text, setup.mesh)


def count_elements(collectives: list[Collective]) -> Counter[Row]:
    sent: Counter[Row] = Counter()
    for row in tabulate_traffic(collectives):
        assert row.elements is not None
        sent[row.axes, row.kind] = row.elements
    return sent


def check(setup: Setup, collectives: list[Collective] | None = None) -> Counter[Row]:
    """Every row of either side is within 5 % of the other; returns what was measured."""
    sent = count_elements(list_collectives(setup) if collectives is None else collectives)
    expected = expect_traffic(setup)
    negligible = NEGLIGIBLE * sum(sent.values())
    for row in sent | expected:
        difference = abs(sent[row] - expected[row])
        assert difference <= max(TOLERANCE * expected[row], negligible), (row, sent[row], expected[row])
    return sent


@cache
def list_usual(exchange: str) -> list[Collective]:
    """Two axes of the batch, one microbatch, nothing computed again."""
    return list_collectives(make_expert_setup("expert4_fsdp2", 3, 1, exchange=exchange))


@pytest.mark.parametrize("exchange", ["capacity", "dropless"])
def test_two_exchanges_in_each_pass_and_no_gather_of_tokens(exchange: str) -> None:
    collectives = list_usual(exchange)
    sent = check(make_expert_setup("expert4_fsdp2", 3, 1, exchange=exchange), collectives)
    dispatched = count_dispatched("expert4_fsdp2", exchange)
    assert sent[("expert",), "all-to-all"] == 4 * LAYERS * dispatched
    gathers = [each for each in collectives if each.kind == "all-gather" and "expert" in each.axes]
    assert gathers, "what the optimizer keeps over `expert` is gathered once a step"
    in_layers = [each for each in gathers if each.op_name != "jit(step)/sharding_constraint"]
    assert all(each.elements <= 8 * 4 for each in in_layers), "no more than a count of each expert"


def test_what_a_dispatch_sends_does_not_grow_with_the_experts() -> None:
    """8 experts have room for 40 tokens of a sequence each, 64 for 5."""
    sent = check(make_expert_setup("expert4_fsdp2", 3, 1, experts=64))
    usual = count_elements(list_usual("capacity"))
    assert sent[("expert",), "all-to-all"] == usual[("expert",), "all-to-all"]


def test_a_counting_pass_shared_experts_and_recomputation_send_what_they_should() -> None:
    """Several microbatches, the first layer dense, and the load of the whole step counted beforehand."""
    moe = {"balance_scope": "step", "shared_experts": 2, "mlp": 128, "first_dense": 1}
    sent = check(make_expert_setup("data2_expert2_tensor2", 1, 4, "full", **moe))
    dispatched = count_dispatched("data2_expert2_tensor2")
    assert sent[("expert",), "all-to-all"] == (4 + 2 + 2) * 4 * (LAYERS - 1) * dispatched


@pytest.mark.full
@pytest.mark.parametrize("exchange", ["capacity", "dropless"])
@pytest.mark.parametrize("remat", ["none", "full"])
@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("mesh", MESHES)
def test_every_mesh_and_stage_carries_what_the_closed_form_says(
    mesh: str, stage: int, microbatches: int, remat: str, exchange: str
) -> None:
    sent = check(make_expert_setup(mesh, stage, microbatches, remat, exchange=exchange))
    exchanges = (6 if remat == "full" else 4) * microbatches * LAYERS
    assert sent[("expert",), "all-to-all"] == exchanges * count_dispatched(mesh, exchange)


KINDS: dict[str, dict[str, Any]] = {
    "switch": {"top_k": 1, "router": "softmax", "experts": 64, "every": 3},
    "deepseek": {"router": "sigmoid", "balance": "loss+bias", "shared_experts": 1, "first_dense": 2},
    "microbatch": {"balance_scope": "microbatch", "overflow": "reroute", "z_coef": 1e-3},
    "step": {"balance_scope": "step", "first_dense": 1, "exchange": "dropless"},
}
REMATS: tuple[Any, ...] = ("attention", "matmuls", {"policy": "full", "keep": ["expert_out"]})


@pytest.mark.full
@pytest.mark.parametrize(("kind", "remat"), list(itertools.product(KINDS, REMATS)), ids=str)
def test_every_kind_of_experts_sends_what_the_closed_form_says(kind: str, remat: Any) -> None:
    for mesh in MESHES:
        check(make_expert_setup(mesh, 3, 4, remat, **KINDS[kind]))


def check_h100(mesh: str, stage: int, microbatches: int, **moe: Any) -> Counter[Row]:
    config = make_traffic_config(
        MESHES[mesh], stage, microbatches, precision="bf16", remat="full", moe={**MOE, **moe}
    )
    return check_traffic(make_setup(config, describe_gpu(8, **MESHES[mesh]), VOCAB))


@pytest.mark.chips
@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("mesh", MESHES)
def test_h100_sends_what_the_closed_form_says(mesh: str, stage: int, microbatches: int) -> None:
    check_h100(mesh, stage, microbatches)


@pytest.mark.chips
@pytest.mark.parametrize("mesh", MESHES)
def test_h100_sends_a_row_for_each_choice_and_no_more(mesh: str) -> None:
    sent = check_h100(mesh, 3, 1, exchange="dropless")
    shards = math.prod(size for axis, size in MESHES[mesh].items() if axis != "tensor")
    rows = MOE["top_k"] * TOKENS // shards
    assert sent[("expert",), "ragged-all-to-all"] == 6 * LAYERS * rows * EMBED
