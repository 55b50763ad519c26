"""What was asked of the compiler against what it made: layouts never differ without a word.

Before the compile every sharding constraint of the traced program is checked: JAX drops one that does not
divide, and the array is then whole on every device. After it, the local shapes of the state and of the
gradient accumulators are read from the compiled program. How each constrained activation was laid is asked
of the compiler by `jaxscale inspect` (`watch_constraints`).
"""

import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

from jax.extend.core import ClosedJaxpr
from jax.sharding import NamedSharding

from jaxscale.config import Config, UserError
from jaxscale.sharding.equations import iterate_equations
from jaxscale.sharding.hlo import Instruction, Program, count_trips, read_arrays, read_host_places
from jaxscale.sharding.rules import Axes, iterate_leaves
from jaxscale.sharding.zero import Layouts, dim_axes
from jaxscale.training.optimizer_layout import HOST_MEMORY


def check_constraints(program: ClosedJaxpr) -> None:
    """Refuses a sharding constraint, of ours or of a user's model, whose array does not divide.

    Raises:
      UserError: lists each such constraint with its array, axes, place in the source and bytes.
    """
    problems = []
    for equation in iterate_equations(program.jaxpr):
        sharding = equation.params.get("sharding")
        if equation.primitive.name != "sharding_constraint" or not isinstance(sharding, NamedSharding):
            continue
        aval = equation.invars[0].aval
        laid = dim_axes(sharding.spec, aval.ndim)
        counts = [math.prod(sharding.mesh.shape[axis] for axis in axes) for axes in laid]
        bad = [dim for dim, count in enumerate(counts) if aval.shape[dim] % count]
        parts = [count for dim, count in enumerate(counts) if dim not in bad]
        size_bytes = aval.size * aval.dtype.itemsize // math.prod(parts)
        for dim in bad:
            problems.append(
                f"{aval.str_short()} at {_find_place(equation)}: dim {dim} of size {aval.shape[dim]} does "
                f"not divide by {_show_axes(sharding, laid[dim])}; a device would hold "
                f"{size_bytes:,} bytes of it. Make it a multiple of {counts[dim]}, or constrain it over "
                "fewer axes"
            )
    if problems:
        listed = "\n  ".join(dict.fromkeys(problems))
        raise UserError(f"JAX would drop these sharding constraints without a word\n  {listed}")


def check_layouts(compiled: Any, state: Any, layouts: Layouts, config: Config) -> None:
    """Compares parameters, optimizer state and gradient accumulators with the compiled step.

    Args:
      compiled: the compiled step; its first outputs are the state.
      state: the state as `ShapeDtypeStruct`s with shardings.

    Raises:
      UserError: lists what lies otherwise than asked, with the bytes a device that it takes.
    """
    text = compiled.as_text()
    problems = [*_compare_state(text, state), *_compare_accumulators(text, layouts, config)]
    if problems:
        raise UserError(
            "the compiler laid these arrays otherwise than asked (nothing was run)\n  "
            + "\n  ".join(problems)
            + "\n  lay them over other axes (strategy, zero.stage); if that does not help, it is a fault of "
            "ours or of XLA: please report it with the configuration"
        )


def _show_axes(sharding: NamedSharding, axes: Axes) -> str:
    return " × ".join(f"{axis}={sharding.mesh.shape[axis]}" for axis in axes)


def _find_place(equation: Any) -> str:
    frames = equation.source_info.traceback
    frame = next((f for f in frames.frames if "/site-packages/" not in f.file_name), None) if frames else None
    return f"{frame.file_name}:{frame.line_num}" if frame else "an unknown place"


def _compare_state(text: str, state: Any) -> Iterator[str]:
    results = text[: text.find("\n")].rpartition("->")[2]
    outputs = zip(iterate_leaves(state), read_arrays(results), read_host_places(results), strict=False)
    for (path, leaf), (_, local), is_on_host in outputs:
        asked = leaf.sharding.shard_shape(leaf.shape)
        if local != asked:
            yield _describe(path, leaf.shape, asked, local, leaf.dtype.itemsize)
        if is_on_host != (leaf.sharding.memory_kind == HOST_MEMORY):
            got = "the host's memory" if is_on_host else "the device's memory"
            yield (
                f"{path} {leaf.shape}: asked in {leaf.sharding.memory_kind}, the compiled step leaves it in "
                f"{got}, {math.prod(local) * leaf.dtype.itemsize:,} bytes"
            )


def _compare_accumulators(text: str, layouts: Layouts, config: Config) -> Iterator[str]:
    if config.batch.microbatches == 1:
        return
    program = Program(text)
    loop = _find_microbatch_loop(program, config.batch.microbatches)
    if loop is None:  # unrolled: there are no accumulators, only sums
        return
    held = Counter(_drop_ones(shape) for shape in _find_changing(program, loop))
    for path, sharding in iterate_leaves(layouts.gradients):
        shape = layouts.leaves[path].shape
        asked = sharding.shard_shape(shape)
        held[_drop_ones(asked)] -= 1
        if held[_drop_ones(asked)] < 0:
            yield (
                f"accumulator of {path} {shape}: {asked} a device was asked, "
                f"{4 * math.prod(asked):,} bytes, and the loop over microbatches holds no such array"
            )


def _find_microbatch_loop(program: Program, trips: int) -> Instruction | None:
    """The loop of the entry with so many trips that carries most."""
    loops = [
        instruction
        for instruction in program.instructions(program.entry)
        if instruction.opcode == "while" and count_trips(program, program.entry, instruction) == trips
    ]
    return max(loops, key=lambda loop: len(loop.type), default=None)


def _find_changing(program: Program, loop: Instruction) -> Iterator[tuple[int, ...]]:
    """Shapes of what the loop changes: weights, which it only reads, may have the shape of an accumulator."""
    [body] = loop.called("body")
    results = program.root(body).operands
    for index, (name, (_, shape)) in enumerate(zip(results, read_arrays(loop.type), strict=True)):
        result = program.instruction(body, name)
        if result.opcode != "get-tuple-element" or f"index={index}" not in result.attributes.split(", "):
            yield shape


def _drop_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Compilers add and remove dims of size 1."""
    return tuple(size for size in shape if size != 1)


def _describe(
    path: str, shape: tuple[int, ...], asked: tuple[int, ...], got: tuple[int, ...], itemsize: int
) -> str:
    return (
        f"{path} {shape}: {asked} a device was asked, {math.prod(asked) * itemsize:,} bytes; the compiled "
        f"step has {got}, {math.prod(got) * itemsize:,} bytes"
    )
