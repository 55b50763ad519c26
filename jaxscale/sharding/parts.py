"""What one device has of an array, from its shape and layout alone."""

import math
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax.sharding import NamedSharding

from jaxscale.sharding.rules import Axes
from jaxscale.sharding.zero import dim_axes, spec_axes


@dataclass(frozen=True)
class Part:
    """What one device has of one array."""

    bytes: int
    whole_on: Axes
    """Mesh axes larger than 1 on which every device has the same part, in mesh order."""
    copies: int
    """Devices that have the same part: the product of those axes."""


def measure_part(shape: tuple[int, ...], dtype: Any, sharding: NamedSharding) -> Part:
    """The part of an array on one device; the largest one where a dim does not divide."""
    sizes = sharding.mesh.shape
    ways = [math.prod(sizes[axis] for axis in axes) for axes in dim_axes(sharding.spec, len(shape))]
    elements = math.prod(-(-size // way) for size, way in zip(shape, ways, strict=True))
    laid = spec_axes(sharding.spec)
    whole_on = tuple(axis for axis, size in sizes.items() if size > 1 and axis not in laid)
    return Part(elements * jnp.dtype(dtype).itemsize, whole_on, math.prod(sizes[axis] for axis in whole_on))
