"""Rotary position embedding (Su 2021), angles in fp32 whatever the compute dtype."""

import jax
import jax.numpy as jnp

# Llama 3.1's published stretch of rotary frequencies.
_STRETCH, _LOW_FACTOR, _HIGH_FACTOR, _ORIGINAL_LENGTH = 8.0, 1.0, 4.0, 8192


def rotary_angles(positions_BT: jax.Array, head: int, theta: float, scaling: str) -> jax.Array:
    """Angles in radians, fp32 [B, T, head/2], for int32 positions.

    Positions and frequencies in bf16 would collide from position 257 on.
    """
    exponents = jnp.arange(0, head, 2, dtype=jnp.float32) / head
    frequencies = theta**-exponents
    if scaling == "llama3.1":
        frequencies = _stretch_low(frequencies)
    return positions_BT.astype(jnp.float32)[..., None] * frequencies


def rotate(x_BTNH: jax.Array, angles_BTH: jax.Array) -> jax.Array:
    """Rotates the pairs (i, i + head/2) of each head, in fp32; result in the dtype of `x_BTNH`."""
    cos, sin = jnp.cos(angles_BTH)[:, :, None], jnp.sin(angles_BTH)[:, :, None]
    first, second = jnp.split(x_BTNH.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x_BTNH.dtype)


def _stretch_low(frequencies: jax.Array) -> jax.Array:
    """Long waves are stretched, short ones kept, those between interpolated."""
    wavelengths = 2 * jnp.pi / frequencies
    smooth = (_ORIGINAL_LENGTH / wavelengths - _LOW_FACTOR) / (_HIGH_FACTOR - _LOW_FACTOR)
    smooth = jnp.clip(smooth, 0.0, 1.0)
    return (1 - smooth) * frequencies / _STRETCH + smooth * frequencies
