"""Sums of gradients over the microbatches of a step, reduced over the batch axes once.

Gradients lie over `fsdp` from ZeRO stage 2 on; over every other batch axis they wait, unreduced, for the end
of the step. Left to plain `jit`, XLA reduces them per layer and microbatch. There are two ways to make them
wait (`Model.reduction`):

*region*: a `shard_map` that is manual over the reduction axes, the rest automatic inside it. For models
whose gathers stand in inner regions of their own: XLA's compilers die on one that they have to partition
inside a manual region.

*groups*: a `vmap` over the shards of the batch. Each has gradients of its own, in arrays with one more dim
that lies over the reduction axes; their sum over that dim is the reduction. For any model.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from jaxscale.mesh import BATCH_AXES
from jaxscale.models.model import Batch, Model, Params
from jaxscale.numerics.draw import make_key
from jaxscale.numerics.fp8 import Fp8Weights
from jaxscale.numerics.policy import widen
from jaxscale.sharding.activations import take_axes
from jaxscale.sharding.zero import Layouts


class Sums(NamedTuple):
    """What microbatches and shards add up to."""

    loss: jax.Array
    weight: jax.Array
    gradients: Params
    amaxes: Any
    """Largest magnitudes of what is in fp8 [layers, 3], by kernel: the one part whose whole is a maximum."""


class Use(NamedTuple):
    """What a step's microbatches all use beside the weights."""

    fp8: Fp8Weights | None
    """What of the weights is in fp8."""
    loss_factor: jax.Array | None
    """Factor of the loss that is differentiated: gradient sums come multiplied by it, losses do not."""


SumMicrobatch = Callable[[Params, Use, Batch], Sums]


def make_gradient_sums(model: Model, layouts: Layouts, dtype: jnp.dtype, seed: int) -> SumMicrobatch:
    """Sums of losses, weights and gradients over a whole step's batch [M, B, T], reduced once, in fp32.

    The function takes weights in use, what else the microbatches use, and a batch whose `sequences` number
    its sequences in the run.

    Args:
      dtype: of the accumulators.
    """

    def sum_microbatch(weights: Params, use: Use, microbatch: Batch) -> Sums:
        arrays = dict(microbatch)
        keys_B = jax.vmap(lambda number: jax.random.fold_in(make_key(seed), number))(arrays.pop("sequences"))

        def sum_losses(weights: Params, scales: Any) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
            options = {"fp8": use.fp8._replace(scales=scales)} if use.fp8 else {}
            loss, weight = model.sum_losses(weights, arrays, keys_B, **options)
            factor = use.loss_factor
            return loss if factor is None else loss.astype(widen(loss.dtype)) * factor, (loss, weight)

        differentiate = jax.grad(sum_losses, argnums=(0, 1), has_aux=True)
        (gradients, amaxes), (loss, weight) = differentiate(weights, use.fp8.scales if use.fp8 else None)
        return Sums(loss.astype(widen(dtype)), weight.astype(widen(dtype)), gradients, amaxes)

    if not layouts.reduction_axes:
        return _scan_microbatches(sum_microbatch, layouts, dtype, groups=())
    if model.reduction == "region":
        return _reduce_in_region(sum_microbatch, layouts, dtype)
    return _reduce_groups(sum_microbatch, layouts, dtype)


def _reduce_in_region(sum_microbatch: SumMicrobatch, layouts: Layouts, dtype: jnp.dtype) -> SumMicrobatch:
    manual = layouts.reduction_axes
    accumulate = _scan_microbatches(sum_microbatch, layouts, dtype, groups=())

    def accumulate_and_reduce(weights: Params, use: Use, batch: Batch) -> Sums:
        sums = accumulate(weights, use, batch)
        amaxes = lax.pmax(sums.amaxes, manual)
        return lax.psum(sums._replace(amaxes=None), manual)._replace(amaxes=amaxes)

    return jax.shard_map(
        accumulate_and_reduce,
        mesh=layouts.mesh,
        in_specs=(PartitionSpec(), PartitionSpec(), PartitionSpec(None, manual)),
        out_specs=PartitionSpec(),
        axis_names=set(manual),
        check_vma=False,
    )


def _reduce_groups(sum_microbatch: SumMicrobatch, layouts: Layouts, dtype: jnp.dtype) -> SumMicrobatch:
    groups = layouts.reduction_axes
    vmapped = jax.vmap(sum_microbatch, in_axes=(None, None, 0), spmd_axis_name=groups)

    def sum_group(weights: Params, use: Use, microbatch: Batch) -> Sums:
        with take_axes(groups):
            return vmapped(weights, use, microbatch)

    accumulate = _scan_microbatches(sum_group, layouts, dtype, groups=groups)

    def accumulate_and_reduce(weights: Params, use: Use, batch: Batch) -> Sums:
        grouped = {name: _group_sequences(array, layouts) for name, array in batch.items()}
        sums = accumulate(weights, use, grouped)
        amaxes = jax.tree.map(lambda amaxes: amaxes.max(0), sums.amaxes)
        return jax.tree.map(lambda sums: sums.sum(0), sums._replace(amaxes=None))._replace(amaxes=amaxes)

    return accumulate_and_reduce


def _group_sequences(array: jax.Array, layouts: Layouts) -> jax.Array:
    """[M, B, ...] as [M, G, B/G, ...]: the sequences by their place on the reduction axes, nothing moved."""
    sizes = {axis: layouts.mesh.shape[axis] for axis in BATCH_AXES if layouts.mesh.shape[axis] > 1}
    groups = layouts.reduction_axes
    others = tuple(axis for axis in sizes if axis not in groups)
    microbatches, rows, *rest = array.shape
    split = array.reshape(microbatches, *sizes.values(), rows // math.prod(sizes.values()), *rest)
    order = [1 + list(sizes).index(axis) for axis in groups + others]
    split = split.transpose(0, *order, *range(1 + len(sizes), split.ndim))
    grouped = split.reshape(microbatches, math.prod(sizes[axis] for axis in groups), -1, *rest)
    spec = PartitionSpec(None, groups, others or None)
    return lax.with_sharding_constraint(grouped, NamedSharding(layouts.mesh, spec))


def _scan_microbatches(
    sum_microbatch: SumMicrobatch, layouts: Layouts, dtype: jnp.dtype, *, groups: tuple[str, ...]
) -> SumMicrobatch:
    """Sums over the leading dim of the batch, in accumulators of `dtype`; the sums come in fp32 at least."""

    def visit(weights: Params, use: Use, microbatch: Batch) -> Sums:
        sums = sum_microbatch(weights, use, microbatch)
        narrow = jax.tree.map(lambda g: g.astype(dtype), sums.gradients)
        return sums._replace(gradients=_pin(narrow, layouts, groups))

    def accumulate(weights: Params, use: Use, batch: Batch) -> Sums:
        if next(iter(batch.values())).shape[0] == 1:  # no accumulator beside the one gradient
            sums = visit(weights, use, jax.tree.map(lambda a: a[0], batch))
        else:

            def add(carry: Sums, microbatch: Batch) -> tuple[Sums, None]:
                return _join(carry, visit(weights, use, microbatch)), None

            lead = (math.prod(layouts.mesh.shape[axis] for axis in groups),) if groups else ()
            zeros = jax.tree.map(lambda w: jnp.zeros((*lead, *w.shape), dtype), weights)
            nothing = jnp.zeros(lead, widen(dtype))
            scales = use.fp8.scales if use.fp8 else None
            amaxes = jax.tree.map(lambda s: jnp.zeros((*lead, *s.shape), s.dtype), scales)
            sums, _ = lax.scan(add, Sums(nothing, nothing, _pin(zeros, layouts, groups), amaxes), batch)
        return jax.tree.map(lambda a: a.astype(widen(a.dtype)), sums)

    return accumulate


def _join(a: Sums, b: Sums) -> Sums:
    amaxes = jax.tree.map(jnp.maximum, a.amaxes, b.amaxes)
    return jax.tree.map(jnp.add, a._replace(amaxes=None), b._replace(amaxes=None))._replace(amaxes=amaxes)


def _pin(tree: Params, layouts: Layouts, groups: tuple[str, ...]) -> Params:
    """Pins accumulators to the gradients' layout, of which no axis is manual; groups are a first dim more.

    Also those that are whole: left open, the partitioner may cut them where it likes.
    """

    def pin(leaf: jax.Array, sharding: NamedSharding) -> jax.Array:
        spec = PartitionSpec(groups, *sharding.spec) if groups else sharding.spec
        return lax.with_sharding_constraint(leaf, spec)

    return jax.tree.map(pin, tree, layouts.gradients)
