"""Dynamic loss scaling for fp16 (Micikevicius 2018, section 3.2; constants as in PyTorch's GradScaler).

A loss is multiplied by the scale before it is differentiated, so that small gradients are not below fp16's
smallest; sums of gradients are in fp32 and divided by it before anything reads them. A step with an infinite
gradient anywhere halves the scale, and so many good steps in a row double it.
"""

import math
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from jaxscale.config import BatchConfig, Config

FLOOR, CEILING = 1.0, 2.0**24


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LossScale:
    """What a run remembers of its scale."""

    scale: jax.Array
    """fp32 scalar; a power of two if it started as one, so that scaling rounds nothing."""
    good_steps: jax.Array
    """Good steps in a row since the scale changed last, uint32."""


def init_loss_scale(config: Config) -> LossScale | None:
    """The scale of a run's first step; None where compute is not fp16, which alone needs one."""
    if config.precision.compute != "fp16":
        return None
    return LossScale(jnp.float32(config.loss_scale.initial), jnp.uint32(0))


def find_loss_factor(state: LossScale | None, batch: BatchConfig) -> jax.Array | None:
    """What a microbatch's sum of losses is multiplied by.

    The published scales are for mean losses. A sum over the tokens of a step is as many times larger, to a
    power of two, so that dividing by it rounds nothing.
    """
    if state is None:
        return None
    tokens = batch.sequences * batch.length
    return state.scale * 2.0 ** -math.floor(math.log2(tokens))


def adapt_loss_scale(state: LossScale | None, is_finite: jax.Array, growth_steps: int) -> LossScale | None:
    """The scale for the next step: halved after a bad step, doubled after `growth_steps` good ones in a row.

    Args:
      is_finite: whether loss and all gradients of the step were, on every device and in every microbatch.
    """
    if state is None:
        return None
    good_steps = state.good_steps + jnp.uint32(1)
    is_due = good_steps >= growth_steps
    scale = jnp.where(is_finite, jnp.where(is_due, state.scale * 2, state.scale), state.scale / 2)
    return replace(
        state,
        scale=jnp.clip(scale, FLOOR, CEILING),
        good_steps=jnp.where(is_finite & ~is_due, good_steps, jnp.zeros_like(good_steps)),
    )
