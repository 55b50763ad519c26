"""Rows of tokens moved by index, with gathers in both passes.

The derivative of a gather is a scatter-add, which TPUs run slowly. Where rows are only rearranged, the places
that a token's rows went to are known, so the derivative is a gather too.
"""

import jax
import jax.numpy as jnp


def gather_rows(x_ND: jax.Array, source_R: jax.Array, rows_NK: jax.Array) -> jax.Array:
    """Row r is token `source_R[r]`, or zeros; each token stands in at most K rows.

    Neither pass looks at anything else: garbage in a token without rows, or in the gradient of an empty row,
    stays there.

    Args:
      x_ND: tokens, any float dtype.
      source_R: int32 in [0, N]; N leaves the row empty.
      rows_NK: int32 in [0, R]: the rows with token n as their source, each once; R stands for none. What
        `source_R` says, from the other side: the derivative is read from it.

    Returns:
      rows_RD in the dtype of x_ND. A token's gradient is summed over its rows in at least fp32.
    """
    return _gather(x_ND, source_R, rows_NK)


@jax.custom_vjp
def _gather(x_ND: jax.Array, source_R: jax.Array, rows_NK: jax.Array) -> jax.Array:
    return take_rows(x_ND, source_R)


def _gather_forward(x_ND: jax.Array, source_R: jax.Array, rows_NK: jax.Array) -> tuple[jax.Array, jax.Array]:
    return take_rows(x_ND, source_R), rows_NK


def _gather_backward(rows_NK: jax.Array, d_rows_RD: jax.Array) -> tuple[jax.Array, None, None]:
    # One choice after the other: [N, K, D] with a small K wastes most of a TPU's tiles.
    first, *others = (take_rows(d_rows_RD, rows_N) for rows_N in rows_NK.T)
    if not others:
        return first, None, None
    dx_ND = first.astype(jnp.promote_types(first.dtype, jnp.float32))
    for other in others:
        dx_ND += other.astype(dx_ND.dtype)
    return dx_ND.astype(first.dtype), None, None


_gather.defvjp(_gather_forward, _gather_backward)


def spread_rows(rows_RD: jax.Array, rows_NK: jax.Array, assignment_R: jax.Array) -> jax.Array:
    """The way back: for each choice of each token, the row that it was given, or zeros.

    Args:
      rows_RD: any float dtype.
      rows_NK: int32 in [0, R], no row twice; R stands for none.
      assignment_R: int32 in [0, N·K]: n·K + k of the choice that row r was given to; N·K leaves it empty. The
        same as rows_NK from the other side, `invert_rows` makes it.

    Returns:
      y_NKD in the dtype of rows_RD.
    """
    y_AD = _gather(rows_RD, rows_NK.reshape(-1), assignment_R[:, None])
    return y_AD.reshape(*rows_NK.shape, rows_RD.shape[-1])


def invert_rows(rows_NK: jax.Array, rows: int) -> jax.Array:
    """assignment_R: which choice n·K + k of rows_NK names row r, N·K where none does.

    `assignment_R // K` is the token, and N where the row is empty: the `source_R` of `gather_rows`.

    Args:
      rows_NK: int32 in [0, rows], no row twice; `rows` stands for none.
      rows: R, how many rows there are.
    """
    assignment_R = jnp.full(rows, rows_NK.size, jnp.int32)
    return assignment_R.at[rows_NK.reshape(-1)].set(
        jnp.arange(rows_NK.size, dtype=jnp.int32), mode="drop", wrap_negative_indices=False
    )


def take_rows(x_ND: jax.Array, source_R: jax.Array) -> jax.Array:
    """Row r is `x_ND[source_R[r]]`, zeros where that is N; for use where no derivative is taken."""
    return x_ND.at[source_R].get(mode="fill", fill_value=0, wrap_negative_indices=False)
