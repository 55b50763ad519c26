"""Bytes that a step sends over each mesh axis in each compute format, by the compilers of v5p and H100.

    scripts/install_chip_compilers PYTHON FOLDER
    export TPU_SKIP_MDS_QUERY=1 ALLOW_MULTIPLE_LIBTPU_LOAD=1 JAX_PLATFORMS=cpu PYTHONPATH=FOLDER
    python scripts/study_formats.py

A Llama of 8 layers on 8 described chips (data=2 fsdp=2 tensor=2), ZeRO stage 3, two microbatches, full remat.
Prints the table of docs/precision.md: MiB a device and step, and the formats that travel. Nothing runs: about
5 CPU-minutes of compilation.
"""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from jax.sharding import Mesh

from jaxscale.config import parse_config
from jaxscale.inspection.inspect import inspect_setup
from jaxscale.inspection.report import TrafficRow
from jaxscale.training.setup import make_setup
from tests.chips import describe_gpu, describe_tpu

MESH = {"data": 2, "fsdp": 2, "tensor": 2}
FORMATS = ("fp32", "bf16", "fp8")
ROWS = (
    (("fsdp",), "all-gather"),
    (("fsdp",), "reduce-scatter"),
    (("data",), "all-gather"),
    (("data",), "reduce-scatter"),
    (("tensor",), "all-reduce"),
)
TREE: dict[str, Any] = {
    "run_dir": "unused",
    "steps": 1000,
    "mesh": MESH,
    "batch": {"sequences": 8, "microbatches": 2, "length": 1024},
    "model": {"family": "llama", "layers": 8, "embed": 1024, "heads": 8, "mlp": 2816, "vocab": 8192},
    "remat": "full",
}


def main() -> None:
    print("| chips | axis | kind | " + " | ".join(FORMATS) + " |")
    print("|---|---|---|" + "---|" * len(FORMATS))
    for chips, mesh in (("v5p", describe_tpu("v5p:2x2x2", **MESH)), ("H100", describe_gpu(8, **MESH))):
        sent = {precision: read_traffic(mesh, precision) for precision in FORMATS}
        for key in ROWS:
            cells = [word_row(sent[precision].get(key)) for precision in FORMATS]
            print(f"| {chips} | {key[0][0]} | {key[1]} | " + " | ".join(cells) + " |", flush=True)


def read_traffic(mesh: Mesh, precision: str) -> dict[Any, TrafficRow]:
    config = parse_config({**TREE, "precision": precision}, origin="study")
    rows = inspect_setup(make_setup(config, mesh, 8192)).collectives
    assert rows is not None
    return {(row.axes, row.kind): row for row in rows}


def word_row(row: TrafficRow | None) -> str:
    if row is None or not row.bytes:
        return "–"
    return f"{row.bytes / 2**20:,.1f} ({', '.join(sorted(row.dtypes))})"


if __name__ == "__main__":
    main()
