"""The step: microbatches in a scan, one reduction over `data`, one update.

An outer region is manual over the axes that gradients are reduced over once a step (`data`, and whichever
batch axes no gradient lies over); `fsdp` and `tensor` stay automatic inside it, so the compiler overlaps
their traffic with the matmuls. Left to plain `jit`, XLA reduces over `data` per layer and microbatch.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from jaxscale.config import Config
from jaxscale.mesh import BATCH_AXES
from jaxscale.models.build import Batch, Model, Params
from jaxscale.numerics.policy import DTYPES, matmul_precision
from jaxscale.sharding.zero import Layouts, spec_axes
from jaxscale.training.optimizer import clip_gradients
from jaxscale.training.schedule import learning_rate
from jaxscale.training.state import TrainState

Metrics = dict[str, jax.Array]
Sums = tuple[jax.Array, jax.Array, Params]  # loss sum, weight sum, gradient sums

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


def make_step(
    model: Model, optimizer: optax.GradientTransformation, layouts: Layouts, config: Config
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """The function of one step, to be compiled once with the state donated.

    Loss and gradients are sums over tokens, divided once by the weight of the whole step. A step with no
    counted token, or whose loss or gradient norm is not finite, changes nothing but the data position and the
    counts of skips.
    """
    sum_gradients = make_gradient_sums(model, layouts, DTYPES[config.precision.accumulate])
    update = _make_update(optimizer, layouts, config)

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        with matmul_precision(config.precision):
            loss_sum, weight_sum, gradient_sums = sum_gradients(state.params, batch)
        weight = jnp.maximum(weight_sum, 1.0)
        # The optimizer works in the layout of its moments; below ZeRO stage 2 this is where each device
        # takes its part of the reduced gradient.
        gradients = jax.tree.map(lambda g: g / weight, _lay(gradient_sums, layouts.moments))
        gradients, norm = clip_gradients(gradients, config.optimizer.clip_norm)
        loss, rate = loss_sum / weight, _find_rate(state, config)
        good = jnp.isfinite(loss) & jnp.isfinite(norm) & (weight_sum > 0)
        # A branch, not a selection of every element: the state left alone costs nothing, and less memory.
        state = lax.cond(good, update, _count_skip, state, gradients, rate)
        state = replace(state, sequences=state.sequences + _sequences(config))
        metrics = {
            "loss": loss,
            "grad_norm": norm,
            "lr": rate,
            "counted_tokens": weight_sum,
            "skipped": ~good,
            "skips_in_row": state.skips_in_row,
        }
        return state, metrics

    return step


def _make_update(
    optimizer: optax.GradientTransformation, layouts: Layouts, config: Config
) -> Callable[[TrainState, Params, jax.Array], TrainState]:
    def update(state: TrainState, gradients: Params, rate: jax.Array) -> TrainState:
        """The state after one update, data position aside."""
        params = _lay(state.params, layouts.moments)
        updates, moments = optimizer.update(gradients, state.moments, params)
        params = jax.tree.map(lambda p, u: (p - rate * u).astype(p.dtype), params, updates)
        return replace(
            state,
            params=_lay(params, layouts.params),
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


def make_gradient_sums(model: Model, layouts: Layouts, dtype: jnp.dtype) -> Callable[[Params, Batch], Sums]:
    """Sums of losses, weights and gradients over a whole step's batch [M, B, T], reduced once, in fp32.

    Args:
      dtype: of the accumulators.
    """
    manual = layouts.reduction_axes

    def sum_microbatch(params: Params, microbatch: Batch) -> Sums:
        (loss, weight), gradients = jax.value_and_grad(model.sum_losses, has_aux=True)(params, microbatch)
        return loss, weight, _lay_inside(jax.tree.map(lambda g: g.astype(dtype), gradients), layouts)

    def accumulate(params: Params, batch: Batch) -> Sums:
        params = model.cast(params)
        if next(iter(batch.values())).shape[0] == 1:  # no accumulator beside the one gradient
            sums = sum_microbatch(params, jax.tree.map(lambda a: a[0], batch))
        else:

            def add(carry: Sums, microbatch: Batch) -> tuple[Sums, None]:
                return jax.tree.map(jnp.add, carry, sum_microbatch(params, microbatch)), None

            zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, dtype), params)
            start = (jnp.zeros((), jnp.float32), jnp.zeros((), jnp.float32), _lay_inside(zeros, layouts))
            sums, _ = lax.scan(add, start, batch)
        sums = jax.tree.map(lambda a: a.astype(jnp.float32), sums)
        return lax.psum(sums, manual) if manual else sums

    if not manual:
        return accumulate
    return jax.shard_map(
        accumulate,
        mesh=layouts.mesh,
        in_specs=(PartitionSpec(), PartitionSpec(None, manual)),
        out_specs=PartitionSpec(),
        axis_names=set(manual),
        check_vma=False,
    )


def make_evaluation(model: Model, config: Config) -> Callable[[Params, Batch], tuple]:
    """Sum of losses and of weights over one batch [B, T] of evaluation."""

    def evaluate(params: Params, batch: Batch) -> tuple[jax.Array, jax.Array]:
        with matmul_precision(config.precision):
            return model.sum_losses(params, jax.tree.map(lambda a: a[0], batch))

    return evaluate


def _lay(tree: Params, shardings: Any) -> Params:
    return jax.tree.map(lax.with_sharding_constraint, tree, shardings)


def _lay_inside(tree: Params, layouts: Layouts) -> Params:
    """Pins accumulators to the gradients' layout from inside the region, where it has no manual axis."""

    def pin(leaf: jax.Array, sharding: NamedSharding) -> jax.Array:
        return lax.with_sharding_constraint(leaf, sharding.spec) if spec_axes(sharding.spec) else leaf

    return jax.tree.map(pin, tree, layouts.gradients)
