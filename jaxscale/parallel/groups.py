"""Groups of rows, each times its own matrix: what experts do to the rows they were given."""

import math
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

# Tiles of the TPU's kernels, of rows and of the matrices' sides: they fit the 16 MiB of vector memory that a
# kernel is given.
_LEAST_TILE_ROWS, _MOST_TILE_ROWS, _TILE_BYTES = 128, 512, 2048


@jax.custom_vjp
def multiply_groups(rows_RD: jax.Array, kernel_GDF: jax.Array, sizes_G: jax.Array) -> jax.Array:
    """Each group of rows times its own matrix, at the cost of the rows there are.

    On TPUs in bf16 and fp32 by the kernels of megablox (MegaBlocks' grouped matmul, Gale 2022), elsewhere by
    a loop over tiles of rows. Not by `lax.ragged_dot`: XLA for CPU and GPU multiplies all rows by every
    matrix and masks, and so does XLA for TPUs where the matrices' derivative is asked for.

    Args:
      rows_RD: sorted by group; what lies beyond sum(sizes_G) is not looked at.
      kernel_GDF: in the dtype of rows_RD.
      sizes_G: int32 rows of each group, at most R together.

    Returns:
      rows_RF in the dtype of rows_RD, accumulated in at least fp32; zeros beyond the groups, in gradients
      too.
    """
    return _multiply(rows_RD, kernel_GDF, sizes_G, contracted=0)


def _multiply_forward(
    rows_RD: jax.Array, kernel_GDF: jax.Array, sizes_G: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array]]:
    residuals = rows_RD, kernel_GDF, sizes_G
    return _multiply(*residuals, contracted=0), residuals


def _multiply_backward(
    residuals: tuple[jax.Array, jax.Array, jax.Array], d_rows_RF: jax.Array
) -> tuple[jax.Array, jax.Array, None]:
    rows_RD, kernel_GDF, sizes_G = residuals
    d_rows_RD = _multiply(d_rows_RF, kernel_GDF, sizes_G, contracted=1)
    d_kernel_GDF = _by_platform(_contract_by_kernel, _contract_in_tiles, rows_RD, d_rows_RF, sizes_G)
    return d_rows_RD, d_kernel_GDF, None


multiply_groups.defvjp(_multiply_forward, _multiply_backward)


def _multiply(rows_RX: jax.Array, kernel_GDF: jax.Array, sizes_G: jax.Array, *, contracted: int) -> jax.Array:
    """Rows times their group's matrix over its dim 0, or over its dim 1 in the backward pass."""
    by_kernel = partial(_multiply_by_kernel, contracted=contracted)
    in_tiles = partial(_multiply_in_tiles, contracted=contracted)
    return _by_platform(by_kernel, in_tiles, rows_RX, kernel_GDF, sizes_G)


def _by_platform(
    by_kernel: Callable[..., jax.Array], in_tiles: Callable[..., jax.Array], *operands: jax.Array
) -> jax.Array:
    # A GPU asks its host before each turn of a loop, so its tiles are large.
    small, large = partial(in_tiles, tile_rows=64), partial(in_tiles, tile_rows=512)
    tpu = by_kernel if operands[0].dtype in (jnp.bfloat16, jnp.float32) else large
    return lax.platform_dependent(*operands, cpu=small, tpu=tpu, default=large)


class _Tiles:
    """Rows of one group after the other, a tile at a time; of the group's last tile the rest is zeros."""

    def __init__(self, sizes_G: jax.Array, rows: int, tile_rows: int) -> None:
        self.sizes_G, self.starts_G = sizes_G, jnp.cumsum(sizes_G, dtype=jnp.int32) - sizes_G
        self.tile_rows, self.padded_rows = tile_rows, rows + tile_rows  # so that no tile sticks out

    def pad(self, rows_RD: jax.Array) -> jax.Array:
        return jnp.pad(rows_RD, ((0, self.padded_rows - rows_RD.shape[0]), (0, 0)))

    def read(self, padded_RD: jax.Array, group: jax.Array, index: jax.Array) -> jax.Array:
        tile_TD = lax.dynamic_slice_in_dim(padded_RD, self.find_start(group, index), self.tile_rows)
        place_T1 = index * self.tile_rows + jnp.arange(self.tile_rows)[:, None]
        return jnp.where(place_T1 < self.sizes_G[group], tile_TD, 0)

    def find_start(self, group: jax.Array, index: jax.Array) -> jax.Array:
        return self.starts_G[group] + index * self.tile_rows

    def count(self, group: jax.Array) -> jax.Array:
        return (self.sizes_G[group] + self.tile_rows - 1) // self.tile_rows


def _multiply_in_tiles(
    rows_RX: jax.Array, kernel_GDF: jax.Array, sizes_G: jax.Array, *, contracted: int, tile_rows: int
) -> jax.Array:
    rows, kept = rows_RX.shape[0], kernel_GDF.shape[2 - contracted]
    tiles = _Tiles(sizes_G, rows, tile_rows)
    padded_RX = tiles.pad(rows_RX)

    def visit_group(group: jax.Array, out_RY: jax.Array) -> jax.Array:
        kernel_DF = kernel_GDF[group]

        def visit_tile(index: jax.Array, out_RY: jax.Array) -> jax.Array:
            tile_TY = _dot(tiles.read(padded_RX, group, index), kernel_DF, (1, contracted))
            # The rest of a last tile is zeros, over which the next group writes.
            return lax.dynamic_update_slice_in_dim(
                out_RY, tile_TY.astype(out_RY.dtype), tiles.find_start(group, index), axis=0
            )

        return lax.fori_loop(0, tiles.count(group), visit_tile, out_RY)

    out_RY = jnp.zeros((tiles.padded_rows, kept), rows_RX.dtype)
    return lax.fori_loop(0, sizes_G.size, visit_group, out_RY)[:rows]


def _contract_in_tiles(
    rows_RD: jax.Array, rows_RF: jax.Array, sizes_G: jax.Array, *, tile_rows: int
) -> jax.Array:
    tiles = _Tiles(sizes_G, rows_RD.shape[0], tile_rows)
    padded_RD, padded_RF = tiles.pad(rows_RD), tiles.pad(rows_RF)

    def sum_group(group: jax.Array) -> jax.Array:
        def visit_tile(index: jax.Array, sum_DF: jax.Array) -> jax.Array:
            tile_TD, tile_TF = (tiles.read(padded, group, index) for padded in (padded_RD, padded_RF))
            return sum_DF + _dot(tile_TD, tile_TF, (0, 0))

        zeros_DF = jnp.zeros((rows_RD.shape[1], rows_RF.shape[1]), _widen(rows_RD.dtype))
        return lax.fori_loop(0, tiles.count(group), visit_tile, zeros_DF).astype(rows_RD.dtype)

    return lax.map(sum_group, jnp.arange(sizes_G.size))


def _dot(left: jax.Array, right: jax.Array, contracted: tuple[int, int]) -> jax.Array:
    dims = (((contracted[0],), (contracted[1],)), ((), ()))
    return lax.dot_general(left, right, dims, preferred_element_type=_widen(left.dtype))


def _widen(dtype: jnp.dtype) -> jnp.dtype:
    return jnp.promote_types(dtype, jnp.float32)


def _multiply_by_kernel(
    rows_RX: jax.Array,
    kernel_GDF: jax.Array,
    sizes_G: jax.Array,
    *,
    contracted: int,
    interpret: bool = False,
) -> jax.Array:
    # lazily: it brings Pallas and 0.2 s, which only a dropless exchange needs
    from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm

    padded_RX, tile_rows = _pad_to_tiles(rows_RX)
    out_RY = gmm(
        padded_RX,
        kernel_GDF,
        sizes_G,
        rows_RX.dtype,
        (tile_rows, _tile_side(rows_RX), _tile_side(kernel_GDF, dim=2 - contracted)),
        transpose_rhs=contracted == 1,
        interpret=interpret,
    )[: rows_RX.shape[0]]
    # What the kernel leaves beyond the groups may be NaN.
    return jnp.where(jnp.arange(rows_RX.shape[0])[:, None] < sizes_G.sum(), out_RY, 0)


def _contract_by_kernel(
    rows_RD: jax.Array, rows_RF: jax.Array, sizes_G: jax.Array, *, interpret: bool = False
) -> jax.Array:
    from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm

    padded_RD, tile_rows = _pad_to_tiles(rows_RD)
    padded_RF, _ = _pad_to_tiles(rows_RF)
    tile = (tile_rows, _tile_side(rows_RD), _tile_side(rows_RF))
    return tgmm(padded_RD.T, padded_RF, sizes_G, rows_RD.dtype, tile, interpret=interpret)


def _tile_side(x: jax.Array, *, dim: int = 1) -> int:
    return min(x.shape[dim], _TILE_BYTES // x.dtype.itemsize)


def _pad_to_tiles(rows_RD: jax.Array) -> tuple[jax.Array, int]:
    """The rows, made a multiple of the tile that is returned with them."""
    rows = rows_RD.shape[0]
    missing = -rows % _LEAST_TILE_ROWS
    return jnp.pad(rows_RD, ((0, missing), (0, 0))), math.gcd(rows + missing, _MOST_TILE_ROWS)
