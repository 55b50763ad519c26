"""Memory of each remat policy by the TPU's compiler, and the FLOPs that it computes again.

    scripts/install_chip_compilers PYTHON FOLDER
    export TPU_SKIP_MDS_QUERY=1 ALLOW_MULTIPLE_LIBTPU_LOAD=1 JAX_PLATFORMS=cpu PYTHONPATH=FOLDER
    python scripts/study_remat.py

A Llama of 16 layers on 4 described v5p chips (data=2 fsdp=2), one sequence of 2048 tokens a device and
microbatch, bf16. Prints the table of docs/memory.md. Nothing runs: about 5 CPU-minutes of compilation.
"""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from jaxscale.config import RematConfig, parse_config
from jaxscale.inspection.remat import compare_remat, measure_remat
from jaxscale.training.setup import make_setup
from tests.chips import describe_tpu

MESH = {"data": 2, "fsdp": 2}
TREE: dict[str, Any] = {
    "run_dir": "unused",
    "steps": 1000,
    "mesh": MESH,
    "batch": {"sequences": 8, "microbatches": 2, "length": 2048},
    "model": {"family": "llama", "layers": 16, "embed": 1024, "heads": 8, "mlp": 2816, "vocab": 8192},
    "precision": "bf16",
}
LISTS = (
    {"policy": "attention", "keep": ("mlp_up", "mlp_gate")},
    {"policy": "full", "offload": ("block_input",)},
    {"policy": "attention", "offload": ("mlp_up", "mlp_gate")},
    {"policy": "matmuls", "offload": ("block_input", "query", "attention_out", "mlp_up", "mlp_gate")},
)


def main() -> None:
    setup = make_setup(parse_config(TREE, origin="study"), describe_tpu("v5p:2x2x1", **MESH), 8192)
    reports = list(compare_remat(setup))
    for each in LISTS:
        reports.append(measure_remat(setup, RematConfig(**each), reports[0].matmul_flops))
    print("| remat | temporaries, MiB | host, MiB | matmuls computed again |")
    print("|---|---|---|---|")
    for report in reports:
        memory, plain = report.memory, report.matmul_flops - report.recomputed_flops
        name = report.name.replace(", ", "; ")
        shown = f"{memory.temporaries / 2**20:,.0f} | {memory.host / 2**20:,.0f}"
        print(f"| {name} | {shown} | {report.recomputed_flops / plain:.1%} |")


if __name__ == "__main__":
    main()
