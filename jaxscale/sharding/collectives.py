"""The collectives of a compiled program, read from its optimised HLO text.

What we promise of communication is read from what the compiler made, not from what we asked for. The texts
of the CPU, TPU and GPU compilers are understood: replica groups as lists, in iota form and in mesh form,
permutes, asynchronous pairs, and collectives inside fusions, calls, branches and (nested) loops.

Device ids in the text are logical partition ids: positions in the mesh's flattened device order, whatever
chips the mesh holds.
"""

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from jaxscale.sharding.hlo import (
    KINDS,
    Instruction,
    Program,
    count_bytes,
    count_trips,
    read_arrays,
    split_top,
)


class MeshShape(Protocol):
    """What is needed of a mesh: `jax.sharding.Mesh` and `AbstractMesh` have it."""

    @property
    def axis_names(self) -> tuple[str, ...]: ...

    @property
    def shape(self) -> Mapping[str, int]: ...


@dataclass(frozen=True, kw_only=True)
class Collective:
    """One collective instruction. An asynchronous pair counts once, at its start.

    Sizes are of the **result on one device, one call**, summed over a tuple:
    all-reduce and collective-broadcast: the whole operand; all-gather: the gathered whole; reduce-scatter:
    the shard that is kept; all-to-all: all that is received, own part included; ragged-all-to-all: as much as
    can cross, the smaller of both buffers; collective-permute: what is received. They are the compiler's
    sizes: a TPU may pad.
    """

    kind: str
    """One of KINDS. A TPU writes a reduce-scatter as an all-reduce in an `all-reduce-scatter` fusion: it is
    given as the reduce-scatter it is, with the size of the shard."""
    axes: tuple[str, ...]
    """Mesh axes along which the devices of a group differ, in mesh order; () if every group is one device."""
    group_size: int
    """Devices in the largest group; less than the product of the axes' sizes if an axis is spanned in part.
    2 for a collective-permute: one sends, one receives."""
    dtypes: tuple[str, ...]
    """HLO names of the result's dtypes, each once, in order of appearance: ("f32",)."""
    elements: int
    """Elements of the result on one device, one call."""
    bytes: int
    """Bytes of the result on one device, one call, sub-byte dtypes packed."""
    trips: int | None
    """Calls a run of the program: the product of the trip counts of the enclosing loops, 1 outside loops;
    None if the count of an enclosing loop cannot be read from the text."""
    loop_depth: int
    """Enclosing loops; 0 outside every loop."""
    in_branch: bool
    """Whether it stands under a conditional, so that a run may make fewer calls than `trips`."""
    name: str
    """Name of the HLO instruction."""
    op_name: str | None
    """Path of the JAX operation, such as `jit(step)/shard_map/psum`; None if the compiler kept none."""
    source: str | None
    """`file:line` of the JAX operation; None if the compiler kept none."""

    @property
    def bytes_a_step(self) -> int | None:
        """`bytes` times `trips`; None where the trips are unknown."""
        return None if self.trips is None else self.bytes * self.trips


@dataclass(frozen=True, kw_only=True)
class CollectiveTotal:
    """All collectives of one kind over one set of axes."""

    axes: tuple[str, ...]
    kind: str
    count: int
    """Instructions in the program."""
    calls_a_step: int | None
    """Calls a run of the program; None if any of their trip counts is unknown."""
    bytes_a_step: int | None
    """Result bytes on one device a run of the program; None if any of their trip counts is unknown."""


def read_collectives(hlo_text: str, mesh: MeshShape) -> list[Collective]:
    """Lists the collectives of a compiled program in program order, loops and branches entered.

    `hlo_text` is `compiled.as_text()`; `mesh` the mesh of its shardings. An instruction in a computation that
    is called from two places is listed twice. Trip counts come from the compiler's `known_trip_count`, else
    from the loop's counter (constant start, step and bound); otherwise `trips` is None. A collective in a
    loop's condition is called once more than the loop's body.

    Raises ValueError if the program was compiled for another number of devices than the mesh has, for more
    than one replica, or if the text has a form that is not known here.
    """
    program = Program(hlo_text)
    device_count = math.prod(mesh.shape[name] for name in mesh.axis_names)
    header = hlo_text[: hlo_text.find("\n")]
    for key, wanted in (("num_partitions", device_count), ("replica_count", 1)):
        found = re.search(rf"\b{key}=(\d+)", header)
        if found and int(found[1]) != wanted:
            raise ValueError(
                f"the program has {key}={found[1]}, but a mesh of {device_count} devices needs {wanted}"
            )
    return list(_walk(program, program.entry, mesh, _Context()))


def summarise(collectives: Sequence[Collective]) -> list[CollectiveTotal]:
    """Sums by (axes, kind); rows with unknown bytes first, then by bytes a step, largest first."""
    rows: dict[tuple[tuple[str, ...], str], list[Collective]] = {}
    for collective in collectives:
        rows.setdefault((collective.axes, collective.kind), []).append(collective)
    totals = [
        CollectiveTotal(
            axes=axes,
            kind=kind,
            count=len(members),
            calls_a_step=_sum_known(member.trips for member in members),
            bytes_a_step=_sum_known(member.bytes_a_step for member in members),
        )
        for (axes, kind), members in rows.items()
    ]
    return sorted(totals, key=lambda t: (t.bytes_a_step is not None, -(t.bytes_a_step or 0), t.axes, t.kind))


def _sum_known(values: Iterator[int | None]) -> int | None:
    total = 0
    for value in values:
        if value is None:
            return None
        total += value
    return total


# --- From instructions to collectives -----------------------------------------------------------------------


@dataclass(frozen=True)
class _Context:
    trips: int | None = 1
    loop_depth: int = 0
    in_branch: bool = False
    scattered: str | None = None  # type of the result, inside a TPU's all-reduce-scatter fusion
    metadata: str = ""  # of the caller, for instructions that have none

    def inside(self, **changes: object) -> "_Context":
        return _Context(**{**self.__dict__, **changes})

    def looped(self, trips: int | None) -> "_Context":
        product = None if trips is None or self.trips is None else self.trips * trips
        return self.inside(trips=product, loop_depth=self.loop_depth + 1)


def _walk(program: Program, computation: str, mesh: MeshShape, context: _Context) -> Iterator[Collective]:
    if not program.speaks(computation):
        return
    for instruction in program.instructions(computation):
        opcode = instruction.opcode
        if opcode.removesuffix("-start") in KINDS:
            yield _describe(program, computation, instruction, mesh, context)
        elif opcode == "while":
            trips = count_trips(program, computation, instruction)
            [body], [condition] = instruction.called("body"), instruction.called("condition")
            yield from _walk(program, condition, mesh, context.looped(None if trips is None else trips + 1))
            yield from _walk(program, body, mesh, context.looped(trips))
        elif opcode == "conditional":
            keys = ("true_computation", "false_computation", "branch_computations")
            for branch in itertools.chain.from_iterable(instruction.called(key) for key in keys):
                yield from _walk(program, branch, mesh, context.inside(in_branch=True))
        elif not _repeats(instruction):
            for key in ("calls", "to_apply", "called_computations"):
                for callee in instruction.called(key):
                    scattered = (
                        instruction.type if callee.startswith("all-reduce-scatter") else context.scattered
                    )
                    inner = context.inside(
                        scattered=scattered, metadata=_metadata(instruction) or context.metadata
                    )
                    yield from _walk(program, callee, mesh, inner)


def _repeats(instruction: Instruction) -> bool:
    """Whether the instruction carries on a collective that an earlier one has started.

    A TPU that overlaps a collective with matmuls writes it into the start, into every fusion that moves it
    along and into the end.
    """
    return (
        instruction.opcode.endswith(("-done", "-update"))
        or instruction.name.startswith("async-collective-done")
        or any(name.startswith("async_collective_fusion") for name in instruction.called("calls"))
    )


def _metadata(instruction: Instruction) -> str:
    start = instruction.attributes.find("metadata={")
    return "" if start < 0 else instruction.attributes[start:]


def _describe(
    program: Program, computation: str, instruction: Instruction, mesh: MeshShape, context: _Context
) -> Collective:
    kind, result = instruction.opcode.removesuffix("-start"), instruction.type
    if kind != instruction.opcode:
        # A start's type is (operands, results, ...); jax 0.10 gives all-reduce-start its results alone.
        parts = split_top(result[1:-1]) if result.startswith("(") else []
        result = parts[1] if parts and (kind != "all-reduce" or parts[0].startswith("(")) else result
    if kind == "ragged-all-to-all":
        operand = program.instruction(computation, instruction.operands[0]).type
        result = min(operand, result, key=lambda each: _measure(each)[1])
    if kind == "all-reduce" and context.scattered is not None:
        kind, result = "reduce-scatter", context.scattered
    dtypes, elements, size_bytes = _measure(result)
    axes, group_size = _find_axes(instruction, kind, mesh)
    metadata = _metadata(instruction) or context.metadata
    op_name = re.search(r'op_name="((?:[^"\\]|\\.)*)"', metadata)
    return Collective(
        kind=kind,
        axes=axes,
        group_size=group_size,
        dtypes=dtypes,
        elements=elements,
        bytes=size_bytes,
        trips=context.trips,
        loop_depth=context.loop_depth,
        in_branch=context.in_branch,
        name=instruction.name,
        op_name=op_name[1] if op_name else None,
        source=program.source(metadata),
    )


def _measure(result: str) -> tuple[tuple[str, ...], int, int]:
    """(dtypes, elements, bytes) of an HLO type, such as `(f32[4,8]{1,0:T(8,128)}, bf16[2])`."""
    dtypes, elements, size_bytes = [], 0, 0
    for dtype, shape in read_arrays(result):
        dtypes.append(dtype)
        elements += math.prod(shape)
        size_bytes += count_bytes(dtype, shape)
    return tuple(dict.fromkeys(dtypes)), elements, size_bytes


# --- From device ids to mesh axes ---------------------------------------------------------------------------


def _find_axes(instruction: Instruction, kind: str, mesh: MeshShape) -> tuple[tuple[str, ...], int]:
    """(axes, group size) of a collective."""
    shape = tuple(mesh.shape[name] for name in mesh.axis_names)
    groups = _read_groups(instruction, kind, math.prod(shape))
    spanned = np.zeros(len(shape), bool)
    for group in groups:
        if group.size and group.max() >= math.prod(shape):
            raise ValueError(
                f"{instruction.name} names device {group.max()}, the mesh has {math.prod(shape)}"
            )
        spanned |= np.array([np.ptp(coordinate) > 0 for coordinate in np.unravel_index(group, shape)], bool)
    axes = tuple(name for name, spans in zip(mesh.axis_names, spanned, strict=True) if spans)
    return axes, max((group.size for group in groups), default=1)


def _read_groups(instruction: Instruction, kind: str, device_count: int) -> list[np.ndarray]:
    """Device ids of each group."""
    text = instruction.unquoted
    key = "source_target_pairs" if kind == "collective-permute" else "replica_groups"
    start = text.find(key + "=") + len(key) + 1
    text = text[start:] if start > len(key) else "{}"
    if found := re.match(r"\{\s*((?:\{[\d,\s]*\},?\s*)*)\}", text):
        groups = [np.array(_integers(group)) for group in re.findall(r"\{([\d,\s]*)\}", found[1])]
    elif found := re.match(r"(?=\[)[\[\]\d,<=\sT()]+?(?=,\s*[a-z]|$)", text):
        shape, _, tiles = found[0].partition("<=")
        groups = list(_iota(tiles).reshape(_integers(shape)))
    elif found := re.match(
        r"(?:mesh\[([^\]]*)\]|@mesh<([^>]*)>)(?:,\s*device_ids=\((.*?)\)(?=\s*\{))?\s*\{([^}]*)\}", text
    ):
        groups = list(_mesh_groups(found[1] or found[2] or "", found[3], found[4]))
    else:
        raise ValueError(f"{instruction.name} has replica groups of an unknown form: {text[:200]}")
    # Without use_global_device_ids the groups of these kinds are of replicas, joined over all partitions when
    # the instruction has a channel. jit makes one replica, so only the group {0} can stand there.
    of_replicas = (
        kind in ("all-reduce", "all-gather", "reduce-scatter")
        and "use_global_device_ids=true" not in instruction.unquoted
        and "channel_id=" in instruction.unquoted
        and [group.tolist() for group in groups] == [[0]]
    )
    everyone = not groups and kind != "collective-permute"
    return [np.arange(device_count)] if everyone or of_replicas else groups


def _integers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


def _iota(text: str) -> np.ndarray:
    """`[2,2,2]T(2,0,1)`: 0, 1, 2, ... in that shape, transposed."""
    shape, _, order = text.partition("T")
    ids = np.arange(math.prod(_integers(shape))).reshape(_integers(shape))
    return ids.transpose(_integers(order)) if order else ids


def _mesh_groups(mesh: str, device_ids: str | None, axes: str) -> np.ndarray:
    """Groups of `mesh['a'=4,'b'=2] {'a':(2)2,'b'}`: over whole axes, or over the part `(major)size` of one.

    The compiler's mesh is its own: its axes need not be ours, so only the device ids are used.
    """
    sizes = {name: int(size) for name, size in re.findall(r"'?([\w.\-]+)'?\s*=\s*(\d+)", mesh)}
    ids = np.arange(math.prod(sizes.values()))
    if device_ids is not None:
        ids = (_iota(device_ids) if "[" in device_ids else np.array(_integers(device_ids))).reshape(-1)
    parts = [
        (name, int(major or 1), int(size or sizes[name]))
        for name, major, size in re.findall(r"'?([\w.\-]+)'?(?::\((\d+)\)(\d+))?(?:,|\s*$)", axes)
    ]
    factors, chosen = [], []
    for name, axis_size in sizes.items():
        mine = [(major, major * size) for part, major, size in parts if part == name]
        cuts = sorted({1, axis_size}.union(*mine))
        for low, high in itertools.pairwise(cuts):
            factors.append(high // low)
            chosen.append(any(start <= low and high <= end for start, end in mine))
    order = sorted(range(len(factors)), key=lambda index: chosen[index])
    group_size = math.prod(factor for factor, is_chosen in zip(factors, chosen, strict=True) if is_chosen)
    return ids.reshape(factors).transpose(order).reshape(-1, group_size)
