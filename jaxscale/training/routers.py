"""What training keeps and reports of routers: the bias of their choice, losses and loads.

The bias is DeepSeek-V3's (arXiv 2412.19437, section 2.1.2): after an update, an expert that had more than an
even share of the step's choices loses `moe.bias_rate`, one that had less gains it. It follows the whole
step's load, which is a sum over all shards and microbatches, and no gradient.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxscale.config import MoeConfig
from jaxscale.models.model import Batch, ExpertSums, RouterInputs, Routers


class RouterState(NamedTuple):
    """What a run keeps of its routers."""

    bias: jax.Array
    """Added to the scores that a choice goes by [layers with experts, experts], fp32."""


def start_routers(routers: Routers | None) -> RouterState | None:
    """No bias; None where the choice goes by none."""
    if routers is None or not routers.has_bias:
        return None
    return RouterState(jnp.zeros((routers.layers, routers.experts), jnp.float32))


def make_inputs(routers: Routers | None, state: RouterState | None) -> RouterInputs | None:
    """What the routers of a step, or of an evaluation, are handed; None for a dense model."""
    if routers is None:
        return None
    return RouterInputs(bias=None if state is None else state.bias)


def find_penalty_factor(routers: Routers | None, batch: Batch, dtype: jnp.dtype) -> jax.Array | None:
    """Weight of a step's labels over its routed tokens.

    Losses of routers are means over routed tokens, but everything is divided by the weight of the labels.
    Both are known before the step. 0 where there is no token; None for a dense model.

    Args:
      dtype: of the losses.
    """
    if routers is None:
        return None
    tokens = count_routed(batch).astype(dtype)
    weight = batch["weights"].sum(dtype=dtype)
    return jnp.where(tokens > 0, weight / jnp.maximum(tokens, 1.0), 0.0)


def count_routed(batch: Batch) -> jax.Array:
    """Tokens that are no padding, fp32. Those whose labels do not count are among them: others read them."""
    return (batch["segments"] > 0).sum(dtype=jnp.float32)


def move_bias(
    state: RouterState | None, load_LE: jax.Array | None, moe: MoeConfig | None, trained_tokens: jax.Array
) -> RouterState | None:
    """The bias after an update.

    Args:
      load_LE: choices that fell on each expert in the whole step.
      trained_tokens: of the run, before the update.
    """
    if state is None:
        return None
    assert moe is not None
    assert load_LE is not None
    change = moe.bias_rate * jnp.sign(load_LE.mean(-1, keepdims=True) - load_LE)
    if moe.bias_freeze_tokens is not None:
        change = jnp.where(trained_tokens < moe.bias_freeze_tokens, change, 0.0)
    return RouterState(state.bias + change.astype(state.bias.dtype))


def measure_routers(
    routers: Routers, state: RouterState | None, sums: ExpertSums, tokens: jax.Array
) -> dict[str, jax.Array]:
    """Figures of a step: means over routed tokens and layers; loads in multiples of an even share.

    Args:
      tokens: routed tokens of the step.
    """
    many = jnp.maximum(tokens, 1.0)
    even = many * routers.top_k / routers.experts
    share_LE = sums.load / even
    figures = {
        "balance": sums.balance.mean() / many,
        "router_z": sums.z.mean() / many,
        "router_entropy": sums.entropy.mean() / many,
        "drop_fraction": sums.dropped.mean() / (many * routers.top_k),
        "load_max": share_LE.max(),
        "load_min": share_LE.min(),
        "load": share_LE,
    }
    if state is not None:
        figures |= {"bias_min": state.bias.min(), "bias_max": state.bias.max()}
    return figures
