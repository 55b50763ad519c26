"""Embedding and cross-entropy over a vocabulary that lies over `tensor`.

Both run in an inner region that is manual over every axis, and bring their own derivative, for two reasons:
the traffic is then what we say (one gather of the table over `fsdp`, one small reduction over `tensor`, one
scatter of its gradient), and no gradient is taken through a reduction.

The cross-entropy computes its gradients in the forward pass, a chunk of tokens at a time: the derivative of
a sum of token losses is known up to the scalar that comes back. So a chunk's logits are made once, never
again, and at most `LOGITS_HELD` of them are alive on a device.
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
)
from jaxscale.sharding.rules import Axes

LOGITS_HELD = 2**24  # elements a device: 64 MiB in fp32


class _Split(NamedTuple):
    """What is laid over which automatic axes; read outside a region, where they still are automatic."""

    batch: Axes
    vocab: Axes
    table: Axes  # the table's embed dim, outside the region; its gradient is scattered back to it

    @classmethod
    def read(cls) -> "_Split":
        batch = activation_axes("batch")
        return cls(batch, activation_axes("vocab"), tuple(axis for axis in batch if axis == "fsdp"))

    @property
    def starts_spec(self) -> PartitionSpec:
        return PartitionSpec(self.vocab or None)

    @property
    def gathered_table_spec(self) -> PartitionSpec:
        return PartitionSpec(self.vocab or None, None)

    @property
    def scattered_table_spec(self) -> PartitionSpec:
        return PartitionSpec(self.vocab or None, self.table or None)

    def list_starts(self, rows: int) -> jax.Array:
        """First row of each vocabulary shard, one a shard."""
        ways = count_shards(self.vocab)
        return jnp.arange(ways, dtype=jnp.int32) * (rows // ways)

    def reduce_table(self, d_table_VD: jax.Array) -> jax.Array:
        """Sums a gradient of the table over the batch shards, and leaves each device its part of it."""
        if self.table:
            d_table_VD = lax.psum_scatter(d_table_VD, self.table, scatter_dimension=1, tiled=True)
        return _sum_over(d_table_VD, tuple(axis for axis in self.batch if axis not in self.table))


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
    split, rows = _Split.read(), table_VD.shape[0]

    def look_up(table_VD: jax.Array, tokens_BT: jax.Array, start: jax.Array) -> jax.Array:
        x_BTD = table_VD.at[tokens_BT - start[0]].get(mode="fill", fill_value=0, wrap_negative_indices=False)
        # In fp32, though all terms but one are zero: XLA's CPU compiler dies on a bf16 reduction in a region.
        return _sum_over(x_BTD.astype(jnp.float32), split.vocab).astype(dtype)

    x_BTD = run_per_shard(
        look_up,
        in_specs=(split.gathered_table_spec, activation_spec("batch", "length"), split.starts_spec),
        out_specs=activation_spec("batch", "length", "embed"),
    )(table_VD.astype(dtype), tokens_BT, split.list_starts(rows))
    # Residuals are arrays only: an empty one carries the table's rows and dtype.
    return x_BTD, (tokens_BT, jnp.zeros((rows, 0), table_VD.dtype))


def _embed_backward(dtype: jnp.dtype, residuals: tuple, dx_BTD: jax.Array) -> tuple[jax.Array, None]:
    tokens_BT, like_table = residuals
    split, rows = _Split.read(), like_table.shape[0]
    shard_rows = rows // count_shards(split.vocab)

    def scatter(dx_BTD: jax.Array, tokens_BT: jax.Array, start: jax.Array) -> jax.Array:
        d_table_VD = jnp.zeros((shard_rows, dx_BTD.shape[-1]), jnp.float32)
        d_table_VD = d_table_VD.at[tokens_BT - start[0]].add(
            dx_BTD.astype(jnp.float32), mode="drop", wrap_negative_indices=False
        )
        return split.reduce_table(d_table_VD)

    d_table_VD = run_per_shard(
        scatter,
        in_specs=(
            activation_spec("batch", "length", "embed"),
            activation_spec("batch", "length"),
            split.starts_spec,
        ),
        out_specs=split.scattered_table_spec,
    )(dx_BTD, tokens_BT, split.list_starts(rows))
    return d_table_VD.astype(like_table.dtype), None


embed_tokens.defvjp(_embed_forward, _embed_backward)


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def sum_token_losses(
    x_BTD: jax.Array, table_VD: jax.Array, labels_BT: jax.Array, weights_BT: jax.Array, vocab: int
) -> jax.Array:
    """Weighted sum of the cross-entropy of each token, in nats, fp32.

    Args:
      x_BTD: final hidden states, compute dtype.
      table_VD: output head (for tied models the embedding); rows beyond `vocab` are padding, never seen.
      labels_BT: int32 in [0, vocab) wherever the weight is not 0.
      weights_BT: fp32; 0 takes a token out.
      vocab: tokens of the tokenizer, at most V.

    Returns:
      fp32 scalar: sum over this region's tokens of weight · (logsumexp(logits) − logits[label]).
    """
    return _loss_over_shards(x_BTD, table_VD, labels_BT, weights_BT, vocab, with_gradient=False)[0]


def _loss_forward(
    x_BTD: jax.Array, table_VD: jax.Array, labels_BT: jax.Array, weights_BT: jax.Array, vocab: int
) -> tuple[jax.Array, tuple]:
    loss, dx_BTD, d_table_VD = _loss_over_shards(
        x_BTD, table_VD, labels_BT, weights_BT, vocab, with_gradient=True
    )
    return loss, (dx_BTD, d_table_VD, jnp.zeros((0,), table_VD.dtype))


def _loss_backward(vocab: int, residuals: tuple, d_loss: jax.Array) -> tuple:
    dx_BTD, d_table_VD, like_table = residuals
    dx_BTD = (dx_BTD * d_loss).astype(dx_BTD.dtype)
    return dx_BTD, (d_table_VD * d_loss).astype(like_table.dtype), None, None


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
    visit = partial(
        _visit_chunk, split=split, vocab=vocab, is_padded=vocab != rows, with_gradient=with_gradient
    )
    return run_per_shard(
        partial(_loss_of_shard, visit=visit, split=split, with_gradient=with_gradient),
        in_specs=(x_spec, split.gathered_table_spec, tokens_spec, tokens_spec, split.starts_spec),
        out_specs=(PartitionSpec(), *((x_spec, split.scattered_table_spec) if with_gradient else ())),
    )(x_BTD, table_VD.astype(x_BTD.dtype), labels_BT, weights_BT, split.list_starts(rows))


def _loss_of_shard(
    x_BTD: jax.Array,
    table_VD: jax.Array,
    labels_BT: jax.Array,
    weights_BT: jax.Array,
    start: jax.Array,
    *,
    visit: partial,
    split: _Split,
    with_gradient: bool,
) -> tuple[jax.Array, ...]:
    """Loss of this shard's tokens, summed over all shards; with it dx_BTD and d_table_VD if asked for."""
    rows, embed = table_VD.shape
    size = _largest_divisor(labels_BT.size, max(LOGITS_HELD // rows, 1))
    chunks = (
        x_BTD.reshape(-1, size, embed),
        labels_BT.reshape(-1, size),
        weights_BT.reshape(-1, size).astype(jnp.float32),
    )
    visit = partial(visit, table_VD=table_VD, start=start[0])
    carry = (jnp.zeros((), jnp.float32), jnp.zeros(table_VD.shape if with_gradient else (), jnp.float32))
    if size == labels_BT.size:  # a loop of one trip would only cost copies
        carry, dx = visit(carry, jax.tree.map(lambda a: a[0], chunks))
    else:
        carry, dx = lax.scan(visit, carry, chunks)
    loss, d_table_VD = carry
    loss = _sum_over(loss, split.batch)
    return (loss, dx.reshape(x_BTD.shape), split.reduce_table(d_table_VD)) if with_gradient else (loss,)


def _visit_chunk(
    carry: tuple[jax.Array, jax.Array],
    chunk: tuple[jax.Array, jax.Array, jax.Array],
    *,
    table_VD: jax.Array,
    start: jax.Array,
    split: _Split,
    vocab: int,
    is_padded: bool,
    with_gradient: bool,
) -> tuple[tuple[jax.Array, jax.Array], jax.Array | None]:
    """Adds a chunk of N tokens to (loss sum, d_table_VD); returns its dx_ND."""
    loss_sum, d_table_VD = carry
    x_ND, labels_N, weights_N = chunk
    ids_V = start + jnp.arange(table_VD.shape[0])

    logits_NV = jnp.einsum("ND,VD->NV", x_ND, table_VD, preferred_element_type=jnp.float32)
    if is_padded:
        logits_NV = jnp.where(ids_V < vocab, logits_NV, -jnp.inf)
    # The largest logit only keeps exp in range; a shard of nothing but padding offers -inf.
    max_N = _max_over(logits_NV.max(-1), split.vocab)
    exp_NV = jnp.exp(logits_NV - max_N[:, None])
    total_N = _sum_over(exp_NV.sum(-1), split.vocab)
    is_label_NV = ids_V == labels_N[:, None]
    label_logit_N = _sum_over(jnp.where(is_label_NV, logits_NV, 0.0).sum(-1), split.vocab)
    loss_N = jnp.log(total_N) + max_N - label_logit_N
    # A token of weight 0 may have any label; `where` keeps an infinity of it out of the sum.
    loss_sum += jnp.where(weights_N > 0, loss_N * weights_N, 0.0).sum()
    if not with_gradient:
        return (loss_sum, d_table_VD), None

    dlogits_NV = (exp_NV / total_N[:, None] - is_label_NV) * weights_N[:, None]
    dlogits_NV = dlogits_NV.astype(x_ND.dtype)
    d_table_VD += jnp.einsum("NV,ND->VD", dlogits_NV, x_ND, preferred_element_type=jnp.float32)
    dx_ND = jnp.einsum("NV,VD->ND", dlogits_NV, table_VD, preferred_element_type=jnp.float32)
    return (loss_sum, d_table_VD), _sum_over(dx_ND, split.vocab).astype(x_ND.dtype)


def _sum_over(x: jax.Array, axes: Axes) -> jax.Array:
    return lax.psum(x, axes) if axes else x


def _max_over(x: jax.Array, axes: Axes) -> jax.Array:
    return lax.pmax(x, axes) if axes else x


def _largest_divisor(number: int, limit: int) -> int:
    return next(size for size in range(min(number, limit), 0, -1) if number % size == 0)
