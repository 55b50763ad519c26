"""The layers that decoders are made of, attention aside: projections, norms and the dense MLP."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxscale.models.remat import name_tensor
from jaxscale.models.shape import DecoderShape
from jaxscale.numerics.draw import draw_normal
from jaxscale.numerics.fp8 import E4M3, Scales, einsum_fp8
from jaxscale.numerics.policy import widen
from jaxscale.sharding.activations import constrain


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


class Mlp(nnx.Module):
    """SwiGLU (Llama) or GELU in its tanh form (GPT-2)."""

    def __init__(self, shape: DecoderShape, rngs: nnx.Rngs, width: int):
        d, f, biased = shape.embed, width, shape.family == "gpt2"
        std = shape.kernel_std(d)
        self.up = Projection(shape, rngs, "BTD,DF->BTF", (d, f), std, (f,) if biased else None)
        self.gate = None if biased else Projection(shape, rngs, "BTD,DF->BTF", (d, f), std, None)
        self.down = Projection(
            shape, rngs, "BTF,FD->BTD", (f, d), shape.residual_std(f), (d,) if biased else None
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
