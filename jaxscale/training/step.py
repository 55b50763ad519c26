"""The step: weights for use, gradient sums over microbatches, one update.

Parameters are kept as the optimizer's; once a step they are cast to the compute format and laid out for use
(`jaxscale.sharding.zero`). How gradients are summed stands in `jaxscale.training.gradients`.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from jaxscale.config import Config
from jaxscale.mesh import BATCH_AXES
from jaxscale.models.model import Batch, Model, Params
from jaxscale.numerics.policy import DTYPES, compute_dtype, matmul_precision
from jaxscale.sharding.rules import iterate_leaves
from jaxscale.sharding.zero import Layouts
from jaxscale.training.gradients import make_gradient_sums
from jaxscale.training.offload import fetch_parameter, make_streamed_update
from jaxscale.training.optimizer import apply_update, clip_gradients
from jaxscale.training.schedule import learning_rate
from jaxscale.training.state import TrainState

Metrics = dict[str, jax.Array]
ApplyUpdate = Callable[[Params, Any, Params, jax.Array], tuple[Params, Any]]

BATCH_DTYPES = {
    "tokens": jnp.int32,
    "labels": jnp.int32,
    "positions": jnp.int32,
    "segments": jnp.int32,
    "weights": jnp.float32,
}


def batch_sharding(layouts: Layouts) -> NamedSharding:
    """Layout of a step's arrays [microbatches, sequences a microbatch, length]."""
    axes = tuple(axis for axis in BATCH_AXES if layouts.mesh.shape[axis] > 1)
    return NamedSharding(layouts.mesh, PartitionSpec(None, axes or None))


def describe_batch(config: Config, layouts: Layouts) -> dict[str, jax.ShapeDtypeStruct]:
    """A step's batch as `ShapeDtypeStruct`s."""
    batch = config.batch
    shape = (batch.microbatches, batch.sequences // batch.microbatches, batch.length)
    sharding = batch_sharding(layouts)
    return {
        name: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for name, dtype in BATCH_DTYPES.items()
    }


def make_weights(params: Params, layouts: Layouts, dtype: jnp.dtype) -> Params:
    """The weights in use: cast while they lie in shards, then gathered as far as the ZeRO stage says."""
    cast = [
        fetch_parameter(leaf, layouts.leaves[path], leaf.dtype if layouts.leaves[path].is_exempt else dtype)
        for path, leaf in iterate_leaves(params)
    ]
    return _lay(jax.tree.unflatten(jax.tree.structure(params), cast), layouts.weights)


def make_step(
    model: Model,
    optimizer: optax.GradientTransformation,
    layouts: Layouts,
    config: Config,
    *,
    with_gradients: bool = False,
) -> Callable[[TrainState, Batch], tuple]:
    """The function of one step, to be compiled once with the state donated.

    Loss and gradients are sums over tokens, divided once by the weight of the whole step. A step with no
    counted token, or whose loss or gradient norm is not finite, changes nothing but the data position and the
    counts of skips.

    Returns:
      (state, batch) -> (state, metrics); `with_gradients` adds the gradients of the mean loss, not clipped.
    """
    sum_gradients = make_gradient_sums(model, layouts, DTYPES[config.precision.accumulate], config.seed)
    update = _make_update(optimizer, layouts, config)

    def step(state: TrainState, batch: Batch) -> tuple:
        with matmul_precision(config.precision):
            weights = make_weights(state.params, layouts, compute_dtype(config.precision))
            numbers = _number_sequences(state, config, layouts)
            loss_sum, weight_sum, gradient_sums = sum_gradients(weights, {**batch, "sequences": numbers})
        weight = jnp.maximum(weight_sum, 1.0)
        # The optimizer works in the layout of its state: where that is finer than the accumulators', this is
        # where each device takes its part of the reduced gradient.
        gradients = jax.tree.map(lambda g: g / weight, _lay(gradient_sums, layouts.moments))
        clipped, norm = clip_gradients(gradients, config.optimizer.clip_norm)
        loss, rate = loss_sum / weight, _find_rate(state, config)
        good = jnp.isfinite(loss) & jnp.isfinite(norm) & (weight_sum > 0)
        # A branch, not a selection of every element: the state left alone costs nothing, and less memory.
        state = lax.cond(good, update, _count_skip, state, clipped, rate)
        state = replace(state, sequences=state.sequences + _sequences(config))
        metrics = {
            "loss": loss,
            "grad_norm": norm,
            "lr": rate,
            "counted_tokens": weight_sum,
            "skipped": ~good,
            "skips_in_row": state.skips_in_row,
        }
        return (state, metrics, gradients) if with_gradients else (state, metrics)

    return step


def _make_update(
    optimizer: optax.GradientTransformation, layouts: Layouts, config: Config
) -> Callable[[TrainState, Params, jax.Array], TrainState]:
    if config.offload.is_off:
        apply: ApplyUpdate = partial(apply_update, optimizer)
    else:
        apply = make_streamed_update(optimizer, layouts)

    def update(state: TrainState, gradients: Params, rate: jax.Array) -> TrainState:
        """The state after one update, data position aside."""
        params, moments = apply(gradients, state.moments, state.params, rate)
        return replace(
            state,
            params=params if config.offload.master_weights else _lay(params, layouts.params),
            moments=moments,
            updates=state.updates + jnp.uint32(1),
            skips_in_row=jnp.zeros_like(state.skips_in_row),
            trained_sequences=state.trained_sequences + _sequences(config),
        )

    return update


def _count_skip(state: TrainState, *_: Any) -> TrainState:
    """The state after a skipped step: the counts of skips have moved, nothing else."""
    return replace(state, skips=state.skips + jnp.uint32(1), skips_in_row=state.skips_in_row + jnp.uint32(1))


def _find_rate(state: TrainState, config: Config) -> jax.Array:
    """Learning rate of the update at hand, read at its end."""
    batch = config.batch
    trained = state.trained_sequences + _sequences(config)
    total_tokens = config.steps * batch.sequences * batch.length
    return learning_rate(trained.astype(jnp.float32) * batch.length, total_tokens, config.optimizer)


def _sequences(config: Config) -> jax.Array:
    return jnp.uint32(config.batch.sequences)


def _number_sequences(state: TrainState, config: Config, layouts: Layouts) -> jax.Array:
    """The number in the run of each sequence of the step [microbatches, sequences a microbatch], uint32."""
    batch = config.batch
    numbers = state.sequences + jnp.arange(batch.sequences, dtype=jnp.uint32)
    return lax.with_sharding_constraint(
        numbers.reshape(batch.microbatches, batch.sequences // batch.microbatches), batch_sharding(layouts)
    )


def make_evaluation(model: Model, layouts: Layouts, config: Config) -> Callable[[Params, Batch], tuple]:
    """Sum of losses and of weights over one batch [1, B, T] of evaluation."""

    def evaluate(params: Params, batch: Batch) -> tuple[jax.Array, jax.Array]:
        with matmul_precision(config.precision):
            weights = make_weights(params, layouts, compute_dtype(config.precision))
            return model.sum_losses(weights, jax.tree.map(lambda a: a[0], batch), None)

    return evaluate


def _lay(tree: Params, shardings: Any) -> Params:
    return jax.tree.map(lax.with_sharding_constraint, tree, shardings)
