"""What an inspection reports: plain values that go into JSON, a table or a picture."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from jaxscale.sharding.host_moves import HostMoves
from jaxscale.sharding.rules import Axes
from jaxscale.training.offload import HostTraffic


@dataclass(frozen=True, kw_only=True)
class StateBytes:
    """Bytes on one device of what training keeps for parameters."""

    parameters: int = 0
    """Weights that compute uses, in the compute format."""
    gradients: int = 0
    """Gradient accumulators."""
    optimizer: int = 0
    """Optimizer state, and the kept master parameters where they are not the array that compute uses."""
    host: int = 0
    """Optimizer state and master parameters that lie in the host's memory instead."""

    @property
    def total(self) -> int:
        """On the device."""
        return self.parameters + self.gradients + self.optimizer

    def to_json(self) -> dict[str, int]:
        return {item.name: getattr(self, item.name) for item in fields(self)}


def sum_bytes(parts: Iterable[StateBytes]) -> StateBytes:
    """Sums by kind."""
    listed = list(parts)
    return StateBytes(
        **{item.name: sum(getattr(p, item.name) for p in listed) for item in fields(StateBytes)}
    )


@dataclass(frozen=True, kw_only=True)
class LeafReport:
    """One parameter: how it lies and what it costs a device."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    """Of the parameter as the run keeps it."""
    dims: tuple[tuple[str, Axes], ...]
    """(dim, mesh axes larger than 1 over which the run keeps it), one a dim of the array."""
    rule: str
    """Pattern of the rule table that names the dims."""
    kept_whole_on: Axes
    """Axes larger than 1 on which every device keeps the same part of the parameter."""
    bytes_per_device: StateBytes
    whole_on: Mapping[str, Axes]
    """Axes larger than 1 on which devices have the same part, by kind: parameters, gradients, optimizer."""
    replication: StateBytes
    """Bytes on a device that would go if each kind were split over the axes on which it is whole."""

    @property
    def replicated_over(self) -> Axes:
        """Axes on which the weights, the accumulator or the optimizer state is whole, in mesh order."""
        return tuple(dict.fromkeys(axis for axes in self.whole_on.values() for axis in axes))

    def to_json(self) -> dict[str, Any]:
        return {
            "path": self.path,
            "shape": list(self.shape),
            "dtype": self.dtype,
            "dims": [[dim, list(axes)] for dim, axes in self.dims],
            "rule": self.rule,
            "bytes_per_device": self.bytes_per_device.to_json(),
            "replicated_over": list(self.replicated_over),
            "replication_bytes": self.replication.total,
            "whole_on": {kind: list(axes) for kind, axes in self.whole_on.items()},
        }


@dataclass(frozen=True, kw_only=True)
class TrafficRow:
    """All collectives of one kind over one set of axes in a step, as one device sends them.

    Elements are counted as in ZeRO (Rajbhandari 2020, section 7): an all-reduce sends its operand twice, an
    all-gather the gathered whole, a reduce-scatter the whole that is scattered; all else what is received.
    """

    axes: Axes
    kind: str
    count: int | None
    """Calls a step, trips of loops multiplied in; None if a trip count cannot be read."""
    elements: int | None
    """Elements a step; None as `count`."""
    bytes: int | None
    """Bytes a step in the formats on the wire; None as `count`."""
    dtypes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "axis": join_axes(self.axes),
            "kind": self.kind,
            "count": self.count,
            "bytes": self.bytes,
            "elements": self.elements,
            "dtypes": list(self.dtypes),
        }


@dataclass(frozen=True, kw_only=True)
class ExpectedRow:
    """What the closed forms say of one kind over one set of axes."""

    axes: Axes
    kind: str
    elements: int
    bytes: int
    """At the width that the compiled program has on the wire, else in the compute format."""
    what: str

    def to_json(self) -> dict[str, Any]:
        return {
            "axis": join_axes(self.axes),
            "kind": self.kind,
            "bytes": self.bytes,
            "elements": self.elements,
            "what": self.what,
        }


@dataclass(frozen=True, kw_only=True)
class ActivationReport:
    """An activation whose layout the model asks for, and how the compiler laid it.

    Shapes are those of the whole array, but for axes over which the step itself is manual.
    """

    dims: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    asked: tuple[Axes, ...]
    """Mesh axes of each dim."""
    bytes_asked: int
    """On one device."""
    bytes_got: int
    is_as_asked: bool

    def to_json(self) -> dict[str, Any]:
        return {
            "dims": [[dim, list(axes)] for dim, axes in zip(self.dims, self.asked, strict=True)],
            "shape": list(self.shape),
            "dtype": self.dtype,
            "bytes_asked": self.bytes_asked,
            "bytes": self.bytes_got,
            "as_asked": self.is_as_asked,
        }


@dataclass(frozen=True, kw_only=True)
class MemoryReport:
    """The compiler's account of one device, in bytes (`memory_analysis`)."""

    arguments: int
    outputs: int
    """Without those that reuse the memory of a donated argument."""
    temporaries: int
    """With the weights in the compute format and the accumulators, which live within a step."""
    host: int = 0
    """In the host's memory, where the compiler tells it apart: not a CPU's."""

    @property
    def peak(self) -> int:
        """On the device."""
        return self.arguments + self.outputs + self.temporaries

    def to_json(self) -> dict[str, int]:
        return {**{item.name: getattr(self, item.name) for item in fields(self)}, "peak": self.peak}


@dataclass(frozen=True, kw_only=True)
class ExpertsReport:
    """A model with experts, in numbers; parameters without rows of vocabulary padding."""

    layers: int
    """Layers with experts."""
    experts: int
    """Of a layer."""
    experts_per_device: int
    top_k: int
    """Experts that a token chooses in each layer."""
    shared_experts: int
    parameters: int
    active_parameters: int
    """Those that one token uses."""


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """The whole report of `inspect_setup`."""

    mesh: Mapping[str, int]
    platform: str
    """Platform whose compiler was asked: cpu, gpu or tpu."""
    zero_stage: int
    leaves: tuple[LeafReport, ...]
    counter_bytes: int
    """Optimizer and run counters, whole on every device."""
    memory: MemoryReport | None
    """None without a compile, as are the activations and the collectives."""
    activations: tuple[ActivationReport, ...] | None
    collectives: tuple[TrafficRow, ...] | None
    expected_collectives: tuple[ExpectedRow, ...]
    host_traffic: HostTraffic | None
    """With state on the host: what lies there and what a step moves, by closed form."""
    host_moves: HostMoves | None
    """What the compiled step moves to and from the host; None on all but TPU, whose compiler alone says."""
    experts: ExpertsReport | None
    """None for a dense model, or one of one's own."""
    warnings: tuple[str, ...]
    errors: tuple[str, ...] = ()
    """What the compiler laid otherwise than asked."""

    @property
    def state_bytes(self) -> StateBytes:
        """Sum over the leaves, counters beside the optimizer state."""
        return sum_bytes(
            [*(leaf.bytes_per_device for leaf in self.leaves), StateBytes(optimizer=self.counter_bytes)]
        )

    @property
    def temporary_bytes(self) -> int | None:
        """What the compiled step needs at its peak beside weights, accumulators and optimizer state:
        activations, gathered weights, workspace. 0 where the compiler never holds all three at once."""
        if self.memory is None:
            return None
        state = self.state_bytes
        # A compiler that tells no host memory apart counts what lies there with the rest.
        return max(0, self.memory.peak - state.total - (0 if self.memory.host else state.host))

    @property
    def total_bytes(self) -> int:
        """Weights, accumulators, optimizer state and temporaries on one device."""
        return self.state_bytes.total + (self.temporary_bytes or 0)

    def to_json(self) -> dict[str, Any]:
        """Plain values for `json.dumps`."""
        return {
            "mesh": dict(self.mesh),
            "platform": self.platform,
            "zero": self.zero_stage,
            "leaves": [leaf.to_json() for leaf in self.leaves],
            "counter_bytes": self.counter_bytes,
            "bytes_per_device": {
                **self.state_bytes.to_json(),
                "temporaries": self.temporary_bytes,
                "total": self.total_bytes,
            },
            "memory": None if self.memory is None else self.memory.to_json(),
            "activations": _list_json(self.activations),
            "collectives": _list_json(self.collectives),
            "expected_collectives": [row.to_json() for row in self.expected_collectives],
            "host_traffic": None if self.host_traffic is None else asdict(self.host_traffic),
            "host_moves": None if self.host_moves is None else asdict(self.host_moves),
            "experts": None if self.experts is None else asdict(self.experts),
            "warnings": list(self.warnings),
            "errors": list(self.errors),
        }


def _list_json(rows: Sequence[ActivationReport | TrafficRow] | None) -> list[dict[str, Any]] | None:
    return None if rows is None else [row.to_json() for row in rows]


def join_axes(axes: Axes) -> str:
    """`data+fsdp`; `self` for a collective whose groups are single devices."""
    return "+".join(axes) or "self"
