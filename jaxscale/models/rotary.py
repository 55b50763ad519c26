"""Rotary position embedding (Su 2021), angles in at least fp32 whatever the compute dtype."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxscale.numerics.policy import widen

# Llama 3.1's published stretch of rotary frequencies.
_STRETCH, _LOW_FACTOR, _HIGH_FACTOR, _ORIGINAL_LENGTH = 8.0, 1.0, 4.0, 8192

_FP32 = jnp.dtype("float32")


class Rotation(NamedTuple):
    """Cosines and sines of each position's angles, at least fp32 [B, T, head/2]; made once for all layers."""

    cos_BTH: jax.Array
    sin_BTH: jax.Array


def make_rotation(
    positions_BT: jax.Array, head: int, theta: float, scaling: str, dtype: jnp.dtype = _FP32
) -> Rotation:
    """The rotation of int32 positions, in `dtype`: fp32, or fp64 where everything is.

    Positions and frequencies in bf16 would collide from position 257 on.
    """
    exponents = jnp.arange(0, head, 2, dtype=dtype) / head
    frequencies = theta**-exponents
    if scaling == "llama3.1":
        frequencies = _stretch_low(frequencies)
    angles_BTH = positions_BT.astype(dtype)[..., None] * frequencies
    return Rotation(jnp.cos(angles_BTH), jnp.sin(angles_BTH))


def rotate(x_BTNH: jax.Array, rotation: Rotation) -> jax.Array:
    """Rotates the pairs (i, i + head/2) of each head, in at least fp32; result in the dtype of `x_BTNH`."""
    cos, sin = rotation.cos_BTH[:, :, None], rotation.sin_BTH[:, :, None]
    first, second = jnp.split(x_BTNH.astype(widen(x_BTNH.dtype)), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x_BTNH.dtype)


def _stretch_low(frequencies: jax.Array) -> jax.Array:
    """Long waves are stretched, short ones kept, those between interpolated."""
    wavelengths = 2 * jnp.pi / frequencies
    smooth = (_ORIGINAL_LENGTH / wavelengths - _LOW_FACTOR) / (_HIGH_FACTOR - _LOW_FACTOR)
    smooth = jnp.clip(smooth, 0.0, 1.0)
    return (1 - smooth) * frequencies / _STRETCH + smooth * frequencies
