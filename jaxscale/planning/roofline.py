"""How long a step takes at best: the slower of arithmetic and memory for each matmul, and what traffic adds.

Nothing here is fitted to how fast anything was found to train. A matmul takes its FLOPs at the chip's peak,
times what the best large matmul was measured to reach on it (`achievable` in the table of chips; 1 on TPUs,
of which no such measurement was found), times how full its sides fill the chip's matrix units: a TPU pads
sides to 128 or 256, a GPU makes tiles of the result, so many at once. Where its operands take longer to come
from memory, it takes as long as they do. What is elementwise has the memory for itself and follows. Left out
are softmax and other arithmetic that is no matmul, launches, and collectives that slow the memory down: real
chips are slower.

Traffic that may be overlapped hides behind all that; what is longer shows, and so does what may not be
overlapped. Collectives follow each other, also those on different wires.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from jaxscale.config import UserError
from jaxscale.planning.hardware import Chip, Slice
from jaxscale.planning.hbm import Moved
from jaxscale.planning.matmuls import Matmul
from jaxscale.planning.wires import Axes, collective_seconds, wire_of


@dataclass(frozen=True)
class Load:
    """What one device does in a step, traffic aside."""

    compute_seconds: float
    """Arithmetic of matmuls, if memory took no time."""
    hbm_seconds: float
    """All that is read and written, if arithmetic took no time."""
    busy_seconds: float
    """Both, overlapped within a matmul alone."""
    compute_bound_seconds: float
    """Of those, in matmuls that are slower than their operands."""


@dataclass(frozen=True)
class Collective:
    """Traffic of one kind over mesh axes in a step."""

    axes: Axes
    kind: str
    sent_bytes: float
    """Of a device, as `jaxscale.planning.wires.collective_seconds` counts."""
    overlappable: bool
    what: str = ""
    count: int = 1
    """Collectives that it is sent in; each waits for its own hops."""


@dataclass(frozen=True)
class StepTime:
    """A step, in seconds; `step_seconds` is busy and exposed together."""

    compute_seconds: float
    hbm_seconds: float
    busy_seconds: float
    network_seconds: Mapping[Axes, float]
    exposed_seconds: float
    """Of the network's, what nothing hides."""
    step_seconds: float
    bound_by: str
    """compute, memory bandwidth, or network over so-and-so: what takes most of the step."""


def find_speed(chip: Chip, number_format: str) -> float | None:
    """FLOP/s that large matmuls of a format reach at most; None where no peak of the chip is known.

    fp8 on a chip without units for it is computed in bf16, as XLA does.

    Raises:
      UserError: the chip has no unit for the format.
    """
    if chip.compute is None:
        return None
    peak = chip.find_peak(number_format)
    if peak is None and number_format == "fp8":
        peak = chip.find_peak("bf16")
    if peak is None:
        known = [each for each in ("bf16", "fp16", "fp32") if chip.find_peak(each)]
        raise UserError(
            f"precision.compute={number_format}: {chip.name} has no unit for it, or no peak is known; use "
            f"{' or '.join(known)}, or give compute.{number_format} in a table of your own"
        )
    return peak * chip.compute.achievable


def find_fill(chip: Chip, matmul: Matmul) -> float:
    """How full a matmul fills the matrix units, 0 to 1."""
    compute = chip.compute
    assert compute is not None
    rows, contracted, columns = matmul.rows, matmul.contracted, matmul.columns
    unit = compute.matrix_unit
    if compute.cores == 1:
        # One operand stays in the units, the other streams through them eight rows at a time; the compiler
        # chooses which.
        return max(
            _fill(contracted, unit) * _fill(kept, unit) * _fill(streamed, 8)
            for kept, streamed in ((columns, rows), (rows, columns))
        )
    if matmul.kind == "attention":  # blocks of all heads are tiles of one launch
        return 1.0
    shapes = ((unit, 2 * unit), (2 * unit, unit), (unit, unit))
    return max(_fill_waves(rows, columns, high, wide, compute.cores) for high, wide in shapes)


def _fill(size: int, unit: int) -> float:
    return size / (math.ceil(size / unit) * unit)


def _fill_waves(rows: int, columns: int, high: int, wide: int, cores: int) -> float:
    tiles = math.ceil(rows / high) * math.ceil(columns / wide)
    return rows * columns / (math.ceil(tiles / cores) * cores * high * wide)


def measure_load(chip: Chip, matmuls: Iterable[Matmul], moved: Iterable[Moved] = ()) -> Load | None:
    """What a device does, matmul by matmul; None where no peak or bandwidth of the chip is known.

    Raises:
      UserError: the chip has no unit for a format.
    """
    if chip.compute is None or chip.hbm is None or chip.hbm.bytes_per_second is None:
        return None
    compute = hbm = busy = bound = 0.0
    for each in matmuls:
        speed = find_speed(chip, each.number_format)
        assert speed is not None
        seconds = each.flops / (speed * find_fill(chip, each))
        memory_seconds = each.hbm_bytes / chip.hbm.bytes_per_second
        compute, hbm, busy = compute + seconds, hbm + memory_seconds, busy + max(seconds, memory_seconds)
        bound += seconds if seconds >= memory_seconds else 0.0
    elementwise = sum(each.bytes for each in moved) / chip.hbm.bytes_per_second
    return Load(compute, hbm + elementwise, busy + elementwise, bound)


def measure_totals(chip: Chip, flops: Mapping[str, float], hbm_bytes: float) -> Load | None:
    """What a device does by its totals alone, arithmetic and memory overlapped throughout.

    Args:
      flops: of a device, by number format.
    """
    if chip.compute is None or chip.hbm is None or chip.hbm.bytes_per_second is None:
        return None
    compute = 0.0
    for number_format, count in flops.items():
        speed = find_speed(chip, number_format)
        assert speed is not None
        compute += count / speed
    hbm = hbm_bytes / chip.hbm.bytes_per_second
    return Load(compute, hbm, max(compute, hbm), compute if compute >= hbm else 0.0)


def estimate_step(
    load: Load, collectives: Sequence[Collective], chips: Slice, sizes: Mapping[str, int]
) -> StepTime:
    """The time of a step on chips whose wires have a known speed."""
    network: dict[Axes, float] = {}
    hidden = shown = 0.0
    for each in collectives:
        wire = wire_of(chips, sizes, each.axes)
        seconds = each.count * collective_seconds(each.kind, each.sent_bytes / each.count, wire)
        network[each.axes] = network.get(each.axes, 0.0) + seconds
        hidden, shown = (hidden + seconds, shown) if each.overlappable else (hidden, shown + seconds)
    exposed = shown + max(0.0, hidden - load.busy_seconds)
    parts = {
        "compute": load.compute_bound_seconds,
        "memory bandwidth": load.busy_seconds - load.compute_bound_seconds,
    }
    if exposed:
        slowest = max(network.items(), key=lambda item: item[1])[0]
        parts[f"network over {'+'.join(slowest)}"] = exposed
    return StepTime(
        compute_seconds=load.compute_seconds,
        hbm_seconds=load.hbm_seconds,
        busy_seconds=load.busy_seconds,
        network_seconds=network,
        exposed_seconds=exposed,
        step_seconds=load.busy_seconds + exposed,
        bound_by=max(parts, key=lambda name: parts[name]),
    )
