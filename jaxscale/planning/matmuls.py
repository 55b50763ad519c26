"""Every matmul that one device does in a step of a decoder, in closed form.

Of each kernel three: forward, and backward to what it read and to itself; what `remat` does not keep is made
again. The model FLOPs of MFU are another count (`jaxscale.metrics.flops`): they know no recomputation and no
kernel that skips what a causal mask hides. Experts get an even share of the tokens, and the sum of a
token's experts by their weights is left out.

Sizes of a device: tokens of a microbatch n, D embed, N query heads, K key/value heads of H channels, F mlp.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from jaxscale.config import Config, RematConfig
from jaxscale.mesh import AXES, BATCH_AXES
from jaxscale.models.attention import choose_splash_block
from jaxscale.models.remat import kept_by_name
from jaxscale.models.shape import DecoderShape
from jaxscale.parallel.capacity import count_slots
from jaxscale.parallel.vocab import LOGITS_HELD, largest_divisor

Pass = Literal["forward", "again", "backward"]

# Matmuls of attention's backward pass. The kernels that keep no scores make them once more; splash has two
# kernels, for dq and for dk and dv, and makes them in both (its scores and the gradient of its weights).
_BACKWARD_ATTENTION = {"xla": 4, "cudnn": 5, "splash": 7}
_CUDNN_BLOCK = 128  # positions; the tile of FlashAttention-2 and -3 for heads of 128 channels

BYTES = {"fp8": 1, "bf16": 2, "fp16": 2, "fp32": 4}


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a step computes, and over which mesh."""

    shape: DecoderShape
    remat: RematConfig
    length: int
    sequences: int
    """Of a step, on all devices."""
    microbatches: int
    sizes: Mapping[str, int]
    """Devices along each mesh axis."""
    compute: str
    """Compute format: `fp8`, `bf16`, `fp16` or `fp32`."""

    @property
    def devices(self) -> int:
        return math.prod(self.sizes.values())

    @property
    def tokens(self) -> int:
        """Of a microbatch, on a device."""
        shards = math.prod(self.sizes.get(axis, 1) for axis in BATCH_AXES)
        return self.sequences // self.microbatches // shards * self.length

    @property
    def tensor(self) -> int:
        return self.sizes.get("tensor", 1)

    @property
    def wide(self) -> str:
        """Format of matmuls that are never in fp8."""
        return "bf16" if self.compute == "fp8" else self.compute

    @property
    def load_passes(self) -> int:
        """Forward passes of a microbatch that only count the load of its experts."""
        experts = self.shape.experts
        return 1 if experts is not None and experts.balance_scope == "step" else 0


@dataclass(frozen=True)
class Matmul:
    """[rows, contracted] times [contracted, columns], so many times a step on a device."""

    name: str
    when: Pass
    number_format: str
    rows: int
    contracted: int
    columns: int
    times: float
    kind: Literal["dense", "attention"] = "dense"
    """attention: of a kernel that holds the scores of a block where it computes."""
    result_bytes: int = 2
    """Of an element of the result, written or added to."""

    @property
    def flops(self) -> float:
        return 2.0 * self.rows * self.contracted * self.columns * self.times

    @property
    def hbm_bytes(self) -> float:
        """Read and written, each operand once; of an attention kernel the streams of its heads."""
        item = BYTES[self.number_format]
        left, right = self.rows * self.contracted, self.contracted * self.columns
        if self.kind == "attention":  # of scores and what they are multiplied by, only the latter leaves
            return float(min(left, right) * 2 * item * self.times)
        return (item * (left + right) + self.result_bytes * self.rows * self.columns) * self.times


def describe_work(config: Config, shape: DecoderShape, sizes: Mapping[str, int]) -> Work:
    """The work of a configuration on a mesh of these sizes."""
    return Work(
        shape=shape,
        remat=config.remat,
        length=config.batch.length,
        sequences=config.batch.sequences,
        microbatches=config.batch.microbatches,
        sizes={axis: sizes.get(axis, 1) for axis in AXES},
        compute=config.precision.compute,
    )


def list_matmuls(work: Work) -> list[Matmul]:
    """Every matmul of a step, on one device."""
    shape, experts = work.shape, work.shape.experts
    found = [*_list_attention(work, shape.layers)]
    if shape.dense_layers:
        found += _list_mlp(work, shape.mlp, shape.dense_layers)
    if experts is not None:
        found += _list_experts(work)
        if experts.shared:
            found += _list_mlp(work, experts.shared * experts.mlp, shape.expert_layers)
    return [*found, *_list_head(work)]


def count_flops(work: Work) -> dict[str, float]:
    """FLOPs of a step by number format, on all devices, as they are executed (those of HFU)."""
    counted: dict[str, float] = {}
    for each in list_matmuls(work):
        flops = each.flops * work.devices
        counted[each.number_format] = counted.get(each.number_format, 0.0) + flops
    return counted


def count_recomputed(work: Work) -> float:
    """FLOPs of a step, on all devices, that only remat asks for."""
    return work.devices * sum(each.flops for each in list_matmuls(work) if each.when == "again")


def _project(
    work: Work,
    name: str,
    sides: tuple[int, int, int],
    times: float,
    *,
    again: bool,
    loads: int,
    number_format: str | None = None,
) -> Iterator[Matmul]:
    """A kernel's matmuls: [rows, read] x [read, made].

    Args:
      times: a step, in the forward pass.
      again: whether it is made again for the backward pass.
      loads: forward passes more, which only count the load of experts.
    """
    rows, read, made = sides
    number_format = number_format or work.compute
    item = BYTES[work.wide]
    yield Matmul(name, "forward", number_format, rows, read, made, times * (1 + loads), result_bytes=item)
    if again:
        yield Matmul(name, "again", number_format, rows, read, made, times, result_bytes=item)
    yield Matmul(f"{name}, input", "backward", number_format, rows, made, read, times, result_bytes=item)
    yield Matmul(f"{name}, kernel", "backward", number_format, read, rows, made, times, result_bytes=item)


def _is_made_again(work: Work, name: str) -> bool:
    return not (work.remat.is_off or kept_by_name(work.remat, name))


def _list_attention(work: Work, layers: int) -> Iterator[Matmul]:
    shape, loads = work.shape, work.load_passes
    times = layers * work.microbatches
    query, kv = shape.heads * shape.head // work.tensor, shape.kv_heads * shape.head // work.tensor
    sides = {"query": (shape.embed, query), "key": (shape.embed, kv), "value": (shape.embed, kv)}
    for name, (read, made) in {**sides, "attention_out": (query, shape.embed)}.items():
        again = _is_made_again(work, name)
        yield from _project(work, name, (work.tokens, read, made), times, again=again, loads=loads)

    share = find_attention_share(shape, work.length)
    heads = times * (work.tokens // work.length) * (shape.heads // work.tensor) * share
    kind: Literal["dense", "attention"] = "dense" if shape.attention == "xla" else "attention"
    scores = (work.length, shape.head, work.length)
    mix = (work.length, work.length, shape.head)

    def make(name: str, when: Pass, sides: tuple[int, int, int], times: float) -> Matmul:
        return Matmul(name, when, work.wide, *sides, times, kind, BYTES[work.wide])

    yield make("scores", "forward", scores, heads * (1 + loads))
    yield make("mix", "forward", mix, heads * (1 + loads))
    mixes_again = _is_made_again(work, "attention")
    # XLA's softmax is no tensor with a name, so its scores are made again whatever the lists say.
    if mixes_again or (shape.attention == "xla" and not work.remat.is_off):
        yield make("scores", "again", scores, heads)
    if mixes_again:
        yield make("mix", "again", mix, heads)
    backward = _BACKWARD_ATTENTION[shape.attention]
    yield make("attention", "backward", scores, heads * (backward // 2))
    yield make("attention", "backward", mix, heads * (backward - backward // 2))


def find_attention_share(shape: DecoderShape, length: int) -> float:
    """Part of all scores that are computed: kernels skip blocks that a causal mask hides, XLA does not."""
    if shape.attention == "xla":
        return 1.0
    block = choose_splash_block(length) if shape.attention == "splash" else min(_CUDNN_BLOCK, length)
    blocks = length / block
    return (blocks + 1) / (2 * blocks)


def _list_mlp(work: Work, width: int, layers: int) -> Iterator[Matmul]:
    names = {"mlp_up": True} if work.shape.family == "gpt2" else {"mlp_up": True, "mlp_gate": True}
    times, mlp, loads = layers * work.microbatches, width // work.tensor, work.load_passes
    for name in names:
        again = _is_made_again(work, name)
        sides = (work.tokens, work.shape.embed, mlp)
        yield from _project(work, name, sides, times, again=again, loads=loads)
    # Nothing in the backward pass reads what it returns.
    sides = (work.tokens, mlp, work.shape.embed)
    yield from _project(work, "mlp_down", sides, times, again=False, loads=loads)


def count_expert_rows(work: Work) -> tuple[int, int]:
    """(rows of one expert on a device for a microbatch, experts of a device)."""
    experts, ways = work.shape.experts, work.sizes.get("expert", 1)
    assert experts is not None
    local = experts.router.experts // ways
    if experts.exchange == "capacity":
        slots = count_slots(
            work.length, experts.router.top_k, experts.router.experts, experts.capacity_factor
        )
        return slots * (work.tokens // work.length) * ways, local
    return max(experts.router.top_k * work.tokens // local, 1), local


def _list_experts(work: Work) -> Iterator[Matmul]:
    shape, experts = work.shape, work.shape.experts
    assert experts is not None
    layers, loads = shape.expert_layers, work.load_passes
    rows, local = count_expert_rows(work)
    times, mlp = layers * work.microbatches * local, experts.mlp // work.tensor
    for name in ("expert_up",) if shape.family == "gpt2" else ("expert_up", "expert_gate"):
        again, sides = _is_made_again(work, name), (rows, shape.embed, mlp)
        yield from _project(work, name, sides, times, again=again, loads=loads)
    again = _is_made_again(work, "expert_out")
    yield from _project(work, "expert_out", (rows, mlp, shape.embed), times, again=again, loads=loads)
    # Each device along `tensor` routes all tokens. The region of a layer's experts makes logits again always.
    yield from _project(
        work,
        "router",
        (work.tokens, shape.embed, experts.router.experts),
        layers * work.microbatches,
        again=True,
        loads=loads,
        number_format="fp32",
    )


def _list_head(work: Work) -> Iterator[Matmul]:
    """The cross-entropy, which makes its gradients in the forward pass, a chunk of tokens at a time."""
    vocab, embed = work.shape.padded_vocab // work.tensor, work.shape.embed
    chunk = largest_divisor(work.tokens, max(LOGITS_HELD // vocab, 1))
    times = work.tokens // chunk * work.microbatches
    # The head's gradient is in fp32 and is read and written for each chunk.
    yield Matmul("logits", "forward", work.wide, chunk, embed, vocab, times, result_bytes=4)
    yield Matmul("logits, input", "backward", work.wide, chunk, vocab, embed, times, result_bytes=4)
    yield Matmul("logits, kernel", "backward", work.wide, embed, chunk, vocab, times, result_bytes=8)
