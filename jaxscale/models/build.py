"""From a configuration to a decoder."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import jax
from flax import nnx

from jaxscale.config import Config, ModelConfig, UserError
from jaxscale.metrics import model_flops_per_token
from jaxscale.models.attention import resolve_implementation
from jaxscale.models.decoder import Decoder, Tokens
from jaxscale.models.decoder_rules import decoder_rules
from jaxscale.models.expert_shape import find_expert_problems, shape_experts
from jaxscale.models.model import NO_INPUTS, Batch, Model, Params, RouterInputs, Routers
from jaxscale.models.remat import find_remat_problems, list_tensors
from jaxscale.models.shape import DecoderShape
from jaxscale.numerics.fp8 import Fp8Weights
from jaxscale.numerics.policy import compute_dtype
from jaxscale.sharding.rules import iterate_leaves, nest_by_name


def shape_decoder(config: Config, *, vocab: int, platform: str) -> DecoderShape:
    """Fills in what the configuration leaves open.

    Args:
      vocab: tokens in the vocabulary (of the tokenizer, or model.vocab).
      platform: `tpu`, `gpu` or `cpu`, which decides the attention kernel.

    Raises:
      UserError: the sizes contradict each other; every contradiction is listed.
    """
    if problems := find_contradictions(config):
        raise UserError(f"the model has {len(problems)} problem(s)\n  " + "\n  ".join(problems))
    return complete_shape(config, vocab=vocab, platform=platform)


def find_contradictions(config: Config) -> list[str]:
    """Every pair of a decoder's sizes that cannot both hold."""
    model, length = config.model, config.batch.length
    assert isinstance(model, ModelConfig)
    kv_heads = model.kv_heads or model.heads
    positions = model.positions or length
    problems = find_expert_problems(config)
    has_dense = config.moe is None or bool(config.moe.first_dense or config.moe.every > 1)
    tensors = list_tensors(
        gated=model.family == "llama",
        dense=has_dense or bool(config.moe and config.moe.shared_experts),
        experts=config.moe is not None,
    )
    problems += find_remat_problems(config.remat, tensors)
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
    head = _find_head(model)
    if model.family == "llama" and head % 2:
        problems.append(f"a head of {head} channels is odd; rotary positions turn pairs, so make it even")
    if length > positions:
        problems.append(
            f"batch.length={length} is longer than model.positions={positions}; lower it, or raise positions"
        )
    return problems


def _find_head(model: ModelConfig) -> int:
    return model.head or max(model.embed // model.heads, 1)


def complete_shape(config: Config, *, vocab: int, platform: str) -> DecoderShape:
    """`shape_decoder` for sizes that may contradict each other, so that all else can be checked too."""
    model, length = config.model, config.batch.length
    assert isinstance(model, ModelConfig)
    head = _find_head(model)
    dtype = compute_dtype(config.precision)
    attention = resolve_implementation(
        model.attention, platform=platform, dtype=dtype, length=length, head=head
    )
    return DecoderShape(
        family=model.family,
        layers=model.layers,
        embed=model.embed,
        heads=model.heads,
        kv_heads=model.kv_heads or model.heads,
        head=head,
        mlp=model.mlp,
        vocab=vocab,
        positions=model.positions or length,
        tied=model.tied,
        rope_theta=model.rope_theta,
        rope_scaling=model.rope_scaling,
        norm_eps=model.norm_eps,
        cross_documents=config.data.cross_documents,
        attention=attention,
        dtype=dtype,
        fp8=config.fp8.scaling if config.fp8 else "none",
        experts=None if config.moe is None else shape_experts(config, platform=platform),
    )


def split_decoder(shape: DecoderShape) -> tuple[nnx.GraphDef, Params]:
    """The decoder's definition and its parameters as `ShapeDtypeStruct`s, nothing allocated."""
    definition, state = nnx.split(nnx.eval_shape(lambda: Decoder(shape, nnx.Rngs(params=0))))
    return definition, nnx.to_pure_dict(state)


def build_decoder(shape: DecoderShape) -> Model:
    plain_shape = replace(shape, fp8="none")
    definition, shapes = split_decoder(plain_shape)
    fp8_definition = definition if shape.fp8 == "none" else split_decoder(shape)[0]

    def init(key: jax.Array) -> Params:
        return nnx.to_pure_dict(nnx.state(Decoder(plain_shape, nnx.Rngs(params=key))))

    def merge(params: Params, fp8: Fp8Weights | None) -> Decoder:
        if fp8 is None:
            return nnx.merge(definition, params)
        return nnx.merge(fp8_definition, _insert_fp8(params, fp8))

    def sum_losses(
        params: Params,
        batch: Batch,
        keys_B: jax.Array | None = None,
        *,
        fp8: Fp8Weights | None = None,
        routers: RouterInputs = NO_INPUTS,
    ) -> tuple:
        decoder, tokens = merge(params, fp8), _read_tokens(batch)
        loss, sums = decoder.sum_losses(tokens, batch["labels"], batch["weights"], routers, keys_B)
        pair = loss, batch["weights"].sum(dtype=loss.dtype)
        return pair if sums is None else (*pair, sums)

    def count_load(
        params: Params,
        batch: Batch,
        keys_B: jax.Array | None,
        *,
        fp8: Fp8Weights | None = None,
        routers: RouterInputs = NO_INPUTS,
    ) -> jax.Array:
        _, sums = merge(params, fp8)(_read_tokens(batch), routers, keys_B)
        assert sums is not None
        return sums.load

    kernels = {path: leaf for path, leaf in iterate_leaves(shapes) if path.endswith("/kernel")}
    in_fp8 = {path: leaf.shape[0] for path, leaf in kernels.items() if "/router/" not in path}
    return Model(
        shapes=shapes,
        rules=decoder_rules(shape),
        init=init,
        sum_losses=sum_losses,
        flops_per_token=partial(_count_flops, shape, kernels),
        fp8_kernels={} if shape.fp8 == "none" else in_fp8,
        routers=None if shape.experts is None else _describe_routers(shape, count_load),
        split_dims=frozenset({"experts"}),
        reduction="region",
    )


def _read_tokens(batch: Batch) -> Tokens:
    return Tokens(batch["tokens"], batch["positions"], batch["segments"])


def _is_expert_kernel(path: str) -> bool:
    """Of an expert that tokens choose, or of the router."""
    return "/experts/" in path and "/shared/" not in path


def _count_used(shape: DecoderShape, path: str, size: int) -> int:
    """Elements of a parameter that one token uses."""
    if shape.experts is None or not _is_expert_kernel(path) or "/router/" in path:
        return size
    return size * shape.experts.router.top_k // shape.experts.router.experts


def _count_flops(shape: DecoderShape, kernels: Mapping[str, Any], length: int) -> float:
    matmul_params = sum(_count_used(shape, path, leaf.size) for path, leaf in kernels.items())
    matmul_params += shape.vocab * shape.embed
    return model_flops_per_token(matmul_params, shape.layers, shape.heads, shape.head, length)


def _describe_routers(shape: DecoderShape, count_load: Callable[..., jax.Array]) -> Routers:
    experts = shape.experts
    assert experts is not None
    return Routers(
        layers=shape.expert_layers,
        experts=experts.router.experts,
        top_k=experts.router.top_k,
        has_bias=experts.has_bias,
        balance_coef=experts.balance_coef,
        z_coef=experts.z_coef,
        needs_load=experts.balance_scope == "step",
        count_load=count_load,
    )


def _insert_fp8(params: Params, fp8: Fp8Weights) -> Params:
    """The parameters with each kernel's fp8 copy and scales beside it, as `Projection` names them."""
    flat = dict(iterate_leaves(params))
    for path in fp8.kernels:
        layer = path.removesuffix("kernel")
        flat |= {f"{layer}kernel_fp8": fp8.kernels[path], f"{layer}scales": fp8.scales[path]}
    return nest_by_name(flat)


def count_parameters(shape: DecoderShape, *, active: bool = False) -> int:
    """Parameters of the published model: rows of vocabulary padding do not count.

    Args:
      active: only those that one token uses, so that of the experts it takes those that a token chooses.
    """
    _, shapes = split_decoder(shape)
    padding = (shape.padded_vocab - shape.vocab) * shape.embed * (1 if shape.tied else 2)
    sizes = {path: leaf.size for path, leaf in iterate_leaves(shapes)}
    counted = (_count_used(shape, path, size) if active else size for path, size in sizes.items())
    return sum(counted) - padding
