"""Grouped-query attention over packed documents, by three kernels that agree up to rounding.

`xla` runs anywhere and is left to the partitioner. `splash` (TPU, Pallas) and `cudnn` (CUDA) are hand-written
kernels that no partitioner can split, so each runs in a small inner `jax.shard_map` over the automatic axes
of the ambient mesh: sequences over the batch axes, heads over `tensor`. No device needs another's keys, so
the region holds no collective, forward or backward.

Which kernel runs is decided once, when the model is built, by `resolve_implementation`: tracing knows the
ambient mesh but not whose chips it is made of.

Letters: B batch, T query position, S key position, N query heads, K key/value heads, H head dim.
"""

import functools
import math
from collections.abc import Callable
from typing import Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxscale.config.errors import UserError
from jaxscale.models.remat import name_tensor
from jaxscale.sharding.activations import activation_axes, activation_spec, count_shards, run_per_shard
from jaxscale.sharding.rules import Axes

Implementation = Literal["xla", "splash", "cudnn"]

# Where each hand-written kernel runs, as `jax.Device.platform` names it; 'auto' prefers it there.
_PLATFORMS: dict[Implementation, str] = {"splash": "tpu", "cudnn": "gpu"}
_PREFERRED: dict[str, Implementation] = {platform: kernel for kernel, platform in _PLATFORMS.items()}

# splash works on tiles of whole vector registers, 128 lanes wide; 512 positions a tile is MaxText's choice.
_SPLASH_LANES = 128
_SPLASH_BLOCK_LIMIT = 512

# `jax.nn.dot_product_attention` takes the softmax of fp64 in fp32, and multiplies fp16 by an algorithm that
# not every platform has.
_PLAIN_DTYPES = (jnp.float64, jnp.float16)

# What `jax.nn.dot_product_attention` accepts of every card; only Hopper and later take wider heads.
_CUDNN_HEAD_LIMIT = 128
_CUDNN_HEAD_MULTIPLE = 8


def resolve_implementation(
    name: Literal["auto", "xla", "splash", "cudnn"],
    *,
    platform: str,
    dtype: DTypeLike,
    length: int,
    head: int,
    interpret: bool = False,
) -> Implementation:
    """Chooses the attention kernel of a run, before anything is traced.

    `auto` is splash on TPU and cuDNN on GPU where that kernel supports the shapes and the number format, and
    xla everywhere else. A kernel asked for by name is that kernel or an error.

    Args:
      name: `model.attention`.
      platform: `platform` of the mesh's devices: "tpu", "gpu" or "cpu".
      dtype: of queries, keys and values.
      length: T, positions in a sequence.
      head: H, channels of a head.
      interpret: whether Pallas kernels are interpreted, which lets splash run on any platform (tests).

    Raises:
      UserError: the kernel asked for does not support this platform, number format or shape.
    """
    kernel = _PREFERRED.get(platform, "xla") if name == "auto" else name
    obstacle = _find_obstacle(kernel, jnp.dtype(dtype), length, head)
    if name == "auto":
        return kernel if obstacle is None else "xla"

    needed_platform = _PLATFORMS.get(kernel, platform)
    if platform != needed_platform and not (kernel == "splash" and interpret):
        reason = f"runs on {needed_platform} devices and the mesh has {platform} devices: change the machine"
        raise UserError(_explain(kernel, reason))
    if obstacle is not None:
        raise UserError(_explain(kernel, obstacle))
    return kernel


def attend(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    *,
    segments_BT: jax.Array | None,
    implementation: Implementation,
    causal: bool = True,
    interpret: bool = False,
) -> jax.Array:
    """Softmax attention of each query head over the positions it may see, logits scaled by 1/sqrt(H).

    Position t sees position s if both carry the same segment id and, when causal, s <= t. Padding (segment 0)
    is a segment like any other: it sees itself, so no row is fully masked and every value and gradient is
    finite. Query head n reads key/value head n // (N / K). Softmax statistics are fp32 in every kernel.

    Args:
      q_BTNH, k_BSKH, v_BSKH: fp32 or bf16, all of one dtype; S = T, N a multiple of K.
      segments_BT: int32 document ids, 0 for padding; None: one document a sequence.
      implementation: as `resolve_implementation` chose it.
      causal: whether positions see only themselves and earlier ones.
      interpret: run splash in Pallas' interpreter, on any platform and slowly.

    Returns:
      out_BTNH in the dtype of `q_BTNH`.

    Raises:
      UserError: query heads that do not group; a shape or dtype the kernel does not take; sequences or heads
        that do not divide over the mesh (splash and cudnn).
    """
    assert implementation in get_args(Implementation), f"{implementation!r} is not resolved"
    heads, kv_heads = q_BTNH.shape[2], k_BSKH.shape[2]
    if heads % kv_heads:
        raise UserError(
            f"model.heads is {heads} and model.kv_heads {kv_heads}: each key/value head serves a whole "
            f"number of query heads, so set model.kv_heads to a divisor of {heads}"
        )
    obstacle = _find_obstacle(implementation, q_BTNH.dtype, q_BTNH.shape[1], q_BTNH.shape[3])
    if obstacle is not None:
        raise UserError(_explain(implementation, obstacle))

    if implementation == "splash":
        kernel = functools.partial(_attend_splash, causal=causal, interpret=interpret)
    else:
        kernel = functools.partial(_attend_dot_product, causal=causal, implementation=implementation)
    if implementation == "xla":
        return name_tensor(kernel(q_BTNH, k_BSKH, v_BSKH, segments_BT), "attention")
    return _run_in_region(kernel, implementation, q_BTNH, k_BSKH, v_BSKH, segments_BT)


def _find_obstacle(kernel: Implementation, dtype: np.dtype, length: int, head: int) -> str | None:
    """Says which shape or number format a kernel cannot take, and the remedy; None if it takes them all."""
    if kernel == "splash" and length % _SPLASH_LANES:
        longer = math.ceil(length / _SPLASH_LANES) * _SPLASH_LANES
        return f"takes a batch.length that is a multiple of {_SPLASH_LANES}, not {length}: use {longer}"
    if kernel == "splash" and dtype == jnp.float16:
        return "computes in bf16 or fp32, not float16: set precision.compute to bf16"
    if kernel != "cudnn":
        return None
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f"computes in bf16 or fp16, not {dtype.name}: set precision.compute to bf16"
    if head % _CUDNN_HEAD_MULTIPLE or head > _CUDNN_HEAD_LIMIT:
        return (
            f"takes heads of {_CUDNN_HEAD_LIMIT} channels at most, in multiples of {_CUDNN_HEAD_MULTIPLE}, "
            f"not {head}: change model.head"
        )
    if length % 2:
        return f"takes an even batch.length, not {length}: use {length + 1}"
    return None


def _explain(kernel: str, obstacle: str) -> str:
    return f"model.attention {kernel!r} {obstacle}, or set model.attention to 'auto' or 'xla'"


def _run_in_region(
    kernel: Callable[..., jax.Array],
    name: str,
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    segments_BT: jax.Array | None,
) -> jax.Array:
    """Runs a kernel on each device's own sequences and heads; no device needs another's keys."""
    _check_divides(name, "sequences of a microbatch", q_BTNH.shape[0], activation_axes("batch"))
    _check_divides(name, "key/value heads", k_BSKH.shape[2], activation_axes("kv_heads"))
    q_spec = activation_spec("batch", "length", "heads", "head")
    kv_spec = activation_spec("batch", "length", "kv_heads", "head")
    segments_spec = activation_spec("batch", "length")
    region = run_per_shard(kernel, (q_spec, kv_spec, kv_spec, segments_spec), q_spec)
    return region(q_BTNH, k_BSKH, v_BSKH, segments_BT)


def _check_divides(name: str, what: str, count: int, axes: Axes) -> None:
    if count % count_shards(axes):
        sizes = jax.sharding.get_abstract_mesh().shape
        layout = " x ".join(f"mesh.{axis}={sizes[axis]}" for axis in axes)
        raise UserError(
            f"model.attention {name!r} gives each device whole {what}, and {count} of them do not divide "
            f"over {layout}: change the mesh or their number, or set model.attention to 'xla'"
        )


def _attend_splash(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    segments_BT: jax.Array | None,
    causal: bool,
    interpret: bool,
) -> jax.Array:
    """Pallas' block-sparse flash attention; skips blocks above the diagonal, not those between documents."""
    # lazily: it brings Pallas and 0.3 s, which only a TPU needs
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as splash_mask

    _, length, heads, head = q_BTNH.shape
    block = choose_splash_block(length)
    mask = splash_mask.CausalMask((length, length)) if causal else splash_mask.FullMask((length, length))
    kernel = splash.make_splash_mha(
        splash_mask.MultiHeadMask([mask] * heads),
        block_sizes=splash.BlockSizes(
            block_q=block,
            block_kv=block,
            block_kv_compute=block,
            block_q_dkv=block,
            block_kv_dkv=block,
            block_kv_dkv_compute=block,
            block_q_dq=block,
            block_kv_dq=block,
        ),
        head_shards=1,
        q_seq_shards=1,
        residual_checkpoint_name="attention",
        interpret=interpret,
    )
    segments = None if segments_BT is None else splash.SegmentIds(q=segments_BT, kv=segments_BT)
    # The kernel works head by head, positions below, and does not scale the logits.
    q_BNTH = (q_BTNH * head**-0.5).swapaxes(1, 2)
    out_BNTH = jax.vmap(kernel)(q_BNTH, k_BSKH.swapaxes(1, 2), v_BSKH.swapaxes(1, 2), segments)
    return out_BNTH.swapaxes(1, 2)


def choose_splash_block(length: int) -> int:
    """The largest multiple of 128 positions, 512 at most, that divides the length; one for all passes."""
    return next(tile for tile in range(_SPLASH_BLOCK_LIMIT, 0, -_SPLASH_LANES) if length % tile == 0)


def _attend_dot_product(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    segments_BT: jax.Array | None,
    causal: bool,
    implementation: Literal["xla", "cudnn"],
) -> jax.Array:
    """`jax.nn.dot_product_attention`: XLA's, with T x S logits in memory, or cuDNN's flash attention.

    Both add the document mask to the logits as a large negative number, so cuDNN too holds B x T x S of it,
    and computes the blocks above the diagonal that it would skip without documents.
    """
    is_plain = implementation == "xla" and q_BTNH.dtype in _PLAIN_DTYPES
    if segments_BT is None and not is_plain:
        return jax.nn.dot_product_attention(
            q_BTNH, k_BSKH, v_BSKH, is_causal=causal, implementation=implementation
        )
    one_document = jnp.zeros((1, q_BTNH.shape[1]), jnp.int32)
    visible_BTS = _find_visible(one_document if segments_BT is None else segments_BT, causal)
    if implementation == "xla":
        return attend_visible(q_BTNH, k_BSKH, v_BSKH, visible_BTS)
    return jax.nn.dot_product_attention(
        q_BTNH, k_BSKH, v_BSKH, mask=visible_BTS[:, None], implementation=implementation
    )


def attend_visible(
    q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, visible_BTS: jax.Array
) -> jax.Array:
    """XLA's attention, over the positions that each position sees, [B or 1, T, S] bool."""
    if q_BTNH.dtype not in _PLAIN_DTYPES:
        return jax.nn.dot_product_attention(
            q_BTNH, k_BSKH, v_BSKH, mask=visible_BTS[:, None], implementation="xla"
        )
    batch, length, _, head = q_BTNH.shape
    q_BTKGH = q_BTNH.reshape(batch, length, k_BSKH.shape[2], -1, head)
    wide = jnp.promote_types(q_BTNH.dtype, jnp.float32)
    logits_BKGTS = jnp.einsum("BTKGH,BSKH->BKGTS", q_BTKGH, k_BSKH, preferred_element_type=wide)
    logits_BKGTS = jnp.where(visible_BTS[:, None, None], logits_BKGTS * head**-0.5, -jnp.inf)
    weights_BKGTS = jax.nn.softmax(logits_BKGTS).astype(v_BSKH.dtype)
    return jnp.einsum("BKGTS,BSKH->BTKGH", weights_BKGTS, v_BSKH).reshape(q_BTNH.shape)


def _find_visible(segments_BT: jax.Array, causal: bool) -> jax.Array:
    """[B, T, S] bool: whether position t sees position s."""
    visible_BTS = segments_BT[:, :, None] == segments_BT[:, None, :]
    if not causal:
        return visible_BTS
    length = segments_BT.shape[1]
    return visible_BTS & jnp.tril(jnp.ones((1, length, length), dtype=bool))
