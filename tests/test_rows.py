"""Rows of tokens moved by index: values and gradients of plain indexing, and nothing but gathers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxscale.parallel.rows import gather_rows, invert_rows, spread_rows

TOKENS, CHOICES, ROWS, EMBED = 6, 2, 9, 4

pytestmark = pytest.mark.smoke


def make_places():
    """Two choices a token, nine rows. Token 0 has none, rows 2 and 4 are empty."""
    rows_NK = [[9, 9], [7, 9], [5, 9], [0, 3], [6, 9], [8, 1]]
    return jnp.asarray(rows_NK, jnp.int32)


def make_array(*shape):
    return jnp.asarray(np.random.default_rng(1).normal(size=shape), jnp.float32)


def test_places_are_inverted():
    rows_NK = make_places()
    assignment_R = np.asarray(invert_rows(rows_NK, ROWS))
    none = TOKENS * CHOICES
    np.testing.assert_array_equal(assignment_R, [6, 11, none, 7, none, 4, 8, 2, 10])


def test_gather_equals_plain_indexing_and_its_gradient():
    rows_NK = make_places()
    source_R = invert_rows(rows_NK, ROWS) // CHOICES

    def gather_plainly(x_ND):
        return jnp.concatenate([x_ND, jnp.zeros((1, EMBED))])[source_R]

    x_ND, d_rows_RD = make_array(TOKENS, EMBED), make_array(ROWS, EMBED)
    rows_RD, pull = jax.vjp(lambda x_ND: gather_rows(x_ND, source_R, rows_NK), x_ND)
    expected_RD, pull_plainly = jax.vjp(gather_plainly, x_ND)
    np.testing.assert_array_equal(rows_RD, expected_RD)
    np.testing.assert_allclose(pull(d_rows_RD)[0], pull_plainly(d_rows_RD)[0], rtol=1e-6)


def test_spread_equals_plain_indexing_and_its_gradient():
    rows_NK = make_places()
    assignment_R = invert_rows(rows_NK, ROWS)

    def spread_plainly(rows_RD):
        return jnp.concatenate([rows_RD, jnp.zeros((1, EMBED))])[rows_NK]

    rows_RD, dy_NKD = make_array(ROWS, EMBED), make_array(TOKENS, CHOICES, EMBED)
    y_NKD, pull = jax.vjp(lambda rows_RD: spread_rows(rows_RD, rows_NK, assignment_R), rows_RD)
    expected_NKD, pull_plainly = jax.vjp(spread_plainly, rows_RD)
    np.testing.assert_array_equal(y_NKD, expected_NKD)
    np.testing.assert_array_equal(pull(dy_NKD)[0], pull_plainly(dy_NKD)[0])


def test_garbage_in_what_nothing_names_stays_there():
    rows_NK = make_places()
    assignment_R = invert_rows(rows_NK, ROWS)
    nan_ND = make_array(TOKENS, EMBED).at[0].set(jnp.nan)
    nan_RD = make_array(ROWS, EMBED).at[jnp.array([2, 4])].set(jnp.nan)
    rows_RD, pull = jax.vjp(lambda x_ND: gather_rows(x_ND, assignment_R // CHOICES, rows_NK), nan_ND)
    dx_ND = np.asarray(pull(nan_RD)[0])
    assert np.isfinite(rows_RD).all()
    assert np.isfinite(dx_ND).all()
    assert (dx_ND[0] == 0).all()
    y_NKD, pull = jax.vjp(lambda rows_RD: spread_rows(rows_RD, rows_NK, assignment_R), nan_RD)
    assert np.isfinite(y_NKD).all()
    d_rows_RD = np.asarray(pull(jnp.full_like(y_NKD, jnp.nan).at[1:].set(1.0))[0])
    assert np.isfinite(d_rows_RD).all()
    assert (d_rows_RD[[2, 4]] == 0).all()


def test_neither_pass_scatters_rows():
    rows_NK = make_places()
    assignment_R = invert_rows(rows_NK, ROWS)

    def compute(x_ND):
        rows_RD = gather_rows(x_ND, assignment_R // CHOICES, rows_NK)
        return jnp.sum(jnp.square(spread_rows(rows_RD, rows_NK, assignment_R)))

    text = jax.jit(jax.grad(compute)).lower(make_array(TOKENS, EMBED)).as_text()
    assert "gather" in text
    assert "scatter" not in text


def test_a_tokens_gradient_is_summed_in_fp32():
    rows_NK = jnp.asarray([[0, 1, 2]], jnp.int32)
    _, pull = jax.vjp(
        lambda x_ND: gather_rows(x_ND, jnp.zeros(3, jnp.int32), rows_NK), jnp.zeros((1, 1), jnp.bfloat16)
    )
    dx_ND = pull(jnp.asarray([[256.0], [1.0], [1.0]], jnp.bfloat16))[0]  # in bf16 256 + 1 is 256
    assert dx_ND.dtype == jnp.bfloat16
    assert float(dx_ND[0, 0]) == 258
