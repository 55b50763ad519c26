"""What chips can do: peaks, memory and wires, read from `chips.yaml` and from a file of the user's.

All figures are of one jax device, in bytes, bytes a second, FLOP/s and seconds, and each group of numbers
stands with its source. Reading the table takes a moment, so nothing here is imported before it is needed.
"""

import difflib
import functools
from collections.abc import Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, TypeAdapter, ValidationError, model_validator
from pydantic.dataclasses import dataclass
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from jaxscale.config import UserError
from jaxscale.config.fields import STRICT, Fraction, Positive, PositiveRate, refuse_bool

_BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


def _parse_bytes(value: Any) -> Any:
    """Reads `95.74Gi` or `80e9` as a whole number of bytes."""
    refuse_bool(value)
    if isinstance(value, str) and value[-2:] in _BINARY:
        try:
            value = float(value[:-2]) * _BINARY[value[-2:]]
        except ValueError:
            raise ValueError("bytes are a number, or a number followed by Ki, Mi, Gi or Ti") from None
    return int(value) if isinstance(value, float) else value


Bytes = Annotated[int, BeforeValidator(_parse_bytes), Field(gt=0)]
Source = Annotated[str, Field(min_length=1)]


@dataclass(frozen=True, config=STRICT, kw_only=True)
class Compute:
    """Peaks of dense matmuls by number format, FLOP/s; None where the chip has no unit for it."""

    source: Source
    bf16: PositiveRate | None = None
    fp16: PositiveRate | None = None
    fp8: PositiveRate | None = None
    tf32: PositiveRate | None = None
    fp32: PositiveRate | None = None
    """Of matmuls that are asked for in full fp32."""
    achievable: Annotated[Fraction, Field(gt=0)] = 1.0
    """What the best large matmul reached of the peak, measured on the chip."""
    matrix_unit: Positive
    """Sides of a matmul are padded to multiples of it."""
    cores: Positive = 1
    """Of a GPU: tiles of the result that are made at once."""


@dataclass(frozen=True, config=STRICT, kw_only=True)
class Hbm:
    """A device's memory."""

    source: Source
    bytes: Bytes
    """Built in."""
    usable_bytes: Bytes
    """What the runtime leaves to programs."""
    default_fraction: Annotated[Fraction, Field(gt=0)] = 1.0
    """Of the usable bytes, what JAX takes unless it is told otherwise."""
    bytes_per_second: PositiveRate | None = None


@dataclass(frozen=True, config=STRICT, kw_only=True)
class Torus:
    """Links between neighbouring chips of a TPU slice."""

    source: Source
    dims: Literal[2, 3]
    link_bytes_per_second: PositiveRate
    """Of a link, each way."""
    hop_seconds: PositiveRate
    wrap_size: Positive | None = None
    """A dim of this size is a ring."""
    wrap_cube: Positive | None = None
    """All dims are rings where all are multiples of it."""
    max_shape: tuple[Positive, ...] | None = None
    """Of the largest slice, its dims in ascending order."""
    core_link_bytes_per_second: PositiveRate | None = None
    """Between the two devices of a chip, each way."""


@dataclass(frozen=True, config=STRICT, kw_only=True)
class Node:
    """GPUs that share a switch, and the network between such nodes."""

    source: Source
    gpus: Positive
    link_bytes_per_second: PositiveRate
    """Of a GPU to the switch, each way."""
    link_achievable: Annotated[Fraction, Field(gt=0)] = 1.0
    """Of it, what large collectives were measured to reach."""
    link_seconds: PositiveRate
    """A hop within the node."""
    network_bytes_per_second: PositiveRate
    """A GPU's share of the node's adapters, each way."""
    network_seconds: PositiveRate
    """A hop between nodes."""


@dataclass(frozen=True, config=STRICT, kw_only=True)
class Line:
    """A wire that is no mesh axis."""

    source: Source
    bytes_per_second: PositiveRate
    """Of a device, each way."""


@dataclass(frozen=True, config=STRICT, kw_only=True)
class Chip:
    """One kind of chip."""

    name: str
    platform: Literal["tpu", "gpu", "cpu"]
    device_kinds: tuple[str, ...]
    """As `jax.Device.device_kind` spells them."""
    devices_per_chip: Positive = 1
    compute: Compute | None = None
    hbm: Hbm | None = None
    torus: Torus | None = None
    node: Node | None = None
    host: Line | None = None
    dcn: Line | None = None
    price_per_chip_hour: Annotated[float, BeforeValidator(refuse_bool), Field(ge=0)] | None = None
    """In a currency of the user's; prices go stale, so the table has none."""

    @model_validator(mode="after")
    def _check_wires(self) -> Self:
        if self.torus is not None and self.node is not None:
            raise ValueError("torus and node are both given; a chip lies in a torus or in nodes")
        if self.hbm is not None and self.hbm.usable_bytes > 1.1 * self.hbm.bytes:
            raise ValueError("hbm.usable_bytes is more than hbm.bytes; lower it")
        return self

    @property
    def hbm_usable_bytes(self) -> int | None:
        """What a program can have of a device's memory; None: not known."""
        return None if self.hbm is None else self.hbm.usable_bytes

    @property
    def hbm_default_bytes(self) -> int | None:
        """What JAX takes of it unless it is told otherwise (GPU: XLA_CLIENT_MEM_FRACTION)."""
        return None if self.hbm is None else int(self.hbm.usable_bytes * self.hbm.default_fraction)

    def find_peak(self, number_format: str) -> float | None:
        """Peak FLOP/s of dense matmuls; None where the chip has no unit for the format, or no peak is known.

        `number_format`: `bf16`, `fp16`, `fp8`, `tf32`, or `fp32` for matmuls in full fp32.
        """
        peak: float | None = None if self.compute is None else getattr(self.compute, number_format)
        return peak


def load_chips(extra: Path | None = None) -> dict[str, Chip]:
    """Every chip by its name.

    Args:
      extra: a YAML file in the form of `jaxscale/metrics/chips.yaml`. What it says of a chip of the table
        goes over what stands there, field by field; a group of numbers needs its own source, whatever it
        changes.

    Raises:
      UserError: the file cannot be read or has problems, all of which are listed.
    """
    if extra is None:
        return dict(_load_own())
    tree = _read_table(extra)
    problems = [problem for name, entry in tree.items() for problem in _find_unsourced(name, entry)]
    chips, known = dict(_load_own()), _read_own()
    for name, entry in tree.items():
        try:
            chips[name] = _parse_chip(name, _merge(known.get(name, {}), entry))
        except ValidationError as error:
            problems += [_word_problem(name, problem) for problem in error.errors()]
    if problems:
        lines = "\n  ".join(dict.fromkeys(problems))
        raise UserError(
            f"{extra}: the table of chips has {len(dict.fromkeys(problems))} problem(s)\n  {lines}"
        )
    return chips


def find_chip(name: str, chips: Mapping[str, Chip]) -> Chip:
    """The chip of this name.

    Raises:
      UserError: there is none; the message has the nearest names.
    """
    if name in chips:
        return chips[name]
    near = difflib.get_close_matches(name.lower().removeprefix("tpu-"), chips, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    raise UserError(
        f"chip {name!r} is not in the table; {hint}It has {', '.join(chips)}; others can be added in a YAML "
        "file of your own"
    )


@functools.cache
def find_device_kind(device_kind: str) -> Chip | None:
    """The chip of the table whose devices JAX calls so."""
    return next((chip for chip in _load_own().values() if device_kind in chip.device_kinds), None)


@functools.cache
def _read_own() -> dict[str, dict[str, Any]]:
    text = resources.files("jaxscale.metrics").joinpath("chips.yaml").read_text(encoding="utf-8")
    tree: dict[str, dict[str, Any]] = YAML(typ="safe", pure=True).load(text)
    return tree


@functools.cache
def _load_own() -> dict[str, Chip]:
    return {name: _parse_chip(name, entry) for name, entry in _read_own().items()}


def _parse_chip(name: str, entry: Mapping[str, Any]) -> Chip:
    return TypeAdapter(Chip).validate_python({"name": name, **entry})


def _read_table(path: Path) -> dict[str, dict[str, Any]]:
    try:
        tree = YAML(typ="safe", pure=True).load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: the table of chips cannot be read: {error}") from None
    except YAMLError as error:
        raise UserError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(tree, dict) or not tree:
        raise UserError(f"{path}: holds no chips; write `name: {{platform: gpu, ...}}`, one chip a name")
    wrong = [f"{name}: {entry!r}" for name, entry in tree.items() if not isinstance(entry, dict)]
    if wrong:
        raise UserError(f"{path}: {'; '.join(wrong)} is no chip; write its fields below its name")
    return {str(name): entry for name, entry in tree.items()}


def _merge(known: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(known)
    for name, value in given.items():
        below = merged.get(name)
        merged[name] = {**below, **value} if isinstance(below, dict) and isinstance(value, dict) else value
    return merged


def _find_unsourced(name: str, entry: Mapping[str, Any]) -> Iterator[str]:
    for group, value in entry.items():
        if isinstance(value, dict) and not value.get("source"):
            yield f"{name}.{group}: {value!r} has no source; say in `source` where its numbers come from"


def _word_problem(name: str, problem: Mapping[str, Any]) -> str:
    path = ".".join([name, *map(str, problem["loc"])])
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        return f"{path}: no such field (value {problem['input']!r}); see jaxscale/metrics/chips.yaml"
    if problem["type"] in ("missing", "missing_argument", "missing_keyword_only_argument"):
        return f"{path}: is required and has no value"
    if not problem["loc"]:
        return f"{path}: {message}"
    return f"{path}: {problem['input']!r}: {message.replace('Input should be', 'must be')}"
