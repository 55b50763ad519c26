"""`--reduce`: a decoder of the same family in small, whose dims divide by the same meshes."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product

from jaxscale.config import Config, ModelConfig, MoeConfig
from jaxscale.models.shape import VOCAB_MULTIPLE

LAYERS = 2  # or so many periods of layers with experts
EMBED = 64
LENGTH = 32
HEAD = 8
EXPERTS = 4  # at least, where there are as many
TOP_K = 2
VOCAB = 256
PADDED_VOCAB = 130  # padded to 256 rows: the last shards of tensor=8 are nothing but padding
MOST_MICROBATCHES = 8
USUAL_MICROBATCHES = 4


def reduce_config(config: Config, device_count: int) -> Config:
    """The configuration in small: a dim divides by an axis of `device_count` devices if it did before.

    A model of one's own keeps its size, which its own arguments decide; the batch is reduced.
    """
    microbatches = config.batch.microbatches
    if not 1 < microbatches <= MOST_MICROBATCHES:
        microbatches = USUAL_MICROBATCHES
    length = min(LENGTH, config.batch.length)
    batch = replace(
        config.batch, sequences=device_count * microbatches, microbatches=microbatches, length=length
    )
    model, moe = config.model, config.moe
    if isinstance(model, ModelConfig):
        layers = min(LAYERS, model.layers)
        if moe is not None:
            periods = min(LAYERS, (model.layers - moe.first_dense) // moe.every)
            moe = _reduce_experts(moe, device_count)
            layers = moe.first_dense + periods * moe.every
        model = _reduce_model(model, config.batch.length, length, device_count)
        model = replace(model, layers=layers)
    return replace(config, batch=batch, model=model, moe=moe)


def _make_alike(device_count: int) -> Callable[[int], Callable[[int], bool]]:
    """Size -> whether another size divides by the same numbers of devices."""
    return lambda size: lambda other: math.gcd(other, device_count) == math.gcd(size, device_count)


def _reduce_experts(moe: MoeConfig, device_count: int) -> MoeConfig:
    """Fewer experts, layers of both kinds if there were; groups, and choice among some, if there were."""
    alike = _make_alike(device_count)
    spare = 2 if moe.exchange == "capacity" and moe.overflow == "reroute" else 1

    def is_right(experts: int, groups: int, kept: int) -> bool:
        top_k = choose_top_k(experts)
        return (
            alike(moe.experts)(experts)
            and experts % groups == 0
            and ((groups > 1, kept < groups) == (moe.groups > 1, moe.groups_kept < moe.groups))
            and ((top_k < experts) == (moe.top_k < moe.experts))
            and experts // groups * kept >= min(top_k * spare, experts)
        )

    def choose_top_k(experts: int) -> int:
        return experts if moe.top_k == moe.experts else min(moe.top_k, TOP_K)

    experts, groups, kept = next(
        (experts, groups, kept)
        for experts in range(min(EXPERTS, moe.experts), moe.experts + 1)
        for groups, kept in product(range(1, moe.groups + 1), range(1, moe.groups_kept + 1))
        if is_right(experts, groups, kept)
    )
    return replace(
        moe,
        experts=experts,
        top_k=choose_top_k(experts),
        groups=groups,
        groups_kept=kept,
        mlp=None if moe.mlp is None else _nearest(EMBED, 1, alike(moe.mlp)),
        first_dense=min(moe.first_dense, 1),
        every=min(moe.every, 2),
    )


def _reduce_model(model: ModelConfig, length: int, new_length: int, device_count: int) -> ModelConfig:
    alike = _make_alike(device_count)
    kv_heads, head = model.kv_heads or model.heads, model.head
    groups = model.heads // kv_heads if model.heads % kv_heads == 0 else 1
    new_kv_heads = math.gcd(kv_heads, device_count)
    sizes = range(min(groups, 2), groups + 1)
    new_heads = new_kv_heads * next(n for n in sizes if alike(model.heads)(new_kv_heads * n) or n == groups)
    step = 1 if head is not None else new_heads * (2 if model.family == "llama" else 1)
    embed = _nearest(EMBED, step, alike(model.embed))
    vocab = model.vocab
    return replace(
        model,
        embed=embed,
        heads=new_heads,
        kv_heads=new_kv_heads if model.kv_heads is not None else None,
        head=None if head is None else min(head, HEAD),
        mlp=_nearest(2 * EMBED, 1, alike(model.mlp)),
        vocab=VOCAB if vocab is not None and vocab % VOCAB_MULTIPLE == 0 else PADDED_VOCAB,
        positions=next(n for n in _count_from(new_length) if alike(model.positions or length)(n)),
    )


def _nearest(wanted: int, step: int, is_right: Callable[[int], bool]) -> int:
    """The multiple of `step` nearest to a size that is right; of sizes as near, the larger."""
    sizes = (size for off in _count_from(0) for size in (wanted + off, wanted - off))
    return next(size for size in sizes if size > 0 and size % step == 0 and is_right(size))


def _count_from(start: int) -> Iterator[int]:
    while True:
        yield start
        start += 1
