"""Sizes of one device's part of everything a step makes: elements, from the shape, the mesh and the batch."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from jaxscale.mesh import BATCH_AXES
from jaxscale.models.remat import DECODER_TENSORS
from jaxscale.models.shape import DecoderShape
from jaxscale.parallel.capacity import count_slots
from jaxscale.parallel.vocab import LOGITS_HELD
from jaxscale.planning.draft import Draft
from jaxscale.sharding.rules import Axes


class ExpertSizes(NamedTuple):
    """Of a layer with experts, on one device."""

    rows: int
    """Rows of the experts' buffers: what they receive at most."""
    sent_rows: int
    """Rows that leave for experts, here or elsewhere."""
    choices: int
    """Experts that a token chooses."""
    mlp: int
    """Channels of an expert."""
    local_experts: int
    shared_mlp: int
    """Channels of the shared experts' MLP; 0: none."""


@dataclass(frozen=True)
class Sizes:
    """One device's part, for one microbatch."""

    sequences: int
    length: int
    embed: int
    heads: int
    query: int
    """Channels of all query heads."""
    kv: int
    """Channels of all key heads, and of all value heads."""
    mlp: int
    vocab: int
    """Rows of the table, padding too."""
    chunk: int
    """Tokens whose logits are made at once."""
    dense_layers: int
    expert_layers: int
    experts: ExpertSizes | None

    @property
    def tokens(self) -> int:
        return self.sequences * self.length

    @property
    def scores(self) -> int:
        """Attention scores of a layer."""
        return self.heads * self.tokens * self.length


def measure_sizes(draft: Draft) -> Sizes:
    """One device's part of a microbatch's arrays."""
    shape, batch, axis_sizes = draft.shape, draft.config.batch, draft.axis_sizes

    def ways(dim: str) -> int:
        return _count_ways(draft.strategy[dim], axis_sizes)

    shards = math.prod(axis_sizes[axis] for axis in BATCH_AXES)
    sequences = -(-batch.sequences // batch.microbatches // shards)
    tokens, vocab = sequences * batch.length, -(-shape.padded_vocab // ways("vocab"))
    heads, kv_heads = -(-shape.heads // ways("heads")), -(-shape.kv_heads // ways("kv_heads"))
    limit = max(LOGITS_HELD // vocab, 1)
    return Sizes(
        sequences=sequences,
        length=batch.length,
        embed=shape.embed,
        heads=heads,
        query=heads * shape.head,
        kv=kv_heads * shape.head,
        mlp=-(-shape.mlp // ways("mlp")),
        vocab=vocab,
        chunk=next(size for size in range(min(tokens, limit), 0, -1) if tokens % size == 0),
        dense_layers=shape.dense_layers,
        expert_layers=shape.expert_layers,
        experts=_measure_experts(shape, sequences, batch.length, ways("mlp"), ways("experts")),
    )


def count_named(sizes: Sizes, has_experts: bool, *, gated: bool) -> dict[str, int]:
    """Elements of each tensor that a decoder's layer names (`jaxscale.models.remat`)."""
    n, d = sizes.tokens, sizes.embed
    named = dict.fromkeys(("block_input", "attention_norm", "attention_out", "mlp_norm"), n * d)
    named |= {"query": n * sizes.query, "attention": n * sizes.query}
    named |= {"key": n * sizes.kv, "value": n * sizes.kv}
    experts = sizes.experts
    mlp = sizes.mlp if not has_experts or experts is None else experts.shared_mlp
    named |= dict.fromkeys(("mlp_up", "mlp_gate", "mlp_hidden"), n * mlp)
    if has_experts and experts is not None:
        named["expert_input"] = experts.rows * d
        named["expert_out"] = n * experts.choices * d
        hidden = experts.rows * experts.mlp
        named |= dict.fromkeys(("expert_up", "expert_gate", "expert_hidden"), hidden)
    if not gated:
        named = {name: count for name, count in named.items() if not name.endswith("_gate")}
    assert set(named) <= set(DECODER_TENSORS)
    return named


def _measure_experts(
    shape: DecoderShape, sequences: int, length: int, mlp_ways: int, devices: int
) -> ExpertSizes | None:
    experts = shape.experts
    if experts is None:
        return None
    count, top_k, tokens = experts.router.experts, experts.router.top_k, sequences * length
    local = count // devices
    if experts.exchange == "capacity":
        slots = count_slots(length, top_k, count, experts.capacity_factor)
        rows = sent = count * sequences * slots
    else:
        sent = tokens * top_k
        rows = devices * tokens * min(top_k, local) if devices > 1 else sent
    return ExpertSizes(
        rows=rows,
        sent_rows=sent,
        choices=top_k,
        mlp=-(-experts.mlp // mlp_ways),
        local_experts=local,
        shared_mlp=-(-experts.shared * experts.mlp // mlp_ways),
    )


def _count_ways(axes: Axes, axis_sizes: Mapping[str, int]) -> int:
    return math.prod(axis_sizes[axis] for axis in axes if axis not in BATCH_AXES or axis == "expert")
