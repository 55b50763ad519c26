"""Leaves that may lie in the host's memory, and how they come to the device: a layer at a time."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxscale.sharding.rules import Leaf


def is_stacked(leaf: Leaf) -> bool:
    """Whether a parameter has one part for each layer."""
    return leaf.dims[:1] == ("layers",)


def is_on_host(leaf: jax.Array) -> bool:
    return jax.typeof(leaf).memory_space == jax.memory.Space.Host


def to_device(leaf: jax.Array) -> jax.Array:
    return jax.device_put(leaf, jax.memory.Space.Device) if is_on_host(leaf) else leaf


def to_memory_of(leaf: jax.Array, home: jax.Array) -> jax.Array:
    return jax.device_put(leaf, jax.memory.Space.Host) if is_on_host(home) else leaf


def map_layers(function: Callable[[jax.Array], Any], leaf: jax.Array, rule: Leaf) -> Any:
    """A function of each layer of a kept parameter, stacked; from the host, one layer is fetched at a time.

    Of the whole parameter where it is not stacked.
    """
    if not is_on_host(leaf):
        return jax.vmap(function)(leaf) if is_stacked(rule) else function(leaf)
    if not is_stacked(rule):
        # Without the barrier the TPU compiler gathers what comes from the host before it is cast.
        return lax.optimization_barrier(function(to_device(leaf)))
    return lax.map(
        lambda layer: function(to_device(lax.dynamic_index_in_dim(leaf, layer, keepdims=False))),
        jnp.arange(leaf.shape[0]),
    )
