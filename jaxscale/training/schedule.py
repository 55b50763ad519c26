"""The learning rate as a function of tokens."""

import jax
import jax.numpy as jnp

from jaxscale.config import OptimizerConfig


def learning_rate(tokens: jax.Array, total_tokens: int, config: OptimizerConfig) -> jax.Array:
    """Rate of the update that brings the run to `tokens` trained tokens; fp32 scalar.

    The clock is read at the end of the update: the first update already learns, the one that completes the
    warm-up runs at the peak, the last one at the final rate, and any later one stays there.

    Args:
      tokens: fp32 scalar, tokens of all applied updates including this one (skipped steps do not count).
      total_tokens: tokens of the whole run.
    """
    warmup = min(config.warmup_tokens, total_tokens)
    # Counts enter as floats: JAX refuses Python integers from 2^31 on, which real runs exceed.
    rise = jnp.minimum(tokens / float(warmup), 1.0) if warmup else jnp.float32(1.0)
    decay_tokens = {
        "constant": 0,
        "cosine": total_tokens - warmup,
        "wsd": min(round(config.decay_fraction * total_tokens), total_tokens - warmup),
    }[config.schedule]
    if not decay_tokens:
        return config.peak_lr * rise
    done = jnp.clip((tokens - float(total_tokens - decay_tokens)) / float(decay_tokens), 0.0, 1.0)
    if config.schedule == "cosine":
        done = (1.0 - jnp.cos(jnp.pi * done)) / 2.0
    return config.peak_lr * rise * (1.0 - done * (1.0 - config.final_lr_fraction))
