"""Which dims of a TPU's torus each mesh axis lies on, as `jax.make_mesh` decides.

The rule is JAX's (`jax.experimental.mesh_utils`): from the innermost axis out, an axis takes whole dims of
the torus, as many as multiply up to it; where that cannot be, dims are split between axes, the inner axis
having the neighbours. Orders that JAX knows for slices of 4 to 16 chips by heart, which make rings of them,
are left out.
"""

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import lru_cache

Assignment = tuple[tuple[int, ...], ...]
"""[axis][dim]: devices of the axis along the dim; their product over axes is the dim."""


@lru_cache(maxsize=4096)
def assign_axes(dims: tuple[int, ...], sizes: tuple[int, ...]) -> Assignment:
    """What each mesh axis has of each dim.

    Args:
      dims: of the torus, in devices.
      sizes: of the mesh axes, outermost first; their product is that of the dims.
    """
    assert math.prod(dims) == math.prod(sizes), (dims, sizes)
    return _assign_whole(dims, sizes) or _assign_split(dims, sizes)


def is_split(dims: tuple[int, ...], sizes: tuple[int, ...]) -> bool:
    """Whether any dim is shared by two axes, for which `jax.make_mesh` needs `allow_split_physical_axes`."""
    return _assign_whole(dims, sizes) is None


def _assign_whole(dims: tuple[int, ...], sizes: tuple[int, ...]) -> Assignment | None:
    free = set(range(len(dims)))
    result: list[tuple[int, ...]] = []
    for size in reversed(sizes):
        choices = (
            taken
            for count in range(len(dims), 0, -1)
            for taken in itertools.combinations(sorted(free), count)
            if math.prod(dims[dim] for dim in taken) == size
        )
        taken = next(choices, None) if size > 1 else ()
        if taken is None:
            return None
        free -= set(taken)
        result.append(tuple(dims[dim] if dim in taken else 1 for dim in range(len(dims))))
    return tuple(reversed(result))


def _assign_split(dims: tuple[int, ...], sizes: tuple[int, ...]) -> Assignment:
    taken = (1,) * len(dims)
    result: list[tuple[int, ...]] = []
    for size in reversed(sizes):
        best = max(_list_choices(dims, taken, size), key=lambda choice: _rank(choice, dims, taken))
        taken = tuple(a * b for a, b in zip(taken, best, strict=True))
        result.append(best)
    return tuple(reversed(result))


def _list_choices(dims: Sequence[int], taken: Sequence[int], size: int) -> Iterator[tuple[int, ...]]:
    """Every way to lay an axis over what is left of the dims."""
    left = [dim // used for dim, used in zip(dims, taken, strict=True)]
    ways = []
    for factor, count in Counter(_factorise(size)).items():
        places = [dim for dim, size in enumerate(left) for each in _factorise(size) if each == factor]
        ways.append([(factor, chosen) for chosen in set(itertools.combinations(places, count))])
    for choice in itertools.product(*ways):
        result = [1] * len(dims)
        for factor, chosen in choice:
            for dim in chosen:
                result[dim] *= factor
        yield tuple(result)


def _rank(choice: tuple[int, ...], dims: Sequence[int], taken: Sequence[int]) -> tuple:
    """JAX's preferences: devices on whole dims, then more whole dims, then devices beside inner axes."""
    whole = [size for size, dim in zip(choice, dims, strict=True) if size == dim]
    shared = math.prod(size for size, used in zip(choice, taken, strict=True) if used > 1)
    return math.prod(whole), sum(size > 1 for size in whole), shared, choice


def _factorise(number: int) -> list[int]:
    factors, divisor = [], 2
    while divisor * divisor <= number:
        while number % divisor == 0:
            factors.append(divisor)
            number //= divisor
        divisor += 1
    return factors + ([number] if number > 1 else [])
