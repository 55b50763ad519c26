"""The text of an optimised HLO module as computations of instructions, and the trip counts of its loops."""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

KINDS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)

# --- Computations of instructions ---------------------------------------------------------------


@dataclass(frozen=True)
class Instruction:
    name: str
    type: str
    opcode: str
    literal: str  # what stands between the parentheses, such as the value of a constant
    attributes: str

    @cached_property
    def operands(self) -> list[str]:
        return [operand.split()[-1].lstrip("%") for operand in split_top(self.literal)]

    @cached_property
    def unquoted(self) -> str:
        """Attributes without text in double quotes, which may hold anything."""
        return _QUOTED.sub('""', self.attributes)

    def called(self, key: str) -> list[str]:
        found = re.search(rf"\b{key}=(\{{[^}}]*\}}|%?[\w.\-]+)", self.unquoted)
        return re.findall(r"[\w.\-]+", found[1]) if found else []


_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"')
_COMPUTATION = re.compile(r"(ENTRY\s+)?%?([\w.\-]+)\s*(?:\(.*\)\s*->.*)?\{\s*$")
_ASSIGNMENT = re.compile(r"\s+(ROOT\s+)?%?([\w.\-]+)\s+=\s+")
_OPCODE = re.compile(r"\s*([\w\-]+)(?=\()")
_PARENTHESIS = re.compile(r"[()]")


class Program:
    """Computations by name; instructions are taken apart when they are asked for."""

    def __init__(self, text: str) -> None:
        self.entry = ""
        self.roots: dict[str, str] = {}
        self._lines: dict[str, dict[str, tuple[str, int]]] = {}
        self._parsed: dict[tuple[str, str], Instruction] = {}
        self._speaks: dict[str, bool] = {}
        self._tables: dict[str, dict[str, str]] = {}
        current = table = None
        for line in text.splitlines():
            if current is None:
                if (found := _COMPUTATION.match(line)) and not line.startswith("HloModule"):
                    current, table = found[2], None
                    self._lines[current] = {}
                    self.entry = current if found[1] else self.entry
                elif line in ("FileNames", "FileLocations", "StackFrames"):
                    table = self._tables.setdefault(line, {})
                elif table is not None and line[:1].isdigit():
                    number, entry = line.split(" ", 1)
                    table[number] = entry
                else:
                    table = None
            elif line.startswith("}") and not line.startswith("}}"):
                # A kernel's configuration may hold line breaks, and a line of it starts with two braces.
                current = None
            elif found := _ASSIGNMENT.match(line):
                self._lines[current][found[2]] = (line, found.end())
                if found[1]:
                    self.roots[current] = found[2]
        if not self.entry:
            raise ValueError("this is not the text of a compiled program: it has no ENTRY computation")

    def instructions(self, computation: str) -> Iterator[Instruction]:
        return (self.instruction(computation, name) for name in self._lines[computation])

    def instruction(self, computation: str, name: str) -> Instruction:
        if (computation, name) not in self._parsed:
            line, start = self._lines[computation][name]
            self._parsed[computation, name] = _parse_instruction(name, line[start:])
        return self._parsed[computation, name]

    def root(self, computation: str) -> Instruction:
        return self.instruction(computation, self.roots[computation])

    def speaks(self, computation: str) -> bool:
        """Whether the computation, or one that it calls, may hold a collective."""
        if computation not in self._speaks:
            lines = [line for line, _ in self._lines[computation].values()]
            self._speaks[computation] = any(kind in line for line in lines for kind in KINDS) or any(
                self.speaks(name)
                for line in lines
                for name in re.findall(r"[=,{\s]%([\w.\-]+)", _QUOTED.sub('""', line))
                if name in self._lines and name != computation
            )
        return self._speaks[computation]

    def source(self, metadata: str) -> str | None:
        """`file:line` from the metadata, written there or by way of the module's table of stack frames."""
        if found := re.search(r'source_file="((?:[^"\\]|\\.)*)"(?:.*?source_line=(\d+))?', metadata):
            return f"{found[1]}:{found[2]}" if found[2] else found[1]
        if not (found := re.search(r"stack_frame_id=(\d+)", metadata)):
            return None
        frame = self._tables.get("StackFrames", {}).get(found[1], "")
        place = re.search(r"file_location_id=(\d+)", frame)
        location = self._tables.get("FileLocations", {}).get(place[1], "") if place else ""
        parts = re.search(r"file_name_id=(\d+).*?\bline=(\d+)", location)
        return f"{self._tables['FileNames'][parts[1]].strip(chr(34))}:{parts[2]}" if parts else None


def _parse_instruction(name: str, text: str) -> Instruction:
    type_end = _closing(text, 0) if text.startswith("(") else text.find(" ")
    opcode = _OPCODE.match(text, type_end)
    if not opcode:
        raise ValueError(f"HLO instruction {name} has an unknown form: {text[:200]}")
    end = _closing(text, opcode.end())
    return Instruction(name, text[:type_end], opcode[1], text[opcode.end() + 1 : end - 1], text[end:])


def _closing(text: str, start: int) -> int:
    """Position after the parenthesis that closes the one at `start`."""
    depth = 0
    for found in _PARENTHESIS.finditer(text, start):
        depth += 1 if found[0] == "(" else -1
        if depth == 0:
            return found.end()
    raise ValueError(f"parentheses do not close in the HLO text: {text[start : start + 200]}")


def split_top(text: str) -> list[str]:
    """Splits at commas outside brackets; comments such as `/*index=5*/` are dropped."""
    text = re.sub(r"/\*.*?\*/", "", text)
    parts, depth, start = [], 0, 0
    for found in re.finditer(r"[()\[\]{},]", text):
        if found[0] != ",":
            depth += 1 if found[0] in "([{" else -1
        elif depth == 0:
            parts.append(text[start : found.start()].strip())
            start = found.end()
    return [part for part in [*parts, text[start:].strip()] if part]


# --- Trip counts --------------------------------------------------------------------------------------------

_SAME_VALUE = ("copy", "bitcast", "convert", "reshape", "copy-start", "copy-done")
_MIRRORED = {"LT": "GT", "GT": "LT", "LE": "GE", "GE": "LE", "NE": "NE"}

_Scope = tuple[str, tuple["_Value | None", ...]]  # a computation and the values of its parameters


@dataclass(frozen=True)
class _Value:
    """A whole number: `offset`, plus element `carried` of the loop's state if that is given."""

    offset: int
    carried: int | None = None


def count_trips(program: Program, computation: str, loop: Instruction) -> int | None:
    """Trips of a while loop; None if they cannot be read."""
    if found := re.search(r'known_trip_count\\?":\s*\{\s*\\?"n\\?":\s*\\?"?(\d+)', loop.attributes):
        return int(found[1])
    [body], [condition] = loop.called("body"), loop.called("condition")
    test, scope = _peel(program, (condition, ()), program.roots[condition])
    direction = re.search(r"direction=(\w+)", test.attributes)
    initial = program.instruction(computation, loop.operands[0])
    next_state = program.root(body)
    if test.opcode != "compare" or not direction or {initial.opcode, next_state.opcode} != {"tuple"}:
        return None
    left, right = (_evaluate(program, scope, operand) for operand in test.operands)
    word = direction[1]
    if left is not None and left.carried is None:
        left, right, word = right, left, _MIRRORED.get(word, word)
    if left is None or right is None or left.carried is None or right.carried is not None:
        return None
    start = _evaluate(program, (computation, ()), initial.operands[left.carried])
    step = _evaluate(program, (body, ()), next_state.operands[left.carried])
    if start is None or step is None or start.carried is not None or step.carried != left.carried:
        return None
    return _count_between(start.offset, right.offset - left.offset, step.offset, word)


def _count_between(start: int, bound: int, step: int, direction: str) -> int | None:
    """Trips of a counter that runs from `start` by `step` while it stands in `direction` to `bound`."""
    if step == 0 or (direction == "NE" and (bound - start) % step):
        return None
    if direction not in _MIRRORED or (direction != "NE" and (step > 0) != (direction in ("LT", "LE"))):
        return None
    return len(range(start, bound + {"LE": 1, "GE": -1}.get(direction, 0), step))


def _peel(program: Program, scope: _Scope, name: str) -> tuple[Instruction, _Scope]:
    """Follows copies and fusions to the instruction that computes a scalar, and the scope it stands in."""
    instruction = program.instruction(scope[0], name)
    while True:
        if instruction.opcode in _SAME_VALUE:
            instruction = program.instruction(scope[0], instruction.operands[0])
        elif instruction.opcode in ("fusion", "call"):
            [callee] = instruction.called("calls") or instruction.called("to_apply")
            scope = (callee, tuple(_evaluate(program, scope, operand) for operand in instruction.operands))
            instruction = program.root(callee)
        else:
            return instruction, scope


def _evaluate(program: Program, scope: _Scope, name: str) -> _Value | None:
    """The value of a scalar in a loop's condition, body or surroundings; None if it is not so simple."""
    instruction, scope = _peel(program, scope, name)
    match instruction.opcode:
        case "constant" if re.fullmatch(r"-?\d+", instruction.literal):
            return _Value(int(instruction.literal))
        case "parameter" if int(instruction.literal) < len(scope[1]):
            return scope[1][int(instruction.literal)]
        case "get-tuple-element":
            index = re.search(r"index=(\d+)", instruction.attributes)
            state = program.instruction(scope[0], instruction.operands[0])
            return _Value(0, int(index[1])) if index and state.opcode == "parameter" else None
        case "add" | "subtract":
            left, right = (_evaluate(program, scope, operand) for operand in instruction.operands)
            sign = 1 if instruction.opcode == "add" else -1
            if left and right and right.carried is None:
                return _Value(left.offset + sign * right.offset, left.carried)
            if left and right and left.carried is None and sign == 1:
                return _Value(left.offset + right.offset, right.carried)
    return None


def read_arrays(hlo_type: str) -> list[tuple[str, tuple[int, ...]]]:
    """(dtype, shape) of the arrays in an HLO type in order, such as `(f32[4,8]{1,0:T(8,128)}, u32[])`."""
    return [
        (dtype, tuple(int(size) for size in re.findall(r"\d+", dims)))
        for dtype, dims in re.findall(r"\b([a-z]\w*)\[([\d,<=]*)\]", hlo_type)
    ]


def count_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of an array, its dtype by HLO's name: `bf16`, `f8e4m3fn`, `s4`, `pred`.

    Raises ValueError if the name says no size.
    """
    bits = re.match(r"(?:bf|[fsuc])(\d+)", dtype)
    if bits is None and dtype != "pred":
        raise ValueError(f"the dtype {dtype} has an unknown size")
    return math.ceil(math.prod(shape) * (int(bits[1]) if bits else 8) / 8)


def read_host_places(hlo_type: str) -> list[bool]:
    """Whether each array of an HLO type, in order, lies in the host's memory: space 5 in its layout."""
    layouts = re.findall(r"\b[a-z]\w*\[[\d,<=]*\](\{[^}]*\})?", hlo_type)
    return ["S(5)" in layout for layout in layouts]
