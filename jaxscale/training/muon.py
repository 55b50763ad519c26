"""Muon (Jordan 2024): the momentum of each layer's matrix, orthogonalised whole.

A matrix lies in shards over the mesh and has to be whole where it is orthogonalised. Stacked layers make that
cheap: an all-to-all over some axes hands each device whole layers in place of a part of every layer, and
another brings the result back. Axes that the number of layers does not need are gathered, one layer at a
time. No device ever holds more than its layers and one matrix.
"""

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import NamedSharding

from jaxscale.config import PrecisionConfig
from jaxscale.numerics.policy import matmul_precision
from jaxscale.sharding.rules import Axes, Leaf, iterate_leaves, map_leaves
from jaxscale.sharding.zero import Layouts, dim_axes
from jaxscale.training.matrices import Sides, find_sides, is_table

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the quintic iteration (Jordan 2024)
EPS = 1e-12  # a gradient of zero stays zero; the 1e-7 of Jordan 2024 would shrink updates of small ones
RMS = 0.2  # of an update's elements, about that of AdamW (Liu 2025, section 2.2)


def find_muon_sides(leaf: Leaf) -> Sides | None:
    """The sides of a parameter that Muon moves: a matrix within the model, neither a table nor a head."""
    return None if is_table(leaf) else find_sides(leaf)


def orthogonalise(x: jax.Array, steps: int) -> jax.Array:
    """Newton-Schulz iteration: the singular values of a matrix [rows, columns] go to about 1 (0.7 to 1.2).

    Jordan 2024: X <- a X + (b A + c A A) X with A = X X^T, from X / |X|, on the shorter side.
    """
    a, b, c = COEFFICIENTS
    is_tall = x.shape[0] > x.shape[1]
    x = x.T if is_tall else x
    x = x / (jnp.linalg.norm(x) + EPS)

    def iterate(_: Any, x: jax.Array) -> jax.Array:
        gram = x @ x.T
        return a * x + (b * gram + c * gram @ gram) @ x

    x = lax.fori_loop(0, steps, iterate, x)
    return x.T if is_tall else x


def scale_by_muon(
    leaves: Mapping[str, Leaf], layouts: Layouts | None, precision: PrecisionConfig, *, steps: int
) -> optax.GradientTransformation:
    """Orthogonalises updates, matrix by matrix, to a root mean square of 0.2 an element.

    A matrix of rank r = min(rows, columns) whose singular values are 1 has the root mean square
    sqrt(r / (rows · columns)) = 1 / sqrt(max(rows, columns)), hence the factor 0.2 sqrt(max(rows, columns)):
    Liu 2025 (arXiv 2502.16982, eq. 4), so that AdamW's learning rates and decay hold. Jordan's own
    sqrt(max(1, rows / columns)), for weights [out, in], wants rates of its own.

    Args:
      leaves: those of the updates have sides (`find_muon_sides`).
      layouts: where updates lie; None: on one device.
      precision: says how exact the matmuls are, as in the model.
    """
    shardings = dict(iterate_leaves(layouts.moments)) if layouts else {}

    def change(path: str, x: jax.Array) -> jax.Array:
        sides = find_muon_sides(leaves[path])
        assert sides, f"{path} is no matrix"
        _, rows, columns = sides.count(x.shape)
        factor = RMS * math.sqrt(max(rows, columns))

        def visit(matrix: jax.Array) -> jax.Array:
            flat = orthogonalise(matrix.reshape(rows, columns), steps)
            return factor * flat.reshape(matrix.shape)

        return map_matrices(visit, x, sides, shardings.get(path))

    def update(updates: Any, params: Any) -> Any:
        with matmul_precision(precision):
            return map_leaves(change, updates)

    return optax.stateless(update)


@dataclass(frozen=True)
class Relay:
    """How an array of matrices is brought from shards to whole matrices."""

    exchanged: Axes
    """Axes over which an all-to-all turns parts of every matrix into whole ones."""
    gathered: Axes
    """Axes over which each matrix is gathered when its turn comes."""
    matrices: int
    """On a device before the exchange, padded to a multiple of the exchanged devices."""
    turns: int
    """Matrices that a device makes."""


def plan_relay(shape: tuple[int, ...], sides: Sides, sharding: NamedSharding) -> Relay:
    """The axes to exchange: those that leave a device the fewest matrices, of these the fewest devices, and
    the slowest axes first, since an exchange sends less than a gather."""
    sizes = sharding.mesh.shape
    laid = dim_axes(sharding.spec, len(shape))
    axes = [
        a for a in sharding.mesh.axis_names if sizes[a] > 1 and any(a in laid[d] for d in _matrix_dims(sides))
    ]
    local = sharding.shard_shape(shape)
    count = math.prod(local[dim] for dim in sides.stacked)

    def rank(exchanged: Axes) -> tuple[int, int]:
        ways = math.prod(sizes[axis] for axis in exchanged)
        return -(-count // ways), ways

    choices = [c for number in range(len(axes) + 1) for c in itertools.combinations(axes, number)]
    exchanged = min(choices, key=rank)
    turns, ways = rank(exchanged)
    return Relay(exchanged, tuple(a for a in axes if a not in exchanged), turns * ways, turns)


def map_matrices(
    visit: Callable[[jax.Array], jax.Array], x: jax.Array, sides: Sides, sharding: NamedSharding | None
) -> jax.Array:
    """Calls `visit` with each whole matrix of an array, one at a time on a device; results lie alike.

    Args:
      visit: a matrix, with all its dims in their order, to one of the same shape.
      sharding: of the array; None: it is on one device.
    """
    inner = _matrix_dims(sides)
    order = (*sides.stacked, *inner)
    back = tuple(order.index(dim) for dim in range(x.ndim))

    def visit_all(x: jax.Array, parts: _Parts) -> jax.Array:
        moved = x.transpose(order)
        held = moved.reshape(-1, *moved.shape[len(sides.stacked) :])
        done = lax.map(lambda part: parts.take(visit(parts.gather(part))), parts.hand_out(held))
        return parts.bring_back(done, len(held)).reshape(moved.shape).transpose(back)

    if sharding is None or sharding.mesh.size == 1:
        return visit_all(x, _Parts(Relay((), (), len(x), len(x)), {}, ((),) * len(inner)))
    laid = dim_axes(sharding.spec, x.ndim)
    parts = _Parts(
        plan_relay(x.shape, sides, sharding), sharding.mesh.shape, tuple(laid[dim] for dim in inner)
    )
    return jax.shard_map(
        lambda local: visit_all(local, parts),
        mesh=sharding.mesh,
        in_specs=sharding.spec,
        out_specs=sharding.spec,
        check_vma=False,
    )(x)


def _matrix_dims(sides: Sides) -> tuple[int, ...]:
    return tuple(sorted((*sides.rows, *sides.columns)))


@dataclass(frozen=True)
class _Parts:
    """The ways between parts of matrices and whole ones, inside a region that is manual over all axes."""

    relay: Relay
    sizes: Mapping[str, int]
    laid: tuple[Axes, ...]
    """Axes of each dim of a matrix."""

    def hand_out(self, x: jax.Array) -> jax.Array:
        """[matrices, part] -> [turns, exchanged devices, part]: every part that there is of this device's
        matrices on the exchanged axes."""
        ways = self._count(self.relay.exchanged)
        if ways == 1:
            return x[:, None]
        padded = jnp.pad(x, [(0, self.relay.matrices - len(x)), *[(0, 0)] * (x.ndim - 1)])
        sent = padded.reshape(ways, self.relay.turns, *x.shape[1:])
        return lax.all_to_all(sent, self.relay.exchanged, 0, 0).swapaxes(0, 1)

    def bring_back(self, x: jax.Array, count: int) -> jax.Array:
        """The way back of `hand_out`, to `count` matrices."""
        if self._count(self.relay.exchanged) == 1:
            return x[:, 0]
        received = lax.all_to_all(x.swapaxes(0, 1), self.relay.exchanged, 0, 0)
        return received.reshape(-1, *received.shape[2:])[:count]

    def gather(self, parts: jax.Array) -> jax.Array:
        """[exchanged devices, part] -> the whole matrix."""
        gathered = self.relay.gathered
        parts = lax.all_gather(parts, gathered) if gathered else parts[None]
        local = parts.shape[2:]
        order, whole = self._arrange(local)
        return parts.reshape(*self._spread(), *local).transpose(order).reshape(whole)

    def take(self, matrix: jax.Array) -> jax.Array:
        """The way back of `gather`: [exchanged devices, part] of a whole matrix."""
        sizes = [self._count(axes) for axes in self.laid]
        local = tuple(size // ways for size, ways in zip(matrix.shape, sizes, strict=True))
        order, _ = self._arrange(local)
        spread = (*self._spread(), *local)
        split = matrix.reshape(*(spread[index] for index in order))
        back = tuple(order.index(index) for index in range(len(order)))
        parts = split.transpose(back).reshape(-1, self._count(self.relay.exchanged), *local)
        gathered = self.relay.gathered
        return (
            lax.dynamic_index_in_dim(parts, lax.axis_index(gathered), keepdims=False)
            if gathered
            else parts[0]
        )

    def _arrange(self, local: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(Order in which axes and dims make the matrix, its shape), from [gathered, exchanged, dims]."""
        axes = (*self.relay.gathered, *self.relay.exchanged)
        order: list[int] = []
        for dim, laid in enumerate(self.laid):
            order += [axes.index(axis) for axis in laid if axis in axes]
            order.append(len(axes) + dim)
        whole = tuple(size * self._count(laid) for size, laid in zip(local, self.laid, strict=True))
        return tuple(order), whole

    def _spread(self) -> tuple[int, ...]:
        return tuple(self.sizes[axis] for axis in (*self.relay.gathered, *self.relay.exchanged))

    def _count(self, axes: Axes) -> int:
        return math.prod(self.sizes[axis] for axis in axes)
