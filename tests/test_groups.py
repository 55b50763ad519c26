"""Groups of rows times their matrices, by the TPU's kernels and by tiles: the plain formula, no garbage."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxscale.parallel import groups
from jaxscale.parallel.groups import multiply_groups


def multiply_plainly(rows_RD, kernel_GDF, sizes_G):
    starts = np.cumsum(sizes_G) - sizes_G
    parts = [
        rows_RD[start : start + size] @ kernel_DF
        for start, size, kernel_DF in zip(starts, sizes_G, kernel_GDF, strict=True)
    ]
    return jnp.pad(jnp.concatenate(parts), ((0, len(rows_RD) - sum(sizes_G)), (0, 0)))


@pytest.fixture(params=["tiles", "kernel"])
def implementation(request, monkeypatch):
    if request.param == "kernel":
        monkeypatch.setattr(
            groups, "_by_platform", lambda by_kernel, _, *operands: by_kernel(*operands, interpret=True)
        )
    return request.param


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("rows", "sizes"), [(384, (30, 0, 200, 77)), (90, (0, 83, 7, 0)), (90, (0, 0, 0, 0))]
)
def test_groups_are_multiplied_and_nothing_beyond_them_is_seen(implementation, rows, sizes):
    generator = np.random.default_rng(0)
    sizes_G = np.array(sizes, np.int32)
    used = sizes_G.sum()
    rows_RD = jnp.asarray(generator.normal(size=(rows, 24)), jnp.float32)
    kernel_GDF = jnp.asarray(generator.normal(size=(4, 24, 40)), jnp.float32)
    d_out_RF = jnp.asarray(generator.normal(size=(rows, 40)), jnp.float32)
    out_RF, pull = jax.vjp(
        partial(multiply_groups, sizes_G=jnp.asarray(sizes_G)), rows_RD.at[used:].set(jnp.nan), kernel_GDF
    )
    expected_RF, pull_plainly = jax.vjp(partial(multiply_plainly, sizes_G=sizes_G), rows_RD, kernel_GDF)
    np.testing.assert_allclose(out_RF, expected_RF, rtol=1e-5, atol=1e-5)
    for found, expected in zip(pull(d_out_RF.at[used:].set(jnp.nan)), pull_plainly(d_out_RF), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    assert (np.asarray(out_RF)[used:] == 0).all()
    assert (np.asarray(pull(d_out_RF)[1])[sizes_G == 0] == 0).all(), "a group without rows got a gradient"


@pytest.mark.parametrize(
    ("implementation", "dtype"),
    [("tiles", jnp.bfloat16), ("tiles", jnp.float16), ("kernel", jnp.bfloat16)],
    indirect=["implementation"],
)
def test_products_are_summed_in_fp32_and_keep_their_dtype(implementation, dtype):
    rows, channels = 64 * 40, 2048  # in bf16 256 + 1 is 256, in fp16 2048 + 1 is 2048
    rows_RD = jnp.full((rows, channels), 1 + 1 / 64, dtype)
    kernel_GDF = jnp.ones((1, channels, 8), dtype)
    sizes_G = jnp.array([rows], jnp.int32)
    out_RF, pull = jax.vjp(lambda kernel_GDF: multiply_groups(rows_RD, kernel_GDF, sizes_G), kernel_GDF)
    d_kernel_GDF = pull(jnp.ones_like(out_RF))[0]
    assert out_RF.dtype == d_kernel_GDF.dtype == dtype
    np.testing.assert_array_equal(out_RF, jnp.asarray(channels * (1 + 1 / 64), dtype))
    np.testing.assert_array_equal(d_kernel_GDF, jnp.asarray(rows * (1 + 1 / 64), dtype))
