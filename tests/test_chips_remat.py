"""Remat compiled for chips that are not here: kernels' results are kept, and host memory takes over."""

from typing import Any

import pytest

from jaxscale.config import parse_config
from jaxscale.inspection.inspect import read_memory
from jaxscale.inspection.report import MemoryReport
from jaxscale.training.setup import Setup, make_setup
from tests.chips import describe_gpu, describe_tpu

pytestmark = pytest.mark.chips

MESH = {"data": 2, "fsdp": 2}
LAYERS, EMBED, MLP, LENGTH, HEADS = 16, 512, 1408, 2048, 4
# A device has one sequence of a microbatch; its tensors are in bf16.
STREAM = LAYERS * LENGTH * EMBED * 2
HIDDEN = LAYERS * LENGTH * MLP * 2


def make_chip_setup(remat: Any, chips: str) -> Setup:
    config = parse_config(
        {
            "run_dir": "unused",
            "steps": 1000,
            "mesh": MESH,
            "batch": {"sequences": 8, "microbatches": 2, "length": LENGTH},
            "model": {
                "family": "llama", "layers": LAYERS, "embed": EMBED, "heads": HEADS, "mlp": MLP,
                "vocab": 1024,
            },
            "precision": "bf16",
            "remat": remat,
        },
        origin="test",
    )  # fmt: skip
    mesh = describe_tpu("v5p:2x2x1", **MESH) if chips == "tpu" else describe_gpu(4, **MESH)
    return make_setup(config, mesh, 1024)


def compile_with(remat: Any, chips: str) -> tuple[str, MemoryReport]:
    compiled: Any = make_chip_setup(remat, chips).compile_step()
    return compiled.as_text(), read_memory(compiled)


def count_kernels(text: str, chips: str) -> int:
    """Calls of attention's kernels in the program, both passes."""
    name = 'custom_call_target="tpu_custom_call"' if chips == "tpu" else 'custom_call_target="__cudnn$fmha'
    return text.count(name)


@pytest.mark.parametrize("chips", ["tpu", "gpu"])
def test_attentions_kernel_runs_once_where_its_results_are_kept(chips: str) -> None:
    kernels = {
        remat: count_kernels(compile_with(remat, chips)[0], chips)
        for remat in ("none", "attention", "matmuls", "full")
    }
    assert kernels["attention"] == kernels["none"]
    assert kernels["matmuls"] == kernels["full"] == kernels["none"] + 1


def test_what_is_offloaded_leaves_the_device_for_the_host() -> None:
    _, kept = compile_with({"policy": "full", "keep": ["mlp_up", "mlp_gate"]}, "tpu")
    _, moved = compile_with({"policy": "full", "offload": ["mlp_up", "mlp_gate"]}, "tpu")
    _, moved_too = compile_with({"policy": "full", "offload": ["block_input", "mlp_up", "mlp_gate"]}, "tpu")
    assert kept.host == 0
    assert moved.host == pytest.approx(2 * HIDDEN, rel=0.05)
    assert kept.temporaries - moved.temporaries > 0.8 * 2 * HIDDEN
    assert moved_too.host == pytest.approx(2 * HIDDEN + STREAM, rel=0.05)
    assert moved.temporaries - moved_too.temporaries > 0.8 * STREAM


@pytest.mark.parametrize("chips", ["tpu", "gpu"])
def test_attentions_results_can_be_offloaded_from_inside_their_kernels(chips: str) -> None:
    """TPU's compiler doubles the body of a loop that moves to the host, in both programs."""
    moved, memory = compile_with({"policy": "full", "offload": ["attention"]}, chips)
    again, _ = compile_with({"policy": "full", "offload": ["block_input"]}, chips)
    assert memory.host >= STREAM
    assert count_kernels(moved, chips) < count_kernels(again, chips)
