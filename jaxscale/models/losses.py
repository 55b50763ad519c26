"""The loss of a language model of your own, as a (sum, weight) pair."""

import jax
import jax.numpy as jnp
from jax import lax

from jaxscale.config import UserError
from jaxscale.numerics.policy import widen


def token_cross_entropy(
    logits_BTV: jax.Array, labels_BT: jax.Array, weights_BT: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Cross-entropy in nats, summed over the tokens that count; the step divides once, by the global weight.

    The label's logit is picked by a comparison, not by a gather, so that a vocabulary that lies over `tensor`
    stays where it is.

    Args:
      logits_BTV: any float dtype; taken to fp32 (or fp64, if they are) before the softmax.
      labels_BT: int32 ids of the next token, as `batch["labels"]` holds them: already shifted.
      weights_BT: 0 for a token that does not count. Whatever its logits and label are, NaN and infinities
        too, neither they nor their gradients reach the sum.

    Returns:
      The weighted sum of the losses and the sum of the weights, fp32 (fp64) scalars. The sum is NaN where a
      label that counts is outside [0, V), which the run then skips and reports.

    Raises:
      UserError: the shapes do not belong together.
    """
    _check_shapes(logits_BTV, labels_BT, weights_BT)
    dtype = widen(logits_BTV.dtype)
    vocab = logits_BTV.shape[-1]
    counts_BT = weights_BT != 0
    logits_BTV = jnp.where(counts_BT[..., None], logits_BTV.astype(dtype), 0)
    is_label_BTV = labels_BT[..., None] == lax.broadcasted_iota(
        labels_BT.dtype, logits_BTV.shape, labels_BT.ndim
    )
    label_logits_BT = jnp.where(is_label_BTV, logits_BTV, 0).sum(axis=-1)
    losses_BT = jax.nn.logsumexp(logits_BTV, axis=-1) - label_logits_BT
    in_range_BT = (labels_BT >= 0) & (labels_BT < vocab)
    losses_BT = jnp.where(in_range_BT | ~counts_BT, losses_BT, jnp.nan)
    weights_BT = weights_BT.astype(dtype)
    return jnp.where(counts_BT, losses_BT * weights_BT, 0).sum(), weights_BT.sum()


def _check_shapes(logits_BTV: jax.Array, labels_BT: jax.Array, weights_BT: jax.Array) -> None:
    if logits_BTV.shape[:-1] != labels_BT.shape or labels_BT.shape != weights_BT.shape:
        raise UserError(
            f"token_cross_entropy: logits {logits_BTV.shape}, labels {labels_BT.shape} and weights "
            f"{weights_BT.shape} do not belong together; logits have one dim more than the two others, "
            "which is the vocabulary. The batch's labels are the next tokens already: do not shift them"
        )
