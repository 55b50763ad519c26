"""One decoder for the Llama family and GPT-2, its layers stacked and scanned.

The module knows nothing of meshes beyond the names of its dims; its partition rules stand in
`jaxscale.models.decoder_rules`. Array suffixes follow the legend in `jaxscale.sharding.rules`.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxscale.models.attention import Implementation, attend, attend_visible
from jaxscale.models.remat import DECODER_MATMULS, name_tensor, remat
from jaxscale.models.rotary import Rotation, make_rotation, rotate
from jaxscale.numerics.draw import draw_normal
from jaxscale.numerics.fp8 import E4M3, Scales, einsum_fp8
from jaxscale.numerics.policy import widen
from jaxscale.parallel.vocab import embed_tokens, sum_token_losses
from jaxscale.sharding.activations import constrain

VOCAB_MULTIPLE = 128  # the table's rows: a multiple of what a matrix unit takes, and of most tensor axes


@dataclass(frozen=True)
class DecoderShape:
    """Everything that decides a decoder; sizes in elements, see `jaxscale.config.ModelConfig`."""

    family: str
    layers: int
    embed: int
    heads: int
    kv_heads: int
    head: int
    mlp: int
    vocab: int
    positions: int
    tied: bool
    rope_theta: float
    rope_scaling: str
    norm_eps: float
    cross_documents: bool
    attention: Implementation
    dtype: jnp.dtype
    fp8: Literal["none", "delayed", "dynamic"] = "none"

    @property
    def padded_vocab(self) -> int:
        """Rows of the table. The padding depends on no mesh, so a run moves between meshes as it is."""
        return math.ceil(self.vocab / VOCAB_MULTIPLE) * VOCAB_MULTIPLE


class Tokens(NamedTuple):
    """What a decoder reads: int32 ids, positions and document numbers (0 is padding), each [B, T]."""

    ids_BT: jax.Array
    positions_BT: jax.Array
    segments_BT: jax.Array


class Cache(NamedTuple):
    """Keys and values of the tokens so far, S slots a sequence; slots not reached yet are never read."""

    keys_LBSKH: jax.Array
    values_LBSKH: jax.Array


class Fp8Input(nnx.Variable):
    """What a projection in fp8 is handed beside its parameters."""


class Projection(nnx.Module):
    """An einsum with a kernel, and a bias where the family has one; in fp8 where the shape says so."""

    def __init__(
        self,
        shape: DecoderShape,
        rngs: nnx.Rngs,
        equation: str,
        kernel: tuple[int, ...],
        std: float,
        bias: tuple[int, ...] | None,
    ):
        self.equation, self.is_dynamic = equation, shape.fp8 == "dynamic"
        self.kernel = nnx.Param(draw_normal(rngs.params(), kernel, std))
        self.bias = None if bias is None else nnx.Param(jnp.zeros(bias, jnp.float32))
        self.kernel_fp8 = None if shape.fp8 == "none" else Fp8Input(jnp.zeros(kernel, E4M3))
        self.scales = None if shape.fp8 == "none" else Fp8Input(jnp.ones(len(Scales._fields), jnp.float32))

    def __call__(self, x: jax.Array) -> jax.Array:
        return project(x, self)[0]


def project(x: jax.Array, *projections: Projection) -> tuple[jax.Array, ...]:
    """The projections of one input."""
    kernels = tuple(each.kernel[...].astype(x.dtype) for each in projections)
    equations = tuple(each.equation for each in projections)
    if projections[0].kernel_fp8 is None:
        results = tuple(
            jnp.einsum(equation, x, kernel) for equation, kernel in zip(equations, kernels, strict=True)
        )
    else:
        kernels_fp8 = tuple(each.kernel_fp8[...] for each in projections if each.kernel_fp8 is not None)
        scales = tuple(Scales(*each.scales[...]) for each in projections if each.scales is not None)
        results = einsum_fp8(equations, projections[0].is_dynamic, x, kernels, kernels_fp8, scales)
    return tuple(
        y if each.bias is None else y + each.bias[...].astype(x.dtype)
        for y, each in zip(results, projections, strict=True)
    )


class Norm(nnx.Module):
    """RMSNorm (Llama) or LayerNorm with bias (GPT-2); statistics and scale in at least fp32."""

    def __init__(self, shape: DecoderShape):
        self.eps = shape.norm_eps
        self.scale = nnx.Param(jnp.ones(shape.embed, jnp.float32))
        self.bias = nnx.Param(jnp.zeros(shape.embed, jnp.float32)) if shape.family == "gpt2" else None

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        x = x_BTD.astype(widen(x_BTD.dtype))
        if self.bias is not None:
            x = x - x.mean(-1, keepdims=True)
        x = x * lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + self.eps) * self.scale[...]
        if self.bias is not None:
            x = x + self.bias[...]
        return x.astype(x_BTD.dtype)


class Attention(nnx.Module):
    """Grouped-query self-attention."""

    def __init__(self, shape: DecoderShape, rngs: nnx.Rngs):
        self.shape = shape
        d, n, k, h = shape.embed, shape.heads, shape.kv_heads, shape.head
        biased = shape.family == "gpt2"
        std, out_std = _kernel_std(shape, d), _residual_std(shape, n * h)
        self.query = Projection(shape, rngs, "BTD,DNH->BTNH", (d, n, h), std, (n, h) if biased else None)
        self.key = Projection(shape, rngs, "BTD,DKH->BTKH", (d, k, h), std, (k, h) if biased else None)
        self.value = Projection(shape, rngs, "BTD,DKH->BTKH", (d, k, h), std, (k, h) if biased else None)
        self.out = Projection(shape, rngs, "BTNH,NHD->BTD", (n, h, d), out_std, (d,) if biased else None)

    def __call__(self, x_BTD: jax.Array, rotation: Rotation | None, segments_BT: jax.Array) -> jax.Array:
        q_BTNH, k_BTKH, v_BTKH = self._project(x_BTD, rotation)
        mixed_BTNH = attend(
            q_BTNH,
            k_BTKH,
            v_BTKH,
            segments_BT=None if self.shape.cross_documents else segments_BT,
            implementation=self.shape.attention,
        )
        return self.out(constrain(mixed_BTNH, "batch", "length", "heads", "head"))

    def extend(
        self,
        x_BTD: jax.Array,
        rotation: Rotation | None,
        keys_BSKH: jax.Array,
        values_BSKH: jax.Array,
        start: jax.Array,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Attention of T new tokens, the first at slot `start`, over a cache that they join."""
        q_BTNH, k_BTKH, v_BTKH = self._project(x_BTD, rotation)
        keys_BSKH = lax.dynamic_update_slice_in_dim(keys_BSKH, k_BTKH, start, axis=1)
        values_BSKH = lax.dynamic_update_slice_in_dim(values_BSKH, v_BTKH, start, axis=1)
        slots_S = jnp.arange(keys_BSKH.shape[1])
        causal_TS = slots_S <= start + jnp.arange(x_BTD.shape[1])[:, None]
        mixed_BTNH = attend_visible(q_BTNH, keys_BSKH, values_BSKH, causal_TS[None])
        return self.out(mixed_BTNH), keys_BSKH, values_BSKH

    def _project(self, x_BTD: jax.Array, rotation: Rotation | None) -> tuple[jax.Array, ...]:
        q_BTNH, k_BTKH, v_BTKH = project(x_BTD, self.query, self.key, self.value)
        q_BTNH = constrain(q_BTNH, "batch", "length", "heads", "head")
        k_BTKH = constrain(k_BTKH, "batch", "length", "kv_heads", "head")
        v_BTKH = constrain(v_BTKH, "batch", "length", "kv_heads", "head")
        if rotation is not None:
            q_BTNH, k_BTKH = rotate(q_BTNH, rotation), rotate(k_BTKH, rotation)
        return name_tensor(q_BTNH, "query"), name_tensor(k_BTKH, "key"), name_tensor(v_BTKH, "value")


class Mlp(nnx.Module):
    """SwiGLU (Llama) or GELU in its tanh form (GPT-2)."""

    def __init__(self, shape: DecoderShape, rngs: nnx.Rngs):
        d, f, biased = shape.embed, shape.mlp, shape.family == "gpt2"
        std = _kernel_std(shape, d)
        self.up = Projection(shape, rngs, "BTD,DF->BTF", (d, f), std, (f,) if biased else None)
        self.gate = None if biased else Projection(shape, rngs, "BTD,DF->BTF", (d, f), std, None)
        self.down = Projection(
            shape, rngs, "BTF,FD->BTD", (f, d), _residual_std(shape, f), (d,) if biased else None
        )

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        if self.gate is None:
            up_BTF = name_tensor(constrain(self.up(x_BTD), "batch", "length", "mlp"), "mlp_up")
            hidden_BTF = jax.nn.gelu(up_BTF, approximate=True)
        else:
            up_BTF, gate_BTF = (
                constrain(y_BTF, "batch", "length", "mlp") for y_BTF in project(x_BTD, self.up, self.gate)
            )
            gate_BTF = name_tensor(gate_BTF, "mlp_gate")
            hidden_BTF = jax.nn.silu(gate_BTF) * name_tensor(up_BTF, "mlp_up")
        return self.down(name_tensor(hidden_BTF, "mlp_hidden"))


class Block(nnx.Module):
    """Pre-norm attention and MLP, each added to the residual stream."""

    def __init__(self, shape: DecoderShape, rngs: nnx.Rngs):
        self.attention_norm = Norm(shape)
        self.attention = Attention(shape, rngs)
        self.mlp_norm = Norm(shape)
        self.mlp = Mlp(shape, rngs)

    def __call__(self, x_BTD: jax.Array, rotation: Rotation | None, segments_BT: jax.Array) -> jax.Array:
        x_BTD = name_tensor(x_BTD, "block_input")
        read_BTD = name_tensor(self.attention_norm(x_BTD), "attention_norm")
        mixed_BTD = name_tensor(self.attention(read_BTD, rotation, segments_BT), "attention_out")
        x_BTD = self._add(x_BTD, mixed_BTD)
        return self._add(x_BTD, self.mlp(name_tensor(self.mlp_norm(x_BTD), "mlp_norm")))

    def extend(self, x_BTD: jax.Array, rotation: Rotation | None, *cache: jax.Array) -> tuple:
        mixed_BTD, keys, values = self.attention.extend(self.attention_norm(x_BTD), rotation, *cache)
        x_BTD = x_BTD + mixed_BTD
        return x_BTD + self.mlp(self.mlp_norm(x_BTD)), keys, values

    def _add(self, x_BTD: jax.Array, y_BTD: jax.Array) -> jax.Array:
        return constrain(x_BTD + y_BTD, "batch", "length", "embed")


class Table(nnx.Module):
    """Rows for ids or positions."""

    def __init__(self, rngs: nnx.Rngs, rows: int, padded: int, embed: int, std: float):
        drawn = draw_normal(rngs.params(), (rows, embed), std)
        self.table = nnx.Param(jnp.pad(drawn, ((0, padded - rows), (0, 0))))


class Decoder(nnx.Module):
    """Token ids to final hidden states; the loss and the logits go through the table that is the head."""

    def __init__(self, shape: DecoderShape, rngs: nnx.Rngs):
        self.shape = shape
        std = _kernel_std(shape, shape.embed)
        self.embed = Table(rngs, shape.vocab, shape.padded_vocab, shape.embed, std)
        if shape.family == "gpt2":
            self.positions = Table(rngs, shape.positions, shape.positions, shape.embed, std)
        self.layers = nnx.vmap(partial(Block, shape))(rngs.split(shape.layers))
        self.final_norm = Norm(shape)
        if not shape.tied:
            self.head = Table(rngs, shape.vocab, shape.padded_vocab, shape.embed, std)

    def __call__(self, tokens: Tokens) -> jax.Array:
        """Final hidden states x_BTD in the compute dtype."""
        x_BTD, rotation = self._enter(tokens.ids_BT, tokens.positions_BT)
        definition, stacked = nnx.split(self.layers)

        def visit(x_BTD: jax.Array, layer: Any) -> tuple[jax.Array, None]:
            return nnx.merge(definition, layer)(x_BTD, rotation, tokens.segments_BT), None

        x_BTD, _ = lax.scan(remat(visit, in_scan=True, matmuls=DECODER_MATMULS), x_BTD, stacked)
        return self.final_norm(x_BTD)

    def sum_losses(self, tokens: Tokens, labels_BT: jax.Array, weights_BT: jax.Array) -> jax.Array:
        """Weighted sum of next-token cross-entropies, nats, fp32 scalar."""
        return sum_token_losses(self(tokens), self._head_table(), labels_BT, weights_BT, self.shape.vocab)

    def extend(self, ids_BT: jax.Array, start: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
        """Decoding: T new tokens from slot `start` on.

        Returns:
          logits_BTV in fp32 over the true vocabulary, and the cache with the tokens in it.
        """
        positions_BT = jnp.broadcast_to(start + jnp.arange(ids_BT.shape[1]), ids_BT.shape)
        x_BTD, rotation = self._enter(ids_BT, positions_BT)
        definition, stacked = nnx.split(self.layers)

        def visit(x_BTD: jax.Array, inputs: tuple) -> tuple[jax.Array, tuple]:
            layer, keys, values = inputs
            block = nnx.merge(definition, layer)
            x_BTD, keys, values = block.extend(x_BTD, rotation, keys, values, start)
            return x_BTD, (keys, values)

        x_BTD, (keys, values) = lax.scan(visit, x_BTD, (stacked, cache.keys_LBSKH, cache.values_LBSKH))
        table_VD = self._head_table()[: self.shape.vocab].astype(x_BTD.dtype)
        logits_BTV = jnp.einsum(
            "BTD,VD->BTV", self.final_norm(x_BTD), table_VD, preferred_element_type=widen(x_BTD.dtype)
        )
        return logits_BTV, Cache(keys, values)

    def make_cache(self, sequences: int, slots: int) -> Cache:
        """An empty cache for `slots` tokens a sequence."""
        shape = (self.shape.layers, sequences, slots, self.shape.kv_heads, self.shape.head)
        return Cache(jnp.zeros(shape, self.shape.dtype), jnp.zeros(shape, self.shape.dtype))

    def _enter(self, ids_BT: jax.Array, positions_BT: jax.Array) -> tuple[jax.Array, Rotation | None]:
        """Embedded tokens and, for rotary families, the rotation of their positions."""
        x_BTD = embed_tokens(self.embed.table[...], ids_BT, self.shape.dtype)
        if self.shape.family == "gpt2":
            x_BTD = x_BTD + embed_tokens(self.positions.table[...], positions_BT, self.shape.dtype)
            return constrain(x_BTD, "batch", "length", "embed"), None
        rotation = make_rotation(
            positions_BT,
            self.shape.head,
            self.shape.rope_theta,
            self.shape.rope_scaling,
            widen(self.shape.dtype),
        )
        return constrain(x_BTD, "batch", "length", "embed"), rotation

    def _head_table(self) -> jax.Array:
        return (self.embed if self.shape.tied else self.head).table[...]


def _kernel_std(shape: DecoderShape, fan_in: int) -> float:
    """GPT-2 published 0.02 for all; elsewhere a projection keeps the variance of what enters it."""
    return 0.02 if shape.family == "gpt2" else fan_in**-0.5


def _residual_std(shape: DecoderShape, fan_in: int) -> float:
    """Projections into the residual stream shrink with depth, so that its variance does not grow (GPT-2)."""
    return _kernel_std(shape, fan_in) / math.sqrt(2 * shape.layers)
