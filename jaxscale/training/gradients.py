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
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from jaxscale.mesh import BATCH_AXES
from jaxscale.models.model import Batch, ExpertSums, Model, Params, RouterInputs, Routers
from jaxscale.numerics.draw import make_key
from jaxscale.numerics.fp8 import Fp8Weights
from jaxscale.numerics.policy import widen
from jaxscale.sharding.activations import take_axes
from jaxscale.sharding.rules import Axes, iterate_leaves
from jaxscale.sharding.zero import Layouts, spec_axes


class Sums(NamedTuple):
    """What microbatches and shards add up to."""

    loss: jax.Array
    weight: jax.Array
    gradients: Params
    amaxes: Any
    """Largest magnitudes of what is in fp8 [layers, 3], by kernel: the one part whose whole is a maximum."""
    experts: ExpertSums | None
    """Of a model with routers."""


class Use(NamedTuple):
    """What a step's microbatches all use beside the weights."""

    fp8: Fp8Weights | None
    """What of the weights is in fp8."""
    loss_factor: jax.Array | None
    """Factor of the loss that is differentiated: gradient sums come multiplied by it, losses do not."""
    routers: RouterInputs | None = None
    """Of a model with routers."""
    penalty_factor: jax.Array | None = None
    """Weight of the step over its routed tokens: losses of routers are means over the latter."""


SumMicrobatch = Callable[[Params, Use, Batch], Sums]
Count = Callable[[Params, Use, Batch], Use] | None


def make_gradient_sums(model: Model, layouts: Layouts, dtype: jnp.dtype, seed: int) -> SumMicrobatch:
    """Sums of losses, weights and gradients over a whole step's batch [M, B, T], reduced once, in fp32.

    The function takes weights in use, what else the microbatches use, and a batch whose `sequences` number
    its sequences in the run.

    Args:
      dtype: of the accumulators.
    """

    def sum_microbatch(weights: Params, use: Use, microbatch: Batch) -> Sums:
        arrays, keys_B = _draw_keys(microbatch, seed)

        def sum_losses(weights: Params, scales: Any) -> tuple[jax.Array, tuple]:
            sums = model.sum_losses(weights, arrays, keys_B, **_list_options(use, scales))
            loss, weight, experts = sums if model.routers else (*sums, None)
            whole = loss
            if model.routers is not None:
                assert use.penalty_factor is not None
                whole = loss + use.penalty_factor * sum_penalty(model.routers, experts)
            factor = use.loss_factor
            whole = whole if factor is None else whole.astype(widen(whole.dtype)) * factor
            return whole, (loss, weight, experts)

        differentiate = jax.grad(sum_losses, argnums=(0, 1), has_aux=True)
        scales, wide = use.fp8.scales if use.fp8 else None, widen(dtype)
        (gradients, amaxes), (loss, weight, experts) = differentiate(weights, scales)
        return Sums(loss.astype(wide), weight.astype(wide), gradients, amaxes, experts)

    scan = partial(_scan_microbatches, layouts=layouts, dtype=dtype, routers=model.routers)
    if layouts.reduction_axes and model.reduction == "groups":
        return _reduce_groups(sum_microbatch, layouts, scan)
    accumulate = scan(sum_microbatch, groups=(), count=_make_counter(model, layouts, seed))
    return _reduce_in_region(accumulate, layouts) if layouts.reduction_axes else accumulate


def sum_penalty(routers: Routers, experts: ExpertSums) -> jax.Array:
    """What routers add to the loss, summed over routed tokens and layers."""
    return routers.balance_coef * experts.balance.sum() + routers.z_coef * experts.z.sum()


def _draw_keys(microbatch: Batch, seed: int) -> tuple[Batch, jax.Array]:
    """The arrays that a model reads, and a key for each of their sequences."""
    arrays = dict(microbatch)
    numbers = arrays.pop("sequences")
    return arrays, jax.vmap(lambda number: jax.random.fold_in(make_key(seed), number))(numbers)


def _list_options(use: Use, scales: Any) -> dict[str, Any]:
    options: dict[str, Any] = {"fp8": use.fp8._replace(scales=scales)} if use.fp8 else {}
    return options if use.routers is None else options | {"routers": use.routers}


def _make_counter(model: Model, layouts: Layouts, seed: int) -> Count:
    """Hands the load of the whole step on to its routers; None where nobody asks for it.

    It takes a forward pass of every microbatch: what the load is, is known only when all have chosen.
    """
    routers = model.routers
    if routers is None or not routers.needs_load:
        return None

    def count(weights: Params, use: Use, batch: Batch) -> Use:
        def add(load: jax.Array, microbatch: Batch) -> tuple[jax.Array, None]:
            arrays, keys_B = _draw_keys(microbatch, seed)
            options = _list_options(use, use.fp8.scales if use.fp8 else None)
            return load + routers.count_load(weights, arrays, keys_B, **options), None

        load, _ = lax.scan(add, jnp.zeros((routers.layers, routers.experts), jnp.float32), batch)
        load = lax.psum(load, layouts.reduction_axes) if layouts.reduction_axes else load
        assert use.routers is not None
        return use._replace(routers=use.routers._replace(load=load))

    return count


def _reduce_in_region(accumulate: SumMicrobatch, layouts: Layouts) -> SumMicrobatch:
    manual = layouts.reduction_axes
    specs = jax.tree.map(lambda sharding: layouts.restrict(sharding.spec, to_reduction=True), layouts.weights)
    flat = dict(iterate_leaves(specs))
    whole: Any = PartitionSpec()

    def accumulate_and_reduce(weights: Params, use: Use, batch: Batch) -> Sums:
        return _reduce(accumulate(weights, use, batch), specs, manual)

    def run(weights: Params, use: Use, batch: Batch) -> Sums:
        uses: Any = Use(None, whole, whole, whole)
        if use.fp8 is not None:
            kernels: Any = {path: flat[path] for path in use.fp8.kernels}
            uses = uses._replace(fp8=Fp8Weights(kernels, whole))
        return jax.shard_map(
            accumulate_and_reduce,
            mesh=layouts.mesh,
            in_specs=(specs, uses, PartitionSpec(None, manual)),
            out_specs=Sums(whole, whole, specs, whole, whole),
            axis_names=set(manual),
            check_vma=False,
        )(weights, use, batch)

    return run


def _reduce(sums: Sums, specs: Params, manual: Axes) -> Sums:
    """Sums over the manual axes; a gradient over those that it does not lie over itself.

    What is summed over all of them crosses at once.
    """
    leaves, structure = jax.tree.flatten(sums.gradients)
    own = [frozenset(spec_axes(spec)) for spec in jax.tree.leaves(specs)]
    wide = [leaf.astype(widen(leaf.dtype)) for leaf in leaves]
    shared = [None if axes else leaf for leaf, axes in zip(wide, own, strict=True)]
    gradients = jax.tree.unflatten(structure, shared)
    whole = lax.psum(sums._replace(gradients=gradients, amaxes=None), manual)
    reduced = iter(jax.tree.leaves(whole.gradients))
    for index, axes in enumerate(own):
        left = tuple(axis for axis in manual if axis not in axes)
        if not axes:
            leaves[index] = next(reduced)
        elif left:
            leaves[index] = lax.psum(wide[index], left)
    return whole._replace(
        gradients=jax.tree.unflatten(structure, leaves), amaxes=lax.pmax(sums.amaxes, manual)
    )


def _reduce_groups(
    sum_microbatch: SumMicrobatch, layouts: Layouts, scan: Callable[..., SumMicrobatch]
) -> SumMicrobatch:
    groups = layouts.reduction_axes
    vmapped = jax.vmap(sum_microbatch, in_axes=(None, None, 0), spmd_axis_name=groups)

    def sum_group(weights: Params, use: Use, microbatch: Batch) -> Sums:
        with take_axes(groups):
            return vmapped(weights, use, microbatch)

    accumulate = scan(sum_group, groups=groups, count=None)

    def accumulate_and_reduce(weights: Params, use: Use, batch: Batch) -> Sums:
        grouped = {name: _group_sequences(array, layouts) for name, array in batch.items()}
        sums = accumulate(weights, use, grouped)
        amaxes = jax.tree.map(lambda amaxes: amaxes.max(0), sums.amaxes)
        whole = jax.tree.map(lambda a: a.astype(widen(a.dtype)).sum(0), sums._replace(amaxes=None))
        return whole._replace(amaxes=amaxes)

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
    sum_microbatch: SumMicrobatch,
    *,
    layouts: Layouts,
    dtype: jnp.dtype,
    routers: Routers | None,
    groups: Axes,
    count: Count,
) -> SumMicrobatch:
    """Sums over the leading dim of the batch, in accumulators of `dtype`.

    The gradient of one microbatch alone comes as the backward pass made it, in the format of the weights.
    """

    def visit(weights: Params, use: Use, microbatch: Batch) -> Sums:
        sums = sum_microbatch(weights, use, microbatch)
        return sums._replace(gradients=_pin(sums.gradients, layouts, groups))

    def accumulate(weights: Params, use: Use, batch: Batch) -> Sums:
        if count is not None:
            use = count(weights, use, batch)
        if next(iter(batch.values())).shape[0] == 1:  # no accumulator beside the one gradient
            sums = visit(weights, use, jax.tree.map(lambda a: a[0], batch))
        else:

            def add(carry: Sums, microbatch: Batch) -> tuple[Sums, None]:
                sums = visit(weights, use, microbatch)
                narrow = jax.tree.map(lambda g: g.astype(dtype), sums.gradients)
                return _join(carry, sums._replace(gradients=narrow)), None

            lead = (math.prod(layouts.mesh.shape[axis] for axis in groups),) if groups else ()
            zeros = jax.tree.map(lambda w: jnp.zeros((*lead, *w.shape), dtype), weights)
            nothing = jnp.zeros(lead, widen(dtype))
            scales = use.fp8.scales if use.fp8 else None
            amaxes = jax.tree.map(lambda s: jnp.zeros((*lead, *s.shape), s.dtype), scales)
            experts = None if routers is None else _zero_experts(routers, widen(dtype))
            carry = Sums(nothing, nothing, _pin(zeros, layouts, groups), amaxes, experts)
            sums, _ = lax.scan(add, carry, batch)
        return sums

    return accumulate


def _zero_experts(routers: Routers, dtype: jnp.dtype) -> ExpertSums:
    load = jnp.zeros((routers.layers, routers.experts), jnp.float32)
    dropped, nothing = jnp.zeros(routers.layers, jnp.float32), jnp.zeros(routers.layers, dtype)
    return ExpertSums(load, dropped, nothing, nothing, nothing)


def _join(a: Sums, b: Sums) -> Sums:
    amaxes = jax.tree.map(jnp.maximum, a.amaxes, b.amaxes)
    return jax.tree.map(jnp.add, a._replace(amaxes=None), b._replace(amaxes=None))._replace(amaxes=amaxes)


def _pin(tree: Params, layouts: Layouts, groups: tuple[str, ...]) -> Params:
    """Pins accumulators to the gradients' layout, of which no axis is manual; groups are a first dim more.

    Also those that are whole: left open, the partitioner may cut them where it likes.
    """

    def pin(leaf: jax.Array, sharding: NamedSharding) -> jax.Array:
        spec = layouts.restrict(sharding.spec, to_reduction=False)
        return lax.with_sharding_constraint(leaf, PartitionSpec(groups, *spec) if groups else spec)

    return jax.tree.map(pin, tree, layouts.gradients)
