"""Tokens to experts through fixed buffers: each expert has room for so many tokens of a sequence.

Room is counted within a sequence, so that what is dropped depends on no mesh and no number of microbatches;
padding takes none. An expert's capacity is ceil(choices of the sequence's tokens / experts · factor), and a
buffer has as many slots as that is without padding. What a device sends does not grow with the experts:
tokens · top_k · factor rows each way.

Letters beside the legend: K choices of a token, C slots of a buffer (a sequence's), R rows of a device.
"""

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxscale.parallel.rows import gather_rows, invert_rows, spread_rows
from jaxscale.sharding.rules import Axes

Priority = Literal["position", "probability"]


class Seats(NamedTuple):
    """Where each token's choices found room; all [b, T, K] of this device's sequences."""

    expert: jax.Array
    """int32 in [0, E)."""
    slot: jax.Array
    """int32 in [0, C), of its sequence's buffer."""
    is_seated: jax.Array


def count_slots(tokens: int, top_k: int, experts: int, factor: float) -> int:
    """Capacity of an expert for a sequence of so many tokens (Fedus 2022, equation 3, with top_k choices).

    No expert can be chosen by more tokens than there are.
    """
    return min(math.ceil(tokens * top_k / experts * factor), tokens)


def seat_tokens(
    choice_BTK: jax.Array,
    is_routed_BT: jax.Array,
    certainty_BT: jax.Array,
    *,
    experts: int,
    top_k: int,
    factor: float,
    priority: Priority,
) -> Seats:
    """Gives each token's choices slots in the buffers of its sequence, first choices before second ones.

    Args:
      choice_BTK: experts in order of preference; more than `top_k` where a choice that found no room goes on
        to the token's next.
      is_routed_BT: False for padding, which takes no room.
      certainty_BT: probability of the first choice, which orders the tokens if `priority` says so
        (Riquelme 2021, arXiv 2106.05974, section 4.1).
    """
    tokens = choice_BTK.shape[1]
    # Looked up rather than computed, so that no device rounds the product otherwise.
    limits = np.array([count_slots(n, top_k, experts, factor) for n in range(tokens + 1)], np.int32)
    limit_B1 = jnp.asarray(limits)[is_routed_BT.sum(1, keepdims=True)]
    order_BT = (
        jnp.argsort(-certainty_BT, axis=1)
        if priority == "probability"
        else jnp.broadcast_to(jnp.arange(tokens), is_routed_BT.shape)
    )
    choice_BTK, is_routed_BT = _take(choice_BTK, order_BT), _take(is_routed_BT, order_BT)
    taken_BE = jnp.zeros((choice_BTK.shape[0], experts), jnp.int32)
    seated_BT = jnp.zeros(is_routed_BT.shape, jnp.int32)
    slots, are_seated = [], []
    for choice_BT in jnp.moveaxis(choice_BTK, -1, 0):
        wants_BT = is_routed_BT & (seated_BT < top_k)
        wants_BTE = jax.nn.one_hot(choice_BT, experts, dtype=jnp.int32) * wants_BT[..., None]
        before_BTE = taken_BE[:, None] + jnp.cumsum(wants_BTE, 1, dtype=jnp.int32) - wants_BTE
        slot_BT = jnp.take_along_axis(before_BTE, choice_BT[..., None], -1)[..., 0]
        is_seated_BT = wants_BT & (slot_BT < limit_B1)
        taken_BE = jnp.minimum(taken_BE + wants_BTE.sum(1, dtype=jnp.int32), limit_B1)
        seated_BT += is_seated_BT
        slots.append(slot_BT)
        are_seated.append(is_seated_BT)
    back_BT = jnp.argsort(order_BT, axis=1)
    return Seats(*(_take(x, back_BT) for x in (choice_BTK, jnp.stack(slots, -1), jnp.stack(are_seated, -1))))


def _take(x_BT: jax.Array, order_BT: jax.Array) -> jax.Array:
    return jax.vmap(lambda x, order: x[order])(x_BT, order_BT)


def run_capacity(
    x_ND: jax.Array,
    seats: Seats,
    capacity: int,
    experts: int,
    apply: Callable[[jax.Array], jax.Array],
    axes: Axes,
) -> jax.Array:
    """Sends tokens to their seats, lets the experts work, and brings the results back; within a region.

    Args:
      x_ND: this device's tokens, its sequences one after another.
      capacity: C, slots of an expert for one sequence.
      apply: [local experts, rows, D] -> the same shape; empty slots are zeros.
      axes: the mesh axis that experts lie over; none where they are whole.

    Returns:
      y_NKD, zeros where a choice has no seat.
    """
    sequences, tokens, choices = seats.slot.shape
    rows = experts * sequences * capacity
    in_sequence = jnp.arange(sequences, dtype=jnp.int32)[:, None, None] * capacity
    row_BTK = seats.expert * (sequences * capacity) + in_sequence + seats.slot
    rows_NK = jnp.where(seats.is_seated, row_BTK, rows).reshape(sequences * tokens, choices)
    choice_R = invert_rows(rows_NK, rows)

    sent_ERD = gather_rows(x_ND, choice_R // choices, rows_NK).reshape(experts, sequences * capacity, -1)
    received_GRD = lax.all_to_all(sent_ERD, axes, 0, 1, tiled=True) if axes else sent_ERD
    y_GRD = apply(received_GRD)
    returned_ERD = lax.all_to_all(y_GRD, axes, 1, 0, tiled=True) if axes else y_GRD
    return spread_rows(returned_ERD.reshape(rows, -1), rows_NK, choice_R)
