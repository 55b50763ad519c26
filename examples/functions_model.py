"""A small decoder in plain JAX: two functions and a table of rules (docs/tutorials/functions.md)."""

import jax
import jax.numpy as jnp

import jaxscale as js

RULES = js.Rules(
    {
        "table": ("vocab", "embed"),
        "layers/attention_norm": ("layers", "norm"),
        "layers/query": ("layers", "embed", "heads", "head"),
        "layers/key": ("layers", "embed", "heads", "head"),
        "layers/value": ("layers", "embed", "heads", "head"),
        "layers/out": ("layers", "heads", "head", "embed"),
        "layers/mlp_norm": ("layers", "norm"),
        "layers/gate": ("layers", "embed", "mlp"),
        "layers/up": ("layers", "embed", "mlp"),
        "layers/down": ("layers", "mlp", "embed"),
        "norm": ("norm",),
    }
)


def normalise(x, scale):
    mean_square = jnp.mean(x.astype(jnp.float32) ** 2, axis=-1, keepdims=True)
    return (x * jax.lax.rsqrt(mean_square + 1e-6) * scale).astype(x.dtype)


def rotate(x_BTNH, positions_BT):
    """Rotary positions."""
    half = x_BTNH.shape[-1] // 2
    angles_BTNH = positions_BT[..., None, None] * 10_000.0 ** -(jnp.arange(half) / half)
    first, second = jnp.split(x_BTNH, 2, axis=-1)
    cos, sin = jnp.cos(angles_BTNH), jnp.sin(angles_BTNH)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x_BTNH.dtype)


def run_layer(x_BTD, w, positions_BT, mask):
    x_BTD = js.constrain(x_BTD, "batch", "length", "embed")
    h_BTD = normalise(x_BTD, w["attention_norm"])
    q_BTNH, k_BTNH, v_BTNH = (
        jnp.einsum("BTD,DNH->BTNH", h_BTD, w[name]) for name in ("query", "key", "value")
    )
    q_BTNH, k_BTNH = rotate(q_BTNH, positions_BT), rotate(k_BTNH, positions_BT)
    mixed_BTNH = jax.nn.dot_product_attention(q_BTNH, k_BTNH, v_BTNH, mask=mask)
    x_BTD += jnp.einsum("BTNH,NHD->BTD", mixed_BTNH, w["out"])
    h_BTD = normalise(x_BTD, w["mlp_norm"])
    h_BTF = jax.nn.silu(h_BTD @ w["gate"]) * (h_BTD @ w["up"])
    return x_BTD + h_BTF @ w["down"]


def loss(params, batch, keys_B):
    positions_BT, segments_BT = batch["positions"], batch["segments"]
    causal_TS = jnp.tril(jnp.ones((positions_BT.shape[1],) * 2, bool))
    same_document_BTS = segments_BT[:, :, None] == segments_BT[:, None, :]
    mask = (causal_TS & same_document_BTS)[:, None]
    x_BTD, _ = jax.lax.scan(
        lambda x_BTD, w: (jax.checkpoint(run_layer)(x_BTD, w, positions_BT, mask), None),
        params["table"][batch["tokens"]],
        params["layers"],
    )
    logits_BTV = normalise(x_BTD, params["norm"]) @ params["table"].T
    return js.token_cross_entropy(logits_BTV, batch["labels"], batch["weights"])


def make_model(vocab, length, width=64, heads=4, layers=2):
    head, mlp = width // heads, 3 * width
    padded_vocab = vocab + -vocab % 64  # rows that no token has, so that the table divides over `tensor`
    shapes = {
        "query": (width, heads, head),
        "key": (width, heads, head),
        "value": (width, heads, head),
        "out": (heads, head, width),
        "gate": (width, mlp),
        "up": (width, mlp),
        "down": (mlp, width),
    }

    def init(key):
        keys = iter(jax.random.split(key, len(shapes) + 1))
        stacked = {
            name: jax.random.normal(next(keys), (layers, *shape)) * width**-0.5
            for name, shape in shapes.items()
        }
        norms = {name: jnp.ones((layers, width)) for name in ("attention_norm", "mlp_norm")}
        table = jax.random.normal(next(keys), (padded_vocab, width)) * width**-0.5
        return {"table": table, "layers": {**stacked, **norms}, "norm": jnp.ones(width)}

    matmul_params = padded_vocab * width + layers * (4 * width * width + 3 * width * mlp)
    return js.from_functions(
        init,
        loss,
        rules=RULES,
        flops_per_token=lambda length: 6 * matmul_params + 12 * layers * width * length,
    )
