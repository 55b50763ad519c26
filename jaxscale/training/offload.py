"""Optimizer state and master weights in the host's memory, streamed through the device a layer at a time.

The idea is ZeRO-Offload's (Ren 2021); the update runs on the device, where a TPU host has no cores to spare.
What is stacked over layers is updated in place by a loop: a slice comes to the device, is updated and goes
back to its place. A `lax.scan` that returns the new slices holds the whole state on the host twice
(`scripts/study_offload.py`); a loop over the buffers themselves does not.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import optax
from jax import lax
from jax.sharding import Mesh

from jaxscale.config import Config
from jaxscale.models.model import Params
from jaxscale.sharding.rules import iterate_leaves, nest_by_name
from jaxscale.sharding.zero import Layouts
from jaxscale.training.host_memory import is_stacked, to_device, to_memory_of
from jaxscale.training.optimizer import apply_update
from jaxscale.training.optimizer_layout import HOST_MEMORY, find_owner
from jaxscale.training.state import TrainState

# Optimizers whose update of an element looks at no other element, so that a layer can go by itself.
ELEMENTWISE_OPTIMIZERS = ("adamw", "lion", "sgd")

Arrays = dict[str, jax.Array]
Finish = Callable[[Params], Params]
"""Sums of gradients, of any part of the parameters -> the gradients that the optimizer takes."""


def find_offload_problems(config: Config, mesh: Mesh) -> list[str]:
    """What keeps state from being kept on the host of these devices."""
    device: Any = mesh.devices.flat[0]
    kinds = [memory.kind for memory in device.addressable_memories()]
    if config.offload.is_off or HOST_MEMORY in kinds:
        return find_stream_problems(config)
    return [
        f"offload: {device.platform} devices have no memory of the kind {HOST_MEMORY}, only "
        f"{', '.join(kinds)}; set offload.optimizer_state and offload.master_weights to false",
        *find_stream_problems(config),
    ]


def find_stream_problems(config: Config) -> list[str]:
    """What keeps state from being streamed from any host."""
    if config.offload.is_off:
        return []
    problems = []
    if config.optimizer.name not in ELEMENTWISE_OPTIMIZERS:
        problems.append(
            f"offload: {config.optimizer.name} looks at more than one element at a time, so its state cannot "
            f"be streamed by layers; take {', '.join(ELEMENTWISE_OPTIMIZERS)}, or turn offload off"
        )
    if config.precision.moments != "fp32":
        problems.append(
            f"offload: precision.moments={config.precision.moments} rounds by draws for whole leaves, and "
            "state is streamed by layers; set precision.moments=fp32, or turn offload off"
        )
    if config.strategy.get("layers"):
        problems.append(
            f"offload: strategy.layers={list(config.strategy['layers'])} cuts the layers, which are streamed "
            "one by one; lay another dim over these axes, or turn offload off"
        )
    return problems


@dataclass(frozen=True)
class HostTraffic:
    """What a step moves between one device and its host, in bytes."""

    held: int
    """State that lies on the host in place of the device."""
    to_device: int
    to_host: int


def expect_host_traffic(state: TrainState) -> HostTraffic:
    """By closed form: moments go each way once; master weights come twice, for use and for the update.

    Args:
      state: `ShapeDtypeStruct`s with shardings (`Setup.abstract_state`).
    """
    moments, params = _weigh_on_host(state.moments), _weigh_on_host(state.params)
    return HostTraffic(moments + params, moments + 2 * params, moments + params)


def _weigh_on_host(tree: Any) -> int:
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
        if leaf.sharding.memory_kind == HOST_MEMORY
    )


def make_streamed_update(
    optimizer: optax.GradientTransformation, layouts: Layouts
) -> Callable[[Finish, Params, Any, Params, jax.Array], tuple[Params, Any]]:
    """As `apply_update`, for state of which some lies on the host; each array stays in its memory."""

    def update(
        finish: Finish, sums: Params, moments: Any, params: Params, rate: jax.Array
    ) -> tuple[Params, Any]:
        structures = jax.tree.structure(params), jax.tree.structure(moments)
        stream = _Stream(optimizer, layouts, finish, dict(iterate_leaves(sums)), rate)
        arrays = _State(dict(iterate_leaves(params)), dict(iterate_leaves(moments)))
        # Counters move on with every part's update, each time from where they were before it.
        counters = {path: leaf for path, leaf in arrays.moments.items() if stream.find_owner(path) is None}
        for paths, layers in _list_parts(layouts):
            part = arrays.take(paths, stream.find_owner)
            moved, last_counters = stream.update_part(part, counters, layers)
            arrays = arrays.put(moved)
        arrays = arrays.put(_State({}, last_counters))
        return tuple(
            jax.tree.unflatten(structure, tree.values())
            for structure, tree in zip(structures, (arrays.params, arrays.moments), strict=True)
        )

    return update


def _list_parts(layouts: Layouts) -> list[tuple[list[str], int | None]]:
    """(paths of parameters that are updated together, layers they are stacked over); None: one whole leaf."""
    stacks: dict[int, list[str]] = {}
    alone: list[tuple[list[str], int | None]] = []
    for path, leaf in layouts.leaves.items():
        if is_stacked(leaf):
            stacks.setdefault(leaf.shape[0], []).append(path)
        else:
            alone.append(([path], None))
    return [*((paths, layers) for layers, paths in stacks.items()), *alone]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _State:
    """Parameters and optimizer state by path, in the order of their trees."""

    params: Arrays
    moments: Arrays

    def take(self, paths: Iterable[str], find_owner: Callable[[str], str | None]) -> "_State":
        """What belongs to some parameters."""
        wanted = set(paths)
        return _State(
            {path: leaf for path, leaf in self.params.items() if path in wanted},
            {path: leaf for path, leaf in self.moments.items() if find_owner(path) in wanted},
        )

    def put(self, changed: "_State") -> "_State":
        return _State({**self.params, **changed.params}, {**self.moments, **changed.moments})


@dataclass(frozen=True)
class _Stream:
    """One update's optimizer, sums of gradients by path, and learning rate."""

    optimizer: optax.GradientTransformation
    layouts: Layouts
    finish: Finish
    sums: Arrays
    rate: jax.Array

    def find_owner(self, path: str) -> str | None:
        return find_owner(path, self.layouts.leaves)

    def update_part(self, part: _State, counters: Arrays, layers: int | None) -> tuple[_State, Arrays]:
        """The part and the counters after the update, each array in the memory that it came from."""
        sums = {path: self.sums[path] for path in part.params}
        if layers is None:
            moved, counted = self._update(sums, jax.tree.map(to_device, part), counters)
            return jax.tree.map(to_memory_of, moved, part), counted

        def visit(layer: jax.Array, carry: tuple[_State, Arrays]) -> tuple[_State, Arrays]:
            held, _ = carry
            pick = partial(lax.dynamic_index_in_dim, index=layer, keepdims=False)
            old = jax.tree.map(lambda leaf: to_device(pick(leaf)), held)
            new, counted = self._update(jax.tree.map(pick, sums), old, counters)
            put = partial(lax.dynamic_update_index_in_dim, index=layer, axis=0)
            return jax.tree.map(lambda leaf, part: put(leaf, to_memory_of(part, leaf)), held, new), counted

        return lax.fori_loop(0, layers, visit, (part, counters))

    def _update(self, sums: Arrays, part: _State, counters: Arrays) -> tuple[_State, Arrays]:
        params, known = nest_by_name(part.params), {**part.moments, **counters}
        structure = jax.eval_shape(self.optimizer.init, params)
        moments = jax.tree.unflatten(
            jax.tree.structure(structure), [known[path] for path, _ in iterate_leaves(structure)]
        )
        gradients = self.finish(nest_by_name(sums))
        params, moments = apply_update(self.optimizer, gradients, moments, params, self.rate)
        named = dict(iterate_leaves(moments))
        moved = _State(dict(iterate_leaves(params)), {path: named[path] for path in part.moments})
        return moved, {path: named[path] for path in counters}
