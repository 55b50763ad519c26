"""Number formats compiled for chips that are not here: gathers carry the format, fp8 matmuls take fp8."""

from collections import Counter
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxscale.config import PrecisionConfig
from jaxscale.inspection.inspect import inspect_setup
from jaxscale.numerics.fp8 import E4M3, Scales
from jaxscale.sharding.collectives import read_collectives
from jaxscale.sharding.hlo import Program
from jaxscale.sharding.rules import iterate_leaves
from jaxscale.training.setup import Setup, make_setup
from tests.chips import describe_gpu, describe_tpu
from tests.test_chips_step import MESH, make_chip_config
from tests.test_fp8_experts import BATCHED, EXPERT_MESH, GROUPED, KERNEL_SPECS, ROWS_SPEC, make_experts

pytestmark = pytest.mark.chips

PROJECTIONS = 7
CHIPS = {"v5p": lambda: describe_tpu("v5p:2x2x2", **MESH), "h100": lambda: describe_gpu(8, **MESH)}


def make_chip_setup(chips: str, precision: str) -> Setup:
    config = replace(make_chip_config(), precision=PrecisionConfig(compute=precision))
    return make_setup(config, CHIPS[chips](), config.model.vocab)


def count_products(text: str) -> Counter[tuple[str, ...]]:
    """How many matmuls the program has of each pair of formats."""
    program = Program(text)
    found: Counter[tuple[str, ...]] = Counter()
    for computation in program.roots:
        for each in program.instructions(computation):
            if each.opcode in ("dot", "convolution"):
                operands = [program.instruction(computation, name) for name in each.operands]
                found[tuple(sorted(operand.type.partition("[")[0] for operand in operands))] += 1
    return found


@pytest.mark.parametrize("chips", CHIPS)
def test_every_matmul_of_the_blocks_takes_fp8(chips: str) -> None:
    found = count_products(make_chip_setup(chips, "fp8").compile_step().as_text())
    assert found.pop(("bf16", "bf16")) == 3, "the head's: logits, and its two gradients"
    assert set(found) == {("f8e4m3fn", "f8e4m3fn"), ("f8e4m3fn", "f8e5m2")}
    if chips == "v5p":  # where matmuls of one shape do not share a computation
        assert found["f8e4m3fn", "f8e5m2"] == 2 * PROJECTIONS
        # Full remat makes a block's products again, but for the last one.
        assert found["f8e4m3fn", "f8e4m3fn"] == 2 * PROJECTIONS - 1


@pytest.mark.parametrize("chips", CHIPS)
def test_gathers_of_weights_carry_the_compute_format(chips: str) -> None:
    gathered = {}
    for precision in ("fp32", "bf16", "fp8"):
        setup = make_chip_setup(chips, precision)
        rows = inspect_setup(setup).collectives
        assert rows is not None
        gathered[precision] = {row.axes: row for row in rows if row.kind == "all-gather"}
    sizes = {path: leaf.size for path, leaf in iterate_leaves(setup.model.shapes)}
    share = sum(sizes[path] for path in setup.model.fp8_kernels) / sum(sizes.values())
    for axis in ("fsdp", "data"):
        fp32, bf16, fp8 = (gathered[precision][axis,] for precision in ("fp32", "bf16", "fp8"))
        assert "f32" not in bf16.dtypes
        assert bf16.bytes / bf16.elements == pytest.approx(2, rel=0.01)
        assert fp32.bytes / fp32.elements == pytest.approx(4, rel=0.01)
        assert set(fp8.dtypes) <= {"f8e4m3fn", "bf16", "s32"}
        assert fp8.bytes / fp8.elements < 2 - 0.9 * share


def compile_experts(form: str, mesh: Mesh) -> str:
    """The forward and backward pass of four experts, kernels at rest over `fsdp` too, dynamic scales."""
    experts, rows, embed, mlp = 4, 1024, 512, 1024

    def describe(shape: tuple[int, ...], dtype: Any, *spec: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec(*spec)))

    shapes = {"up": (embed, mlp), "gate": (embed, mlp), "down": (mlp, embed)}

    def describe_kernels(dtype: Any) -> dict[str, jax.ShapeDtypeStruct]:
        at_rest = {name: [axis or "fsdp" for axis in KERNEL_SPECS[name]] for name in shapes}
        return {name: describe((experts, *shape), dtype, *at_rest[name]) for name, shape in shapes.items()}

    rows_ERD = describe((experts, rows, embed), jnp.bfloat16, *ROWS_SPEC)
    kernels, kernels_fp8 = describe_kernels(jnp.bfloat16), describe_kernels(E4M3)
    scales = dict.fromkeys(shapes, Scales(*(describe((), jnp.float32) for _ in Scales._fields)))
    with jax.set_mesh(mesh):
        differentiate = jax.grad(make_experts(form, True, mesh), argnums=(0, 2, 4), has_aux=True)
        return (
            jax.jit(differentiate).lower(rows_ERD, rows_ERD, kernels, kernels_fp8, scales).compile().as_text()
        )


@pytest.mark.parametrize("chips", CHIPS)
def test_every_matmul_of_experts_takes_fp8_and_kernels_are_gathered_in_it(chips: str) -> None:
    mesh = describe_tpu("v5p:2x2x2", **EXPERT_MESH) if chips == "v5p" else describe_gpu(8, **EXPERT_MESH)
    text = compile_experts(BATCHED, mesh)
    found = count_products(text)
    assert set(found) == {("f8e4m3fn", "f8e4m3fn"), ("f8e4m3fn", "f8e5m2")}, found
    if chips == "v5p":  # where matmuls of one shape do not share a computation
        assert found["f8e4m3fn", "f8e4m3fn"] == 3
        assert found["f8e4m3fn", "f8e5m2"] == 6
    gathered = {each.dtypes for each in read_collectives(text, mesh) if each.kind == "all-gather"}
    assert gathered == {("f8e4m3fn",)}, "kernels that take gradients are not read"


def test_a_grouped_matmul_takes_fp8_where_the_chip_does() -> None:
    """TPU 7x: a kernel forward and for the rows' gradients; a masked matmul for those of the matrices."""
    text = compile_experts(GROUPED, describe_tpu("tpu7x:2x2x1", **EXPERT_MESH))
    program, kernels = Program(text), Counter[tuple[str, ...]]()
    for computation in program.roots:
        for each in program.instructions(computation):
            if each.opcode == "custom-call" and each.name.startswith("ragged-dot-none"):
                operands = [program.instruction(computation, name) for name in each.operands[-2:]]
                kernels[tuple(sorted(operand.type.partition("[")[0] for operand in operands))] += 1
    assert kernels == {("f8e4m3fn", "f8e4m3fn"): 3, ("f8e4m3fn", "f8e5m2"): 3}
    assert count_products(text) == {("f8e4m3fn", "f8e5m2"): 3}


def test_a_grouped_matmul_on_h100_is_a_masked_one_in_fp8() -> None:
    found = count_products(compile_experts(GROUPED, describe_gpu(8, **EXPERT_MESH)))
    assert set(found) == {("f8e4m3fn", "f8e4m3fn"), ("f8e4m3fn", "f8e5m2")}
