"""From a configuration to a decoder."""

from dataclasses import replace

import jax
from flax import nnx

from jaxscale.config import Config, ModelConfig, UserError
from jaxscale.metrics import model_flops_per_token
from jaxscale.models.attention import resolve_implementation
from jaxscale.models.decoder import Decoder, DecoderShape, Tokens
from jaxscale.models.decoder_rules import decoder_rules
from jaxscale.models.model import Batch, Model, Params
from jaxscale.models.remat import DECODER_TENSORS, find_remat_problems
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
    tensors = [name for name in DECODER_TENSORS if name != "mlp_gate" or model.family == "llama"]
    problems = find_remat_problems(config.remat, tensors)
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

    def sum_losses(
        params: Params, batch: Batch, _: jax.Array | None = None, *, fp8: Fp8Weights | None = None
    ) -> tuple[jax.Array, jax.Array]:
        tokens = Tokens(batch["tokens"], batch["positions"], batch["segments"])
        if fp8 is None:
            decoder = nnx.merge(definition, params)
        else:
            decoder = nnx.merge(fp8_definition, _insert_fp8(params, fp8))
        loss = decoder.sum_losses(tokens, batch["labels"], batch["weights"])
        return loss, batch["weights"].sum(dtype=loss.dtype)

    kernels = {path: leaf.size for path, leaf in iterate_leaves(shapes) if path.endswith("/kernel")}

    def count_flops(length: int) -> float:
        matmul_params = sum(kernels.values()) + shape.vocab * shape.embed
        return model_flops_per_token(matmul_params, shape.layers, shape.heads, shape.head, length)

    return Model(
        shapes=shapes,
        rules=decoder_rules(shape.family, tied=shape.tied),
        init=init,
        sum_losses=sum_losses,
        flops_per_token=count_flops,
        fp8_kernels={} if shape.fp8 == "none" else dict.fromkeys(kernels, shape.layers),
        reduction="region",
    )


def _insert_fp8(params: Params, fp8: Fp8Weights) -> Params:
    """The parameters with each kernel's fp8 copy and scales beside it, as `Projection` names them."""
    flat = dict(iterate_leaves(params))
    for path in fp8.kernels:
        layer = path.removesuffix("kernel")
        flat |= {f"{layer}kernel_fp8": fp8.kernels[path], f"{layer}scales": fp8.scales[path]}
    return nest_by_name(flat)


def count_parameters(shape: DecoderShape) -> int:
    """Parameters of the published model: rows of vocabulary padding do not count."""
    _, shapes = split_decoder(shape)
    padding = (shape.padded_vocab - shape.vocab) * shape.embed * (1 if shape.tied else 2)
    return sum(leaf.size for leaf in jax.tree.leaves(shapes)) - padding
