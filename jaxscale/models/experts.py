"""A layer of experts: router, exchange over `expert`, and the experts' matmuls, in one inner region.

The region is manual over every axis that is left, so that each device shuffles its own tokens and all that
crosses `expert` are tokens on their way to experts and back (`jaxscale.parallel`). An expert's channels lie
over `tensor`: each device returns its part of the sum, which is added up outside.
"""

from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec

from jaxscale.models.layers import Fp8Input, Mlp
from jaxscale.models.model import ExpertSums, RouterInputs
from jaxscale.models.remat import keep_named, name_tensor
from jaxscale.models.router import (
    Scores,
    choose_experts,
    count_choices,
    draw_jitter,
    score_experts,
    sum_balance,
    sum_entropy,
    sum_z,
    weigh_choices,
)
from jaxscale.models.shape import DecoderShape, ExpertShape
from jaxscale.numerics.draw import draw_normal
from jaxscale.numerics.fp8 import E4M3, Scales, einsum_fp8
from jaxscale.parallel.capacity import count_slots, run_capacity, seat_tokens
from jaxscale.parallel.dropless import run_dropless
from jaxscale.parallel.groups import multiply_groups
from jaxscale.parallel.kernels import copies_spec, copy_kernel
from jaxscale.parallel.scales import copy_scales, scales_spec
from jaxscale.sharding.activations import (
    activation_axes,
    activation_spec,
    region_axes,
    run_per_shard,
)

Purpose = Literal["training", "evaluation", "generation"]

_UP_DIMS = ("experts", "embed", "mlp")
_DOWN_DIMS = ("experts", "mlp", "embed")


class Kernel(nnx.Module):
    """A kernel without an einsum of its own; perhaps with its copy in fp8."""

    def __init__(self, rngs: nnx.Rngs, shape: tuple[int, ...], std: float, *, is_fp8: bool = False):
        self.kernel = nnx.Param(draw_normal(rngs.params(), shape, std))
        self.kernel_fp8 = Fp8Input(jnp.zeros(shape, E4M3)) if is_fp8 else None
        self.scales = Fp8Input(jnp.ones(len(Scales._fields), jnp.float32)) if is_fp8 else None


class _Copy(NamedTuple):
    """A device's copy of its experts' kernel [G, D, F]; on the way into a region with a leading dim more."""

    kernel: jax.Array
    kernel_fp8: jax.Array | None
    scales: jax.Array | None


class Experts(nnx.Module):
    """Experts in place of the MLP: SwiGLU (Llama) or GELU (GPT-2), without biases; perhaps shared ones."""

    def __init__(self, shape: DecoderShape, rngs: nnx.Rngs):
        assert shape.experts is not None
        self.shape = shape.experts
        count, d, f = self.shape.router.experts, shape.embed, self.shape.mlp
        std = shape.kernel_std(d)
        self.router = Kernel(rngs, (d, count), std)
        make = partial(Kernel, rngs, is_fp8=shape.fp8 != "none")
        self.is_dynamic = shape.fp8 == "dynamic"
        self.up = make((count, d, f), std)
        self.gate = None if shape.family == "gpt2" else make((count, d, f), std)
        self.down = make((count, f, d), shape.residual_std(f))
        self.shared = Mlp(shape, rngs, self.shape.shared * f) if self.shape.shared else None

    def __call__(
        self,
        x_BTD: jax.Array,
        is_routed_BT: jax.Array,
        inputs: RouterInputs,
        keys_B: jax.Array | None,
        *,
        purpose: Purpose,
    ) -> tuple[jax.Array, ExpertSums]:
        """What the experts add to the residual stream, and the sums of this layer.

        Args:
          is_routed_BT: False for padding, which no expert sees.
          inputs: of this layer: bias and load are [E].
          keys_B: a key a sequence, for jitter; None: none is drawn.
          purpose: which capacity holds; text is generated without any, so that no token is dropped.
        """
        run = keep_named(partial(self._run_in_region, purpose=purpose))
        y_BTD, sums = run(x_BTD, is_routed_BT, inputs, keys_B)
        if self.shared is not None:
            y_BTD = y_BTD + self.shared(x_BTD)
        return y_BTD, sums

    def _run_in_region(
        self,
        x_BTD: jax.Array,
        is_routed_BT: jax.Array,
        inputs: RouterInputs,
        keys_B: jax.Array | None,
        *,
        purpose: Purpose,
    ) -> tuple[jax.Array, ExpertSums]:
        """What the chosen experts add, and the sums."""
        batch, tensor = activation_axes("batch"), activation_axes("mlp")
        kernels, specs = self._copy_kernels(x_BTD.dtype)
        rows = activation_spec("batch")
        region = run_per_shard(
            partial(self._run, purpose=purpose),
            in_specs=(
                activation_spec("batch", "length", "embed"),
                rows,
                PartitionSpec(),
                PartitionSpec(),
                rows,
                specs,
            ),
            out_specs=(
                PartitionSpec(tensor or None, *activation_spec("batch", "length", "embed")),
                PartitionSpec(batch or None),
            ),
        )
        y_PBTD, sums = region(x_BTD, is_routed_BT, self.router.kernel[...], inputs, keys_B, kernels)
        return y_PBTD.sum(0), jax.tree.map(lambda parts: parts.sum(0), sums)

    def _copy_kernels(self, dtype: jnp.dtype) -> tuple[dict[str, _Copy], dict[str, Any]]:
        """Copies of the kernels for a region, by name, and their layouts."""
        copies: dict[str, _Copy] = {}
        specs: dict[str, Any] = {}
        for name, each in (("up", self.up), ("gate", self.gate), ("down", self.down)):
            if each is None:
                continue
            dims = _DOWN_DIMS if name == "down" else _UP_DIMS
            kernel = copy_kernel(each.kernel[...].astype(dtype), dims)
            spec: Any = copies_spec(dims)
            scales: Any = scales_spec()
            if each.kernel_fp8 is None or each.scales is None:
                copies[name], specs[name] = _Copy(kernel, None, None), _Copy(spec, None, None)
            else:
                kernel_fp8 = copy_kernel(lax.stop_gradient(each.kernel_fp8[...]), dims)
                copies[name] = _Copy(kernel, kernel_fp8, copy_scales(each.scales[...]))
                specs[name] = _Copy(spec, spec, scales)
        return copies, specs

    def _run(
        self,
        x_BTD: jax.Array,
        is_routed_BT: jax.Array,
        router_DE: jax.Array,
        inputs: RouterInputs,
        keys_B: jax.Array | None,
        kernels: dict[str, _Copy],
        *,
        purpose: Purpose,
    ) -> tuple[jax.Array, ExpertSums]:
        """One device's tokens through the experts of all devices; sums with a leading dim of one."""
        shape = self.shape
        noise_BTD = None
        if keys_B is not None and shape.router.jitter:
            noise_BTD = draw_jitter(keys_B, x_BTD.shape, shape.router.jitter)
        scores = score_experts(x_BTD, router_DE, shape.router, noise_BTD)
        has_capacity = shape.exchange == "capacity" and purpose != "generation"
        spare = 2 if has_capacity and shape.reroutes else 1
        candidates = min(shape.router.top_k * spare, shape.router.experts)
        choice_BTK = choose_experts(scores, inputs.bias, shape.router, candidates)
        used = jax.tree.map(lambda copies: copies[0], kernels)
        if has_capacity:
            y_BTD, dropped = self._run_capacity(x_BTD, scores, choice_BTK, is_routed_BT, used, purpose)
        else:
            y_BTD, dropped = self._run_dropless(x_BTD, scores, choice_BTK, is_routed_BT, used), jnp.float32(0)
        first_BTK = choice_BTK[..., : shape.router.top_k]
        sums = self._sum(scores, first_BTK, is_routed_BT, inputs, dropped)
        return y_BTD[None], jax.tree.map(lambda each: each[None], sums)

    def _run_capacity(
        self,
        x_BTD: jax.Array,
        scores: Scores,
        choice_BTK: jax.Array,
        is_routed_BT: jax.Array,
        kernels: dict[str, _Copy],
        purpose: Purpose,
    ) -> tuple[jax.Array, jax.Array]:
        """The experts' part of each token, and how many choices found no room."""
        shape, (_, tokens, embed) = self.shape, x_BTD.shape
        experts, top_k = shape.router.experts, shape.router.top_k
        factor = shape.capacity_factor if purpose == "training" else shape.eval_capacity_factor
        seats = seat_tokens(
            choice_BTK,
            is_routed_BT,
            scores.probability_BTE.max(-1),
            experts=experts,
            top_k=top_k,
            factor=factor,
            priority=shape.priority,
        )
        # Weights of choices that were dropped are lost, not shared out; a choice in place of one counts.
        counted_BTK = seats.is_seated if shape.reroutes else is_routed_BT[..., None]
        weight_BTK = weigh_choices(scores, choice_BTK, counted_BTK, shape.router)
        y_NKD = run_capacity(
            x_BTD.reshape(-1, embed),
            seats,
            count_slots(tokens, top_k, experts, factor),
            experts,
            partial(self._run_mlp, kernels, None),
            region_axes("experts"),
        )
        dropped = top_k * is_routed_BT.sum(dtype=jnp.float32) - seats.is_seated.sum(dtype=jnp.float32)
        return _combine(y_NKD, weight_BTK, x_BTD), dropped

    def _run_dropless(
        self,
        x_BTD: jax.Array,
        scores: Scores,
        choice_BTK: jax.Array,
        is_routed_BT: jax.Array,
        kernels: dict[str, _Copy],
    ) -> jax.Array:
        shape, embed = self.shape, x_BTD.shape[-1]
        weight_BTK = weigh_choices(scores, choice_BTK, is_routed_BT[..., None], shape.router)
        choice_BTK = jnp.where(is_routed_BT[..., None], choice_BTK, shape.router.experts)

        axes = region_axes("experts")
        assert len(axes) <= 1
        y_NKD = run_dropless(
            x_BTD.reshape(-1, embed),
            choice_BTK.reshape(-1, choice_BTK.shape[-1]),
            shape.router.experts,
            lambda rows_RD, sizes_G: self._run_mlp(kernels, sizes_G, rows_RD),
            axes[0] if axes else None,
            "padded" if shape.exchange == "capacity" else shape.exchange,
        )
        return _combine(y_NKD, weight_BTK, x_BTD)

    def _run_mlp(self, kernels: dict[str, _Copy], sizes_G: jax.Array | None, rows: jax.Array) -> jax.Array:
        """Rows through the experts that they belong to; a part of the sum over channels.

        Args:
          sizes_G: of rows [R, D] that lie sorted by expert; None: each expert has its own rows [G, R, D].
        """
        rows = name_tensor(rows, "expert_input")
        if "gate" in kernels:
            up, gate = self._project(rows, sizes_G, kernels["up"], kernels["gate"])
            hidden = jax.nn.silu(name_tensor(gate, "expert_gate")) * name_tensor(up, "expert_up")
        else:
            (up,) = self._project(rows, sizes_G, kernels["up"])
            hidden = jax.nn.gelu(name_tensor(up, "expert_up"), approximate=True)
        (y,) = self._project(name_tensor(hidden, "expert_hidden"), sizes_G, kernels["down"])
        return y

    def _project(self, rows: jax.Array, sizes_G: jax.Array | None, *copies: _Copy) -> tuple[jax.Array, ...]:
        """The rows times each of the kernels."""
        kernels = tuple(each.kernel for each in copies)
        equation = "GRD,GDF->GRF" if sizes_G is None else "RD,GDF->RF"
        if copies[0].kernel_fp8 is not None:
            return einsum_fp8(
                (equation,) * len(copies),
                self.is_dynamic,
                rows,
                kernels,
                tuple(each.kernel_fp8 for each in copies if each.kernel_fp8 is not None),
                tuple(Scales(*each.scales) for each in copies if each.scales is not None),
                sizes_G=sizes_G,
                axes=(*region_axes("batch"), *region_axes("mlp")),
            )
        if sizes_G is None:
            return tuple(jnp.einsum(equation, rows, kernel) for kernel in kernels)
        return tuple(multiply_groups(rows, kernel, sizes_G) for kernel in kernels)

    def _sum(
        self,
        scores: Scores,
        choice_BTK: jax.Array,
        is_routed_BT: jax.Array,
        inputs: RouterInputs,
        dropped: jax.Array,
    ) -> ExpertSums:
        shape = self.shape
        load_BE = count_choices(choice_BTK, is_routed_BT, shape.router.experts)
        if shape.balance_scope is None:
            balance = jnp.zeros((), scores.logits_BTE.dtype)
        else:
            scope_BE = _find_scope(shape, load_BE, inputs)
            balance = sum_balance(scores, is_routed_BT, scope_BE, scope_BE.sum(-1))
        return ExpertSums(
            load=load_BE.sum(0),
            dropped=dropped,
            balance=balance,
            z=sum_z(scores, is_routed_BT),
            entropy=sum_entropy(scores, is_routed_BT),
        )


def _find_scope(shape: ExpertShape, load_BE: jax.Array, inputs: RouterInputs) -> jax.Array:
    """Choices of each expert within the scope that the balance loss takes its fractions of, [b or 1, E]."""
    if shape.balance_scope == "sequence":
        return load_BE
    if shape.balance_scope == "step" and inputs.load is not None:
        return inputs.load[None]
    axes = region_axes("batch")
    load_1E = lax.stop_gradient(load_BE.sum(0, keepdims=True))
    return lax.psum(load_1E, axes) if axes else load_1E


def _combine(y_NKD: jax.Array, weight_BTK: jax.Array, like_BTD: jax.Array) -> jax.Array:
    """Each token's choices, summed by their weights."""
    y_NKD = name_tensor(y_NKD, "expert_out")
    weight_NK = weight_BTK.reshape(y_NKD.shape[:2])
    y_ND = jnp.einsum(
        "NKD,NK->ND", y_NKD, weight_NK.astype(y_NKD.dtype), preferred_element_type=weight_NK.dtype
    )
    return y_ND.astype(like_BTD.dtype).reshape(like_BTD.shape)
