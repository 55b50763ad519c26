"""Chips that could be rented: so many of a kind, and how they lie.

`v5p:4x4x4` is a slice of a TPU torus, `h100:8x8` are 8 nodes of 8 GPUs, `h100:8` is one node of 8, and
`cpu:8` are 8 simulated devices.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from jaxscale.config import UserError
from jaxscale.metrics.chips import Chip, find_chip, load_chips

__all__ = ["Chip", "Slice", "find_chip", "load_chips", "parse_slice"]


@dataclass(frozen=True)
class Slice:
    """Chips of a kind and their places."""

    chip: Chip
    shape: tuple[int, ...]
    """TPU: chips along each dim of the torus. GPU: (nodes, GPUs a node). CPU: (devices,)."""

    def __str__(self) -> str:
        return f"{self.chip.name}:{'x'.join(map(str, self.shape))}"

    @property
    def chips(self) -> int:
        return math.prod(self.shape)

    @property
    def count(self) -> int:
        """Devices, as JAX counts them."""
        return self.chips * self.chip.devices_per_chip

    @property
    def wraps(self) -> tuple[bool, ...]:
        """Whether each dim of the torus is a ring; empty for what is no torus."""
        torus = self.chip.torus
        if torus is None:
            return ()
        is_cube = torus.wrap_cube is not None and all(size % torus.wrap_cube == 0 for size in self.shape)
        return tuple(is_cube or size == torus.wrap_size for size in self.shape)

    @property
    def price_per_hour(self) -> float | None:
        """In the currency of the user's table; None where it has no price."""
        price = self.chip.price_per_chip_hour
        return None if price is None else price * self.chips


def parse_slice(text: str, chips: Mapping[str, Chip] | None = None) -> Slice:
    """Reads `v5p:4x4x4`, `h100:8x8`, `h100:8` or `cpu:8`.

    Args:
      chips: the table that names are looked up in; None: the one that comes along.

    Raises:
      UserError: the text has another form, the chip is not known, or there is no such slice of it.
    """
    name, colon, sizes = text.strip().partition(":")
    parts = sizes.lower().split("x")
    if not colon or not name or not all(part.isascii() and part.isdigit() for part in parts):
        raise UserError(
            f"chips {text!r}: write the chip, a colon and sizes, such as v5p:4x4x4 (a torus), h100:8x8 "
            "(nodes x GPUs a node), h100:8 (one node) or cpu:8"
        )
    shape = tuple(map(int, parts))
    chip = find_chip(name, load_chips() if chips is None else chips)
    if 0 in shape:
        raise UserError(f"chips {text!r}: a size is 0; every size is at least 1")
    if chip.platform == "tpu":
        _check_torus(text, chip, shape)
    elif chip.platform == "gpu":
        shape = (1, *shape) if len(shape) == 1 else shape
        _check_nodes(text, chip, shape)
    elif len(shape) != 1:
        raise UserError(f"chips {text!r}: simulated devices lie in no torus; write {name}:{math.prod(shape)}")
    return Slice(chip, shape)


def _check_torus(text: str, chip: Chip, shape: tuple[int, ...]) -> None:
    torus = chip.torus
    if torus is None:
        raise UserError(
            f"chips {text!r}: the table does not say how {chip.name} is wired; {_word_remedy('torus')}"
        )
    if len(shape) != torus.dims:
        example = "x".join(["4"] * torus.dims)
        raise UserError(
            f"chips {text!r}: {len(shape)} size(s), but the torus of {chip.name} has {torus.dims} dims; "
            f"write {torus.dims} sizes, such as {chip.name}:{example}"
        )
    largest = torus.max_shape
    if largest is not None and any(a > b for a, b in zip(sorted(shape), sorted(largest), strict=True)):
        raise UserError(
            f"chips {text!r}: the largest slice of {chip.name} is {'x'.join(map(str, largest))}; ask for a "
            "smaller one"
        )


def _check_nodes(text: str, chip: Chip, shape: tuple[int, ...]) -> None:
    if chip.node is None:
        raise UserError(
            f"chips {text!r}: the table does not say how {chip.name} is wired; {_word_remedy('node')}"
        )
    if len(shape) != 2:
        raise UserError(
            f"chips {text!r}: {len(shape)} sizes; GPUs are nodes x GPUs a node, such as {chip.name}:4x"
            f"{chip.node.gpus}"
        )
    if shape[1] > chip.node.gpus:
        raise UserError(
            f"chips {text!r}: {shape[1]} GPUs a node, but a node of {chip.name} has {chip.node.gpus}; write "
            f"nodes x GPUs a node, such as {chip.name}:{math.ceil(math.prod(shape) / chip.node.gpus)}x"
            f"{chip.node.gpus}, or give node.gpus in a table of your own"
        )


def _word_remedy(group: str) -> str:
    return f"give `{group}` in a table of your own (as in jaxscale/metrics/chips.yaml)"
