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
from jaxscale.numerics.policy import DTYPES, compute_dtype, matmul_precision, widen
from jaxscale.sharding.rules import map_leaves
from jaxscale.sharding.zero import Layouts
from jaxscale.training.fp8_scaling import are_finite, make_fp8_weights, record_amaxes
from jaxscale.training.gradients import Sums, Use, make_gradient_sums
from jaxscale.training.host_memory import map_layers
from jaxscale.training.loss_scale import find_loss_factor, move_loss_scale
from jaxscale.training.nonfinite import count_nonfinite
from jaxscale.training.offload import Finish, make_streamed_update
from jaxscale.training.optimizer import apply_update, clip_gradients, find_norm
from jaxscale.training.routers import (
    RouterState,
    count_routed,
    find_penalty_factor,
    make_inputs,
    measure_routers,
    move_bias,
)
from jaxscale.training.schedule import learning_rate
from jaxscale.training.state import TrainState

Metrics = dict[str, jax.Array]
ApplyUpdate = Callable[[Finish, Params, Any, Params, jax.Array], tuple[Params, Any]]

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

    def cast(path: str, leaf: jax.Array) -> jax.Array:
        rule = layouts.leaves[path]
        kept = leaf.dtype if rule.keeps_format else dtype
        return map_layers(lambda layer: layer.astype(kept), leaf, rule)

    return _lay(map_leaves(cast, params), layouts.weights)


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
    counted token, or whose loss or gradient norm is not finite, changes nothing but the data position, the
    counts of skips and, in fp16, the loss scale.

    Returns:
      (state, batch) -> (state, metrics); `with_gradients` adds the gradients of the mean loss, not clipped.
    """
    sum_gradients = make_gradient_sums(model, layouts, DTYPES[config.precision.accumulate], config.seed)
    update = _make_update(optimizer, layouts, config)

    def step(state: TrainState, batch: Batch) -> tuple:
        with matmul_precision(config.precision):
            weights = make_weights(state.params, layouts, compute_dtype(config.precision))
            numbers = _number_sequences(state, config, layouts)
            fp8 = make_fp8_weights(state.params, state.fp8, model, layouts, config.fp8)
            factor = find_loss_factor(state.loss_scale, config.batch)
            inputs = make_inputs(model.routers, state.routers)
            use = Use(fp8, factor, inputs, find_penalty_factor(model.routers, batch))
            sums = sum_gradients(weights, use, {**batch, "sequences": numbers})
        weight = jnp.maximum(sums.weight, 1.0)
        divisor = weight if factor is None else weight * factor
        # The optimizer works in the layout of its state: where that is finer than the accumulators', this is
        # where each device takes its part of the reduced gradient.
        sums = sums._replace(gradients=_lay(sums.gradients, layouts.moments))
        gradients = _divide(sums.gradients, divisor)
        loss, norm, rate = sums.loss / weight, find_norm(gradients), _find_rate(state, config)
        # One flag for all: every gradient of every shard and microbatch is in the norm.
        is_finite = jnp.isfinite(loss) & jnp.isfinite(norm) & are_finite(sums.amaxes)
        good = is_finite & (sums.weight > 0)
        # A branch, not a selection of every element: the state left alone costs nothing, and less memory.
        # It takes the sums, not the quotients: whatever it is handed has to be in memory.
        state, bad = lax.cond(good, update, _count_skip, state, sums, divisor, norm, rate)
        state = replace(state, sequences=state.sequences + _sequences(config))
        metrics = {
            "loss": loss,
            "grad_norm": norm,
            "lr": rate,
            "counted_tokens": sums.weight,
            "skipped": ~good,
            "skips_in_row": state.skips_in_row,
            "nonfinite": bad,
        }
        if model.routers is not None:
            assert sums.experts is not None
            metrics |= measure_routers(model.routers, state.routers, sums.experts, count_routed(batch))
        if state.loss_scale is not None:
            assert config.loss_scale is not None
            metrics["loss_scale"] = state.loss_scale.scale
            moved = move_loss_scale(state.loss_scale, config.loss_scale, finite=is_finite, applied=good)
            state = replace(state, loss_scale=moved)
        return (state, metrics, gradients) if with_gradients else (state, metrics)

    return step


def _make_update(
    optimizer: optax.GradientTransformation, layouts: Layouts, config: Config
) -> Callable[[TrainState, Sums, jax.Array, jax.Array, jax.Array], tuple[TrainState, Any]]:
    if config.offload.is_off:
        apply: ApplyUpdate = partial(_apply_whole, optimizer)
    else:
        apply = make_streamed_update(optimizer, layouts)

    def update(
        state: TrainState, sums: Sums, divisor: jax.Array, norm: jax.Array, rate: jax.Array
    ) -> tuple[TrainState, Any]:
        """The state after one update, data position and loss scale aside; nothing is not finite."""

        # Made within the update, layer by layer where that is: the quotients are not in memory, and the
        # compiler rounds the same way wherever the state lies.
        def finish(sums: Params) -> Params:
            return clip_gradients(_divide(sums, divisor), norm, config.optimizer.clip_norm)

        params, moments = apply(finish, sums.gradients, state.moments, state.params, rate)
        nothing = jnp.zeros(len(layouts.leaves), jnp.float32)
        load = None if sums.experts is None else sums.experts.load
        trained_tokens = state.trained_sequences.astype(jnp.float32) * config.batch.length
        updated = replace(
            state,
            params=params if config.offload.master_weights else _lay(params, layouts.params),
            moments=moments,
            fp8=record_amaxes(state.fp8, sums.amaxes),
            routers=move_bias(state.routers, load, config.moe, trained_tokens),
            updates=state.updates + jnp.uint32(1),
            skips_in_row=jnp.zeros_like(state.skips_in_row),
            trained_sequences=state.trained_sequences + _sequences(config),
        )
        return updated, nothing

    return update


def _apply_whole(
    optimizer: optax.GradientTransformation,
    finish: Finish,
    sums: Params,
    moments: Any,
    params: Params,
    rate: jax.Array,
) -> tuple[Params, Any]:
    return apply_update(optimizer, finish(sums), moments, params, rate)


def _divide(sums: Params, divisor: jax.Array) -> Params:
    """Gradients of the mean loss, fp32 at least."""
    return jax.tree.map(lambda g: g.astype(widen(g.dtype)) / divisor, sums)


def _count_skip(state: TrainState, sums: Sums, *_: Any) -> tuple[TrainState, Any]:
    """The state after a skipped step, where nothing but the counts of skips has moved; what is not finite."""
    one = jnp.uint32(1)
    skipped = replace(state, skips=state.skips + one, skips_in_row=state.skips_in_row + one)
    return skipped, count_nonfinite(sums.gradients)


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


def make_evaluation(
    model: Model, layouts: Layouts, config: Config
) -> Callable[[Params, RouterState | None, Batch], tuple]:
    """Sum of losses and of weights over one batch [1, B, T] of evaluation."""

    def evaluate(params: Params, routers: RouterState | None, batch: Batch) -> tuple[jax.Array, jax.Array]:
        inputs = make_inputs(model.routers, routers)
        options = {} if inputs is None else {"routers": inputs}
        with matmul_precision(config.precision):
            weights = make_weights(params, layouts, compute_dtype(config.precision))
            loss, weight, *_ = model.sum_losses(weights, jax.tree.map(lambda a: a[0], batch), None, **options)
            return loss, weight

    return evaluate


def _lay(tree: Params, shardings: Any) -> Params:
    return jax.tree.map(lax.with_sharding_constraint, tree, shardings)
