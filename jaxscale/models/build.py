"""From a configuration to a model: the four things that training needs of one."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxscale.config import Config, UserError
from jaxscale.models.attention import resolve_implementation
from jaxscale.models.decoder import Decoder, DecoderShape, Tokens
from jaxscale.models.decoder_rules import decoder_rules
from jaxscale.numerics.policy import compute_dtype
from jaxscale.sharding.rules import Rules, iterate_leaves, match_rules

Params = Any
Batch = Mapping[str, jax.Array]


@dataclass(frozen=True)
class Model:
    """A model as training sees it: shapes, rules, an initialiser and a loss, all of plain nested dicts."""

    shapes: Params
    """Parameters as `ShapeDtypeStruct`s."""
    rules: Rules
    """Path pattern -> dim names."""
    init: Callable[[jax.Array], Params]
    """PRNG key -> parameters; the same numbers on every mesh."""
    cast: Callable[[Params], Params]
    """Parameters -> parameters in the formats that compute takes; done once a step, before any gather."""
    sum_losses: Callable[[Params, Batch], tuple[jax.Array, jax.Array]]
    """Parameters and one microbatch -> (sum of token losses, sum of weights), fp32 scalars."""


def shape_decoder(config: Config, *, vocab: int, platform: str) -> DecoderShape:
    """Fills in what the configuration leaves open.

    Args:
      vocab: tokens in the vocabulary (of the tokenizer, or model.vocab).
      platform: `tpu`, `gpu` or `cpu`, which decides the attention kernel.

    Raises:
      UserError: the sizes contradict each other; every contradiction is listed.
    """
    model, length = config.model, config.batch.length
    kv_heads = model.kv_heads or model.heads
    positions = model.positions or length
    problems = []
    if model.heads % kv_heads:
        problems.append(
            f"model.heads={model.heads} does not divide by model.kv_heads={kv_heads}; "
            "make kv_heads a divisor of heads"
        )
    if model.head is None and model.embed % model.heads:
        problems.append(
            f"model.embed={model.embed} does not divide by model.heads={model.heads}; "
            "change one of them or set model.head"
        )
    head = model.head or max(model.embed // model.heads, 1)
    if model.family == "llama" and head % 2:
        problems.append(f"a head of {head} channels is odd; rotary positions turn pairs, so make it even")
    if length > positions:
        problems.append(
            f"batch.length={length} is longer than model.positions={positions}; lower it, or raise positions"
        )
    if problems:
        raise UserError(f"the model has {len(problems)} problem(s)\n  " + "\n  ".join(problems))
    dtype = compute_dtype(config.precision)
    attention = resolve_implementation(
        model.attention, platform=platform, dtype=dtype, length=length, head=head
    )
    return DecoderShape(
        family=model.family,
        layers=model.layers,
        embed=model.embed,
        heads=model.heads,
        kv_heads=kv_heads,
        head=head,
        mlp=model.mlp,
        vocab=vocab,
        positions=positions,
        tied=model.tied,
        rope_theta=model.rope_theta,
        rope_scaling=model.rope_scaling,
        norm_eps=model.norm_eps,
        cross_documents=config.data.cross_documents,
        attention=attention,
        remat=config.remat,
        dtype=dtype,
    )


def split_decoder(shape: DecoderShape) -> tuple[nnx.GraphDef, Params]:
    """The decoder's definition and its parameters as `ShapeDtypeStruct`s, nothing allocated."""
    definition, state = nnx.split(nnx.eval_shape(lambda: Decoder(shape, nnx.Rngs(params=0))))
    return definition, nnx.to_pure_dict(state)


def build_decoder(shape: DecoderShape) -> Model:
    definition, shapes = split_decoder(shape)
    rules = decoder_rules(shape.family, tied=shape.tied)
    dims = match_rules(shapes, rules)

    def init(key: jax.Array) -> Params:
        return nnx.to_pure_dict(nnx.state(Decoder(shape, nnx.Rngs(params=key))))

    def cast(params: Params) -> Params:
        leaves = [
            leaf if "norm" in dims[path] else leaf.astype(shape.dtype)
            for path, leaf in iterate_leaves(params)
        ]
        return jax.tree.unflatten(jax.tree.structure(params), leaves)

    def sum_losses(params: Params, batch: Batch) -> tuple[jax.Array, jax.Array]:
        tokens = Tokens(batch["tokens"], batch["positions"], batch["segments"])
        decoder = nnx.merge(definition, params)
        loss = decoder.sum_losses(tokens, batch["labels"], batch["weights"])
        return loss, batch["weights"].sum(dtype=jnp.float32)

    return Model(shapes, rules, init, cast, sum_losses)


def count_parameters(shape: DecoderShape) -> int:
    """Parameters of the published model: rows of vocabulary padding do not count."""
    _, shapes = split_decoder(shape)
    padding = (shape.padded_vocab - shape.vocab) * shape.embed * (1 if shape.tied else 2)
    return sum(leaf.size for leaf in jax.tree.leaves(shapes)) - padding
