"""The optimizer: optax for the moments, the learning rate and clipping in plain sight."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding

from jaxscale.config import OptimizerConfig, PrecisionConfig
from jaxscale.numerics.policy import DTYPES
from jaxscale.sharding.rules import iterate_leaves
from jaxscale.sharding.zero import Layouts

DECAYED = ("kernel", "table")  # norms and biases are not decayed


def make_optimizer(config: OptimizerConfig, precision: PrecisionConfig) -> optax.GradientTransformation:
    """AdamW without its learning rate: the step multiplies by that, so what is logged is what is used."""
    return optax.chain(
        optax.scale_by_adam(config.beta1, config.beta2, config.eps, mu_dtype=DTYPES[precision.moments]),
        optax.add_decayed_weights(config.weight_decay, mask=mask_decay),
    )


def mask_decay(params: Any) -> Any:
    """True for the leaves that weight decay pulls on."""
    marks = [path.rpartition("/")[2] in DECAYED for path, _ in iterate_leaves(params)]
    return jax.tree.unflatten(jax.tree.structure(params), marks)


def lay_optimizer(optimizer: optax.GradientTransformation, shapes: Any, layouts: Layouts) -> Any:
    """Sharding of each leaf of the optimizer state: moments like their parameter, counters replicated.

    Left to itself `jit(optimizer.init)` puts all moments on one device, since zeros depend on no input.
    """
    abstract = jax.eval_shape(optimizer.init, shapes)

    def lay(moment: Any, sharding: NamedSharding) -> NamedSharding:
        assert moment.ndim >= len(sharding.spec), (moment, sharding)
        return sharding

    return optax.tree.map_params(
        optimizer, lay, abstract, layouts.moments, transform_non_params=lambda _: layouts.replicated
    )


def clip_gradients(gradients: Any, limit: float | None) -> tuple[Any, jax.Array]:
    """Scales gradients so that their global norm is at most `limit`.

    Returns:
      gradients, and the norm before clipping (fp32): that of the one mathematical gradient, since every leaf
      is counted once however it lies.
    """
    norm = optax.tree.norm(jax.tree.map(lambda g: g.astype(jnp.float32), gradients))
    if limit is None:
        return gradients, norm
    scale = jnp.minimum(1.0, limit / jnp.maximum(norm, jnp.finfo(jnp.float32).tiny))
    return jax.tree.map(lambda g: g * scale, gradients), norm
