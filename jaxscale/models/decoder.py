"""One decoder for the Llama family and GPT-2, its layers stacked and scanned.

The module knows nothing of meshes beyond the names of its dims; its partition rules stand in
`jaxscale.models.decoder_rules`. Array suffixes follow the legend in `jaxscale.sharding.rules`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxscale.models.attention import attend, attend_visible
from jaxscale.models.experts import Experts, Purpose
from jaxscale.models.layers import Mlp, Norm, Projection, project
from jaxscale.models.model import NO_INPUTS, ExpertSums, RouterInputs
from jaxscale.models.remat import DECODER_MATMULS, name_tensor, remat
from jaxscale.models.rotary import Rotation, make_rotation, rotate
from jaxscale.models.shape import DecoderShape
from jaxscale.models.stack import scan_layers
from jaxscale.numerics.draw import draw_normal
from jaxscale.numerics.policy import widen
from jaxscale.parallel.vocab import embed_tokens, sum_token_losses
from jaxscale.sharding.activations import constrain

Visit = Callable[[Any, "Block", Any], tuple[Any, Any]]
Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


class Tokens(NamedTuple):
    """What a decoder reads: int32 ids, positions and document numbers (0 is padding), each [B, T]."""

    ids_BT: jax.Array
    positions_BT: jax.Array
    segments_BT: jax.Array


class Cache(NamedTuple):
    """Keys and values of the tokens so far, S slots a sequence; slots not reached yet are never read."""

    keys_LBSKH: jax.Array
    values_LBSKH: jax.Array


class Attention(nnx.Module):
    """Grouped-query self-attention."""

    def __init__(self, shape: DecoderShape, rngs: nnx.Rngs):
        self.shape = shape
        d, n, k, h = shape.embed, shape.heads, shape.kv_heads, shape.head
        biased = shape.family == "gpt2"
        std, out_std = shape.kernel_std(d), shape.residual_std(n * h)
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


class Block(nnx.Module):
    """Pre-norm attention and MLP, or experts in its place, each added to the residual stream."""

    def __init__(self, shape: DecoderShape, rngs: nnx.Rngs, *, has_experts: bool = False):
        self.attention_norm = Norm(shape)
        self.attention = Attention(shape, rngs)
        self.mlp_norm = Norm(shape)
        if has_experts:
            self.experts = Experts(shape, rngs)
        else:
            self.mlp = Mlp(shape, rngs, shape.mlp)

    def __call__(self, x_BTD: jax.Array, rotation: Rotation | None, segments_BT: jax.Array) -> jax.Array:
        x_BTD = self._mix(x_BTD, rotation, segments_BT)
        return _add(x_BTD, self.mlp(name_tensor(self.mlp_norm(x_BTD), "mlp_norm")))

    def route(
        self,
        x_BTD: jax.Array,
        rotation: Rotation | None,
        segments_BT: jax.Array,
        inputs: RouterInputs,
        keys_B: jax.Array | None,
    ) -> tuple[jax.Array, ExpertSums]:
        """The block of a layer with experts; padding reaches none."""
        x_BTD = self._mix(x_BTD, rotation, segments_BT)
        read_BTD = name_tensor(self.mlp_norm(x_BTD), "mlp_norm")
        purpose: Purpose = "evaluation" if keys_B is None else "training"
        y_BTD, sums = self.experts(read_BTD, segments_BT > 0, inputs, keys_B, purpose=purpose)
        return _add(x_BTD, y_BTD), sums

    def extend(
        self, x_BTD: jax.Array, rotation: Rotation | None, inputs: RouterInputs, *cache: jax.Array
    ) -> tuple:
        mixed_BTD, keys, values = self.attention.extend(self.attention_norm(x_BTD), rotation, *cache)
        x_BTD = x_BTD + mixed_BTD
        read_BTD = self.mlp_norm(x_BTD)
        if hasattr(self, "mlp"):
            return x_BTD + self.mlp(read_BTD), keys, values
        every = jnp.ones(x_BTD.shape[:2], bool)
        y_BTD, _ = self.experts(read_BTD, every, inputs, None, purpose="generation")
        return x_BTD + y_BTD, keys, values

    def _mix(self, x_BTD: jax.Array, rotation: Rotation | None, segments_BT: jax.Array) -> jax.Array:
        x_BTD = name_tensor(x_BTD, "block_input")
        read_BTD = name_tensor(self.attention_norm(x_BTD), "attention_norm")
        return _add(x_BTD, name_tensor(self.attention(read_BTD, rotation, segments_BT), "attention_out"))


def _add(x_BTD: jax.Array, y_BTD: jax.Array) -> jax.Array:
    return constrain(x_BTD + y_BTD, "batch", "length", "embed")


class Table(nnx.Module):
    """Rows for ids or positions."""

    def __init__(self, rngs: nnx.Rngs, rows: int, padded: int, embed: int, std: float):
        drawn = draw_normal(rngs.params(), (rows, embed), std)
        self.table = nnx.Param(jnp.pad(drawn, ((0, padded - rows), (0, 0))))


class Decoder(nnx.Module):
    """Token ids to final hidden states; the loss and the logits go through the table that is the head.

    Layers alike are stacked: `layers`, or `dense_layers` and `expert_layers` in a model with experts.
    """

    def __init__(self, shape: DecoderShape, rngs: nnx.Rngs):
        self.shape = shape
        std = shape.kernel_std(shape.embed)
        self.embed = Table(rngs, shape.vocab, shape.padded_vocab, shape.embed, std)
        if shape.family == "gpt2":
            self.positions = Table(rngs, shape.positions, shape.positions, shape.embed, std)
        if shape.experts is None:
            self.layers = nnx.vmap(partial(Block, shape))(rngs.split(shape.layers))
        else:
            if shape.dense_layers:
                self.dense_layers = nnx.vmap(partial(Block, shape))(rngs.split(shape.dense_layers))
            make_block = partial(Block, shape, has_experts=True)
            self.expert_layers = nnx.vmap(make_block)(rngs.split(shape.expert_layers))
        self.final_norm = Norm(shape)
        if not shape.tied:
            self.head = Table(rngs, shape.vocab, shape.padded_vocab, shape.embed, std)

    def __call__(
        self, tokens: Tokens, inputs: RouterInputs = NO_INPUTS, keys_B: jax.Array | None = None
    ) -> tuple[jax.Array, ExpertSums | None]:
        """Final hidden states x_BTD in the compute dtype, and what layers with experts add up to.

        Args:
          keys_B: a key a sequence in training; None in evaluation.
        """
        x_BTD, rotation = self._enter(tokens.ids_BT, tokens.positions_BT)

        def visit_dense(x_BTD: jax.Array, block: Block, _: Any) -> tuple[jax.Array, None]:
            return block(x_BTD, rotation, tokens.segments_BT), None

        def visit_experts(x_BTD: jax.Array, block: Block, extra: Any) -> tuple[jax.Array, ExpertSums]:
            inputs, number = extra
            keys = keys_B if keys_B is None else jax.vmap(partial(jax.random.fold_in, data=number))(keys_B)
            return block.route(x_BTD, rotation, tokens.segments_BT, inputs, keys)

        extras = (inputs, jnp.arange(self.shape.expert_layers, dtype=jnp.uint32))
        x_BTD, _, sums = self._visit_layers(
            visit_dense,
            visit_experts,
            x_BTD,
            None,
            extras,
            wrap=partial(remat, in_scan=True, matmuls=DECODER_MATMULS),
        )
        return self.final_norm(x_BTD), sums

    def sum_losses(
        self,
        tokens: Tokens,
        labels_BT: jax.Array,
        weights_BT: jax.Array,
        inputs: RouterInputs = NO_INPUTS,
        keys_B: jax.Array | None = None,
    ) -> tuple[jax.Array, ExpertSums | None]:
        """Weighted sum of next-token cross-entropies, nats, fp32 scalar, and the sums of the experts."""
        x_BTD, sums = self(tokens, inputs, keys_B)
        loss = sum_token_losses(x_BTD, self._head_table(), labels_BT, weights_BT, self.shape.vocab)
        return loss, sums

    def extend(
        self, ids_BT: jax.Array, start: jax.Array, cache: Cache, inputs: RouterInputs = NO_INPUTS
    ) -> tuple[jax.Array, Cache]:
        """Decoding: T new tokens from slot `start` on.

        Returns:
          logits_BTV in fp32 over the true vocabulary, and the cache with the tokens in it.
        """
        positions_BT = jnp.broadcast_to(start + jnp.arange(ids_BT.shape[1]), ids_BT.shape)
        x_BTD, rotation = self._enter(ids_BT, positions_BT)

        def visit_layer(x_BTD: jax.Array, block: Block, extra: Any) -> tuple[jax.Array, Any]:
            inputs, (keys, values) = extra
            x_BTD, keys, values = block.extend(x_BTD, rotation, inputs, keys, values, start)
            return x_BTD, (keys, values)

        split = [self.shape.dense_layers]
        dense, experts = zip(*(jnp.split(kept, split) for kept in cache), strict=True)
        x_BTD, dense, experts = self._visit_layers(
            visit_layer, visit_layer, x_BTD, (NO_INPUTS, dense), (inputs, experts), wrap=lambda run: run
        )
        kept = [part for part in (dense, experts) if part is not None]
        cache = Cache(*(jnp.concatenate(parts) for parts in zip(*kept, strict=True)))
        table_VD = self._head_table()[: self.shape.vocab].astype(x_BTD.dtype)
        logits_BTV = jnp.einsum(
            "BTD,VD->BTV", self.final_norm(x_BTD), table_VD, preferred_element_type=widen(x_BTD.dtype)
        )
        return logits_BTV, cache

    def make_cache(self, sequences: int, slots: int) -> Cache:
        """An empty cache for `slots` tokens a sequence; dense layers come before those with experts."""
        shape = (self.shape.layers, sequences, slots, self.shape.kv_heads, self.shape.head)
        return Cache(jnp.zeros(shape, self.shape.dtype), jnp.zeros(shape, self.shape.dtype))

    def _visit_layers(
        self, visit_dense: Visit, visit_expert: Visit, carry: Any, dense: Any, expert: Any, *, wrap: Wrap
    ) -> tuple[Any, Any, Any]:
        """All layers in their order (`scan_layers`).

        Args:
          visit_dense, visit_expert: (carry, block, what the layer is handed) -> (carry, what it returns).
          dense, expert: what layers of a kind are handed, stacked.
          wrap: what becomes of the function of one layer.
        """
        experts = self.shape.experts
        stacks = {"dense": getattr(self, "dense_layers", None), "expert": None}
        if experts is None:
            stacks["dense"] = self.layers
        else:
            stacks["expert"] = self.expert_layers

        def prepare(stack: Block | None, visit: Visit, handed: Any) -> tuple[Any, Any]:
            if stack is None:
                return None, None
            definition, stacked = nnx.split(stack)

            def run(carry: Any, layer: Any) -> tuple[Any, Any]:
                return visit(carry, nnx.merge(definition, layer[0]), layer[1])

            return wrap(run), (stacked, handed)

        run_dense, dense = prepare(stacks["dense"], visit_dense, dense)
        run_expert, expert = prepare(stacks["expert"], visit_expert, expert)
        first, every = (experts.first_dense, experts.every) if experts else (0, 1)
        return scan_layers(run_dense, run_expert, carry, dense, expert, first_dense=first, every=every)

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
