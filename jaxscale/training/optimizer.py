"""The optimizers by name: optax for the moments, the learning rate and clipping in plain sight."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxscale.config import OptimizerConfig, PrecisionConfig, UserError, check_origin
from jaxscale.numerics.policy import DTYPES, widen
from jaxscale.sharding.rules import Leaf, map_leaves
from jaxscale.sharding.zero import Layouts
from jaxscale.training import adafactor
from jaxscale.training.matrices import is_decayed
from jaxscale.training.moments import store_moments
from jaxscale.training.muon import find_muon_sides, scale_by_muon

Leaves = Mapping[str, Leaf]


def make_optimizer(
    config: OptimizerConfig, precision: PrecisionConfig, leaves: Leaves, layouts: Layouts | None = None
) -> optax.GradientTransformation:
    """An optimizer without its learning rate: the step multiplies by that and subtracts, so what is logged is
    what is used. Formulas and sources: docs/optimizers.md.

    Args:
      layouts: where the parameters lie, for Muon; None: on one device.

    Raises:
      UserError: the configuration says that the optimizer comes from Python.
    """
    check_origin(config, is_given=False)
    makers: dict[str, Callable[[], optax.GradientTransformation]] = {
        "adamw": lambda: _decay(config, leaves, _adam(config, precision)),
        "adafactor": lambda: _decay(config, leaves, _adafactor(config, precision, leaves)),
        "lion": lambda: _decay(config, leaves, _lion(config, precision)),
        "sgd": lambda: _decay(config, leaves, _momentum(config, precision)),
        "muon": lambda: _muon(config, precision, leaves, layouts),
    }
    return makers[config.name]()


def adopt_optimizer(
    config: OptimizerConfig, precision: PrecisionConfig, optimizer: optax.GradientTransformation
) -> optax.GradientTransformation:
    """A user's optimizer as the step takes one: optax's updates are to be added, the step subtracts.

    Raises:
      UserError: the configuration names another optimizer, or a format for moments that are not ours.
    """
    check_origin(config, is_given=True)
    if precision.moments == "bf16":
        raise UserError(
            "precision.moments is bf16, and an optimizer that comes from Python keeps its state as it likes; "
            "set precision.moments=fp32, and the format in the optimizer (such as mu_dtype)"
        )
    return optax.chain(optimizer, optax.scale(-1.0))


def _adam(config: OptimizerConfig, precision: PrecisionConfig) -> optax.GradientTransformation:
    read = config.settings
    return store_moments(
        optax.scale_by_adam(read["beta1"], read["beta2"], read["eps"]), DTYPES[precision.moments]
    )


def _lion(config: OptimizerConfig, precision: PrecisionConfig) -> optax.GradientTransformation:
    read = config.settings
    return store_moments(optax.scale_by_lion(read["beta1"], read["beta2"]), DTYPES[precision.moments])


def _momentum(config: OptimizerConfig, precision: PrecisionConfig) -> optax.GradientTransformation:
    """Sum of gradients that decays; none is kept where it decays at once."""
    read = config.settings
    if not read["momentum"]:
        return optax.identity()
    return store_moments(optax.trace(read["momentum"], read["nesterov"]), DTYPES[precision.moments])


def _adafactor(
    config: OptimizerConfig, precision: PrecisionConfig, leaves: Leaves
) -> optax.GradientTransformation:
    """Factored moments stay fp32: they are few, and decay too slowly for bf16."""
    read = config.settings
    factored = adafactor.scale_by_factored_moments(
        leaves, decay_exponent=read["decay_exponent"], eps=read["eps"], min_factored=read["min_factored"]
    )
    parts = [
        store_moments(factored, widen(jnp.bfloat16)),
        adafactor.clip_by_matrix_rms(leaves, read["clip_rms"]),
    ]
    if read["scale_by_parameter"]:
        parts.append(adafactor.scale_by_matrix_rms(leaves))
    if read["beta1"]:
        parts.append(store_moments(optax.ema(read["beta1"], debias=False), DTYPES[precision.moments]))
    return optax.chain(*parts)


def _muon(
    config: OptimizerConfig, precision: PrecisionConfig, leaves: Leaves, layouts: Layouts | None
) -> optax.GradientTransformation:
    """Muon for the matrices within the model; AdamW, at its own rate, for tables, heads and vectors."""
    read = config.settings

    def label(params: Any) -> Any:
        return map_leaves(lambda path, _: "muon" if find_muon_sides(leaves[path]) else "adamw", params)

    orthogonal = scale_by_muon(leaves, layouts, precision, steps=read["ns_steps"])
    muon = optax.chain(_momentum(config, precision), orthogonal)
    rest = optax.chain(_decay(config, leaves, _adam(config, precision)), optax.scale(read["adamw_lr_ratio"]))
    return optax.partition({"muon": _decay(config, leaves, muon), "adamw": rest}, label)


def _decay(
    config: OptimizerConfig, leaves: Leaves, inner: optax.GradientTransformation
) -> optax.GradientTransformation:
    """Decoupled weight decay: beside the moments, never through them."""
    mask = partial(mask_decay, leaves=leaves)
    return optax.chain(inner, optax.add_decayed_weights(config.settings["weight_decay"], mask=mask))


def apply_update(
    optimizer: optax.GradientTransformation, gradients: Any, moments: Any, params: Any, rate: jax.Array
) -> tuple[Any, Any]:
    """(parameters, optimizer state) after one update at a learning rate."""
    updates, moments = optimizer.update(gradients, moments, params)
    return jax.tree.map(lambda p, u: (p - rate * u).astype(p.dtype), params, updates), moments


def mask_decay(params: Any, leaves: Leaves) -> Any:
    """True for the leaves that weight decay pulls on."""
    return map_leaves(lambda path, _: is_decayed(leaves[path]), params)


def find_norm(gradients: Any) -> jax.Array:
    """The global norm, fp32 at least: that of the one mathematical gradient, since every leaf is counted once
    however it lies."""
    return optax.tree.norm(jax.tree.map(lambda g: g.astype(widen(g.dtype)), gradients))


def clip_gradients(gradients: Any, norm: jax.Array, limit: float | None) -> Any:
    """Scales gradients of this global norm so that it is at most `limit`."""
    if limit is None:
        return gradients
    scale = jnp.minimum(1.0, limit / jnp.maximum(norm, jnp.finfo(jnp.float32).tiny))
    scale = jnp.where(jnp.isfinite(norm), scale, 1.0)  # what is not finite stays where it is, to be found
    return jax.tree.map(lambda g: g * scale, gradients)
