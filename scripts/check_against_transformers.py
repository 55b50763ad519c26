"""Compares logits with Hugging Face's Llama (3.1 frequencies), GPT-2 and Mixtral: tiny random weights, fp32.

    pip install torch transformers
    python scripts/check_against_transformers.py

Prints the largest absolute difference for each family; ends with 1 if one exceeds TOLERANCE.
"""

import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

from jaxscale.config import parse_config
from jaxscale.models.build import shape_decoder, split_decoder
from jaxscale.models.decoder import Tokens
from jaxscale.models.shape import DecoderShape
from jaxscale.sharding.rules import iterate_leaves

LAYERS, EMBED, HEADS, KV_HEADS, MLP, VOCAB, LENGTH = 3, 128, 4, 2, 160, 300, 48
EXPERTS, TOP_K = 4, 2
TOLERANCE = 1e-4


def make_shape(moe: dict[str, Any] | None = None, **model: Any) -> DecoderShape:
    sizes = {"layers": LAYERS, "embed": EMBED, "heads": HEADS, "mlp": MLP}
    batch = {"sequences": 2, "length": LENGTH}
    tree = {"run_dir": "unused", "steps": 1, "batch": batch, "model": {**sizes, **model}, "moe": moe}
    return shape_decoder(parse_config(tree, origin="this script"), vocab=VOCAB, platform="cpu")


def make_llama() -> tuple[DecoderShape, torch.nn.Module]:
    stretch = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope = {**stretch, "rope_theta": 500_000.0, "original_max_position_embeddings": 8192}
    sizes = {"hidden_size": EMBED, "intermediate_size": MLP, "num_hidden_layers": LAYERS, "vocab_size": VOCAB}
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS}
    config = LlamaConfig(
        **sizes, **heads, rms_norm_eps=1e-5, initializer_range=0.1, rope_parameters=rope,
        max_position_embeddings=131_072,
    )  # fmt: skip
    shape = make_shape(family="llama", kv_heads=KV_HEADS, rope_theta=500_000.0, rope_scaling="llama3.1")
    return shape, LlamaForCausalLM(config)


def make_gpt2() -> tuple[DecoderShape, torch.nn.Module]:
    sizes = {"n_positions": LENGTH, "n_embd": EMBED, "n_layer": LAYERS, "n_head": HEADS, "n_inner": MLP}
    config = GPT2Config(**sizes, vocab_size=VOCAB, initializer_range=0.1, bos_token_id=0, eos_token_id=0)
    return make_shape(family="gpt2", tied=True), GPT2LMHeadModel(config)


def make_mixtral() -> tuple[DecoderShape, torch.nn.Module]:
    sizes = {"hidden_size": EMBED, "intermediate_size": MLP, "num_hidden_layers": LAYERS, "vocab_size": VOCAB}
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS}
    experts = {"num_local_experts": EXPERTS, "num_experts_per_tok": TOP_K}
    rope = {"rope_type": "default", "rope_theta": 1e6}
    config = MixtralConfig(
        **sizes, **heads, **experts, rms_norm_eps=1e-5, initializer_range=0.1, rope_parameters=rope
    )
    moe = {"experts": EXPERTS, "top_k": TOP_K, "router": "softmax_kept", "exchange": "dropless"}
    shape = make_shape(moe, family="llama", kv_heads=KV_HEADS, rope_theta=1e6)
    return shape, MixtralForCausalLM(config)


def convert_llama(weights: dict[str, np.ndarray], place: str) -> np.ndarray:
    """The leaf at a path of our tree; torch keeps linear layers as [out, in]."""
    if place.endswith("table"):
        name = {"embed/table": "model.embed_tokens.weight", "head/table": "lm_head.weight"}[place]
        return np.pad(weights[name], ((0, -VOCAB % 128), (0, 0)))
    if place.endswith("norm/scale"):
        norm = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
        inner = norm.get(place.split("/")[1])
        return stack(weights, f"model.layers.{{}}.{inner}.weight") if inner else weights["model.norm.weight"]
    _, part, projection, _ = place.split("/")
    torch_part = {"attention": "self_attn", "mlp": "mlp"}[part]
    torch_name = {"query": "q", "key": "k", "value": "v", "out": "o"}.get(projection, projection)
    return stack(weights, f"model.layers.{{}}.{torch_part}.{torch_name}_proj.weight").swapaxes(1, 2)


def convert_gpt2(weights: dict[str, np.ndarray], place: str) -> np.ndarray:
    """The leaf at a path of our tree; GPT-2 keeps its matrices as [in, out], and q, k, v side by side."""
    kind = {"kernel": "weight", "scale": "weight", "bias": "bias", "table": "weight"}[place.split("/")[-1]]
    if not place.startswith("layers"):
        name = {"embed": "wte", "positions": "wpe", "final_norm": "ln_f"}[place.split("/")[0]]
        leaf = weights[f"transformer.{name}.{kind}"]
        return np.pad(leaf, ((0, -VOCAB % 128), (0, 0))) if name == "wte" else leaf
    part = place[len("layers/") : place.rindex("/")]
    if part in (qkv := ("attention/query", "attention/key", "attention/value")):
        joined = stack(weights, f"transformer.h.{{}}.attn.c_attn.{kind}")
        return np.split(joined, 3, axis=-1)[qkv.index(part)]
    names = {"attention/out": "attn.c_proj", "mlp/up": "mlp.c_fc", "mlp/down": "mlp.c_proj"}
    names |= {"attention_norm": "ln_1", "mlp_norm": "ln_2"}
    return stack(weights, f"transformer.h.{{}}.{names[part]}.{kind}")


def convert_mixtral(weights: dict[str, np.ndarray], place: str) -> np.ndarray:
    """The leaf at a path of our tree; torch keeps an expert's gate above its up projection, as [out, in]."""
    if not place.startswith("expert_layers/experts/"):
        return convert_llama(weights, place.removeprefix("expert_"))
    projection = place.split("/")[2]
    if projection == "router":
        return stack(weights, "model.layers.{}.mlp.gate.weight").swapaxes(1, 2)
    if projection == "down":
        return stack(weights, "model.layers.{}.mlp.experts.down_proj").swapaxes(2, 3)
    gate_up = stack(weights, "model.layers.{}.mlp.experts.gate_up_proj").swapaxes(2, 3)
    return np.split(gate_up, 2, axis=-1)[("gate", "up").index(projection)]


def stack(weights: dict[str, np.ndarray], pattern: str) -> np.ndarray:
    """One leaf of all layers."""
    return np.stack([weights[pattern.format(layer)] for layer in range(LAYERS)])


def compare(shape: DecoderShape, theirs: torch.nn.Module, convert: Any) -> tuple[float, float]:
    with torch.no_grad():  # biases and norms start at 0 and 1, where faults would hide
        for weight in theirs.parameters():
            weight.add_(0.05 * torch.randn_like(weight))
    weights = {name: tensor.numpy() for name, tensor in theirs.state_dict().items()}
    definition, shapes = split_decoder(shape)
    leaves = [convert(weights, path).reshape(leaf.shape) for path, leaf in iterate_leaves(shapes)]
    params = jax.tree.unflatten(jax.tree.structure(shapes), map(jnp.asarray, leaves))
    ids = np.random.default_rng(0).integers(0, VOCAB, (2, LENGTH)).astype(np.int32)
    positions = jnp.tile(jnp.arange(LENGTH, dtype=jnp.int32), (2, 1))
    decoder = nnx.merge(definition, params)
    logits = decoder.extend(ids, jnp.int32(0), decoder.make_cache(2, LENGTH))[0]
    hidden, _ = decoder(Tokens(jnp.asarray(ids), positions, jnp.ones_like(positions)))
    whole = hidden @ params["embed" if shape.tied else "head"]["table"][:VOCAB].T
    with torch.no_grad():
        expected = theirs.eval()(torch.from_numpy(ids).long()).logits.numpy()
    return max(np.abs(got - expected).max() for got in (logits, whole)), np.abs(expected).max()


def main() -> int:
    torch.manual_seed(0)
    differences = []
    for family, make, convert in (
        ("llama", make_llama, convert_llama),
        ("gpt2", make_gpt2, convert_gpt2),
        ("mixtral", make_mixtral, convert_mixtral),
    ):
        difference, largest = compare(*make(), convert)
        print(f"{family}: max abs logit difference {difference:.2e} (largest logit {largest:.1f})")
        differences.append(difference)
    return int(max(differences) > TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
