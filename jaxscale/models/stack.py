"""Loops over a decoder's layers, of which those alike are stacked."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

Run = Callable[[Any, Any], tuple[Any, Any]]
"""(carry, what a layer takes) -> (carry, what it returns), as a `lax.scan` wants it."""


def scan_layers(
    run_dense: Run, run_expert: Run, carry: Any, dense: Any, expert: Any, *, first_dense: int, every: int
) -> tuple[Any, Any, Any]:
    """Runs dense layers and layers with experts in their order.

    The first `first_dense` layers are dense; of those that follow, the last of every `every` has experts.

    Args:
      dense, expert: what the layers of each kind take, stacked in their order; either may be None.

    Returns:
      the carry, and what the layers of each kind return, stacked; None where there are none.
    """
    if expert is None:
        carry, results = lax.scan(run_dense, carry, dense)
        return carry, results, None
    if dense is None:
        carry, results = lax.scan(run_expert, carry, expert)
        return carry, None, results
    first = jax.tree.map(lambda a: a[:first_dense], dense)
    rest = jax.tree.map(lambda a: a[first_dense:], dense)
    between = every - 1
    carry, dense_results = lax.scan(run_dense, carry, first)
    rest = jax.tree.map(lambda a: a.reshape(a.shape[0] // max(between, 1), between, *a.shape[1:]), rest)

    def run_period(carry: Any, period: Any) -> tuple[Any, Any]:
        several, last = period
        results = []
        for index in range(between):
            carry, result = run_dense(carry, jax.tree.map(lambda a, at=index: a[at], several))
            results.append(result)
        carry, expert_result = run_expert(carry, last)
        return carry, (jax.tree.map(lambda *a: jnp.stack(a), *results) if results else None, expert_result)

    carry, (rest_results, expert_results) = lax.scan(run_period, carry, (rest if between else None, expert))
    if between:
        flat = jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), rest_results)
        dense_results = jax.tree.map(lambda a, b: jnp.concatenate([a, b]), dense_results, flat)
    return carry, dense_results, expert_results
