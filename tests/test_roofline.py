"""Closed forms of a step's time: matmuls against the traced step, memory and rooflines by hand."""

import math
from dataclasses import replace
from typing import Any

import pytest

from jaxscale.config import RematConfig, UserError
from jaxscale.inspection.remat import count_matmul_flops
from jaxscale.metrics import model_flops_per_token
from jaxscale.models.build import shape_decoder
from jaxscale.planning.hardware import load_chips, parse_slice
from jaxscale.planning.hbm import Moved, list_moved
from jaxscale.planning.matmuls import (
    Matmul,
    Work,
    count_flops,
    count_recomputed,
    describe_work,
    find_attention_share,
    list_matmuls,
)
from jaxscale.planning.roofline import (
    Collective,
    Load,
    estimate_step,
    find_fill,
    find_speed,
    measure_load,
    measure_totals,
)
from tests.tiny import make_config, make_tiny_setup

MOE: dict[str, Any] = {"experts": 8, "top_k": 2, "mlp": 32}
CAPACITY = {**MOE, "exchange": "capacity"}


def make_work(**changes: Any) -> Work:
    """Llama 3 8B's sizes, one sequence of 4096 on one device, in bf16, everything kept."""
    config = make_config(
        model={"layers": 32, "embed": 4096, "heads": 32, "kv_heads": 8, "mlp": 14336},
        batch={"sequences": 1, "length": 4096},
        precision="bf16",
    )
    shape = shape_decoder(config, vocab=128_256, platform="tpu")
    return replace(describe_work(config, shape, {}), **changes)


@pytest.mark.parametrize(
    ("family", "mesh", "moe", "remat"),
    [
        ("llama", {"fsdp": 4, "tensor": 2}, None, "none"),
        ("llama", {"data": 8}, None, "full"),
        ("gpt2", {"fsdp": 8}, None, "matmuls"),
        ("llama", {}, None, {"policy": "attention", "keep": ["mlp_up"]}),
        ("llama", {}, None, {"policy": "none", "recompute": ["query"]}),
        ("llama", {"fsdp": 2}, MOE, "none"),
        ("llama", {"expert": 2, "fsdp": 2}, CAPACITY, "full"),
        ("llama", {"data": 2}, {**MOE, "shared_experts": 1, "first_dense": 1}, "matmuls"),
        ("gpt2", {"expert": 2, "tensor": 2}, {**CAPACITY, "balance_scope": "step"}, "attention"),
    ],
)
def test_matmuls_are_those_of_the_traced_step(family, mesh, moe, remat):
    """A dense decoder's exactly; with experts the sum by weights is left out."""
    config = make_config(
        mesh=mesh,
        remat=remat,
        model={"family": family, "layers": 3, "kv_heads": 8 if family == "gpt2" else 4},
        batch={"microbatches": 2},
        **({"moe": moe} if moe else {}),
    )
    setup = make_tiny_setup(config)
    traced = count_matmul_flops(setup.trace_step().jaxpr.jaxpr)
    work = describe_work(config, setup.shape, dict(setup.mesh.shape))
    counted = sum(count_flops(work).values())
    assert counted == pytest.approx(traced, rel=0.02 if moe else 1e-12)
    if remat == "none":  # of a layer with experts the router's logits are made again all the same
        routers = 3 * 2 * config.batch.sequences * config.batch.length * setup.shape.embed * 8 if moe else 0
        assert count_recomputed(work) == routers


def test_without_remat_and_skipping_they_are_the_model_flops():
    work = make_work()
    xla = replace(work, shape=replace(work.shape, attention="xla"))
    kernels = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
    model = 4096 * model_flops_per_token(kernels + 128_256 * 4096, 32, 32, 128, 4096)
    assert sum(count_flops(xla).values()) == pytest.approx(model, rel=1e-12)


def test_kernels_skip_what_a_causal_mask_hides_and_make_scores_again_backward():
    shape = make_work().shape
    assert find_attention_share(shape, 4096) == pytest.approx(9 / 16), "36 of 64 blocks of 512"
    assert find_attention_share(replace(shape, attention="cudnn"), 4096) == pytest.approx(33 / 64)
    assert find_attention_share(replace(shape, attention="xla"), 4096) == 1

    def count(attention: str) -> float:
        work = make_work(shape=replace(shape, attention=attention))
        names = ("scores", "mix", "attention")
        return sum(each.flops for each in list_matmuls(work) if each.name in names)

    one = 32 * 32 * 2 * 4096 * 4096 * 128  # a matmul of all scores
    assert count("xla") == pytest.approx(6 * one)
    assert count("splash") == pytest.approx(9 * one * 9 / 16)
    assert count("cudnn") == pytest.approx(7 * one * 33 / 64)


def test_fp8_is_for_the_blocks_alone():
    flops = count_flops(make_work(compute="fp8"))
    plain = count_flops(make_work())
    assert set(flops) == {"fp8", "bf16"}
    assert sum(flops.values()) == pytest.approx(plain["bf16"])
    assert flops["fp8"] == pytest.approx(
        6 * 4096 * 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
    )


def test_the_mesh_shares_work_out_and_remat_adds_to_it():
    work = make_work(sequences=64, remat=RematConfig(policy="full"))
    sizes = {"data": 2, "fsdp": 8, "tensor": 4}
    on_mesh = replace(work, sizes=sizes)
    assert on_mesh.tokens == 4 * 4096
    assert sum(count_flops(on_mesh).values()) == pytest.approx(sum(count_flops(work).values()))
    again = count_recomputed(work)
    forward = sum(each.flops for each in list_matmuls(work) if each.when == "forward")
    head_and_down = 64 * 4096 * (2 * 128_256 * 4096 + 32 * 2 * 14336 * 4096)
    assert again == pytest.approx(forward - head_and_down)


def test_speed_is_the_peak_times_what_was_measured_of_it():
    chips = load_chips()
    assert find_speed(chips["v5p"], "bf16") == 459e12
    assert find_speed(chips["h100"], "bf16") == pytest.approx(0.803 * 989e12)
    assert find_speed(chips["a100"], "fp8") == find_speed(chips["a100"], "bf16"), "a wider format stands in"
    assert find_speed(chips["cpu"], "bf16") is None
    with pytest.raises(UserError, match=r"v100 has no unit for it.*use fp16 or fp32"):
        find_speed(chips["v100"], "bf16")


def multiply(rows: int, contracted: int, columns: int, **more: Any) -> Matmul:
    return Matmul("x", "forward", "bf16", rows, contracted, columns, 1, **more)


def test_sides_that_do_not_fill_the_units_are_padded():
    chips = load_chips()
    assert find_fill(chips["v5p"], multiply(4096, 4096, 4096)) == 1
    assert find_fill(chips["v5p"], multiply(4096, 64, 4096)) == pytest.approx(1 / 2)
    assert find_fill(chips["v6e"], multiply(4096, 128, 4096)) == pytest.approx(1 / 2), "units of 256"
    assert find_fill(chips["v5p"], multiply(4096, 4096, 8)) == 1, "streamed, the other side stays"
    # 132 cores, tiles of 128 x 256: 33 x 16 tiles are 4 full rounds, 34 x 16 take a fifth.
    assert find_fill(chips["h100"], multiply(33 * 128, 4096, 4096)) == 1
    assert 0.8 < find_fill(chips["h100"], multiply(34 * 128, 4096, 4096)) < 1
    assert find_fill(chips["h100"], multiply(128, 4096, 128)) == pytest.approx(1 / 132)


def test_a_matmul_takes_as_long_as_the_slower_of_arithmetic_and_memory():
    v5e = load_chips()["v5e"]
    large, small = multiply(4096, 4096, 4096), multiply(128, 4096, 4096)
    load = measure_load(v5e, [large, small], [Moved("more", 819e6)])
    arithmetic = [2 * 4096**3 / 197e12, 2 * 128 * 4096**2 / 197e12]
    memory = [3 * 2 * 4096**2 / 819e9, 2 * (4096**2 + 2 * 128 * 4096) / 819e9]
    assert arithmetic[0] > memory[0]
    assert arithmetic[1] < memory[1], "240 FLOPs a byte are needed (Scaling book, Rooflines)"
    assert load.compute_seconds == pytest.approx(sum(arithmetic))
    assert load.hbm_seconds == pytest.approx(sum(memory) + 1e-3)
    assert load.busy_seconds == pytest.approx(arithmetic[0] + memory[1] + 1e-3)
    assert load.compute_bound_seconds == pytest.approx(arithmetic[0])
    assert measure_load(load_chips()["cpu"], [large]) is None
    totals = measure_totals(v5e, {"bf16": 197e12}, 2 * 819e9)
    assert (totals.busy_seconds, totals.compute_bound_seconds) == (2.0, 0.0)


def test_traffic_hides_behind_work_where_it_may():
    chips, sizes = parse_slice("v5p:4x4x4"), {"fsdp": 16, "tensor": 4}
    gather = 1e9 * 2 * 9e10 / 1e9 * 2 * 16 / 15  # a second over two rings
    load = Load(compute_seconds=0.5, hbm_seconds=0.2, busy_seconds=0.6, compute_bound_seconds=0.4)

    def estimate(*collectives: Collective) -> Any:
        return estimate_step(load, collectives, chips, sizes)

    weights = Collective(("fsdp",), "all-gather", gather, overlappable=True)
    alone = estimate(weights)
    assert alone.network_seconds[("fsdp",)] == pytest.approx(1, rel=1e-3)
    assert alone.exposed_seconds == pytest.approx(0.4, rel=1e-2)
    assert alone.step_seconds == pytest.approx(1, rel=1e-3)
    assert estimate(replace(weights, sent_bytes=gather / 4)).exposed_seconds == 0
    assert estimate(replace(weights, sent_bytes=gather / 4)).bound_by == "compute"
    blocking = Collective(("tensor",), "all-reduce", 2 * 1.8e11 * 4 / 3, overlappable=False)
    both = estimate(weights, blocking)
    assert both.exposed_seconds == pytest.approx(2.4, rel=1e-2)
    assert both.bound_by == "network over tensor"
    many = estimate(replace(weights, count=1000))
    assert many.step_seconds - alone.step_seconds == pytest.approx(999 * 4e-6, rel=1e-3), "4 hops each"
    slow = estimate_step(Load(0.1, 0.9, 0.9, 0.1), [], chips, sizes)
    assert (slow.bound_by, slow.step_seconds) == ("memory bandwidth", 0.9)


def test_memory_is_counted_by_purpose():
    work = make_work(microbatches=1)
    moved = {each.what: each.bytes for each in list_moved(work, kept_elements=1000, used_elements=4000)}
    assert moved["optimizer"] == 1000 * (4 + 2 * (4 + 8)), "gradient; weight and two moments, there and back"
    assert moved["weights cast"] == 1000 * 6
    assert moved["cross-entropy"] == 4096 * 128_256 * 18
    layer = 4096 * (8 * 4096 + 2 * 40 * 128 + 3 * 14336)
    assert moved["elementwise, forward"] == 32 * layer * 2
    assert "accumulators" not in moved
    again = make_work(microbatches=2, sequences=2, remat=RematConfig(policy="full"))
    twice = {each.what: each.bytes for each in list_moved(again, kept_elements=1000, used_elements=4000)}
    assert twice["elementwise, forward"] == 2 * 2 * moved["elementwise, forward"]
    assert twice["accumulators"] == 4000 * 10 * 2
    xla = make_work(shape=replace(work.shape, attention="xla"))
    softmax = {each.what: each.bytes for each in list_moved(xla, kept_elements=0, used_elements=0)}["softmax"]
    assert softmax == 3 * 32 * 32 * 4096 * 4096 * 12


def test_a_wide_vocabulary_makes_the_heads_chunks_slower_than_their_arithmetic():
    """Of 128,256 tokens, logits of 128 positions fit into 64 MiB: their matmuls wait for the head."""
    v5p = load_chips()["v5p"]
    head = [each for each in list_matmuls(make_work()) if each.name.startswith("logits")]
    assert {min(each.rows, each.contracted, each.columns) for each in head} == {128}
    load = measure_load(v5p, head)
    assert load.busy_seconds > 1.5 * load.compute_seconds
    assert math.isclose(load.busy_seconds, load.hbm_seconds)
