"""Embedding and cross-entropy over a vocabulary that lies over `tensor`, its channels over `fsdp`.

Both run in an inner region that is manual over every axis, and bring their own derivative, for two reasons:
the traffic is then what we say, and no gradient is taken through a reduction.

*Embedding*: tokens travel, not the table. Each device looks up its channels for the tokens of the whole
`fsdp` group, and an all-to-all hands every device all channels of its own tokens. The backward pass is the
same way back. That moves tokens · D elements instead of V · D / tensor, and neither the gathered table nor
its gradient is ever held.

*Cross-entropy* computes its gradients in the forward pass, a chunk of tokens at a time: the derivative of a
sum of token losses is known up to the scalar that comes back. So a chunk's logits are made once, never again,
and at most `LOGITS_HELD` of them are alive on a device. The head is gathered over `fsdp` once, its gradient
scattered once, both as [D, V]: a collective over the first dim moves contiguous memory.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from jaxscale.sharding.activations import (
    activation_axes,
    activation_spec,
    count_shards,
    run_per_shard,
    weight_axes,
)
from jaxscale.sharding.rules import Axes

LOGITS_HELD = 2**24  # elements a device: 64 MiB in fp32
_FAR_BELOW = -1e30  # any logit, and still a number
_FP16_LIFT = 2.0**12  # of fp16's dlogits, of which none is larger than its token's weight: 15 is the most


class _Split(NamedTuple):
    """What is laid over which automatic axes; read outside a region, where they still are automatic."""

    batch: Axes
    vocab: Axes
    channels: Axes  # of the table's embed dim

    @classmethod
    def read(cls) -> "_Split":
        batch, channels = activation_axes("batch"), weight_axes("embed")
        return cls(batch, activation_axes("vocab"), tuple(axis for axis in batch if axis in channels))

    @property
    def starts_spec(self) -> PartitionSpec:
        return PartitionSpec(self.vocab or None)

    @property
    def table_spec(self) -> PartitionSpec:
        return PartitionSpec(self.vocab or None, self.channels or None)

    @property
    def other_batch_axes(self) -> Axes:
        """Batch axes over which the table is whole, so that its gradient is summed over them."""
        return tuple(axis for axis in self.batch if axis not in self.channels)

    def list_starts(self, rows: int) -> jax.Array:
        """First row of each vocabulary shard, one a shard."""
        ways = count_shards(self.vocab)
        return jnp.arange(ways, dtype=jnp.int32) * (rows // ways)

    def gather_tokens(self, tokens_BT: jax.Array) -> jax.Array:
        """The tokens of the whole group whose devices hold a part of the channels each."""
        return lax.all_gather(tokens_BT, self.channels, axis=0, tiled=True) if self.channels else tokens_BT

    def exchange(self, x_BTD: jax.Array, *, split: int, join: int) -> jax.Array:
        """All-to-all between "all tokens, some channels" and "some tokens, all channels"."""
        return lax.all_to_all(x_BTD, self.channels, split, join, tiled=True) if self.channels else x_BTD


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def embed_tokens(table_VD: jax.Array, tokens_BT: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Rows of the table for each token, or for each position.

    Left to the partitioner, such a gather inside a manual region ends XLA's TPU compiler.

    Args:
      table_VD: embedding, any float dtype; V may be padded beyond the tokenizer's vocabulary.
      tokens_BT: int32 ids in [0, V); the data floor has checked the range.
      dtype: of the result.

    Returns:
      x_BTD in `dtype`.
    """
    return _embed_forward(table_VD, tokens_BT, dtype)[0]


def _embed_forward(table_VD: jax.Array, tokens_BT: jax.Array, dtype: jnp.dtype) -> tuple[jax.Array, tuple]:
    split = _Split.read()

    def look_up(table_VD: jax.Array, tokens_BT: jax.Array, start: jax.Array) -> jax.Array:
        ids_BT = split.gather_tokens(tokens_BT) - start[0]
        x_BTD = table_VD.at[ids_BT].get(mode="fill", fill_value=0, wrap_negative_indices=False)
        x_BTD = split.exchange(x_BTD.astype(dtype), split=0, join=2)
        # In fp32, though all terms but one are zero: XLA's CPU compiler dies on a bf16 reduction in a region.
        return _sum_over(x_BTD.astype(_widen(dtype)), split.vocab).astype(dtype)

    x_BTD = run_per_shard(
        look_up,
        in_specs=(split.table_spec, activation_spec("batch", "length"), split.starts_spec),
        out_specs=activation_spec("batch", "length", "embed"),
    )(table_VD, tokens_BT, split.list_starts(table_VD.shape[0]))
    # Residuals are arrays only: an empty one carries the table's rows and dtype.
    return x_BTD, (tokens_BT, jnp.zeros((table_VD.shape[0], 0), table_VD.dtype))


def _embed_backward(dtype: jnp.dtype, residuals: tuple, dx_BTD: jax.Array) -> tuple[jax.Array, None]:
    tokens_BT, like_table = residuals
    split, rows = _Split.read(), like_table.shape[0]
    shard_rows = rows // count_shards(split.vocab)

    def scatter(dx_BTD: jax.Array, tokens_BT: jax.Array, start: jax.Array) -> jax.Array:
        ids_BT = split.gather_tokens(tokens_BT) - start[0]
        dx_BTD = split.exchange(dx_BTD, split=2, join=0)
        d_table_VD = jnp.zeros((shard_rows, dx_BTD.shape[-1]), _widen(dtype))
        d_table_VD = d_table_VD.at[ids_BT].add(
            dx_BTD.astype(d_table_VD.dtype), mode="drop", wrap_negative_indices=False
        )
        return _sum_over(d_table_VD, split.other_batch_axes)

    d_table_VD = run_per_shard(
        scatter,
        in_specs=(
            activation_spec("batch", "length", "embed"),
            activation_spec("batch", "length"),
            split.starts_spec,
        ),
        out_specs=split.table_spec,
    )(dx_BTD, tokens_BT, split.list_starts(rows))
    return d_table_VD.astype(like_table.dtype), None


embed_tokens.defvjp(_embed_forward, _embed_backward)


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def sum_token_losses(
    x_BTD: jax.Array, table_VD: jax.Array, labels_BT: jax.Array, weights_BT: jax.Array, vocab: int
) -> jax.Array:
    """Weighted sum of the cross-entropy of each token, in nats, at least fp32.

    Args:
      x_BTD: final hidden states, compute dtype.
      table_VD: output head (for tied models the embedding); rows beyond `vocab` are padding, never seen.
      labels_BT: int32 in [0, vocab) wherever the weight is not 0.
      weights_BT: fp32; 0 takes a token out.
      vocab: tokens of the tokenizer, at most V.

    Returns:
      Scalar, at least fp32: sum over this region's tokens of weight · (logsumexp(logits) − logits[label]).
    """
    return _loss_over_shards(x_BTD, table_VD, labels_BT, weights_BT, vocab, with_gradient=False)[0]


def _loss_forward(
    x_BTD: jax.Array, table_VD: jax.Array, labels_BT: jax.Array, weights_BT: jax.Array, vocab: int
) -> tuple[jax.Array, tuple]:
    loss, dx_BTD, d_head_DV = _loss_over_shards(
        x_BTD, table_VD, labels_BT, weights_BT, vocab, with_gradient=True
    )
    return loss, (dx_BTD, d_head_DV, jnp.zeros((0,), x_BTD.dtype), jnp.zeros((0,), table_VD.dtype))


def _loss_backward(vocab: int, residuals: tuple, d_loss: jax.Array) -> tuple:
    dx_BTD, d_head_DV, like_x, like_table = residuals
    dx_BTD = (dx_BTD * d_loss).astype(like_x.dtype)
    return dx_BTD, (d_head_DV * d_loss).astype(like_table.dtype).T, None, None


sum_token_losses.defvjp(_loss_forward, _loss_backward)


def _loss_over_shards(
    x_BTD: jax.Array,
    table_VD: jax.Array,
    labels_BT: jax.Array,
    weights_BT: jax.Array,
    vocab: int,
    *,
    with_gradient: bool,
) -> tuple[jax.Array, ...]:
    split, rows = _Split.read(), table_VD.shape[0]
    tokens_spec = activation_spec("batch", "length")
    x_spec = activation_spec("batch", "length", "embed")
    head_spec = PartitionSpec(split.channels or None, split.vocab or None)
    visit = partial(
        _visit_chunk, split=split, vocab=vocab, is_padded=vocab != rows, with_gradient=with_gradient
    )
    return run_per_shard(
        partial(_loss_of_shard, visit=visit, split=split, with_gradient=with_gradient),
        in_specs=(
            x_spec,
            PartitionSpec(None, split.vocab or None),
            tokens_spec,
            tokens_spec,
            split.starts_spec,
        ),
        out_specs=(PartitionSpec(), *((x_spec, head_spec) if with_gradient else ())),
    )(x_BTD, table_VD.astype(x_BTD.dtype).T, labels_BT, weights_BT, split.list_starts(rows))


def _loss_of_shard(
    x_BTD: jax.Array,
    head_DV: jax.Array,
    labels_BT: jax.Array,
    weights_BT: jax.Array,
    start: jax.Array,
    *,
    visit: partial,
    split: _Split,
    with_gradient: bool,
) -> tuple[jax.Array, ...]:
    """Loss of this shard's tokens, summed over all shards; with it dx_BTD and d_head_DV if asked for."""
    (embed, rows), wide = head_DV.shape, _widen(x_BTD.dtype)
    # XLA's CPU compiler gathers bf16 as fp32, and would then also multiply in fp32, at half the speed.
    x_BTD, head_DV = lax.optimization_barrier((x_BTD, head_DV))
    size = largest_divisor(labels_BT.size, max(LOGITS_HELD // rows, 1))
    chunks = (
        x_BTD.reshape(-1, size, embed),
        labels_BT.reshape(-1, size),
        weights_BT.reshape(-1, size).astype(wide),
    )
    visit = partial(visit, head_DV=head_DV, start=start[0])
    carry = (jnp.zeros((), wide), jnp.zeros(head_DV.shape if with_gradient else (), wide))
    if size == labels_BT.size:  # a loop of one trip would only cost copies
        carry, dx = visit(carry, jax.tree.map(lambda a: a[0], chunks))
    else:
        carry, dx = lax.scan(visit, carry, chunks)
    loss, d_head_DV = carry
    loss = _sum_over(loss, split.batch)
    if not with_gradient:
        return (loss,)
    if split.channels:
        d_head_DV = lax.psum_scatter(d_head_DV, split.channels, scatter_dimension=0, tiled=True)
        # Without the barrier XLA's TPU compiler scatters after the loop over microbatches, in fp32, and its
        # accumulator is whole.
        d_head_DV = lax.optimization_barrier(d_head_DV)
    return loss, dx.reshape(x_BTD.shape), _sum_over(d_head_DV, split.other_batch_axes)


def _visit_chunk(
    carry: tuple[jax.Array, jax.Array],
    chunk: tuple[jax.Array, jax.Array, jax.Array],
    *,
    head_DV: jax.Array,
    start: jax.Array,
    split: _Split,
    vocab: int,
    is_padded: bool,
    with_gradient: bool,
) -> tuple[tuple[jax.Array, jax.Array], jax.Array | None]:
    """Adds a chunk of N tokens to (loss sum, d_head_DV); returns its dx_ND."""
    loss_sum, d_head_DV = carry
    x_ND, labels_N, weights_N = chunk
    ids_V, wide = start + jnp.arange(head_DV.shape[1]), _widen(x_ND.dtype)

    logits_NV = jnp.einsum("ND,DV->NV", x_ND, head_DV, preferred_element_type=wide)
    if is_padded:
        logits_NV = jnp.where(ids_V < vocab, logits_NV, -jnp.inf)
    # The largest logit only keeps exp in range; a shard of nothing but padding offers a number far below.
    max_N = jnp.maximum(logits_NV.max(-1), _FAR_BELOW)
    # The barrier keeps the exponentials in memory: XLA's CPU compiler would make them twice.
    exp_NV = lax.optimization_barrier(jnp.exp(logits_NV - max_N[:, None]))
    label_logit_N = logits_NV.at[jnp.arange(labels_N.size), labels_N - start].get(
        mode="fill", fill_value=0.0, wrap_negative_indices=False
    )
    log_total_N, label_logit_N = _join_shards(max_N, exp_NV.sum(-1), label_logit_N, split.vocab)
    loss_N = log_total_N - label_logit_N
    # A token of weight 0 may have any label; `where` keeps an infinity of it out of the sum.
    loss_sum += jnp.where(weights_N > 0, loss_N * weights_N, 0.0).sum()
    if not with_gradient:
        return (loss_sum, d_head_DV), None

    softmax_NV = exp_NV * (weights_N * jnp.exp(max_N - log_total_N))[:, None]  # times the weight
    label_NV = jnp.where(ids_V == labels_N[:, None], weights_N[:, None], 0.0)
    # The factor of a scaled loss comes only with the backward pass: what fp16 would lose till then is lifted.
    lift, kept = (_FP16_LIFT, wide) if x_ND.dtype == jnp.float16 else (1.0, x_ND.dtype)
    dlogits_NV = ((softmax_NV - label_NV) * lift).astype(x_ND.dtype)
    d_head_part_DV = jnp.einsum("ND,NV->DV", x_ND, dlogits_NV, preferred_element_type=wide)
    dx_ND = jnp.einsum("NV,DV->ND", dlogits_NV, head_DV, preferred_element_type=wide)
    dx_ND = (_sum_over(dx_ND, split.vocab) / lift).astype(kept)
    return (loss_sum, d_head_DV + d_head_part_DV / lift), dx_ND


def _widen(dtype: jnp.dtype) -> jnp.dtype:
    """At least fp32, as `jaxscale.numerics.policy.widen`, which is no floor below this one."""
    return jnp.promote_types(dtype, jnp.float32)


def _sum_over(x: jax.Array, axes: Axes) -> jax.Array:
    return lax.psum(x, axes) if axes else x


def _join_shards(
    max_N: jax.Array, total_N: jax.Array, label_logit_N: jax.Array, axes: Axes
) -> tuple[jax.Array, jax.Array]:
    """Logarithm of the sum of all exponentials, and the label's logit, from each shard's part; one exchange.

    A shard's `total_N` is relative to its own `max_N`; only the shard that has the label offers its logit.
    """
    if not axes:
        return jnp.log(total_N) + max_N, label_logit_N
    parts = lax.all_gather(jnp.stack([max_N, total_N, label_logit_N]), axes)
    maxima, totals, label_logits = parts[:, 0], parts[:, 1], parts[:, 2]
    max_N = maxima.max(0)
    return jnp.log((totals * jnp.exp(maxima - max_N)).sum(0)) + max_N, label_logits.sum(0)


def largest_divisor(number: int, limit: int) -> int:
    return next(size for size in range(min(number, limit), 0, -1) if number % size == 0)
