"""Adafactor (Shazeer and Stern 2018, arXiv 1804.04235): second moments as rows and columns of each matrix.

optax factors the two largest dims of a leaf, which in stacked layers may be the layers themselves, and clips
and scales a leaf as a whole. Here every layer is a matrix of its own, as if layers were not stacked.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxscale.sharding.rules import Leaf, iterate_leaves, map_leaves
from jaxscale.training.matrices import Sides, find_sides, find_stacked

MIN_SCALE = 1e-3  # epsilon 2 of the paper: parameters that are zero still move


class FactoredMoments(NamedTuple):
    """State, three trees like the parameters: each has rows and columns, or a whole moment; the rest is None.

    Rows and columns keep the parameter's rank, so that their layout is plain also where sides are as long:
    dims that are averaged over have size 1.
    """

    step: jax.Array
    rows: Any
    """Means over the columns."""
    columns: Any
    """Means over the rows."""
    whole: Any
    """Moments that are not factored."""


def find_factored(leaf: Leaf, min_factored: int) -> Sides | None:
    """The sides of a parameter whose second moments are factored; None: they are kept whole."""
    sides = find_sides(leaf)
    return sides if sides and min(sides.count(leaf.shape)[1:]) >= min_factored else None


def scale_by_factored_moments(
    leaves: Mapping[str, Leaf], *, decay_exponent: float, eps: float, min_factored: int
) -> optax.GradientTransformation:
    """Divides gradients by the root of their factored second moment (algorithm 4, lines 5 to 9)."""

    def factor(path: str) -> Sides | None:
        return find_factored(leaves[path], min_factored)

    def init(params: Any) -> FactoredMoments:
        def make(path: str, leaf: jax.Array, part: str) -> jax.Array | None:
            shape, sides = list(leaf.shape), factor(path)
            if (part == "whole") == (sides is not None):
                return None
            if sides:
                for dim in sides.columns if part == "rows" else sides.rows:
                    shape[dim] = 1
            return jnp.zeros(shape, leaf.dtype)

        def make_tree(part: str) -> Any:
            return map_leaves(partial(make, part=part), params)

        return FactoredMoments(jnp.zeros((), jnp.int32), *map(make_tree, FactoredMoments._fields[1:]))

    def update(gradients: Any, state: FactoredMoments, params: Any = None) -> tuple[Any, FactoredMoments]:
        decay = 1.0 - (state.step + 1.0) ** -decay_exponent

        def mix(moment: jax.Array, new: jax.Array) -> jax.Array:
            return (decay * moment + (1.0 - decay) * new).astype(moment.dtype)

        def scale(path: str, g: jax.Array, rows: jax.Array, columns: jax.Array, whole: jax.Array) -> tuple:
            square, sides = g * g + eps, factor(path)
            if sides is None:
                whole = mix(whole, square)
                return g * jax.lax.rsqrt(whole), rows, columns, whole
            rows = mix(rows, square.mean(sides.columns, keepdims=True))
            columns = mix(columns, square.mean(sides.rows, keepdims=True))
            relative = rows / rows.mean(sides.rows, keepdims=True)
            return g * jax.lax.rsqrt(relative) * jax.lax.rsqrt(columns), rows, columns, whole

        parts = (
            jax.tree.leaves(part, is_leaf=lambda leaf: leaf is None)
            for part in (state.rows, state.columns, state.whole)
        )
        scaled = [
            scale(path, g, *moments)
            for (path, g), *moments in zip(iterate_leaves(gradients), *parts, strict=True)
        ]
        structure = jax.tree.structure(gradients)
        updates, *moments = (jax.tree.unflatten(structure, column) for column in zip(*scaled, strict=True))
        return updates, FactoredMoments(state.step + 1, *moments)

    return optax.GradientTransformation(init, update)


def clip_by_matrix_rms(leaves: Mapping[str, Leaf], limit: float) -> optax.GradientTransformation:
    """Scales the update of each matrix (or vector), layer by layer, to a root mean square of at most `limit`
    (line 10 of algorithm 4)."""

    def clip(path: str, u: jax.Array, _: jax.Array) -> jax.Array:
        return u / jnp.maximum(1.0, _measure_rms(leaves[path], u) / limit)

    return _map_matrices(clip)


def scale_by_matrix_rms(leaves: Mapping[str, Leaf]) -> optax.GradientTransformation:
    """Scales the update of each matrix (or vector), layer by layer, by the root mean square of the parameter
    (line 4 of algorithm 4)."""

    def scale(path: str, u: jax.Array, parameter: jax.Array) -> jax.Array:
        return u * jnp.maximum(MIN_SCALE, _measure_rms(leaves[path], parameter))

    return _map_matrices(scale)


def _map_matrices(change: Any) -> optax.GradientTransformation:
    return optax.stateless(lambda updates, params: map_leaves(change, updates, params))


def _measure_rms(leaf: Leaf, x: jax.Array) -> jax.Array:
    """Root mean square of each layer's part, dims kept with size 1."""
    stacked = find_stacked(leaf)
    dims = tuple(dim for dim in range(x.ndim) if dim not in stacked)
    return jnp.sqrt(jnp.square(x).mean(dims, keepdims=True))
