"""Matmuls in fp8: E4M3 forward, E5M2 for gradients, one scale a tensor (Micikevicius 2022, arXiv 2209.05433).

A scale is a power of two, the largest that keeps what it is made of within the format. So scaling and its
undoing round nothing, and a scale twice as large gives the same numbers but for those that fall below the
format's smallest: neither a mesh nor a number of microbatches shows in the digits.

Products are summed in fp32 and rounded to the format of activations. Hardware without fp8 multiplies the same
fp8 numbers in a wider format, which holds every product exactly.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

E4M3 = jnp.dtype(jnp.float8_e4m3fn)
E5M2 = jnp.dtype(jnp.float8_e5m2)

_MOST_EXPONENT = 126  # a scale and its inverse are both normal numbers of fp32


class Scales(NamedTuple):
    """Scales of a matmul's operands, fp32 scalars: a number times its scale is stored."""

    kernel: jax.Array
    activation: jax.Array
    gradient: jax.Array
    """Of the loss with respect to the matmul's result."""


class Fp8Weights(NamedTuple):
    """What a model multiplies in fp8, by the path of the kernel, layers first."""

    kernels: dict[str, jax.Array]
    """Kernels times their scales, E4M3."""
    scales: dict[str, jax.Array]
    """[layers, 3], in the order of `Scales`, fp32."""


def find_amax(x: jax.Array, axis: tuple[int, ...] | None = None) -> jax.Array:
    """The largest magnitude, fp32; not finite where any element is not."""
    return jnp.abs(x).max(axis).astype(jnp.float32)


def find_scale(amax: jax.Array, dtype: jnp.dtype, margin: int = 0) -> jax.Array:
    """The largest power of two that keeps `amax` times it within the format's range over 2^margin.

    1 where `amax` is zero or not finite. fp32, of the shape of `amax`.
    """
    _, exponent = jnp.frexp(jnp.finfo(dtype).max.astype(jnp.float32) / amax)
    exponent = jnp.clip(exponent - 1 - margin, -_MOST_EXPONENT, _MOST_EXPONENT)
    return jnp.where(jnp.isfinite(amax) & (amax > 0), jnp.ldexp(jnp.float32(1), exponent), 1.0)


def quantise(x: jax.Array, scale: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """`x` times its scale in fp8; what lies beyond the format's range becomes its end."""
    limit = jnp.finfo(dtype).max.astype(x.dtype)
    return jnp.clip(x * scale.astype(x.dtype), -limit, limit).astype(dtype)


def einsum_fp8(
    equations: tuple[str, ...],
    is_dynamic: bool,
    x: jax.Array,
    kernels: tuple[jax.Array, ...],
    kernels_fp8: tuple[jax.Array, ...],
    scales: tuple[Scales, ...],
    *,
    sizes_G: jax.Array | None = None,
    axes: tuple[str, ...] = (),
) -> tuple[jax.Array, ...]:
    """`einsum(equation, x, kernel)` for each kernel in fp8, and so are the matmuls of the gradients.

    Kernels that share their input are handed over together: it is made fp8 once, and the gradients that flow
    back to it are summed before their scale is undone. Where the sum is over devices it then crosses once.

    Args:
      equations: each of two operands, such as "BTD,DF->BTF" or, where experts have rows of their own,
        "GRD,GDF->GRF": the result has the dims that both share, those that are left of x, those that are left
        of the kernel.
      is_dynamic: whether the scales of activation and gradient are found in the tensors at hand, rather than
        taken from `scales`.
      kernels: take the gradients; their numbers are not read.
      kernels_fp8: each kernel times its scale, E4M3.
      scales: of each kernel; that of the activation is the first's.
      sizes_G: int32, for rows that lie sorted by group, as "RD,GDF->RF": the first dim of x is cut into G
        groups of so many rows, each multiplied by its own matrix. Rows beyond their sum are garbage: nothing
        of them is seen, in x and in gradients, and nothing is said of them in results.
      axes: manual axes over which the tensors lie in parts. Dynamic scales are those of the whole.

    Returns:
      the results in the dtype of x. The derivative with respect to `scales` is not one: it is the largest
      magnitudes of activation and gradient (0 for the kernel), which is how they leave a backward pass. They
      are those of the tensors at hand, parts or not (`jaxscale.parallel.scales`).
    """
    return _einsum(equations, is_dynamic, axes, x, kernels, kernels_fp8, scales, sizes_G)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _einsum(
    equations: tuple[str, ...],
    is_dynamic: bool,
    axes: tuple[str, ...],
    x: jax.Array,
    kernels: tuple[jax.Array, ...],
    kernels_fp8: tuple[jax.Array, ...],
    scales: tuple[Scales, ...],
    sizes_G: jax.Array | None,
) -> tuple[jax.Array, ...]:
    return _forward(equations, is_dynamic, axes, x, kernels, kernels_fp8, scales, sizes_G)[0]


def _forward(
    equations: tuple[str, ...],
    is_dynamic: bool,
    axes: tuple[str, ...],
    x: jax.Array,
    kernels: tuple[jax.Array, ...],
    kernels_fp8: tuple[jax.Array, ...],
    scales: tuple[Scales, ...],
    sizes_G: jax.Array | None,
) -> tuple:
    x = _clear_garbage(x, sizes_G)
    amax = find_amax(x)
    scale = find_scale(_join_parts(amax, axes), E4M3) if is_dynamic else scales[0].activation
    x_fp8 = quantise(x, scale, E4M3)
    results = tuple(
        _multiply(equation, x_fp8, kernel, sizes_G, x.dtype) / (scale * each.kernel).astype(x.dtype)
        for equation, kernel, each in zip(equations, kernels_fp8, scales, strict=True)
    )
    dtypes = tuple(jnp.zeros((), kernel.dtype) for kernel in kernels)
    return results, (x_fp8, scale, amax, kernels_fp8, scales, sizes_G, dtypes)


def _backward(
    equations: tuple[str, ...],
    is_dynamic: bool,
    axes: tuple[str, ...],
    kept: tuple,
    dys: tuple[jax.Array, ...],
) -> tuple:
    x_fp8, x_scale, x_amax, kernels_fp8, scales, sizes_G, dtypes = kept
    dys = tuple(_clear_garbage(dy, sizes_G) for dy in dys)
    amaxes = [find_amax(dy) for dy in dys]
    dy_scales = [
        find_scale(_join_parts(amax, axes), E5M2) if is_dynamic else each.gradient
        for amax, each in zip(amaxes, scales, strict=True)
    ]
    # One scale for all that is summed: smaller than a gradient's own, and E5M2 has 30 powers of two to spare.
    dx_scale = jnp.stack([dy * each.kernel for dy, each in zip(dy_scales, scales, strict=True)]).min()
    dx_sum, dkernels = jnp.zeros((), dys[0].dtype), []
    for equation, dy, kernel_fp8, each, like in zip(equations, dys, kernels_fp8, scales, dtypes, strict=True):
        operands, y_dims = equation.split("->")
        x_dims, kernel_dims = operands.split(",")
        dy_scale = dx_scale / each.kernel
        dy_fp8 = quantise(dy, dy_scale, E5M2)
        dx_sum += _multiply(f"{y_dims},{kernel_dims}->{x_dims}", dy_fp8, kernel_fp8, sizes_G, dy.dtype)
        dkernel = _multiply(f"{x_dims},{y_dims}->{kernel_dims}", x_fp8, dy_fp8, sizes_G, like.dtype)
        dkernels.append(dkernel / (x_scale * dy_scale).astype(like.dtype))
    seen = tuple(Scales(jnp.zeros_like(amax), x_amax, amax) for amax in amaxes)
    nothing = tuple(jnp.zeros_like(kernel_fp8) for kernel_fp8 in kernels_fp8)
    return dx_sum / dx_scale.astype(dx_sum.dtype), tuple(dkernels), nothing, seen, None


_einsum.defvjp(_forward, _backward)


def _clear_garbage(x: jax.Array, sizes_G: jax.Array | None) -> jax.Array:
    """Zeros in the rows that belong to no group."""
    if sizes_G is None:
        return x
    is_used_R = jnp.arange(x.shape[0]) < sizes_G.sum()
    return jnp.where(is_used_R.reshape(-1, *(1,) * (x.ndim - 1)), x, 0)


def _join_parts(amax: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    return lax.pmax(amax, axes) if axes else amax


def _multiply(
    equation: str, a: jax.Array, b: jax.Array, sizes_G: jax.Array | None, dtype: jnp.dtype
) -> jax.Array:
    """An einsum of two fp8 operands, perhaps of two formats, rounded to `dtype`, scales and all.

    The rounding comes before scales are undone: where a dim that is summed lies over devices, `dtype` then
    travels and not fp32. With `sizes_G`, either b or the result has one matrix for each group of rows.
    """
    operands, result = equation.split("->")
    a_dims, b_dims = operands.split(",")
    shared = [dim for dim in a_dims if dim in b_dims]
    summed = [dim for dim in shared if dim not in result]
    batch = [dim for dim in shared if dim in result]
    free = [dim for dim in a_dims + b_dims if dim not in shared]

    def place(dims: list[str]) -> tuple[list[int], list[int]]:
        return [a_dims.index(dim) for dim in dims], [b_dims.index(dim) for dim in dims]

    numbers = place(summed), place(batch)
    if sizes_G is None:
        assert result == "".join(batch + free), f"{equation}: what is shared comes first, then x, then kernel"
        return lax.dot_general(a, b, numbers, preferred_element_type=dtype)
    groups = [b_dims.index(dim) for dim in free if dim not in a_dims + result]
    ragged = lax.RaggedDotDimensionNumbers(numbers, [0], groups)
    return lax.ragged_dot_general(a, b, sizes_G, ragged, preferred_element_type=dtype)
