"""The optimizer: optax for the moments, the learning rate and clipping in plain sight."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxscale.config import OptimizerConfig, PrecisionConfig
from jaxscale.numerics.policy import DTYPES, widen
from jaxscale.sharding.rules import Leaf, iterate_leaves

UNDECAYED_NAMES = ("bias", "scale")


def make_optimizer(
    config: OptimizerConfig, precision: PrecisionConfig, leaves: Mapping[str, Leaf]
) -> optax.GradientTransformation:
    """AdamW without its learning rate: the step multiplies by that, so what is logged is what is used."""
    return optax.chain(
        optax.scale_by_adam(config.beta1, config.beta2, config.eps, mu_dtype=DTYPES[precision.moments]),
        optax.add_decayed_weights(config.weight_decay, mask=partial(mask_decay, leaves=leaves)),
    )


def apply_update(
    optimizer: optax.GradientTransformation, gradients: Any, moments: Any, params: Any, rate: jax.Array
) -> tuple[Any, Any]:
    """(parameters, optimizer state) after one update at a learning rate."""
    updates, moments = optimizer.update(gradients, moments, params)
    return jax.tree.map(lambda p, u: (p - rate * u).astype(p.dtype), params, updates), moments


def mask_decay(params: Any, leaves: Mapping[str, Leaf]) -> Any:
    """True for the leaves that weight decay pulls on: matrices and tables, not norms, biases and vectors."""
    marks = [is_decayed(leaves[path]) for path, _ in iterate_leaves(params)]
    return jax.tree.unflatten(jax.tree.structure(params), marks)


def is_decayed(leaf: Leaf) -> bool:
    dims = [dim for dim in leaf.dims if dim != "layers"]
    name = leaf.path.rpartition("/")[2]
    return len(dims) >= 2 and name not in UNDECAYED_NAMES and not leaf.is_exempt


def clip_gradients(gradients: Any, limit: float | None) -> tuple[Any, jax.Array]:
    """Scales gradients so that their global norm is at most `limit`.

    Returns:
      gradients, and the norm before clipping (fp32 at least): that of the one mathematical gradient, since
      every leaf is counted once however it lies.
    """
    norm = optax.tree.norm(jax.tree.map(lambda g: g.astype(widen(g.dtype)), gradients))
    if limit is None:
        return gradients, norm
    scale = jnp.minimum(1.0, limit / jnp.maximum(norm, jnp.finfo(jnp.float32).tiny))
    return jax.tree.map(lambda g: g * scale, gradients), norm
