"""Which wire each mesh axis lies on, and how long a collective takes over it.

*TPU.* `jaxscale.planning.torus` says which dims of the torus an axis has. On a whole dim a device sends both
ways round if the dim is a ring, which is twice a link's bandwidth, and one way if it is a line, whose middle
link carries nearly everything. An axis that has a part of a dim is a line; where its devices lie `stride`
apart, so many groups share each link. Several dims are used at once, and their bandwidths add up as far as
each can bring in what lies along it (XLA does so for planes and cubes with equal sides; for others this is
its best case).

*GPU.* Ranks count up within a node first, so the innermost axes fill the nodes. A group that has L GPUs in
each of M nodes is a tree of two levels: NVLink between L, and between nodes the L adapters together. The
slower of both bounds it. Groups that do not divide a node evenly are counted as if all went over the network.

*CPU.* Simulated devices share one memory; no speed is known.

Sources: "How to scale your model" (jax-ml), the chapters on sharding (torus) and on GPUs (tree).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jaxscale.mesh import AXES
from jaxscale.planning.hardware import Slice
from jaxscale.planning.torus import assign_axes

Axes = tuple[str, ...]

COLLECTIVES = (
    *("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "ragged-all-to-all"),
    "collective-permute",
)


@dataclass(frozen=True)
class Level:
    """One dim of a torus, or one level of a tree, as far as a group of devices has it."""

    name: str
    """ICI, or NVLink or network."""
    size: int
    """Devices of the group along the dim; children of the tree at this level."""
    bytes_per_second: float
    """Torus: what a device takes in of a gather along the dim. Tree: what a child of this level takes in,
    which is a whole node where nodes are the children."""
    neighbour_bytes_per_second: float
    """What a device sends to its next, one way."""
    hops: int
    """Of the farthest way that a gather has to go."""
    hop_seconds: float


@dataclass(frozen=True)
class Wire:
    """What the devices of a group are joined by, for one mesh axis or several together."""

    axes: Axes
    name: str
    """ICI, NVLink, network or memory; `none` for a single device."""
    size: int
    levels: tuple[Level, ...]
    """Of more than one device; empty for memory, and for a single device."""

    @property
    def is_torus(self) -> bool:
        return self.name == "ICI"

    @property
    def has_speed(self) -> bool:
        """Whether times can be told; not so on the simulated mesh."""
        return self.size == 1 or bool(self.levels)

    @property
    def bytes_per_second(self) -> float:
        """What a device takes in of an all-gather, or gives away in a reduce-scatter."""
        return (self.size - 1) / self.size / self._gather_seconds_per_byte if self.levels else math.inf

    @property
    def latency_seconds(self) -> float:
        """Of an all-gather of next to nothing."""
        return sum(level.hops * level.hop_seconds for level in self.levels)

    @property
    def _gather_seconds_per_byte(self) -> float:
        """For each byte of the gathered whole."""
        if self.is_torus:
            every_dim = (self.size - 1) / sum(level.bytes_per_second for level in self.levels)
            # What lies elsewhere along a dim comes over that dim, for all devices of a slab together.
            a_dim = max((level.size - 1) / level.bytes_per_second for level in self.levels)
            return max(every_dim, a_dim) / self.size
        return max((level.size - 1) / level.size / level.bytes_per_second for level in self.levels)

    @property
    def _exchange_seconds_per_byte(self) -> float:
        """For each byte that a device holds before an all-to-all."""
        if self.is_torus:
            # What crosses the middle of a line of n: half of the devices, each with its part for the others.
            return max(level.size**2 // 4 / level.size / level.bytes_per_second for level in self.levels)
        return max(
            (level.size - 1)
            / level.size
            / level.neighbour_bytes_per_second
            / _count_above(self.levels, level)
            for level in self.levels
        )

    @property
    def _neighbour_seconds_per_byte(self) -> float:
        return max(1 / level.neighbour_bytes_per_second for level in self.levels)


def _count_above(levels: Sequence[Level], level: Level) -> int:
    """Groups that share out a device's data before this level of a tree does."""
    return math.prod(each.size for each in levels[levels.index(level) + 1 :])


def place_axes(chips: Slice, sizes: Mapping[str, int]) -> dict[str, Wire]:
    """The wire of each mesh axis.

    Args:
      sizes: devices along each of `jaxscale.mesh.AXES`; axes left out have one. Their product is the
        number of devices.
    """
    return {axis: wire_of(chips, sizes, (axis,)) for axis in AXES}


def wire_of(chips: Slice, sizes: Mapping[str, int], axes: Axes) -> Wire:
    """The wire of several axes that a collective goes over as one.

    Args: as `place_axes`.
    """
    lengths = tuple(sizes.get(axis, 1) for axis in AXES)
    assert math.prod(lengths) == chips.count, f"a mesh {dict(sizes)} on {chips}, {chips.count} devices"
    axes = tuple(axis for axis in AXES if axis in axes)
    size = math.prod(sizes.get(axis, 1) for axis in axes)
    if size == 1:
        return Wire(axes, "none", 1, ())
    chosen = [AXES.index(axis) for axis in axes]
    if chips.chip.torus is not None:
        return Wire(axes, "ICI", size, _lay_on_torus(chips, lengths, chosen))
    if chips.chip.node is not None:
        levels = _lay_on_nodes(chips, lengths, chosen)
        return Wire(axes, levels[-1].name, size, levels)
    return Wire(axes, "memory", size, ())


def _lay_on_torus(chips: Slice, lengths: tuple[int, ...], chosen: Sequence[int]) -> tuple[Level, ...]:
    torus = chips.chip.torus
    assert torus is not None
    dims, wraps = chips.shape, chips.wraps
    speeds = [torus.link_bytes_per_second] * len(dims)
    if chips.chip.devices_per_chip > 1:
        dims, wraps = (*dims, chips.chip.devices_per_chip), (*wraps, False)
        speeds.append(torus.core_link_bytes_per_second or torus.link_bytes_per_second)
    assignment = assign_axes(dims, lengths)
    levels = []
    for dim, length in enumerate(dims):
        size = math.prod(assignment[axis][dim] for axis in chosen)
        if size == 1:
            continue
        inner = max(axis for axis in chosen if assignment[axis][dim] > 1)
        stride = math.prod(part[dim] for part in assignment[inner + 1 :])
        outer = min(axis for axis in chosen if assignment[axis][dim] > 1)
        span = math.prod(part[dim] for part in assignment[outer:])
        between = span // stride // size  # parts of other axes that lie between those chosen share its links
        is_ring = wraps[dim] and span == length
        one_way = speeds[dim] / stride / between
        levels.append(
            Level(
                name="ICI",
                size=size,
                bytes_per_second=one_way * (2 if is_ring else 1),
                neighbour_bytes_per_second=one_way,
                hops=span // 2 if is_ring else span - stride,
                hop_seconds=torus.hop_seconds,
            )
        )
    return tuple(levels)


def _lay_on_nodes(chips: Slice, lengths: tuple[int, ...], chosen: Sequence[int]) -> tuple[Level, ...]:
    node, gpus = chips.chip.node, chips.shape[1]
    assert node is not None
    size, within = math.prod(lengths[axis] for axis in chosen), 1
    for axis in chosen:
        stride = math.prod(lengths[axis + 1 :])
        within *= math.gcd(lengths[axis], gpus // stride) if gpus % stride == 0 else 1
    levels = []
    if within > 1:
        link, seconds = node.link_bytes_per_second * node.link_achievable, node.link_seconds
        levels.append(Level("NVLink", within, link, link, math.ceil(math.log2(within)), seconds))
    if size > within:
        network, nodes = node.network_bytes_per_second, size // within
        hops = math.ceil(math.log2(nodes))
        levels.append(Level("network", nodes, within * network, network, hops, node.network_seconds))
    return tuple(levels)


def collective_seconds(kind: str, sent_bytes: float, wire: Wire) -> float:
    """How long a collective takes that has the wire for itself.

    Amounts are those of `jaxscale.training.traffic.ExpectedTraffic.elements`, times the bytes of an element:
    an all-gather 1 for each element of the gathered whole, a reduce-scatter 1 for each of the whole that is
    scattered, an all-reduce 2 for each of its operand, an all-to-all 1 for each of its operand (of one
    device), whether ragged or not, and a collective-permute 1 for each element that a device hands on. A
    gather of V bytes over n devices takes V (n-1)/n over the bandwidth, an all-reduce of V (2V here) a
    scatter and a gather. An exchange of B bytes a device takes B n/4 over the bandwidth of a dim of n, since
    all that crosses its middle does, and on a switch B (n-1)/n.

    Args:
      kind: one of COLLECTIVES.
      wire: with a speed (`Wire.has_speed`).
    """
    assert kind in COLLECTIVES, kind
    assert wire.has_speed, f"no speed is known of {wire.name}"
    if wire.size == 1 or sent_bytes == 0:
        return 0.0
    latency = wire.latency_seconds * (2 if kind == "all-reduce" else 1)
    if kind == "collective-permute":
        return sent_bytes * wire._neighbour_seconds_per_byte + max(level.hop_seconds for level in wire.levels)
    if "all-to-all" in kind:
        return sent_bytes * wire._exchange_seconds_per_byte + latency
    return sent_bytes * wire._gather_seconds_per_byte + latency
