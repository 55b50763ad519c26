"""What a step should send over each mesh axis, by closed form, to be held against the compiled program.

Elements are those that a device sends in ZeRO's convention (Rajbhandari 2020, section 7): an all-reduce 2 for
each element of its operand; an all-gather 1 for each element of the gathered whole, a reduce-scatter 1 for
each element of the whole that is scattered, an all-to-all 1 for each element of its operand. With Psi
parameters, stages 0, 1 and 2 send 2 Psi a step, and stage 3 sends 3 Psi for each microbatch. From stage 2 on
gradients are reduced for each microbatch, since accumulators lie in shards.

Parameters' traffic holds for any model. A decoder's vocabulary is the exception that is ours: tokens travel
to the embedding's channels instead of its table, and the head is gathered once for both passes
(`jaxscale.parallel.vocab`). Traffic over `tensor` is the decoder's alone (Megatron's f and g).

Experts lie over `expert`, so their gradients are never reduced over it; tokens travel there instead, to their
experts and back, and once more each way with their gradients. A balance loss of the scope `step` takes one
more forward pass of every microbatch, and all that a forward pass sends. The loads, E numbers a layer, are
not counted.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import jax
from jax.sharding import NamedSharding

from jaxscale.mesh import BATCH_AXES
from jaxscale.models.remat import kept_by_name
from jaxscale.models.shape import DecoderShape, ExpertShape
from jaxscale.parallel.capacity import count_slots
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
    is_split: bool
    """Whether the model takes it apart over devices by itself (`Model.split_dims`), as experts' kernels."""
    is_router: bool
    layers: int
    """Of a stacked parameter; 1 of any other."""
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
        rows += [*_expect_routers(setup, setup.shape), *_expect_dispatch(setup, setup.shape)]
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
                is_split=not layouts.split_dims.isdisjoint(leaf.dims),
                is_router="router" in leaf.dims,
                layers=leaf.shape[0] if "layers" in leaf.dims[:1] else 1,
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
    """Over the batch axes that wait for the end of the step, less those that a gradient lies over itself."""
    for parameter in parameters:
        waiting = frozenset(setup.layouts.reduction_axes) - parameter.gradient_axes
        if waiting:
            axes = _in_order(setup.layouts, waiting)
            scattered = parameter.kept_axes - parameter.gradient_axes == waiting
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
            yield ExpectedTraffic(
                axes,
                "all-gather",
                _count_gathers(setup, parameter, is_head=is_head) * parameter.gathered // parameter.layers,
                "weights, for each microbatch",
            )
        if is_head or parameter.is_split:  # ours to schedule, so that even the CPU compiler scatters
            what = "the head's gradient" if is_head else "experts' gradients"
            yield ExpectedTraffic(
                axes, "reduce-scatter", times * parameter.gathered, f"{what}, for each microbatch"
            )
        elif not is_looked_up and not parameter.is_router:
            scattered = ZERO_AXIS in parameter.gradient_axes
            yield _reduce(
                setup, axes, times * parameter.gathered, scattered, "gradients, for each microbatch"
            )


def _count_gathers(setup: Setup, parameter: _Parameter, *, is_head: bool) -> int:
    """Layers of a parameter that a step gathers: the head for both passes at once, others for each pass."""
    uses = 1 if is_head else 2
    times, counted = setup.config.batch.microbatches, 0 if is_head else _count_extra_passes(setup)
    # XLA's CPU compiler takes a gather that stands in no loop of layers out of the loop of microbatches.
    alone = 0
    if setup.platform == "cpu":
        alone = 1 if is_head else _count_unlooped(setup.shape, parameter.path)
    in_loops = parameter.layers - alone
    return in_loops * (uses * times + counted) + alone * (uses + bool(counted))


def _count_unlooped(shape: DecoderShape | None, path: str) -> int:
    """Layers of a stacked parameter whose loop runs once (`jaxscale.models.stack`), which is then no loop."""
    stack = path.partition("/")[0]
    if shape is None:
        return 0
    if shape.experts is not None and stack == "dense_layers":
        between = shape.experts.every - 1 if shape.expert_layers == 1 else 0
        return between + (shape.experts.first_dense == 1)
    depth = {"layers": shape.layers, "expert_layers": shape.expert_layers}.get(stack)
    return 1 if depth == 1 else 0


def _count_extra_passes(setup: Setup) -> int:
    """Forward passes of a step that only count the load of its experts."""
    routers = setup.model.routers
    return setup.config.batch.microbatches if routers is not None and routers.needs_load else 0


def _expect_vocabulary(setup: Setup, shape: DecoderShape) -> Iterator[ExpectedTraffic]:
    """Tokens that travel to the channels of a table, there and back in each pass."""
    if setup.mesh.shape[ZERO_AXIS] == 1 or ZERO_AXIS in setup.layouts.reduction_axes:
        return
    if ZERO_AXIS not in setup.strategy["embed"]:
        return
    times, tables = setup.config.batch.microbatches, len(_find_tables(shape))
    # Forward once for each table; backward once for all, which share their gradient.
    exchanges = (tables + 1) * times + tables * _count_extra_passes(setup)
    elements = exchanges * _tokens_a_device(setup) * shape.embed
    yield ExpectedTraffic((ZERO_AXIS,), "all-to-all", elements, "embedded tokens")


def _expect_tensor(setup: Setup, shape: DecoderShape) -> Iterator[ExpectedTraffic]:
    ways, axes = setup.mesh.shape["tensor"], ("tensor",)
    if ways == 1 or any("tensor" not in setup.strategy[dim] for dim in ("heads", "kv_heads", "mlp", "vocab")):
        return
    microbatches, counted = setup.config.batch.microbatches, _count_extra_passes(setup)
    tokens, tables = _tokens_a_device(setup), len(_find_tables(shape))
    sums = microbatches * _count_sums(setup, shape) + counted * (2 * shape.layers + _count_shared(shape))
    yield ExpectedTraffic(axes, "all-reduce", 2 * tokens * shape.embed * sums, "activations of the layers")
    yield ExpectedTraffic(
        axes,
        "all-reduce",
        2 * tokens * shape.embed * (microbatches * (tables + 1) + counted * tables),
        "embedded tokens, and the gradient of the final hidden states",
    )
    yield ExpectedTraffic(
        axes, "all-gather", 3 * ways * microbatches * tokens, "statistics of the cross-entropy"
    )


def _count_sums(setup: Setup, shape: DecoderShape) -> int:
    """Activations [tokens, D] that a microbatch sums over `tensor` in all layers."""
    # Attention and MLP, or experts, each sum once in the forward pass and once in the backward pass; where
    # attention's output is computed again it is summed once more. The others' is not needed again.
    again = 0 if kept_by_name(setup.config.remat, "attention_out") else 1
    sums = (4 + again) * shape.layers + 2 * _count_shared(shape)
    if setup.platform == "cpu":  # sums the gradients from q, k, v, and from gate and up, each by itself
        sums += 2 * shape.layers
        if shape.family == "llama":
            sums += shape.dense_layers + _count_shared(shape)
    return sums


def _count_shared(shape: DecoderShape) -> int:
    """Layers with shared experts, an MLP beside the experts that tokens choose."""
    return shape.expert_layers if shape.experts is not None and shape.experts.shared else 0


def _expect_routers(setup: Setup, shape: DecoderShape) -> Iterator[ExpectedTraffic]:
    """Gradients of routers, which a region takes whole: summed over all axes that are automatic outside."""
    if shape.experts is None:
        return
    sizes = setup.mesh.shape
    batch = (axis for axis in BATCH_AXES if axis not in setup.layouts.reduction_axes)
    axes = _in_order(setup.layouts, frozenset(axis for axis in (*batch, "tensor") if sizes[axis] > 1))
    if axes:
        kernels = shape.expert_layers * shape.embed * shape.experts.router.experts
        elements = setup.config.batch.microbatches * kernels
        scattered = axes == (ZERO_AXIS,)  # of which each device keeps its part
        yield _reduce(setup, axes, elements, scattered, "routers' gradients, for each microbatch")


def _expect_dispatch(setup: Setup, shape: DecoderShape) -> Iterator[ExpectedTraffic]:
    """Tokens on their way to experts and back, and their gradients the other way round."""
    experts, axes = shape.experts, ("expert",)
    if experts is None or setup.mesh.shape["expert"] == 1 or "expert" not in setup.strategy["experts"]:
        return
    remat = setup.config.remat
    # What was sent is sent again where it is computed again, each way by itself.
    again = sum(not kept_by_name(remat, name) for name in ("expert_input", "expert_out"))
    exchanges = (4 + again) * setup.config.batch.microbatches + 2 * _count_extra_passes(setup)
    rows = _count_dispatched(setup, experts)
    elements = exchanges * shape.expert_layers * rows * shape.embed
    kind = "ragged-all-to-all" if experts.exchange == "ragged" else "all-to-all"
    yield ExpectedTraffic(axes, kind, elements, "tokens to experts and back")


def _count_dispatched(setup: Setup, experts: ExpertShape) -> int:
    """Rows that a device sends one way: what its buffers hold, or without buffers one for each choice.

    Where XLA lacks a ragged exchange, chunks are sent, to every device as large as could be needed.
    """
    length, router, tokens = setup.config.batch.length, experts.router, _tokens_a_device(setup)
    if experts.exchange == "capacity":
        slots = count_slots(length, router.top_k, router.experts, experts.capacity_factor)
        return router.experts * slots * tokens // length
    if experts.exchange == "ragged":
        return router.top_k * tokens
    devices = setup.mesh.shape["expert"]
    return devices * tokens * min(router.top_k, router.experts // devices)


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
