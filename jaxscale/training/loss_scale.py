"""Dynamic loss scaling of fp16 compute (Micikevicius 2018, section 3.2; the constants are torch's).

fp16 rounds what is at or below 2^-25 to zero, and gradients are small. So each microbatch's loss is
multiplied by a factor before the gradient, and the reduced sums of gradients are divided by it, in fp32.
An overflow anywhere leaves infinities or NaN in the sums, hence in the step's one gradient norm: that is the
global flag, and nothing more is gathered for it.
"""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxscale.config import BatchConfig, LossScaleConfig

FLOOR = 1.0
CEILING = 2.0**24


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LossScale:
    """Scalars of the run's state."""

    scale: jax.Array
    """Factor of the loss, fp32."""
    streak: jax.Array
    """Updates applied since the factor last changed, or since an overflow at the floor; uint32."""


def start_loss_scale(config: LossScaleConfig | None) -> LossScale | None:
    """The loss scale before the first step; None where none is wanted."""
    if config is None:
        return None
    return LossScale(jnp.full((), config.initial, jnp.float32), jnp.zeros((), jnp.uint32))


def find_loss_factor(state: LossScale | None, batch: BatchConfig) -> jax.Array | None:
    """What a microbatch's sum of losses is multiplied by: the loss scale is that of a mean, as published.

    Divided by a power of two near the microbatch's tokens, so that no bit of the gradients is rounded by it.
    """
    if state is None:
        return None
    tokens = batch.sequences // batch.microbatches * batch.length
    return state.scale / 2.0 ** round(math.log2(tokens))


def move_loss_scale(
    before: LossScale, config: LossScaleConfig, *, finite: jax.Array, applied: jax.Array
) -> LossScale:
    """The loss scale after a step: halved by an overflow, doubled by `growth_steps` updates in a row.

    Args:
      finite: bool scalar, whether loss and gradient norm of the step were.
      applied: bool scalar, whether the update was made; a finite step without a counted token moves nothing.
    """
    streak = before.streak + jnp.uint32(1)
    grows = streak >= config.growth_steps
    scale = jnp.where(grows, jnp.minimum(before.scale * 2, CEILING), before.scale)
    scale = jnp.where(applied, scale, before.scale)
    streak = jnp.where(applied, jnp.where(grows, jnp.uint32(0), streak), before.streak)
    halved = jnp.maximum(before.scale / 2, FLOOR)
    return LossScale(jnp.where(finite, scale, halved), jnp.where(finite, streak, jnp.uint32(0)))
