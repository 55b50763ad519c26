"""Combinations whose memory is predicted in closed form and compiled, for the CPU mesh and for TPUs."""

import re
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax

from jaxscale.config import Config, load_config, parse_config
from jaxscale.mesh import axis_sizes, make_mesh, resolve_mesh
from jaxscale.planning.draft import Drafter
from jaxscale.planning.memory import MemoryForecast, predict_memory
from jaxscale.training.setup import make_setup
from tests.chips import describe_tpu

BARS = {"cpu": 0.10, "tpu": 0.15}
CONFIGS = Path(__file__).parents[1] / "configs"

_SMALL: dict[str, Any] = {
    "run_dir": "unused",
    "steps": 1000,
    "batch": {"sequences": 16, "length": 256},
    "model": {
        "family": "llama",
        "layers": 6,
        "embed": 512,
        "heads": 8,
        "kv_heads": 4,
        "mlp": 1408,
        "vocab": 8192,
    },
    "precision": "bf16",
    "remat": "full",
}
_GPT2 = {"family": "gpt2", "kv_heads": 8, "mlp": 2048, "tied": True}
_CAPACITY = {"experts": 8, "top_k": 2, "mlp": 704, "exchange": "capacity"}
_DROPLESS = {**_CAPACITY, "exchange": "dropless"}


@dataclass(frozen=True)
class Case:
    """One combination."""

    name: str
    mesh: dict[str, int]
    sections: dict[str, Any] = field(default_factory=dict)
    """Sections or fields of them that differ from the configuration's."""
    config: str | None = None
    """Name of a shipped configuration; None: the small decoder of this file."""
    chips: str | None = None
    """A topology of described TPUs; None: the CPU mesh."""

    def read(self) -> Config:
        """Its configuration."""
        changes = {"mesh": self.mesh, **self.sections}
        if self.config is not None:
            lines = [
                f"{section}.{key}={value}" if isinstance(fields, dict) else f"{section}={fields}"
                for section, fields in changes.items()
                for key, value in (fields.items() if isinstance(fields, dict) else [("", None)])
            ]
            return load_config(CONFIGS / f"{self.config}.yaml", lines)
        tree = dict(_SMALL)
        for section, fields in changes.items():
            base = tree.get(section)
            tree[section] = (
                {**base, **fields} if isinstance(base, dict) and isinstance(fields, dict) else fields
            )
        return parse_config(tree, origin=self.name)


@dataclass(frozen=True)
class Compiled:
    """What a compiler says, bytes a device."""

    arguments: int
    temporaries: int
    """Of `memory_analysis`."""
    alive: int
    """The most temporaries that are alive at once; a CPU's compiler tells them from no others."""
    allocated: int
    """What its buffer assignment sets aside for temporaries; a CPU's is what `memory_analysis` says."""

    @property
    def total(self) -> int:
        return self.arguments + self.alive


def predict_case(case: Case) -> MemoryForecast:
    config = case.read()
    assert config.model is not None
    vocab = config.model.vocab or 257
    platform = "cpu" if case.chips is None else "tpu"
    return predict_memory(
        Drafter(config, vocab=vocab, platform=platform).draft(config, axis_sizes(config.mesh))
    )


def compile_case(case: Case) -> Compiled:
    config = case.read()
    assert config.model is not None
    if case.chips is None:
        mesh = make_mesh(resolve_mesh(config.mesh, 8), jax.devices()[:8])
    else:
        mesh = describe_tpu(case.chips, **case.mesh)
    setup = make_setup(config, mesh, config.model.vocab or 257)
    if case.chips is None:
        memory = setup.compile_step().memory_analysis()
        temporaries = memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
        return Compiled(memory.argument_size_in_bytes, temporaries, temporaries, temporaries)
    # A TPU's `temp_size_in_bytes` is what is allocated and, a second time, what of it is not used at a peak:
    # it differs by gigabytes between two compilations of the same live buffers. Both others are read too.
    with tempfile.TemporaryDirectory() as folder, setup.ambient():
        options: Any = {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}
        memory = setup.trace_step().lower().compile(compiler_options=options).memory_analysis()
        allocated = read_allocated(Path(folder))
    arguments = memory.argument_size_in_bytes
    return Compiled(arguments, memory.temp_size_in_bytes, memory.peak_memory_in_bytes - arguments, allocated)


def read_allocated(folder: Path) -> int:
    """Bytes that a dumped buffer assignment sets aside for temporaries in a TPU's HBM."""
    (path,) = folder.glob("*after_optimizations-buffer-assignment.txt")
    sizes = re.findall(r"^allocation \d+: size (\d+), preallocated-temp", path.read_text(), re.MULTILINE)
    return sum(map(int, sizes))


CPU_CASES = (
    Case("zero 0, data=8, full", {"data": 8}, {"zero": {"stage": 0}}),
    Case("zero 1, data=8, none", {"data": 8}, {"zero": {"stage": 1}, "remat": "none"}),
    Case("zero 1, fsdp=8, attention", {"fsdp": 8}, {"zero": {"stage": 1}, "remat": "attention"}),
    Case("zero 2, fsdp=8, full", {"fsdp": 8}, {"zero": {"stage": 2}}),
    Case(
        "zero 2, data=4 fsdp=2, full, 2 microbatches",
        {"data": 4, "fsdp": 2},
        {"zero": {"stage": 2}, "batch": {"sequences": 32, "microbatches": 2}},
    ),
    Case("zero 3, fsdp=8, none", {"fsdp": 8}, {"remat": "none"}),
    Case("zero 3, fsdp=8, attention", {"fsdp": 8}, {"remat": "attention"}),
    Case("zero 3, fsdp=8, matmuls", {"fsdp": 8}, {"remat": "matmuls"}),
    Case("zero 3, fsdp=8, full", {"fsdp": 8}),
    Case("zero 3, data=2 fsdp=2 tensor=2, none", {"data": 2, "fsdp": 2, "tensor": 2}, {"remat": "none"}),
    Case("zero 3, fsdp=4 tensor=2, full", {"fsdp": 4, "tensor": 2}),
    Case(
        "zero 3, data=2 fsdp=4, full, 2 microbatches",
        {"data": 2, "fsdp": 4},
        {"batch": {"sequences": 32, "microbatches": 2}},
    ),
    Case(
        "zero 3, fsdp=2 tensor=4, attention, 4 microbatches",
        {"fsdp": 2, "tensor": 4},
        {"remat": "attention", "batch": {"microbatches": 4}},
    ),
    Case("zero 3, fsdp=8, full, fp32", {"fsdp": 8}, {"precision": "fp32"}),
    Case("zero 3, data=2 fsdp=4, none, fp32", {"data": 2, "fsdp": 4}, {"precision": "fp32", "remat": "none"}),
    Case(
        "zero 3, fsdp=8, full, all state on the host",
        {"fsdp": 8},
        {"offload": {"optimizer_state": True, "master_weights": True}},
    ),
    Case(
        "zero 3, data=2 fsdp=4, matmuls, optimizer state on the host",
        {"data": 2, "fsdp": 4},
        {"offload": {"optimizer_state": True}, "remat": "matmuls"},
    ),
    Case("zero 3, fsdp=8, full, length 1024", {"fsdp": 8}, {"batch": {"sequences": 8, "length": 1024}}),
    Case("gpt2, zero 3, fsdp=8, full", {"fsdp": 8}, {"model": _GPT2}),
    Case("gpt2, zero 3, data=2 tensor=4, none", {"data": 2, "tensor": 4}, {"model": _GPT2, "remat": "none"}),
    Case("experts, capacity, fsdp=2 expert=4, full", {"fsdp": 2, "expert": 4}, {"moe": _CAPACITY}),
    Case(
        "experts, capacity, fsdp=2 expert=4, none",
        {"fsdp": 2, "expert": 4},
        {"moe": _CAPACITY, "remat": "none"},
    ),
    Case(
        "experts, capacity, zero 1, data=2 expert=4, full",
        {"data": 2, "expert": 4},
        {"moe": _CAPACITY, "zero": {"stage": 1}},
    ),
    Case("experts, dropless, fsdp=2 expert=4, full", {"fsdp": 2, "expert": 4}, {"moe": _DROPLESS}),
    Case(
        "experts, dropless, fsdp=2 expert=2 tensor=2, matmuls",
        {"fsdp": 2, "expert": 2, "tensor": 2},
        {"moe": _DROPLESS, "remat": "matmuls"},
    ),
    Case("tiny.yaml", {"data": 2, "fsdp": 2, "tensor": 2}, config="tiny"),
    Case("tiny_moe.yaml", {"fsdp": 2, "expert": 4}, config="tiny_moe"),
)

_V5P, _V5E = "v5p:4x4x4", "v5e:4x4"
TPU_CASES = (
    Case(
        "llama3_8b, v5p:4x4x4, fsdp=64, full, 64 × 8192",
        {"fsdp": 64},
        {"batch": {"sequences": 64, "microbatches": 1}},
        "llama3_8b",
        _V5P,
    ),
    Case(
        "llama3_8b, v5p:4x4x4, fsdp=16 tensor=4, attention, 64 × 8192, 2 microbatches",
        {"fsdp": 16, "tensor": 4},
        {"batch": {"sequences": 64, "microbatches": 2}, "remat": "attention"},
        "llama3_8b",
        _V5P,
    ),
    Case(
        "llama3_8b, v5p:4x4x4, zero 1, data=16 fsdp=4, full, 64 × 8192",
        {"data": 16, "fsdp": 4},
        {"batch": {"sequences": 64, "microbatches": 1}, "zero": {"stage": 1}},
        "llama3_8b",
        _V5P,
    ),
    Case(
        "llama3_8b, v5e:4x4, fsdp=16, full, 16 × 4096",
        {"fsdp": 16},
        {"batch": {"sequences": 16, "microbatches": 1, "length": 4096}},
        "llama3_8b",
        _V5E,
    ),
    Case(
        "llama3_8b, v5e:4x4, fsdp=4 tensor=4, full, 8 × 4096, 2 microbatches",
        {"fsdp": 4, "tensor": 4},
        {"batch": {"sequences": 8, "microbatches": 2, "length": 4096}},
        "llama3_8b",
        _V5E,
    ),
    Case(
        "mixtral_8x7b, v5p:4x4x4, capacity, fsdp=16 expert=4, full, 128 × 4096, 2 microbatches",
        {"fsdp": 16, "expert": 4},
        {"batch": {"sequences": 128, "microbatches": 2}, "moe": {"exchange": "capacity"}},
        "mixtral_8x7b",
        _V5P,
    ),
    Case(
        "mixtral_8x7b, v5p:4x4x4, dropless, fsdp=16 expert=4, full, 64 × 4096",
        {"fsdp": 16, "expert": 4},
        {"batch": {"sequences": 64, "microbatches": 1}},
        "mixtral_8x7b",
        _V5P,
    ),
)
