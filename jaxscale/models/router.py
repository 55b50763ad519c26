"""Which experts a token takes, with what weights, and the losses that keep the load even; all in fp32.

Every function works on the sequences of one device and needs no other: what is to be summed over devices
leaves as a sum. The one number that has to be known of other devices beforehand, the load that a balance
loss takes as given, is handed in.

Letters beside the legend: K choices of a token.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxscale.numerics.policy import widen


@dataclass(frozen=True)
class RouterShape:
    """What decides a choice; as `jaxscale.config.MoeConfig`."""

    experts: int
    top_k: int
    kind: Literal["softmax", "softmax_kept", "sigmoid"]
    weight_scale: float
    groups: int
    groups_kept: int
    jitter: float


class Scores(NamedTuple):
    """What a router thinks of each expert, at least fp32 [b, T, E]."""

    logits_BTE: jax.Array
    affinity_BTE: jax.Array
    """What weights are made of: softmax or sigmoid of the logits."""
    probability_BTE: jax.Array
    """Affinities that sum up to one."""


def score_experts(
    x_BTD: jax.Array, router_DE: jax.Array, shape: RouterShape, noise_BTD: jax.Array | None
) -> Scores:
    """Scores of every expert.

    Args:
      noise_BTD: what the input is multiplied by (`draw_jitter`); None: no jitter.
    """
    x_BTD = x_BTD.astype(widen(x_BTD.dtype))
    if noise_BTD is not None:
        x_BTD = x_BTD * noise_BTD
    # By default a TPU multiplies fp32 in bf16, and a choice is a comparison of neighbours.
    logits_BTE = jnp.einsum(
        "BTD,DE->BTE", x_BTD, router_DE.astype(x_BTD.dtype), precision=lax.Precision.HIGHEST
    )
    if shape.kind == "sigmoid":
        affinity_BTE = jax.nn.sigmoid(logits_BTE)
        return Scores(logits_BTE, affinity_BTE, affinity_BTE / _sum_up(affinity_BTE))
    probability_BTE = jax.nn.softmax(logits_BTE)
    return Scores(logits_BTE, probability_BTE, probability_BTE)


def draw_jitter(keys_B: jax.Array, shape: tuple[int, ...], jitter: float) -> jax.Array:
    """Uniform numbers in 1 ± jitter for each channel of each token (Fedus 2022, appendix C), [b, T, D]."""
    draw = jax.vmap(lambda key: jax.random.uniform(key, shape[1:], minval=1 - jitter, maxval=1 + jitter))
    return draw(keys_B)


def choose_experts(scores: Scores, bias_E: jax.Array | None, shape: RouterShape, count: int) -> jax.Array:
    """The experts with the highest scores in order, int32 [b, T, count]; of equal ones the first.

    A bias moves the choice and nothing else (DeepSeek-V3, arXiv 2412.19437, equation 16). Of the groups,
    those whose two best experts have the highest sum of scores stay in the choice.
    """
    score_BTE = lax.stop_gradient(scores.affinity_BTE)
    if bias_E is not None:
        score_BTE = score_BTE + bias_E.astype(score_BTE.dtype)
    if shape.groups_kept < shape.groups:
        score_BTGE = score_BTE.reshape(*score_BTE.shape[:-1], shape.groups, -1)
        best = min(2, score_BTGE.shape[-1])
        worth_BTG = lax.top_k(score_BTGE, best)[0].sum(-1)
        kept_BTK = lax.top_k(worth_BTG, shape.groups_kept)[1]
        is_kept_BTG = jax.nn.one_hot(kept_BTK, shape.groups, dtype=bool).any(-2)
        score_BTE = jnp.where(is_kept_BTG[..., None], score_BTGE, -jnp.inf).reshape(score_BTE.shape)
    return lax.top_k(score_BTE, count)[1].astype(jnp.int32)


def weigh_choices(
    scores: Scores, choice_BTK: jax.Array, is_counted_BTK: jax.Array, shape: RouterShape
) -> jax.Array:
    """Weights of a token's choices [b, T, K]; those that are not counted weigh nothing and sum up nowhere."""
    affinity_BTK = jnp.take_along_axis(scores.affinity_BTE, choice_BTK, -1)
    affinity_BTK = jnp.where(is_counted_BTK, affinity_BTK, 0.0)
    if shape.kind != "softmax":
        affinity_BTK = affinity_BTK / _sum_up(affinity_BTK)
    return affinity_BTK * shape.weight_scale


def _sum_up(x: jax.Array) -> jax.Array:
    """Sum over the last dim; 1 where it is 0, as for padding."""
    total = x.sum(-1, keepdims=True)
    return jnp.where(total > 0, total, 1.0)


def count_choices(choice_BTK: jax.Array, is_routed_BT: jax.Array, experts: int) -> jax.Array:
    """Tokens of each sequence that chose each expert, before any is dropped, [b, E], fp32."""
    chosen_BTE = jax.nn.one_hot(choice_BTK, experts, dtype=jnp.float32).sum(-2)
    return (chosen_BTE * is_routed_BT[..., None]).sum(1)


def sum_balance(
    scores: Scores, is_routed_BT: jax.Array, load_BE: jax.Array, tokens_B: jax.Array
) -> jax.Array:
    """Switch's balance loss (Fedus 2022, equations 4 to 6), summed over this device's routed tokens.

    E · sum over experts of f · P, where f is the fraction of a scope's choices that fell on the expert, taken
    as given, and P the mean probability; times the tokens that P is a mean over, so that sums add up. An even
    load gives 1 a token.

    Args:
      load_BE: choices that fell on each expert within the scope of each sequence: its own, or all that are
        counted together; [b, E] or [1, E].
      tokens_B: choices in the scope; [b] or [1].
    """
    experts = load_BE.shape[-1]
    fraction_BE = lax.stop_gradient(load_BE / jnp.maximum(tokens_B, 1)[:, None])
    probability_BE = jnp.where(is_routed_BT[..., None], scores.probability_BTE, 0.0).sum(1)
    return experts * (fraction_BE.astype(probability_BE.dtype) * probability_BE).sum()


def sum_z(scores: Scores, is_routed_BT: jax.Array) -> jax.Array:
    """Squares of logsumexp of the logits, summed over routed tokens (ST-MoE, Zoph 2022, equation 5)."""
    total_BT = jax.nn.logsumexp(scores.logits_BTE, axis=-1)
    return jnp.where(is_routed_BT, jnp.square(total_BT), 0.0).sum()


def sum_entropy(scores: Scores, is_routed_BT: jax.Array) -> jax.Array:
    """Entropy of the probabilities, nats, summed over routed tokens."""
    probability_BTE = lax.stop_gradient(scores.probability_BTE)
    return jnp.where(is_routed_BT, jax.scipy.special.entr(probability_BTE).sum(-1), 0.0).sum()
