"""Number formats compiled for chips that are not here: gathers carry the format, fp8 matmuls take fp8."""

from collections import Counter
from dataclasses import replace

import pytest

from jaxscale.config import PrecisionConfig
from jaxscale.inspection.inspect import inspect_setup
from jaxscale.sharding.hlo import Program
from jaxscale.sharding.rules import iterate_leaves
from jaxscale.training.setup import Setup, make_setup
from tests.chips import describe_gpu, describe_tpu
from tests.test_chips_step import MESH, make_chip_config

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
