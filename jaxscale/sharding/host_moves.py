"""What a compiled program moves between the device and its host, read from its HLO."""

from dataclasses import dataclass

from jaxscale.sharding.hlo import (
    Instruction,
    Program,
    count_bytes,
    count_trips,
    read_arrays,
    read_host_places,
)

_MOVES = ("copy-start", "dynamic-slice-start", "dynamic-update-slice-start")


@dataclass(frozen=True)
class HostMoves:
    """Bytes that one device moves in a run of the program, the dearest branch taken."""

    to_device: int = 0
    to_host: int = 0

    def __add__(self, other: "HostMoves") -> "HostMoves":
        return HostMoves(self.to_device + other.to_device, self.to_host + other.to_host)


def read_host_moves(hlo_text: str) -> HostMoves:
    """Sums the asynchronous copies into and out of the host's memory, trips of loops multiplied in.

    Only TPU's compiler writes them so; on other platforms nothing is found.

    Raises ValueError if the trips of a loop that moves something cannot be read.
    """
    program = Program(hlo_text)
    return _sum_moves(program, program.entry)


def _sum_moves(program: Program, computation: str) -> HostMoves:
    total = HostMoves()
    for instruction in program.instructions(computation):
        if instruction.opcode in _MOVES:
            total += _measure(instruction)
        elif instruction.opcode == "while":
            [body] = instruction.called("body")
            inner = _sum_moves(program, body)
            if inner == HostMoves():
                continue
            trips = count_trips(program, computation, instruction)
            if trips is None:
                raise ValueError(f"{instruction.name} moves to or from the host, and its trips are unknown")
            total += HostMoves(trips * inner.to_device, trips * inner.to_host)
        elif instruction.opcode == "conditional":
            names = instruction.called("branch_computations") or [
                *instruction.called("true_computation"),
                *instruction.called("false_computation"),
            ]
            branches = [_sum_moves(program, name) for name in names]
            total += max(branches, key=lambda moves: moves.to_device + moves.to_host)
        elif instruction.opcode in ("call", "async-start"):
            for name in (*instruction.called("to_apply"), *instruction.called("calls")):
                total += _sum_moves(program, name)
    return total


def _measure(instruction: Instruction) -> HostMoves:
    """A move's type lists source and result: of a slice's update, the array and what is put into it."""
    arrays, places = read_arrays(instruction.type), read_host_places(instruction.type)
    if instruction.opcode == "copy-start":  # (result, source, context)
        if places[0] == places[1]:
            return HostMoves()
        return _count(arrays[0], to_host=places[0])
    if not places[0]:  # an ordinary copy within the device
        return HostMoves()
    if instruction.opcode == "dynamic-update-slice-start":  # ((array, update, indices), result, context)
        return HostMoves() if places[1] else _count(arrays[1], to_host=True)
    # ((array, indices), result, context)
    result = next(i for i in range(1, len(arrays)) if len(arrays[i][1]) == len(arrays[0][1]))
    return HostMoves() if places[result] else _count(arrays[result], to_host=False)


def _count(array: tuple[str, tuple[int, ...]], *, to_host: bool) -> HostMoves:
    size = count_bytes(*array)
    return HostMoves(to_host=size) if to_host else HostMoves(to_device=size)
