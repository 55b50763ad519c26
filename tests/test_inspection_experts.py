"""What `jaxscale inspect` says of a model with experts."""

import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from rich.console import Console

from jaxscale.cli.main import main
from jaxscale.inspection.inspect import inspect_setup
from jaxscale.inspection.remat import count_matmul_flops
from jaxscale.inspection.report import Inspection, LeafReport
from jaxscale.inspection.tables import render_tables
from jaxscale.parallel.groups import multiply_groups
from tests.tiny import make_config, make_tiny_setup

CONFIGS = Path(__file__).parents[1] / "configs"
MOE: dict[str, Any] = {"experts": 8, "top_k": 2, "mlp": 64, "exchange": "capacity"}
CUBE = {"fsdp": 2, "expert": 2, "tensor": 2}
EXPERTS = ("up", "gate", "down")


def inspect_experts(mesh: dict[str, int], *, compile: bool = False, **sections: Any) -> Inspection:
    moe = {**MOE, **sections.pop("moe", {})}
    return inspect_setup(make_tiny_setup(make_config(mesh=mesh, moe=moe, **sections)), compile=compile)


def find_leaf(inspection: Inspection, path: str) -> LeafReport:
    return next(leaf for leaf in inspection.leaves if leaf.path == f"expert_layers/{path}/kernel")


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_experts_lie_over_expert_in_every_stage_and_over_fsdp_as_it_says(stage: int) -> None:
    """Every state of an expert is cut along `expert` and `tensor`; the ZeRO stage decides on `fsdp` alone."""
    inspection = inspect_experts(CUBE, zero={"stage": stage}, precision="bf16")
    for name in EXPERTS:
        leaf = find_leaf(inspection, f"experts/{name}")
        over = ("fsdp",) if stage >= 1 else ()
        laid = dict(leaf.dims)
        assert (laid["experts"], laid["embed"], laid["mlp"]) == (("expert",), over, ("tensor",))
        assert leaf.whole_on == {
            "parameters": () if stage == 3 else ("fsdp",),
            "gradients": () if stage >= 2 else ("fsdp",),
            "optimizer": () if stage >= 1 else ("fsdp",),
        }
        size = math.prod(leaf.shape)
        assert leaf.bytes_per_device.parameters == 2 * size // (8 if stage == 3 else 4)
        assert leaf.bytes_per_device.gradients == 4 * size // (8 if stage >= 2 else 4)
        assert leaf.bytes_per_device.optimizer == 12 * size // (8 if stage >= 1 else 4)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_what_the_optimizer_keeps_of_dense_leaves_lies_over_expert_too(stage: int) -> None:
    inspection = inspect_experts({"data": 2, "fsdp": 2, "expert": 2}, zero={"stage": stage}, precision="bf16")
    for name in ("attention/query", "attention/out", "experts/router"):
        leaf = find_leaf(inspection, name)
        others = ("data", "expert")
        assert leaf.whole_on == {
            "parameters": others if stage == 3 else ("data", "fsdp", "expert"),
            "gradients": others if stage >= 2 else ("data", "fsdp", "expert"),
            "optimizer": () if stage >= 1 else ("data", "fsdp", "expert"),
        }
    for name in EXPERTS:
        kept = find_leaf(inspection, f"experts/{name}").whole_on["optimizer"]
        assert kept == (() if stage >= 1 else ("data", "fsdp"))
    assert inspection.warnings == ()


def render_plain(inspection: Inspection) -> str:
    console = Console(width=100, color_system=None)
    with console.capture() as capture:
        console.print(render_tables(inspection))
    return capture.get()


def test_the_head_counts_experts_and_active_parameters() -> None:
    moe = {"shared_experts": 1, "first_dense": 1}
    inspection = inspect_experts(CUBE, moe=moe, model={"layers": 3})
    text = render_plain(inspection)
    assert "8 in each of 2 layers, 4 of them on a device; a token takes 2 beside 1 shared" in text
    padding = 2 * (384 - 257) * 32  # rows of the table and of the head
    total = sum(math.prod(leaf.shape) for leaf in inspection.leaves) - padding
    idle = 2 * 3 * 32 * 64 * (8 - 2)  # layers, kernels, their sizes, experts that a token does not take
    assert f"{total:,} in all, {total - idle:,} active" in text
    experts = inspection.to_json()["experts"]
    assert (experts["parameters"], experts["active_parameters"]) == (total, total - idle)
    assert inspect_setup(make_tiny_setup(make_config(mesh=CUBE)), compile=False).experts is None


def test_the_compiled_step_sends_what_is_expected() -> None:
    """`expert` is manual and stands behind `fsdp`, which is not: JAX cannot read layouts there, and tokens
    change places, which in so small a model is worth a warning."""
    moe = {"exchange": "dropless", "balance": "loss+bias", "router": "sigmoid"}
    inspection = inspect_experts({"fsdp": 2, "expert": 4}, compile=True, moe=moe)
    assert [each for each in inspection.warnings if not each.startswith("collective-permute")] == []
    assert inspection.errors == ()
    assert inspection.activations == ()
    assert "JAX cannot read any" in render_plain(inspection)
    rows = {(row.axes, row.kind): row for row in inspection.collectives or ()}
    expected = {(row.axes, row.kind): row for row in inspection.expected_collectives}
    dispatch = (("expert",), "all-to-all")
    assert rows[dispatch].elements == expected[dispatch].elements
    assert inspection.memory is not None


def test_the_command_takes_experts(capsys: pytest.CaptureFixture[str]) -> None:
    experts = ["moe.experts=8", "moe.top_k=2", "mesh.expert=2", "mesh.fsdp=2", "mesh.data=1", "mesh.tensor=2"]
    assert main(["inspect", str(CONFIGS / "tiny.yaml"), "--no-compile", *experts]) == 0
    text = capsys.readouterr().out
    for words in ("a token takes 2", "experts=8/expert", "expert_layers/experts/down/kernel", "No warnings"):
        assert words in text


def test_grouped_matmuls_are_counted_by_their_rows() -> None:
    rows, kernel, sizes = jnp.zeros((256, 5)), jnp.zeros((3, 5, 7)), jnp.array([4, 8, 12])
    flops = 2 * 256 * 5 * 7
    assert count_matmul_flops(jax.make_jaxpr(multiply_groups)(rows, kernel, sizes).jaxpr) == flops
    gradient = jax.grad(lambda *operands: multiply_groups(*operands, sizes).sum(), argnums=(0, 1))
    backward = count_matmul_flops(jax.make_jaxpr(gradient)(rows, kernel).jaxpr)
    assert backward == 2 * flops, "of the rows, and of the matrices"
