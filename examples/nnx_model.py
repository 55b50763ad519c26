"""Mamba-2, as the package mamba2-jax has it (docs/tutorials/nnx.md)."""

from mamba2_jax import Mamba2Config, Mamba2ForCausalLM

import jaxscale as js

RULES = js.Rules(
    {
        "backbone/embedder/embedding": ("vocab", "embed"),
        "backbone/layers/*/norm/weight": ("norm",),
        "backbone/layers/*/mixer/in_proj/kernel": ("embed", "mlp"),
        "backbone/layers/*/mixer/conv1d/conv/*": js.REPLICATED,
        "backbone/layers/*/mixer/A_log": ("heads",),
        "backbone/layers/*/mixer/D": ("heads",),
        "backbone/layers/*/mixer/dt_bias": ("heads",),
        "backbone/layers/*/mixer/norm/weight": ("norm",),
        "backbone/layers/*/mixer/out_proj/kernel": ("mlp", "embed"),
        "backbone/final_norm/weight": ("norm",),
    }
)


def loss(model, batch, keys_B):
    logits_BTV = model(batch["tokens"])["logits"]
    return js.token_cross_entropy(logits_BTV, batch["labels"], batch["weights"])


def make_model(vocab, length, width=64, layers=2):
    config = Mamba2Config(
        vocab_size=vocab + -vocab % 64,  # rows that no token has, so that the table divides over `tensor`
        hidden_size=width,
        num_hidden_layers=layers,
        state_size=16,
        head_dim=16,
        chunk_size=min(length, 16),
    )
    return js.from_nnx(lambda rngs: Mamba2ForCausalLM(config, rngs=rngs), loss, rules=RULES)
