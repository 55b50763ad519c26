"""One pytree is the run: saving it saves the run."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxscale.config import Config
from jaxscale.models.model import Model
from jaxscale.sharding.zero import Layouts
from jaxscale.training.fp8_scaling import init_history
from jaxscale.training.loss_scale import LossScale, start_loss_scale
from jaxscale.training.optimizer_layout import HOST_MEMORY, lay_optimizer
from jaxscale.training.routers import RouterState, start_routers


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """Everything that decides the next step; counters are uint32 scalars."""

    params: Any
    """Nested dicts of arrays, as the optimizer keeps them."""
    moments: Any
    """State of the optax optimizer."""
    loss_scale: LossScale | None
    """None unless compute is fp16."""
    fp8: Any
    """Largest magnitudes of the last steps (`jaxscale.training.fp8_scaling`); None without delayed scales."""
    routers: RouterState | None
    """None unless the choice of experts goes by a bias."""
    updates: jax.Array
    """Applied optimizer updates."""
    skips: jax.Array
    """Skipped steps, all in all."""
    skips_in_row: jax.Array
    """Skipped steps since the last applied one."""
    sequences: jax.Array
    """Sequences consumed, skipped ones too: the position in the data."""
    trained_sequences: jax.Array
    """Sequences of applied updates: the clock of the learning rate, in units of batch.length tokens."""


def init_state(
    model: Model, optimizer: optax.GradientTransformation, config: Config, key: jax.Array
) -> TrainState:
    """The state before the first step; run it under `jit` with `lay_state` as output shardings."""
    params = model.init(key)

    # One zero each: two leaves that share a buffer cannot both be donated.
    def zero() -> jax.Array:
        return jnp.zeros((), jnp.uint32)

    return TrainState(
        params=params,
        moments=optimizer.init(params),
        loss_scale=start_loss_scale(config.loss_scale),
        fp8=init_history(model, config.fp8),
        routers=start_routers(model.routers),
        updates=zero(),
        skips=zero(),
        skips_in_row=zero(),
        sequences=zero(),
        trained_sequences=zero(),
    )


def lay_state(
    model: Model, optimizer: optax.GradientTransformation, config: Config, layouts: Layouts
) -> TrainState:
    """The sharding of each leaf of the state, with its kind of memory, as a `TrainState` of shardings."""
    whole: Any = layouts.replicated
    moments = lay_optimizer(optimizer, model.shapes, layouts, on_host=config.offload.optimizer_state)
    params = layouts.params
    if config.offload.master_weights:
        params = jax.tree.map(lambda sharding: sharding.with_memory_kind(HOST_MEMORY), params)
    extras = jax.eval_shape(
        lambda: (
            start_loss_scale(config.loss_scale),
            init_history(model, config.fp8),
            start_routers(model.routers),
        )
    )
    loss_scale, history, routers = jax.tree.map(lambda _: whole, extras)
    return TrainState(params, moments, loss_scale, history, routers, whole, whole, whole, whole, whole)


def describe_state(
    model: Model, optimizer: optax.GradientTransformation, config: Config, shardings: TrainState
) -> TrainState:
    """The state as `ShapeDtypeStruct`s with shardings, nothing allocated."""
    abstract = jax.eval_shape(lambda: init_state(model, optimizer, config, jax.random.key(0)))
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        abstract,
        shardings,
    )
