"""What a step should send over each mesh axis, by closed form, to be held against the compiled program.

Elements are those that a device sends in ZeRO's convention (Rajbhandari 2020, section 7): an all-reduce 2 for
each element of its operand; an all-gather 1 for each element of the gathered whole, a reduce-scatter 1 for
each element of the whole that is scattered, an all-to-all 1 for each element of its operand. With Psi
parameters, stages 0, 1 and 2 send 2 Psi a step, and stage 3 sends 3 Psi for each microbatch. From stage 2 on
gradients are reduced for each microbatch, since accumulators lie in shards.

Parameters' traffic holds for any model. A decoder's vocabulary is the exception that is ours: tokens travel
to the embedding's channels instead of its table, and the head is gathered once for both passes
(`jaxscale.parallel.vocab`). Traffic over `tensor` is the decoder's alone (Megatron's f and g).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import jax
from jax.sharding import NamedSharding

from jaxscale.mesh import BATCH_AXES
from jaxscale.models.remat import kept_by_name
from jaxscale.models.shape import DecoderShape
from jaxscale.sharding.rules import Axes, Leaf, iterate_leaves
from jaxscale.sharding.zero import ZERO_AXIS, Layouts, dim_axes, spec_axes
from jaxscale.training.adafactor import find_factored
from jaxscale.training.muon import find_muon_sides, plan_relay
from jaxscale.training.setup import Setup


@dataclass(frozen=True)
class ExpectedTraffic:
    """Traffic of one kind over a set of axes, for one purpose."""

    axes: Axes
    kind: str
    elements: int
    """Sent by a device in a step."""
    what: str


@dataclass(frozen=True)
class _Parameter:
    """Elements of a parameter on a device in each layout, and the axes it lies over."""

    path: str
    used: int
    gathered: int
    """In use, once gathered over `fsdp` too."""
    accumulated: int
    kept_axes: frozenset[str]
    used_axes: frozenset[str]
    gradient_axes: frozenset[str]


def expected_traffic(setup: Setup) -> list[ExpectedTraffic]:
    """Every exchange of more than a few scalars that the step calls for; axes of size 1 send nothing.

    The simulated mesh has habits of its own, which are taken into account: XLA's CPU compiler makes no
    reduce-scatter by itself, where an all-reduce stands in for it, and joins no all-reduces of a sum's terms.
    """
    parameters = _measure_parameters(setup)
    rows = [
        *_expect_gathers_a_step(setup, parameters),
        *_expect_reduction_a_step(setup, parameters),
        *_expect_zero_a_microbatch(setup, parameters),
        *_expect_optimizer(setup),
    ]
    if setup.shape is not None:
        rows += [*_expect_vocabulary(setup, setup.shape), *_expect_tensor(setup, setup.shape)]
    return [row for row in rows if row.elements]


def _measure_parameters(setup: Setup) -> list[_Parameter]:
    layouts, sizes = setup.layouts, setup.mesh.shape
    trees = (layouts.params, layouts.weights, layouts.gradients)
    measured = []
    for leaf, *shardings in zip(layouts.leaves.values(), *map(jax.tree.leaves, trees), strict=True):
        kept, used, gradient = (
            frozenset(axis for axis in spec_axes(sharding.spec) if sizes[axis] > 1) for sharding in shardings
        )
        used_elements = math.prod(shardings[1].shard_shape(leaf.shape))
        measured.append(
            _Parameter(
                path=leaf.path,
                used=used_elements,
                gathered=used_elements * (sizes[ZERO_AXIS] if ZERO_AXIS in used else 1),
                accumulated=math.prod(shardings[2].shard_shape(leaf.shape)),
                kept_axes=kept,
                used_axes=used,
                gradient_axes=gradient,
            )
        )
    return measured


def _expect_gathers_a_step(setup: Setup, parameters: list[_Parameter]) -> Iterator[ExpectedTraffic]:
    for parameter in parameters:
        axes = _in_order(setup.layouts, parameter.kept_axes - parameter.used_axes)
        if axes:
            yield ExpectedTraffic(axes, "all-gather", parameter.used, "weights for use, once a step")


def _expect_reduction_a_step(setup: Setup, parameters: list[_Parameter]) -> Iterator[ExpectedTraffic]:
    axes = setup.layouts.reduction_axes
    if not axes:
        return
    for parameter in parameters:
        scattered = parameter.kept_axes - parameter.gradient_axes == set(axes)
        yield _reduce(setup, axes, parameter.accumulated, scattered, "gradients, once a step")


def _expect_zero_a_microbatch(setup: Setup, parameters: list[_Parameter]) -> Iterator[ExpectedTraffic]:
    """What crosses `fsdp` for each microbatch: from stage 2 on gradients, in stage 3 weights too."""
    times = setup.config.batch.microbatches
    if setup.mesh.shape[ZERO_AXIS] == 1 or ZERO_AXIS in setup.layouts.reduction_axes:
        return
    axes = (ZERO_AXIS,)
    tables = _find_tables(setup.shape)
    for parameter in parameters:
        is_looked_up, is_head = parameter.path in tables, parameter.path == _head_path(setup.shape)
        if ZERO_AXIS in parameter.used_axes and (is_head or not is_looked_up):
            # XLA's CPU compiler takes the head's gather out of the loop.
            gathers = 2 * times if not is_head else 1 if setup.platform == "cpu" else times
            yield ExpectedTraffic(
                axes, "all-gather", gathers * parameter.gathered, "weights, for each microbatch"
            )
        if is_head:  # ours to schedule, so that even the CPU compiler scatters
            yield ExpectedTraffic(
                axes, "reduce-scatter", times * parameter.gathered, "the head's gradient, for each microbatch"
            )
        elif not is_looked_up:
            scattered = ZERO_AXIS in parameter.gradient_axes
            yield _reduce(
                setup, axes, times * parameter.gathered, scattered, "gradients, for each microbatch"
            )


def _expect_vocabulary(setup: Setup, shape: DecoderShape) -> Iterator[ExpectedTraffic]:
    """Tokens that travel to the channels of a table, there and back in each pass."""
    if setup.mesh.shape[ZERO_AXIS] == 1 or ZERO_AXIS in setup.layouts.reduction_axes:
        return
    if ZERO_AXIS not in setup.strategy["embed"]:
        return
    tokens = _tokens_a_device(setup) * setup.config.batch.microbatches
    # Forward once for each table; backward once for all, which share their gradient.
    exchanges = len(_find_tables(shape)) + 1
    yield ExpectedTraffic((ZERO_AXIS,), "all-to-all", exchanges * tokens * shape.embed, "embedded tokens")


def _expect_tensor(setup: Setup, shape: DecoderShape) -> Iterator[ExpectedTraffic]:
    ways, axes = setup.mesh.shape["tensor"], ("tensor",)
    if ways == 1 or any("tensor" not in setup.strategy[dim] for dim in ("heads", "kv_heads", "mlp", "vocab")):
        return
    microbatches = setup.config.batch.microbatches
    tokens = _tokens_a_device(setup)
    # Attention and MLP each sum once in the forward pass and once in the backward pass; where attention's
    # output is computed again it is summed once more. The MLP's is not needed again.
    sums_a_layer = 4 if kept_by_name(setup.config.remat, "attention_out") else 5
    if setup.platform == "cpu":  # sums the gradients from q, k, v, and from gate and up, each by itself
        sums_a_layer += 3 if shape.family == "llama" else 2
    yield ExpectedTraffic(
        axes,
        "all-reduce",
        2 * microbatches * tokens * shape.embed * sums_a_layer * shape.layers,
        "activations of the layers",
    )
    tables = len(_find_tables(shape))
    yield ExpectedTraffic(
        axes,
        "all-reduce",
        2 * microbatches * tokens * shape.embed * (tables + 1),
        "embedded tokens, and the gradient of the final hidden states",
    )
    yield ExpectedTraffic(
        axes, "all-gather", 3 * ways * microbatches * tokens, "statistics of the cross-entropy"
    )


def _expect_optimizer(setup: Setup) -> Iterator[ExpectedTraffic]:
    """What the update sends beside its gradients: an optimizer that goes element by element sends nothing."""
    expect = {"muon": _expect_muon, "adafactor": _expect_adafactor}.get(setup.config.optimizer.name)
    if expect is None:
        return
    for path, sharding in iterate_leaves(setup.layouts.moments):
        yield from expect(setup, setup.layouts.leaves[path], sharding)


def _expect_muon(setup: Setup, leaf: Leaf, sharding: NamedSharding) -> Iterator[ExpectedTraffic]:
    """Each matrix is brought together where it is orthogonalised; its parts then find their way back."""
    sides = find_muon_sides(leaf)
    if sides is None:
        return
    relay = plan_relay(leaf.shape, sides, sharding)
    local = sharding.shard_shape(leaf.shape)
    part = math.prod(local[dim] for dim in (*sides.rows, *sides.columns))
    _, rows, columns = sides.count(leaf.shape)
    if relay.exchanged:
        yield ExpectedTraffic(
            relay.exchanged, "all-to-all", 2 * relay.matrices * part, "layers to orthogonalise, and back"
        )
    if relay.gathered:
        yield ExpectedTraffic(
            relay.gathered, "all-gather", relay.turns * rows * columns, "matrices to orthogonalise"
        )


def _expect_adafactor(setup: Setup, leaf: Leaf, sharding: NamedSharding) -> Iterator[ExpectedTraffic]:
    """Means over a side that lies in shards."""
    sides = find_factored(leaf, setup.config.optimizer.settings["min_factored"])
    if sides is None:
        return
    laid, local = dim_axes(sharding.spec, len(leaf.shape)), sharding.shard_shape(leaf.shape)
    for averaged, kept in ((sides.columns, sides.rows), (sides.rows, sides.columns)):
        over = frozenset(axis for dim in averaged for axis in laid[dim] if setup.mesh.shape[axis] > 1)
        if over:
            elements = math.prod(local[dim] for dim in (*sides.stacked, *kept))
            axes = _in_order(setup.layouts, over)
            yield ExpectedTraffic(axes, "all-reduce", 2 * elements, "rows and columns of second moments")


def _reduce(setup: Setup, axes: Axes, elements: int, scattered: bool, what: str) -> ExpectedTraffic:
    if scattered and setup.platform != "cpu":
        return ExpectedTraffic(axes, "reduce-scatter", elements, what)
    return ExpectedTraffic(axes, "all-reduce", 2 * elements, what)


def _find_tables(shape: DecoderShape | None) -> tuple[str, ...]:
    """Paths of the tables that tokens or positions are looked up in."""
    if shape is None:
        return ()
    return ("embed/table", "positions/table") if shape.family == "gpt2" else ("embed/table",)


def _head_path(shape: DecoderShape | None) -> str | None:
    if shape is None:
        return None
    return "embed/table" if shape.tied else "head/table"


def _tokens_a_device(setup: Setup) -> int:
    """Tokens of a microbatch on one device."""
    batch = setup.config.batch
    shards = math.prod(setup.mesh.shape[axis] for axis in BATCH_AXES)
    return batch.sequences // batch.microbatches // shards * batch.length


def _in_order(layouts: Layouts, axes: frozenset[str]) -> Axes:
    return tuple(axis for axis in layouts.mesh.axis_names if axis in axes)
