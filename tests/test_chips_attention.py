"""The hand-written attention kernels compile for real chips, in the step's own surroundings."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxscale.models.attention import attend, resolve_implementation
from tests.chips import describe_gpu, describe_tpu

pytestmark = pytest.mark.chips

LAYERS, BATCH, HEADS, KV_HEADS, EMBED = 2, 8, 8, 4, 256


def _run_block(x_BTD, weights, *, segments_BT, implementation):
    q_BTNH = jnp.einsum("BTD,DNH->BTNH", x_BTD, weights["q"].astype(x_BTD.dtype))
    k_BTKH = jnp.einsum("BTD,DKH->BTKH", x_BTD, weights["k"].astype(x_BTD.dtype))
    v_BTKH = jnp.einsum("BTD,DKH->BTKH", x_BTD, weights["v"].astype(x_BTD.dtype))
    out_BTNH = attend(q_BTNH, k_BTKH, v_BTKH, segments_BT=segments_BT, implementation=implementation)
    return x_BTD + jnp.einsum("BTNH,NHD->BTD", out_BTNH, weights["o"].astype(x_BTD.dtype)), None


def _compute_gradients(weights, x_BTD, segments_BT, *, implementation, mesh):
    """Gradients as the step takes them: manual over `data`, remat in a scan over layers, summed in fp32."""

    def compute_loss(weights, x_BTD, segments_BT):
        block = functools.partial(_run_block, segments_BT=segments_BT, implementation=implementation)
        out_BTD, _ = jax.lax.scan(jax.checkpoint(block), x_BTD, weights)
        return jnp.sum(jnp.square(out_BTD.astype(jnp.float32)))

    manual = {"data"} if mesh.shape["data"] > 1 else set()

    def accumulate(weights, x_BTD, segments_BT):
        gradients = jax.grad(compute_loss)(weights, x_BTD, segments_BT)
        return jax.lax.psum(gradients, "data") if manual else gradients

    if not manual:
        return accumulate(weights, x_BTD, segments_BT)
    rows = PartitionSpec("data")
    return jax.shard_map(
        accumulate,
        in_specs=(PartitionSpec(), rows, rows),
        out_specs=PartitionSpec(),
        axis_names=manual,
        check_vma=False,
    )(weights, x_BTD, segments_BT)


def _compile_text(mesh: Mesh, implementation: str, *, dtype=jnp.bfloat16, length=512, head=128) -> str:
    def describe(shape, dtype, *spec):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec(*spec)))

    def describe_projection(count):
        return describe((LAYERS, EMBED, count, head), jnp.float32, None, "fsdp", "tensor")

    batch = ("data", "fsdp", "expert")
    weights = {
        "q": describe_projection(HEADS),
        "k": describe_projection(KV_HEADS),
        "v": describe_projection(KV_HEADS),
        "o": describe((LAYERS, HEADS, head, EMBED), jnp.float32, None, "tensor", None, "fsdp"),
    }
    step = functools.partial(_compute_gradients, implementation=implementation, mesh=mesh)
    with jax.set_mesh(mesh):
        lowered = jax.jit(step).lower(
            weights,
            describe((BATCH, length, EMBED), dtype, batch),
            describe((BATCH, length), jnp.int32, batch),
        )
        return lowered.compile().as_text()


@pytest.mark.parametrize(
    ("axis_sizes", "dtype", "length", "head"),
    [
        ({"data": 2, "fsdp": 2, "tensor": 2}, jnp.bfloat16, 512, 128),
        ({"data": 2, "expert": 2, "tensor": 2}, jnp.float32, 384, 64),
        ({"fsdp": 8}, jnp.bfloat16, 512, 80),
    ],
)
def test_splash_compiles_forward_and_backward_for_v5p(axis_sizes, dtype, length, head):
    mesh = describe_tpu("v5p:2x2x2", **axis_sizes)
    name = resolve_implementation(
        "auto", platform=mesh.devices.flat[0].platform, dtype=dtype, length=length, head=head
    )
    text = _compile_text(mesh, name, dtype=dtype, length=length, head=head)
    for kernel in ("fwd", "dq", "dkv"):
        call = rf'%splash_mha_{kernel}_segmented\S* = .*custom-call\(.*custom_call_target="tpu_custom_call"'
        assert re.search(call, text), kernel


@pytest.mark.parametrize("axis_sizes", [{"data": 2, "fsdp": 2, "tensor": 2}, {"fsdp": 4, "expert": 2}])
def test_cudnn_compiles_forward_and_backward_for_8_h100(axis_sizes):
    mesh = describe_gpu(8, **axis_sizes)
    name = resolve_implementation(
        "auto", platform=mesh.devices.flat[0].platform, dtype=jnp.bfloat16, length=512, head=128
    )
    text = _compile_text(mesh, name)
    assert 'custom_call_target="__cudnn$fmhaScaleBiasSoftmax"' in text
    assert 'custom_call_target="__cudnn$fmhaScaleBiasSoftmaxBackward"' in text
