"""What XLA's compilers for TPUs and GPUs keep in memory beside the arguments, buffer by buffer.

Formats are those that were asked for, and attention's scores are not in memory: splash (TPU) and cuDNN (GPU)
keep softmax statistics instead. The terms are those of the TPU's buffer assignments. For GPUs they are the
same ones with cuDNN's statistics, and have not been compared with a GPU's compiler.

Letters as in `jaxscale.sharding.rules`, N = B · T.
"""

from collections.abc import Iterator, Sequence

from jaxscale.models.remat import kept_by_name
from jaxscale.numerics.policy import DTYPES, compute_dtype
from jaxscale.planning.buffers import ALWAYS, BACKWARD, THROUGH_LAYERS, Buffer, Kind, Moment
from jaxscale.planning.draft import Draft
from jaxscale.planning.sizes import ExpertSizes, Sizes, count_named
from jaxscale.planning.weights import Weight, find_head_path

_FP32 = 4
_LANES = 128  # of a TPU's vector register: splash repeats each token's statistics over all of them


def list_buffers(draft: Draft, sizes: Sizes, weights: Sequence[Weight]) -> list[Buffer]:
    """All that the step holds beside its arguments."""
    return [
        *_list_weights(draft, weights),
        *_list_gradients(draft, weights),
        *_list_kept(draft, sizes),
        *_list_head(draft, sizes, weights),
        *_list_layer(draft, sizes, weights),
    ]


def _width(draft: Draft) -> int:
    return compute_dtype(draft.config.precision).itemsize


def _list_weights(draft: Draft, weights: Sequence[Weight]) -> Iterator[Buffer]:
    # Master weights on the host are never what compute uses.
    is_copied = _width(draft) < _FP32 or draft.config.offload.master_weights
    copied = [each for each in weights if is_copied or each.is_moved]
    layers = sum(each.in_use for each in copied if each.is_stacked and not each.keeps_format)
    yield Buffer("parameters", "weights of layers, in use", _width(draft) * layers, THROUGH_LAYERS)
    if draft.config.batch.microbatches > 1:  # what all microbatches use is made before their loop
        tables = sum(each.in_use for each in copied if each.is_table)
        yield Buffer("parameters", "tables, in use", _width(draft) * tables, THROUGH_LAYERS)
    if draft.config.precision.compute == "fp8":
        kernels = sum(each.in_use for each in weights if each.is_mlp or each.is_attention or each.is_expert)
        yield Buffer("parameters", "kernels in fp8", kernels, THROUGH_LAYERS)


def _list_gradients(draft: Draft, weights: Sequence[Weight]) -> Iterator[Buffer]:
    config, many = draft.config, draft.config.batch.microbatches > 1
    stacks = sum(
        each.gradient * (_FP32 if each.keeps_format else _width(draft)) for each in weights if each.is_stacked
    )
    last = Moment.EXPERTS if many or draft.layouts.reduction_axes else Moment.UPDATE
    yield Buffer("gradients", "gradients of layers, stacked by the loop", stacks, (Moment.ATTENTION, last))
    if many:
        width, every = DTYPES[config.precision.accumulate].itemsize, sum(each.gradient for each in weights)
        yield Buffer("gradients", "accumulators", width * every, ALWAYS)
    elif draft.layouts.reduction_axes:
        kept = sum(each.kept for each in weights)
        at_update = (Moment.UPDATE, Moment.UPDATE)
        yield Buffer("gradients", "gradients of layers, not reduced yet", stacks, at_update)
        yield Buffer("gradients", "reduced gradients", _FP32 * kept, at_update)


def _list_kept(draft: Draft, sizes: Sizes) -> Iterator[Buffer]:
    remat, gated = draft.config.remat, draft.shape.family == "llama"
    for kind, layers in (("dense", sizes.dense_layers), ("experts", sizes.expert_layers)):
        if not layers:
            continue
        kept = {
            name: count
            for name, count in count_named(sizes, kind == "experts", gated=gated).items()
            if name not in remat.offload and (name == "block_input" or kept_by_name(remat, name))
        }
        if remat.is_off:
            kept |= _add_unnamed(sizes, kept, has_mlp=kind == "dense")
        size = _width(draft) * sum(kept.values())
        if remat.is_off:
            size += 6 * _FP32 * sizes.tokens * sizes.embed  # forms of x in both norms, and x itself
        if "attention" in kept:
            size += _FP32 * sizes.heads * sizes.tokens
        what = f"kept for the backward pass of layers ({kind})"
        yield Buffer("activations", what, size * layers, THROUGH_LAYERS)


def _add_unnamed(sizes: Sizes, kept: dict[str, int], *, has_mlp: bool) -> dict[str, int]:
    """What changes where a layer's whole inside is kept, and not by name."""
    changed = {
        "block_input": 0,  # kept in fp32, with the norms' forms of it
        "attention_out": 0,  # nothing in the backward pass reads it
        "attention": 2 * kept["attention"],  # as the kernel lays it, and as the projection reads it
    }
    # Six forms of hidden channels, whatever the activation; regions of experts keep what has a name alone.
    return changed | ({"mlp_hidden": (6 - ("mlp_gate" in kept) - 1) * kept["mlp_hidden"]} if has_mlp else {})


def _list_head(draft: Draft, sizes: Sizes, weights: Sequence[Weight]) -> Iterator[Buffer]:
    width, at_head = _width(draft), (Moment.HEAD, Moment.HEAD)
    head = sizes.embed * sizes.vocab
    if sizes.chunk < sizes.tokens:
        # A loop over chunks adds it up, in memory that is set aside before the first layer, but for within a
        # loop over microbatches. It is scattered after the last layer.
        first = Moment.HEAD if draft.config.batch.microbatches > 1 else Moment.FORWARD
        yield Buffer(
            "gradients", "gradient of the head, fp32 and whole", _FP32 * head, (first, Moment.UPDATE)
        )
    else:
        own = sum(each.gradient for each in weights if each.path == find_head_path(draft.shape))
        backward = (Moment.ATTENTION, Moment.UPDATE)
        yield Buffer("gradients", "gradient of the head", _FP32 * own, backward)
    logits = 2 * _FP32 * sizes.chunk * sizes.vocab
    # The gather is assembled beside its parts; logits come when these are gone.
    yield Buffer("gathered", "head", width * head, at_head)
    if logits > width * head:
        yield Buffer("logits", "logits and exponentials", logits, at_head)
    else:
        yield Buffer("gathered", "head, on its way", width * head, at_head)
    yield Buffer("working", "what the head reads", 3 * width * sizes.tokens * sizes.embed, at_head)


def _list_layer(draft: Draft, sizes: Sizes, weights: Sequence[Weight]) -> Iterator[Buffer]:
    width, n, d = _width(draft), sizes.tokens, sizes.embed
    yield Buffer("working", "residual stream, norms and their gradients", 5 * width * n * d, BACKWARD)
    yield Buffer("working", "queries, attention and their gradients", 3 * width * n * sizes.query, BACKWARD)
    lanes = _LANES if draft.platform == "tpu" else 1
    yield Buffer("working", "softmax statistics", _FP32 * lanes * n * sizes.heads, BACKWARD)
    if draft.shape.attention == "xla":
        yield Buffer("working", "scores", 2 * _FP32 * sizes.scores, BACKWARD)
    for is_dense in (True, False):
        moment = Moment.DENSE if is_dense else Moment.EXPERTS
        at_once = (moment, moment)
        stack = [each for each in weights if each.is_stacked and is_dense != each.is_of_expert_layer]
        attention = sum(each.gathered for each in stack if each.is_attention and each.is_cut)
        yield Buffer("gathered", "kernels of attention", width * attention, at_once)
        mlp = sum(each.gathered for each in stack if each.is_mlp and each.is_cut)
        yield Buffer("gathered", "kernels of the MLP", width * mlp, at_once)
        d_mlp = max((each.gathered for each in stack if each.is_mlp), default=0)
        yield Buffer("gradients", "gradient of a kernel of the MLP", width * d_mlp, at_once)
        hidden = sizes.mlp if is_dense else 0 if sizes.experts is None else sizes.experts.shared_mlp
        yield Buffer("working", "hidden channels and gradients", 4 * width * n * hidden, at_once)
    if sizes.experts is not None:
        kernels = [each for each in weights if each.is_expert]
        yield from _list_experts(draft, sizes.experts, d, kernels)


def _list_experts(draft: Draft, experts: ExpertSizes, d: int, kernels: Sequence[Weight]) -> Iterator[Buffer]:
    width, at_experts = _width(draft), (Moment.EXPERTS, Moment.EXPERTS)
    kernel = max(each.gathered for each in kernels)
    cut = 2 * kernel if any(each.is_cut for each in kernels) else 0

    def make(kind: Kind, what: str, elements: int) -> Buffer:
        return Buffer(kind, what, width * elements, at_experts)

    yield make("gathered", "two kernels of experts", cut)
    assert draft.shape.experts is not None
    if draft.shape.experts.exchange == "capacity":
        yield make("exchange", "slots and their gradients", 2 * experts.rows * d)
        yield make("working", "hidden channels of slots", 4 * experts.rows * experts.mlp)
        yield make("gradients", "gradient of a kernel of experts", kernel)
    else:
        yield make("exchange", "rows and their gradients", 4 * experts.rows * d)
        yield make("working", "hidden channels of rows", 3 * experts.rows * experts.mlp)
