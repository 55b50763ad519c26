"""One pytree is the run: saving it saves the run."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxscale.config import OffloadConfig
from jaxscale.models.model import Model
from jaxscale.sharding.zero import Layouts
from jaxscale.training.optimizer_layout import HOST_MEMORY, lay_optimizer


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """Everything that decides the next step; counters are uint32 scalars."""

    params: Any
    """Nested dicts of arrays, as the optimizer keeps them."""
    moments: Any
    """State of the optax optimizer."""
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


def init_state(model: Model, optimizer: optax.GradientTransformation, key: jax.Array) -> TrainState:
    """The state before the first step; run it under `jit` with `lay_state` as output shardings."""
    params = model.init(key)

    # One zero each: two leaves that share a buffer cannot both be donated.
    def zero() -> jax.Array:
        return jnp.zeros((), jnp.uint32)

    return TrainState(params, optimizer.init(params), zero(), zero(), zero(), zero(), zero())


def lay_state(
    model: Model, optimizer: optax.GradientTransformation, layouts: Layouts, offload: OffloadConfig
) -> TrainState:
    """The sharding of each leaf of the state, with its kind of memory, as a `TrainState` of shardings."""
    whole: Any = layouts.replicated
    moments = lay_optimizer(optimizer, model.shapes, layouts, on_host=offload.optimizer_state)
    params = layouts.params
    if offload.master_weights:
        params = jax.tree.map(lambda sharding: sharding.with_memory_kind(HOST_MEMORY), params)
    return TrainState(params, moments, whole, whole, whole, whole, whole)


def describe_state(
    model: Model, optimizer: optax.GradientTransformation, shardings: TrainState
) -> TrainState:
    """The state as `ShapeDtypeStruct`s with shardings, nothing allocated."""
    abstract = jax.eval_shape(lambda: init_state(model, optimizer, jax.random.key(0)))
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        abstract,
        shardings,
    )
