"""Expert layers compile for real chips: the ragged exchange, and no more matmuls than rows there are."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxscale.config import MeshConfig
from jaxscale.parallel.groups import multiply_groups
from jaxscale.sharding.collectives import read_collectives
from tests.chips import describe_gpu, describe_tpu
from tests.test_dropless import Run

pytestmark = pytest.mark.chips

TOKENS, EMBED, MLP, CHOICES, LAYERS, EXPERT, FSDP = 8 * 512, 1024, 2048, 2, 3, 4, 2


def compile_for(mesh, *, experts=8, is_nested=False):
    """Gradients of SwiGLU experts in bf16, fully rematted, in a scan over layers."""
    run = Run(
        MeshConfig(expert=EXPERT, fsdp=FSDP),
        layers=LAYERS,
        experts=experts,
        exchange="ragged",
        is_nested=is_nested,
    )
    shapes = {
        "x": (TOKENS, EMBED),
        "weight": (TOKENS, CHOICES),
        "gate": (LAYERS, experts, EMBED, MLP),
        "up": (LAYERS, experts, EMBED, MLP),
        "down": (LAYERS, experts, MLP, EMBED),
    }
    arrays = {name: jax.ShapeDtypeStruct(shape, jnp.bfloat16) for name, shape in shapes.items()}
    choice_NK = jax.ShapeDtypeStruct((TOKENS, CHOICES), jnp.int32)
    return run.lower(mesh, arrays, choice_NK).compile()


def check_traffic(text, mesh):
    """Six exchanges a layer, in buffers of N·K rows at the tokens' end and of the worst case at the experts'.

    What travels is said by sizes that only a run knows: at most N·K rows a device each way, which is the
    buffer at the tokens' end. Neither buffer grows with the number of experts.
    """
    over_expert = [each for each in read_collectives(text, mesh) if "expert" in each.axes]
    exchanges = [each for each in over_expert if each.kind == "ragged-all-to-all"]
    assert {(each.axes, each.dtypes) for each in exchanges} == {(("expert",), ("bf16",))}
    tokens = TOKENS // mesh.devices.size
    sent, worst = tokens * CHOICES * EMBED * 2, EXPERT * tokens * CHOICES * EMBED * 2
    calls = {size: sum(each.trips for each in exchanges if each.bytes == size) for size in (sent, worst)}
    assert calls == {sent: 3 * LAYERS, worst: 3 * LAYERS}
    assert sum(each.bytes_a_step for each in exchanges) == 3 * LAYERS * (sent + worst)
    others = [each for each in over_expert if each not in exchanges and each.elements > 1]
    assert {dtype for each in others for dtype in each.dtypes} == {"s32"}, (
        "something else travels over expert"
    )


@pytest.mark.parametrize(("experts", "is_nested"), [(8, False), (64, True)])
def test_experts_compile_for_v5p_with_the_ragged_exchange_and_grouped_kernels(experts, is_nested):
    mesh = describe_tpu("v5p:2x2x2", expert=EXPERT, fsdp=FSDP)
    text = compile_for(mesh, experts=experts, is_nested=is_nested).as_text()
    check_traffic(text, mesh)
    kernels = re.findall(r'%(t?gmm)[.\d]* = .*custom_call_target="tpu_custom_call"', text)
    assert (kernels.count("gmm"), kernels.count("tgmm")) == (9, 3)
    assert not re.search(r" (convolution|dot|ragged-dot)\(", text), "a matmul outside the kernels"


@pytest.mark.parametrize("chips", ["v5p:2x2x1", "v5e:2x2"])
def test_kernels_in_fp32_fit_the_vector_memory(chips):
    mesh = describe_tpu(chips, fsdp=4)

    def compute_sum(rows_RD, kernel_GDF, sizes_G):
        return multiply_groups(rows_RD, kernel_GDF, sizes_G).sum()

    def describe(shape, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec()))

    shapes = describe((2048, 2048)), describe((2, 2048, 4096)), describe((2,), jnp.int32)
    with jax.set_mesh(mesh):
        region = jax.shard_map(
            jax.grad(compute_sum, (0, 1)),
            in_specs=PartitionSpec(),
            out_specs=PartitionSpec(),
            check_vma=False,
        )
        assert "%tgmm" in jax.jit(region).lower(*shapes).compile().as_text()


def test_experts_compile_for_8_h100_with_the_ragged_exchange_and_tiles():
    mesh = describe_gpu(8, expert=EXPERT, fsdp=FSDP)
    text = compile_for(mesh).as_text()
    check_traffic(text, mesh)
    products = re.findall(r" = \w+\[([\d,]+)\]\S* dot\(", text)
    assert len(products) >= 12
    rows = EXPERT * TOKENS // 8 * CHOICES
    assert not [shape for shape in products if str(rows) in shape.split(",")], "all rows in one product"
