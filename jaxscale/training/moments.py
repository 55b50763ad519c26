"""Moments kept in a reduced format: computed in fp32, rounded stochastically where they are stored.

bf16 has 8 bits of precision: a change of less than 1/512 of a number is rounded away. A second moment with
beta2 = 0.999 changes by at most 1/1000 of itself while gradients shrink, so that rounded to nearest it would
stay for ever; with beta2 = 0.95 it stops some percent from where it should be. Rounded up or down at random,
up as often as its distance says, it is right in the mean (`tests/test_optimizers.py` shows all three).
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxscale.numerics.draw import make_key
from jaxscale.numerics.policy import widen

_SEED = 0x6D6F6D  # of the rounding, the same in every run


class StoredMoments(NamedTuple):
    """State of `store_moments`."""

    step: jax.Array
    """Number of the update, uint32: what the rounding is drawn from."""
    stored: Any
    """State of the inner transformation, float leaves in the reduced format."""


def store_moments(inner: optax.GradientTransformation, dtype: jnp.dtype) -> optax.GradientTransformation:
    """Keeps every float leaf of `inner`'s state in `dtype`; `inner` computes in fp32 at least.

    The draws are a function of the update's number and the leaf, element by element, so that the rounding is
    the same on every mesh and after a resume.

    Args:
      dtype: fp32 or wider: nothing is rounded, and the state is `inner`'s own; or bf16.
    """

    def init_wide(params: Any) -> Any:
        return inner.init(_map_floats(lambda leaf: leaf.astype(widen(leaf.dtype)), params))

    def update_wide(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        widened = _map_floats(lambda leaf: leaf.astype(widen(leaf.dtype)), (updates, params))
        return inner.update(widened[0], state, widened[1])

    if dtype != jnp.bfloat16:
        return optax.GradientTransformation(init_wide, update_wide)

    def init(params: Any) -> StoredMoments:
        state = _map_floats(lambda leaf: leaf.astype(dtype), init_wide(params))
        return StoredMoments(jnp.zeros((), jnp.uint32), state)

    def update(updates: Any, state: StoredMoments, params: Any = None) -> tuple[Any, StoredMoments]:
        wide = _map_floats(lambda leaf: leaf.astype(jnp.float32), state.stored)
        updates, wide = update_wide(updates, wide, params)
        step = state.step + jnp.uint32(1)
        leaves, structure = jax.tree.leaves(wide), jax.tree.structure(wide)
        key = jax.random.fold_in(make_key(_SEED), step)
        rounded = [
            round_stochastically(leaf, jax.random.fold_in(key, index)) if _is_float(leaf) else leaf
            for index, leaf in enumerate(leaves)
        ]
        return updates, StoredMoments(step, jax.tree.unflatten(structure, rounded))

    return optax.GradientTransformation(init, update)


def round_stochastically(x: jax.Array, key: jax.Array) -> jax.Array:
    """fp32 to bf16, up with the probability that makes the mean right; what bf16 can say stays as it is.

    bf16 is the upper half of fp32: 16 random bits are added to the lower half, which is then cut off.
    """
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    noise = jax.random.bits(key, x.shape, jnp.uint16).astype(jnp.uint32)
    upper = ((bits + noise) >> 16).astype(jnp.uint16)
    rounded = lax.bitcast_convert_type(upper, jnp.bfloat16)
    return jnp.where(jnp.isfinite(x), rounded, x.astype(jnp.bfloat16))


def _map_floats(change: Any, tree: Any) -> Any:
    return jax.tree.map(lambda leaf: change(leaf) if _is_float(leaf) else leaf, tree)


def _is_float(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.floating)
