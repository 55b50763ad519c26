"""Delayed scaling: an fp8 scale follows from the largest magnitudes of the last steps (Micikevicius 2022).

A step's magnitude is the largest of all its microbatches and shards, so scales depend on neither. Kernels
need no history: they are at hand before the step, and so is their largest magnitude.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jaxscale.config import Fp8Config
from jaxscale.models.model import Model, Params
from jaxscale.numerics.fp8 import E4M3, E5M2, Fp8Weights, find_amax, find_scale, quantise
from jaxscale.sharding.rules import iterate_leaves
from jaxscale.sharding.zero import Layouts
from jaxscale.training.host_memory import map_layers

History = dict[str, jax.Array]
"""Path of a kernel -> largest magnitudes of activation and gradient [layers, 2, steps], newest first."""

# A run's first step has no history. Activations are near 1 in size. Gradients are those of a sum of token
# losses, which start between -1 and 1 at the logits: E5M2 then reaches from 2^-26 to 56.
_FIRST_ACTIVATION, _FIRST_GRADIENT = 1.0, 2.0**10


def init_history(model: Model, config: Fp8Config | None) -> History | None:
    """Nothing seen yet; None where scales are dynamic, or nothing is in fp8."""
    if config is None or config.scaling == "dynamic":
        return None
    return {
        path: jnp.zeros((layers, 2, config.history), jnp.float32)
        for path, layers in model.fp8_kernels.items()
    }


def make_fp8_weights(
    params: Params, history: History | None, model: Model, layouts: Layouts, config: Fp8Config | None
) -> Fp8Weights | None:
    """Kernels made fp8 while they lie in shards, then laid out for use: gathers carry a byte an element.

    None where nothing is in fp8.
    """
    if config is None:
        return None
    leaves, layout = dict(iterate_leaves(params)), dict(iterate_leaves(layouts.weights))
    kernels, scales = {}, {}
    for path in model.fp8_kernels:
        kernel_fp8, scale_L = map_layers(_quantise_kernel, leaves[path], layouts.leaves[path])
        # Without the barrier the TPU compiler gathers first, in fp32.
        kernels[path] = lax.with_sharding_constraint(lax.optimization_barrier(kernel_fp8), layout[path])
        others = (1.0, 1.0) if history is None else _find_delayed(history[path], config.margin)
        scales[path] = jnp.stack(jnp.broadcast_arrays(scale_L, *others), axis=1)
    return Fp8Weights(kernels, scales)


def _quantise_kernel(kernel: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A layer's kernel in fp8, and its scale."""
    scale = find_scale(find_amax(kernel), E4M3)
    return quantise(kernel, scale, E4M3), scale


def _find_delayed(history_LOS: jax.Array, margin: int) -> tuple[jax.Array, jax.Array]:
    """Scales [layers] of activation and gradient."""
    activation_L, gradient_L = history_LOS.max(-1).T
    return (
        jnp.where(activation_L > 0, find_scale(activation_L, E4M3, margin), _FIRST_ACTIVATION),
        jnp.where(gradient_L > 0, find_scale(gradient_L, E5M2, margin), _FIRST_GRADIENT),
    )


def are_finite(amaxes: dict[str, jax.Array] | None) -> jax.Array:
    """Whether nothing that was made fp8 was infinite or no number: clipping would hide it."""
    return jnp.all(jnp.array([jnp.isfinite(amax).all() for amax in (amaxes or {}).values()] or [True]))


def record_amaxes(history: History | None, amaxes: dict[str, jax.Array]) -> History | None:
    """The history with a step's largest magnitudes, [layers, 3] a kernel in the order of `Scales`."""
    if history is None:
        return None
    return {
        path: jnp.concatenate([amaxes[path][:, 1:, None], past_LOS[..., :-1]], -1)
        for path, past_LOS in history.items()
    }
