"""The matrices within a parameter: stacked layers are many, and an attention kernel's heads are one side."""

import math
from dataclasses import dataclass

from jaxscale.sharding.rules import Leaf

STACKED_DIMS = ("layers", "experts")
TABLE_DIMS = ("vocab", "positions")  # rows are looked up one by one
_UNDECAYED_NAMES = ("bias", "scale")
_HEAD_DIMS = ("heads", "kv_heads")  # with the `head` that follows, one side of a matrix


@dataclass(frozen=True)
class Sides:
    """Which dims of a parameter number its matrices, and which make up their two sides."""

    stacked: tuple[int, ...]
    rows: tuple[int, ...]
    columns: tuple[int, ...]

    def count(self, shape: tuple[int, ...]) -> tuple[int, int, int]:
        """(matrices, rows, columns) of an array of this shape."""
        matrices, rows, columns = (
            math.prod(shape[dim] for dim in dims) for dims in (self.stacked, self.rows, self.columns)
        )
        return matrices, rows, columns


def find_stacked(leaf: Leaf) -> tuple[int, ...]:
    """The dims that number a parameter's layers and experts."""
    return tuple(index for index, dim in enumerate(leaf.dims) if dim in STACKED_DIMS)


def find_sides(leaf: Leaf) -> Sides | None:
    """The two sides of a parameter's matrices; None if it is none: vectors, norms, what has three sides.

    `(layers, embed, heads, head)` is a matrix embed × (heads · head) in each layer.
    """
    if not is_decayed(leaf):
        return None
    stacked = find_stacked(leaf)
    sides: list[tuple[int, ...]] = []
    for index, dim in enumerate(leaf.dims):
        if index in stacked:
            continue
        if dim == "head" and sides and leaf.dims[sides[-1][-1]] in _HEAD_DIMS and sides[-1][-1] == index - 1:
            sides[-1] = (*sides[-1], index)
        else:
            sides.append((index,))
    return Sides(stacked, *sides) if len(sides) == 2 else None


def is_decayed(leaf: Leaf) -> bool:
    """Whether weight decay pulls on a parameter: on matrices and tables, not on norms, biases and vectors."""
    dims = [dim for dim in leaf.dims if dim != "layers"]
    name = leaf.path.rpartition("/")[2]
    return len(dims) >= 2 and name not in _UNDECAYED_NAMES and not leaf.is_exempt


def is_table(leaf: Leaf) -> bool:
    """An embedding table or an output head, whose rows belong to tokens or positions."""
    return not set(TABLE_DIMS).isdisjoint(leaf.dims)
