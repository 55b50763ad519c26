"""A small GPT with dropout, in Flax Linen (docs/tutorials/linen.md)."""

import jax
import jax.numpy as jnp
from flax import linen as nn

import jaxscale as js


class Block(nn.Module):
    heads: int
    dropout: float

    @nn.compact
    def __call__(self, x_TD, mask, deterministic):
        width = x_TD.shape[-1]
        dropout = nn.Dropout(self.dropout, deterministic=deterministic)
        attention = nn.MultiHeadDotProductAttention(self.heads, use_bias=False, name="attention")
        x_TD += dropout(attention(nn.LayerNorm(name="attention_norm")(x_TD), mask=mask))
        h_TF = nn.gelu(nn.Dense(4 * width, name="up")(nn.LayerNorm(name="mlp_norm")(x_TD)))
        return x_TD + dropout(nn.Dense(width, name="down")(h_TF))


class GPT(nn.Module):
    vocab: int
    length: int
    width: int
    heads: int
    layers: int
    dropout: float

    @nn.compact
    def __call__(self, tokens_T, positions_T, segments_T, deterministic=True):
        table = nn.Embed(self.vocab, self.width, name="tokens")
        x_TD = table(tokens_T) + nn.Embed(self.length, self.width, name="positions")(positions_T)
        same_document = nn.make_attention_mask(segments_T, segments_T, jnp.equal)
        mask = nn.combine_masks(nn.make_causal_mask(tokens_T), same_document)
        for layer in range(self.layers):
            x_TD = Block(self.heads, self.dropout, name=f"block_{layer}")(x_TD, mask, deterministic)
        return table.attend(nn.LayerNorm(name="norm")(x_TD))


RULES = js.Rules(
    {
        "tokens/embedding": ("vocab", "embed"),
        "positions/embedding": ("positions", "embed"),
        "block_*/*_norm/*": ("norm",),
        "block_*/attention/query/kernel": ("embed", "heads", "head"),
        "block_*/attention/key/kernel": ("embed", "heads", "head"),
        "block_*/attention/value/kernel": ("embed", "heads", "head"),
        "block_*/attention/out/kernel": ("heads", "head", "embed"),
        "block_*/up/kernel": ("embed", "mlp"),
        "block_*/up/bias": ("mlp",),
        "block_*/down/kernel": ("mlp", "embed"),
        "block_*/down/bias": ("embed",),
        "norm/*": ("norm",),
    }
)


def loss(apply, batch, keys_B):
    def run(tokens_T, positions_T, segments_T, key):  # key is None in evaluation
        rngs = None if key is None else {"dropout": key}
        return apply(tokens_T, positions_T, segments_T, deterministic=key is None, rngs=rngs)

    logits_BTV = jax.vmap(run)(batch["tokens"], batch["positions"], batch["segments"], keys_B)
    return js.token_cross_entropy(logits_BTV, batch["labels"], batch["weights"])


def make_model(vocab, length, width=64, heads=4, layers=2, dropout=0.1):
    padded_vocab = vocab + -vocab % 64  # rows that no token has, so that the table divides over `tensor`
    module = GPT(padded_vocab, length, width, heads, layers, dropout)
    example_T = jnp.zeros(length, jnp.int32)
    return js.from_linen(
        module, loss, rules=RULES, init=lambda key: module.init(key, example_T, example_T, example_T)
    )
