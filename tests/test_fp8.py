"""fp8 matmuls: scales, exact simulation, gradients, and what leaves a backward pass beside them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.linen import fp8_ops

from jaxscale.numerics.fp8 import E4M3, E5M2, Scales, einsum_fp8, find_scale, quantise

EQUATION = "BTD,DF->BTF"


def draw(seed: int, *shape: int, dtype: Any = jnp.bfloat16, std: float = 1.0) -> jax.Array:
    return (jax.random.normal(jax.random.key(seed), shape) * std).astype(dtype)


def widen(x: jax.Array) -> np.ndarray:
    return np.asarray(x).astype(np.float64)


@pytest.mark.smoke
@pytest.mark.parametrize(("dtype", "largest"), [(E4M3, 448.0), (E5M2, 57344.0)])
@pytest.mark.parametrize("margin", [0, 3])
def test_a_scale_is_the_largest_power_of_two_that_fits(dtype: Any, largest: float, margin: int) -> None:
    amax = jnp.array([1e-20, 3e-5, 1.0, 7.0, 448.0, 449.0, 1e6, 57344.0], jnp.float32)
    scale = np.asarray(find_scale(amax, dtype, margin), np.float64)
    assert np.all(np.log2(scale) % 1 == 0)
    assert np.all(np.asarray(amax, np.float64) * scale <= largest / 2**margin)
    assert np.all(np.asarray(amax, np.float64) * scale * 2 > largest / 2**margin)


def test_nothing_and_infinity_have_the_scale_one() -> None:
    scale = find_scale(jnp.array([0.0, jnp.inf, jnp.nan]), E4M3)
    np.testing.assert_array_equal(scale, 1)


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_numbers_are_made_fp8_as_flax_makes_them(dtype: Any) -> None:
    x = draw(0, 64, 64, std=300.0)
    scale = jnp.float32(4)
    ours = quantise(x, scale, dtype)
    theirs = fp8_ops.quantize(x, dtype, 1 / scale, jnp.bfloat16)
    np.testing.assert_array_equal(widen(ours), widen(theirs))
    assert np.abs(widen(ours)).max() == (448 if dtype == E4M3 else np.abs(widen(ours)).max())


def test_what_is_no_number_stays_none() -> None:
    assert np.isnan(widen(quantise(jnp.array([jnp.nan]), jnp.float32(1), E4M3))).all()


def multiply(x: jax.Array, *kernels: jax.Array, scales: tuple[Scales, ...], dynamic: bool = False) -> Any:
    """The results, and (x, kernels, dys) -> gradients and magnitudes."""
    kernels_fp8 = tuple(quantise(k, s.kernel, E4M3) for k, s in zip(kernels, scales, strict=True))
    equations = (EQUATION,) * len(kernels)

    def run(x: jax.Array, kernels: tuple, scales: tuple[Scales, ...]) -> tuple:
        return einsum_fp8(equations, dynamic, x, kernels, kernels_fp8, scales)

    return jax.vjp(run, x, kernels, scales)


def make_scales(kernel: float, activation: float, gradient: float) -> Scales:
    return Scales(*(jnp.float32(scale) for scale in (kernel, activation, gradient)))


@pytest.mark.smoke
def test_a_product_is_that_of_the_fp8_numbers_exactly() -> None:
    """Against fp64 on the numbers that fp8 holds: what hardware without fp8 does is no approximation."""
    x, kernel = draw(0, 4, 8, 64, dtype=jnp.float32), draw(1, 64, 32, dtype=jnp.float32)
    scales = make_scales(64, 32, 1024)
    (y,), backward = multiply(x, kernel, scales=(scales,))
    x_fp8, kernel_fp8 = (
        widen(quantise(x, scales.activation, E4M3)),
        widen(quantise(kernel, scales.kernel, E4M3)),
    )
    np.testing.assert_allclose(y, np.einsum(EQUATION, x_fp8, kernel_fp8) / (64 * 32), rtol=0, atol=2e-6)
    unrounded = np.einsum(EQUATION, widen(x), widen(kernel))
    assert 0.01 < np.linalg.norm(y - unrounded) / np.linalg.norm(unrounded) < 0.05

    dy = draw(2, 4, 8, 32, dtype=jnp.float32, std=0.01)
    dx, (dkernel,), _ = backward((dy,))
    dy_fp8 = widen(quantise(dy, scales.gradient, E5M2))
    expected = np.einsum("BTF,DF->BTD", dy_fp8, kernel_fp8) / (1024 * 64)
    np.testing.assert_allclose(dx, expected, rtol=0, atol=1e-7)
    expected = np.einsum("BTD,BTF->DF", x_fp8, dy_fp8) / (1024 * 32)
    np.testing.assert_allclose(dkernel, expected, rtol=0, atol=1e-6)


def test_magnitudes_leave_the_backward_pass_beside_the_gradients() -> None:
    x, kernel, dy = draw(0, 2, 8, 16), draw(1, 16, 24), draw(2, 2, 8, 24, std=1e-3)
    _, backward = multiply(x, kernel, scales=(make_scales(1, 1, 1),))
    *_, (seen,) = backward((dy,))
    assert seen.kernel == 0
    assert seen.activation == np.abs(widen(x)).max()
    assert seen.gradient == np.abs(widen(dy)).max()


def test_kernels_with_one_input_have_the_gradients_that_each_has_alone() -> None:
    """But for what one scale for all of them pushes below the format's smallest."""
    x, kernels = draw(0, 2, 8, 16), (draw(1, 16, 24), draw(2, 16, 24, std=0.02))
    scales = (make_scales(64, 32, 2**12), make_scales(4096, 32, 2**20))
    dys = (draw(3, 2, 8, 24, std=1.0), draw(4, 2, 8, 24, std=0.01))
    results, backward = multiply(x, *kernels, scales=scales)
    dx, dkernels, _ = backward(dys)
    expected_dx = np.zeros(x.shape)
    for index in range(2):
        (alone,), back = multiply(x, kernels[index], scales=(scales[index],))
        dx_alone, (dkernel_alone,), _ = back((dys[index],))
        np.testing.assert_array_equal(widen(results[index]), widen(alone))
        np.testing.assert_allclose(widen(dkernels[index]), widen(dkernel_alone), rtol=1e-2, atol=1e-6)
        expected_dx += widen(dx_alone)
    assert np.linalg.norm(widen(dx) - expected_dx) < 5e-3 * np.linalg.norm(expected_dx)


def test_a_scale_twice_as_small_changes_no_digit() -> None:
    x, kernel, dy = draw(0, 2, 8, 16), draw(1, 16, 24), draw(2, 2, 8, 24)
    both = []
    for factor in (1, 0.5):
        (y,), backward = multiply(x, kernel, scales=(make_scales(64 * factor, 64 * factor, 1024 * factor),))
        dx, (dkernel,), _ = backward((dy,))
        both.append((widen(y), widen(dx), widen(dkernel)))
    for once, again in zip(*both, strict=True):
        np.testing.assert_allclose(again, once, rtol=0, atol=2e-3 * np.abs(once).max())


def test_dynamic_scales_are_those_of_the_tensors_at_hand() -> None:
    x, kernel, dy = draw(0, 2, 8, 16, std=1e-3), draw(1, 16, 24), draw(2, 2, 8, 24, std=1e4)
    right = make_scales(
        64, float(find_scale(jnp.abs(x).max(), E4M3)), float(find_scale(jnp.abs(dy).max(), E5M2))
    )
    (y,), backward = multiply(x, kernel, scales=(right,))
    (y_dynamic,), backward_dynamic = multiply(x, kernel, scales=(make_scales(64, 1, 1),), dynamic=True)
    np.testing.assert_array_equal(widen(y_dynamic), widen(y))
    for ours, theirs in zip(
        jax.tree.leaves(backward_dynamic((dy,))), jax.tree.leaves(backward((dy,))), strict=True
    ):
        np.testing.assert_array_equal(widen(ours), widen(theirs))
