"""What XLA's CPU compiler keeps in memory beside the arguments, buffer by buffer.

It computes bf16 in fp32, and so also keeps in fp32 what a narrow format was asked for: weights for use, and
what the backward pass reads. It schedules early: constants, zeros and gathers of the head are there before
the first layer. Attention is XLA's own: scores [heads, T, T] lie in memory.

Each term names buffers that its assignment lists; letters as in `jaxscale.sharding.rules`, N = B · T.
"""

from collections.abc import Iterator, Sequence

from jaxscale.models.remat import kept_by_name
from jaxscale.numerics.policy import DTYPES, compute_dtype
from jaxscale.planning.buffers import ALWAYS, BACKWARD, THROUGH_LAYERS, Buffer, Moment
from jaxscale.planning.draft import Draft
from jaxscale.planning.sizes import ExpertSizes, Sizes, count_named
from jaxscale.planning.weights import Weight, find_head_path

_FP32 = 4
_TILE_ROWS = 64  # of the loop over tiles that multiplies groups of rows on a CPU


def list_buffers(draft: Draft, sizes: Sizes, weights: Sequence[Weight]) -> list[Buffer]:
    """All that the step holds beside its arguments."""
    return [
        *_list_weights(draft, weights),
        *_list_gradients(draft, weights),
        *_list_kept(draft, sizes),
        *_list_head(draft, sizes, weights),
        *_list_layer(draft, sizes, weights),
    ]


def is_narrow(draft: Draft) -> bool:
    return compute_dtype(draft.config.precision).itemsize < _FP32


def _list_weights(draft: Draft, weights: Sequence[Weight]) -> Iterator[Buffer]:
    copied = [each for each in weights if is_narrow(draft) or each.is_moved]
    layers = sum(each.in_use for each in copied if each.is_stacked and not each.keeps_format)
    yield Buffer("parameters", "weights of layers, converted to fp32", _FP32 * layers, THROUGH_LAYERS)
    if draft.config.batch.microbatches > 1:  # what all microbatches use is made before their loop
        tables = sum(
            each.in_use for each in copied if each.is_table and each.path != find_head_path(draft.shape)
        )
        yield Buffer("parameters", "tables, converted to fp32", _FP32 * tables, THROUGH_LAYERS)


def _list_gradients(draft: Draft, weights: Sequence[Weight]) -> Iterator[Buffer]:
    config, narrow = draft.config, compute_dtype(draft.config.precision).itemsize
    is_accumulated = config.batch.microbatches > 1
    stacks = sum(
        each.gradient * (_FP32 if each.keeps_format else narrow) for each in weights if each.is_stacked
    )
    # What is added to accumulators, or reduced, is gone before the update.
    last = Moment.EXPERTS if is_accumulated or draft.layouts.reduction_axes else Moment.UPDATE
    yield Buffer("gradients", "gradients of layers, stacked by the loop", stacks, (Moment.FORWARD, last))
    looked_up = sum(each.gradient for each in weights if each.is_table and "head" not in each.path)
    yield Buffer("gradients", "gradient of tables looked up in", _FP32 * looked_up, (Moment.FORWARD, last))
    head = sum(each.gradient for each in weights if each.path == find_head_path(draft.shape))
    yield Buffer("gradients", "gradient of the head", _FP32 * head, (Moment.ATTENTION, last))
    every = sum(each.gradient for each in weights)
    if is_accumulated:
        width = DTYPES[config.precision.accumulate].itemsize
        yield Buffer("gradients", "accumulators", width * every, ALWAYS)
    elif not draft.layouts.reduction_axes:
        # The divisor is known before the loop, and its broadcast is hoisted out of the update's branch.
        shapes = {each.kept_local: each.kept for each in weights}
        yield Buffer("gradients", "divisor, once a shape", _FP32 * sum(shapes.values()), ALWAYS)
    if draft.layouts.reduction_axes:
        update = (Moment.UPDATE, Moment.UPDATE)
        yield Buffer("gradients", "reduced gradients", _FP32 * every, update)
        if not is_accumulated and is_narrow(draft):
            kept = sum(each.kept for each in weights)
            yield Buffer("gradients", "reduced gradients, rounded and widened", _FP32 * kept, update)


def _list_kept(draft: Draft, sizes: Sizes) -> Iterator[Buffer]:
    remat, n, gated = draft.config.remat, sizes.tokens, draft.shape.family == "llama"
    for kind, layers in (("dense", sizes.dense_layers), ("experts", sizes.expert_layers)):
        if not layers:
            continue
        elements = sum(
            count
            for name, count in count_named(sizes, kind == "experts", gated=gated).items()
            if (kept_by_name(remat, name) and name != "attention_out") or name == "block_input"
        )
        if remat.is_off:
            # x, normed and scaled, of both norms, and exponentials and quotients of the softmax
            elements += 5 * n * sizes.embed + 2 * sizes.scores
            # and six forms of hidden channels, whatever the activation
            elements += (3 if gated else 4) * n * sizes.mlp if kind == "dense" else 0
        what = f"kept for the backward pass of layers ({kind})"
        yield Buffer("activations", what, _FP32 * elements * layers, (Moment.HEAD, Moment.EXPERTS))
        narrow = compute_dtype(draft.config.precision).itemsize
        yield Buffer("activations", what, narrow * elements * layers, (Moment.FORWARD, Moment.FORWARD))


def _list_head(draft: Draft, sizes: Sizes, weights: Sequence[Weight]) -> Iterator[Buffer]:
    narrow = compute_dtype(draft.config.precision).itemsize
    n, head = sizes.chunk, sizes.embed * sizes.vocab
    is_gathered = any(each.path == find_head_path(draft.shape) and each.in_use < head for each in weights)
    at_head = (Moment.HEAD, Moment.HEAD)
    many = draft.config.batch.microbatches > 1
    yield Buffer(
        "gathered",
        "head",
        (narrow if is_gathered else _FP32) * head,
        (Moment.FORWARD, Moment.EXPERTS if many else Moment.HEAD),
    )
    logits, d_head = 2 * _FP32 * n * sizes.vocab, _FP32 * (n * sizes.vocab + head)
    yield Buffer(
        "logits", "logits and exponentials, or their gradient and the head's", max(logits, d_head), at_head
    )
    if n < sizes.tokens:
        yield Buffer("logits", "gradient of the head, summed over chunks", _FP32 * head, at_head)
    yield Buffer("working", "what the head reads", 3 * _FP32 * sizes.tokens * sizes.embed, at_head)


def _list_layer(draft: Draft, sizes: Sizes, weights: Sequence[Weight]) -> Iterator[Buffer]:
    n, d = sizes.tokens, sizes.embed
    forward = (Moment.FORWARD, Moment.FORWARD)
    yield Buffer("working", "mask, as numbers and as bits", (_FP32 + 1) * sizes.scores, forward)
    yield Buffer("working", "scores", 2 * _FP32 * sizes.scores, forward)
    yield Buffer("working", "residual stream and its norm", 3 * _FP32 * n * d, forward)
    layer = (Moment.DENSE, Moment.EXPERTS)
    yield Buffer("working", "scores, made again", 2 * _FP32 * sizes.scores, layer)
    yield Buffer("working", "residual stream, norms and their gradients", 10 * _FP32 * n * d, layer)
    width = compute_dtype(draft.config.precision).itemsize if is_narrow(draft) else 0
    at_attention = (Moment.ATTENTION, Moment.ATTENTION)
    yield Buffer("working", "scores, three forms", (3 * _FP32 + width) * sizes.scores, at_attention)
    yield Buffer("working", "residual stream, norm and heads", 6 * _FP32 * n * d, at_attention)
    yield Buffer("working", "keys and values", 2 * _FP32 * n * sizes.kv, BACKWARD)
    for is_dense in (True, False):
        moment = Moment.DENSE if is_dense else Moment.EXPERTS
        stack = [each for each in weights if each.is_stacked and is_dense != each.is_of_expert_layer]
        attention = sum(each.gathered for each in stack if each.is_attention)
        # They come before attention is made again.
        gathered = (Moment.ATTENTION if is_dense else moment, moment)
        yield Buffer("gathered", "kernels of attention", _FP32 * attention, gathered)
        mlp = max((each.gathered for each in stack if each.is_mlp), default=0)
        yield Buffer("gathered", "two kernels of the MLP", 2 * _FP32 * mlp, gathered)
        hidden = sizes.mlp if is_dense else 0 if sizes.experts is None else sizes.experts.shared_mlp
        many = 3.5 if is_narrow(draft) else 8
        yield Buffer(
            "working", "hidden channels and gradients", int(many * _FP32 * n * hidden), (moment, moment)
        )
    if sizes.experts is not None:
        kernel = max(each.gathered for each in weights if each.is_expert)
        yield from _list_experts(draft, sizes.experts, d, kernel)


def _list_experts(draft: Draft, experts: ExpertSizes, d: int, kernel: int) -> Iterator[Buffer]:
    narrow, at_experts = compute_dtype(draft.config.precision).itemsize, (Moment.EXPERTS, Moment.EXPERTS)
    rows_d, rows_f = experts.rows * d, experts.rows * experts.mlp
    assert draft.shape.experts is not None
    if draft.shape.experts.exchange == "capacity":
        # The peak is where gradients of kernels are made, in fp32 already where hidden channels are.
        slots, hidden, kernels = (3, 2, 4) if is_narrow(draft) else (2, 7, 3)
        yield Buffer("exchange", "slots and gradients", slots * _FP32 * rows_d, at_experts)
        yield Buffer("working", "hidden channels of slots", hidden * _FP32 * rows_f, at_experts)
        yield Buffer("gathered", "kernels of experts, their gradients", kernels * _FP32 * kernel, at_experts)
        return
    rows_d, rows_f = (size + _TILE_ROWS * width for size, width in ((rows_d, d), (rows_f, experts.mlp)))
    yield Buffer("exchange", "rows and gradients", (2 * _FP32 + 3 * narrow) * rows_d, at_experts)
    yield Buffer("working", "hidden channels of rows", (3 * _FP32 + 2 * narrow) * rows_f, at_experts)
    yield Buffer("gathered", "kernels of experts, their gradients", 3 * (_FP32 + narrow) * kernel, at_experts)
