"""Tokens sent to their experts and back, with nothing dropped: the exchange over the `expert` axis.

Each device sorts what its tokens chose by expert, so that the rows for one expert are one block. A block is
sent straight to its place among the rows of its expert: every device knows all blocks' sizes from one small
gather of counts, and so where each of them begins at both ends. Nothing is rearranged on arrival, and the way
back is the same with the ends swapped.

Buffers are static, for the worst case: all tokens of the axis on one device, each as often as that device has
experts. What lies in them beyond the blocks is zeros, and is neither sent nor read.
"""

from collections.abc import Callable
from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxscale.parallel.rows import gather_rows, invert_rows, spread_rows, take_rows

Exchange = Literal["ragged", "padded"]


def run_dropless(
    x_ND: jax.Array,
    choice_NK: jax.Array,
    experts: int,
    apply: Callable[[jax.Array, jax.Array], jax.Array],
    axis: str | None,
    exchange: Exchange,
) -> jax.Array:
    """What each choice's expert makes of the token; for use in a region that is manual over every axis.

    Two all-to-alls of rows over `axis` in each pass: at most N·K rows a device each way, whatever `experts`
    is. No gradient is taken through a reduction.

    Args:
      x_ND: tokens of this device, any float dtype.
      choice_NK: int32 expert of each choice, in [0, experts]; `experts` itself is not routed (padding). The
        choices of a token are different experts.
      experts: E, over the whole axis; device i of n has experts [i·E/n, (i+1)·E/n).
      apply: (rows_RD sorted by this device's experts, sizes_G int32 rows of each of them) -> rows_RD. Its
        result beyond sum(sizes_G) is not looked at.
      axis: mesh axis that the experts lie over; None where they are all here.
      exchange: `ragged` sends what there is (TPU, GPU); `padded` sends worst-case chunks, for XLA on CPU,
        which lacks the ragged one.

    Returns:
      y_NKD in the dtype of `apply`'s result; zeros where a choice is not routed.
    """
    tokens, choices = choice_NK.shape
    none = tokens * choices
    choice_A = choice_NK.reshape(-1)
    order_A = jnp.argsort(choice_A, stable=True).astype(jnp.int32)
    counts_E = (choice_A[:, None] == jnp.arange(experts)).sum(axis=0, dtype=jnp.int32)
    # Sorting puts what is not routed last: those rows are empty.
    assignment_R = jnp.where(jnp.arange(none) < counts_E.sum(), order_A, none)
    rows_NK = invert_rows(assignment_R[:, None], none).reshape(choice_NK.shape)
    rows_RD = gather_rows(x_ND, assignment_R // choices, rows_NK)
    if axis is None:
        return spread_rows(apply(rows_RD, counts_E), rows_NK, assignment_R)
    devices = lax.axis_size(axis)
    chunk = tokens * min(choices, experts // devices)
    there = _Way(axis, exchange, rows_in=none, rows_out=devices * chunk, chunk=chunk)
    sent, received, sizes_G = _place_blocks(counts_E, axis)
    rows_RD = _exchange(rows_RD, sent, received, there)
    rows_RD = _exchange(apply(rows_RD, sizes_G), received, sent, there.back)
    return spread_rows(rows_RD, rows_NK, assignment_R)


class _Blocks(NamedTuple):
    """One end of an exchange: rows for one expert, from one device to another, are a block.

    In the order of the device at the other end, then of its experts or this device's.
    """

    starts_E: jax.Array
    sizes_E: jax.Array
    landings_E: jax.Array  # where the block begins at the other end


class _Way(NamedTuple):
    """What is static about an exchange in one direction."""

    axis: str
    exchange: Exchange
    rows_in: int
    rows_out: int
    chunk: int  # most rows from one device to another

    @property
    def back(self) -> "_Way":
        return self._replace(rows_in=self.rows_out, rows_out=self.rows_in)


def _place_blocks(counts_E: jax.Array, axis: str) -> tuple[_Blocks, _Blocks, jax.Array]:
    """What this device sends to experts, what its experts receive, and the rows of each of its experts.

    Three tables [sender, expert]: where blocks begin on the sender, which sorts by expert; their sizes; where
    they begin on the receiver, which sorts by its experts, then by sender.
    """
    devices, here = lax.axis_size(axis), lax.axis_index(axis)
    assert counts_E.size % devices == 0, f"{counts_E.size} experts over {devices} devices"
    sizes_SE = lax.all_gather(counts_E, axis)
    totals_E = sizes_SE.sum(axis=0, dtype=jnp.int32)
    starts_SE = _sum_before(sizes_SE, axis=1)
    expert_starts_E = _sum_before(totals_E.reshape(devices, -1), axis=1).reshape(-1)
    landings_SE = expert_starts_E + _sum_before(sizes_SE, axis=0)

    def mine(table_E: jax.Array) -> jax.Array:
        """Columns of this device's experts."""
        return table_E.reshape(*table_E.shape[:-1], devices, -1)[..., here, :]

    sent = _Blocks(starts_SE[here], sizes_SE[here], landings_SE[here])
    received = _Blocks(*(mine(table).reshape(-1) for table in (landings_SE, sizes_SE, starts_SE)))
    return sent, received, mine(totals_E)


def _sum_before(x: jax.Array, axis: int) -> jax.Array:
    return jnp.cumsum(x, axis=axis, dtype=x.dtype) - x


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _exchange(rows_RD: jax.Array, sent: _Blocks, received: _Blocks, way: _Way) -> jax.Array:
    """Blocks of rows_RD moved over the axis; zeros beside them. The derivative is the way back."""
    assert rows_RD.shape[0] == way.rows_in
    if way.exchange == "ragged":
        return lax.ragged_all_to_all(
            rows_RD,
            jnp.zeros((way.rows_out, rows_RD.shape[1]), rows_RD.dtype),
            sent.starts_E,
            sent.sizes_E,
            sent.landings_E,
            received.sizes_E,
            axis_name=way.axis,
        )
    devices = lax.axis_size(way.axis)
    sent_chunks_E, received_chunks_E = (
        _place_in_chunks(blocks.sizes_E, devices, way.chunk) for blocks in (sent, received)
    )
    rows_RD = _move_blocks(rows_RD, sent.starts_E, sent_chunks_E, sent.sizes_E, devices * way.chunk)
    rows_RD = lax.all_to_all(rows_RD, way.axis, 0, 0, tiled=True)
    return _move_blocks(rows_RD, received_chunks_E, received.starts_E, received.sizes_E, way.rows_out)


def _exchange_forward(
    rows_RD: jax.Array, sent: _Blocks, received: _Blocks, way: _Way
) -> tuple[jax.Array, tuple[_Blocks, _Blocks]]:
    return _exchange(rows_RD, sent, received, way), (sent, received)


def _exchange_backward(
    way: _Way, residuals: tuple[_Blocks, _Blocks], d_rows_RD: jax.Array
) -> tuple[jax.Array, None, None]:
    sent, received = residuals
    return _exchange(d_rows_RD, received, sent, way.back), None, None


_exchange.defvjp(_exchange_forward, _exchange_backward)


def _place_in_chunks(sizes_E: jax.Array, devices: int, chunk: int) -> jax.Array:
    """Where blocks begin that lie one behind the other in a chunk for each device."""
    within_PG = _sum_before(sizes_E.reshape(devices, -1), axis=1)
    return (within_PG + chunk * jnp.arange(devices, dtype=jnp.int32)[:, None]).reshape(-1)


def _move_blocks(
    rows_RD: jax.Array, from_E: jax.Array, to_E: jax.Array, sizes_E: jax.Array, count: int
) -> jax.Array:
    """`count` rows in which blocks begin at `to_E` instead of `from_E`; zeros elsewhere."""
    row_R1 = jnp.arange(count, dtype=jnp.int32)[:, None]
    is_in_RE = (row_R1 >= to_E) & (row_R1 < to_E + sizes_E)
    source_R = row_R1[:, 0] + jnp.where(is_in_RE, from_E - to_E, 0).sum(axis=1, dtype=jnp.int32)
    return take_rows(rows_RD, jnp.where(is_in_RE.any(axis=1), source_R, rows_RD.shape[0]))
