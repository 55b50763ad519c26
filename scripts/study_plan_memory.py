"""Memory in closed form beside what the compilers allocate, every combination with its error.

    python scripts/study_plan_memory.py                 # the CPU's compiler, 8 simulated devices

    scripts/install_chip_compilers PYTHON FOLDER
    export TPU_SKIP_MDS_QUERY=1 ALLOW_MULTIPLE_LIBTPU_LOAD=1 JAX_PLATFORMS=cpu PYTHONPATH=FOLDER
    python scripts/study_plan_memory.py --target tpu    # described v5p and v5e chips

Prints the tables of docs/planning.md, in MiB a device; nothing runs. 4 CPU-minutes of compilation for the
CPU, 10 for TPUs. `--cache FILE` keeps what the compilers said. Exit code 1 if a bar is missed: 10 % of
`memory_analysis` on the CPU; on TPUs 15 % of what is alive at the peak and of what is allocated.
"""

import argparse
import hashlib
import json
import sys
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from jaxscale.config import MeshConfig
from jaxscale.mesh import simulate_devices
from jaxscale.planning.memory import MemoryForecast
from tests.plan_memory import BARS, CPU_CASES, TPU_CASES, Case, Compiled, compile_case, predict_case

MIB = 2**20
CPU_HEAD = "| combination | peak in | arguments | error | temporaries | compiled | error | total | error |"
TPU_HEAD = (
    "| combination | peak in | arguments | error | temporaries | alive | allocated | total | error: alive "
    "| allocated | `memory_analysis` |"
)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", choices=["cpu", "tpu"], default="cpu")
    parser.add_argument("--cache", type=Path)
    parser.add_argument("--only", default="", help="text in the name of a case")
    args = parser.parse_args()
    if args.target == "cpu":
        simulate_devices(MeshConfig(data=8))
    head = CPU_HEAD if args.target == "cpu" else TPU_HEAD
    print(head)
    print("|---" * (head.count("|") - 1) + "|")
    errors = []
    for case in CPU_CASES if args.target == "cpu" else TPU_CASES:
        if args.only in case.name:
            predicted, compiled = predict_case(case), recall(args.cache, case)
            print(word_row(case, predicted, compiled), flush=True)
            errors += [compare(predicted, compiled, size) for size in (compiled.alive, compiled.allocated)]
    bar, worst = BARS[args.target], max(map(abs, errors))
    print(f"\n{len(errors) // 2} combinations, largest error {worst:.1%}, bar {bar:.0%}")
    return int(worst > bar)


def compare(predicted: MemoryForecast, compiled: Compiled, temporaries: int) -> float:
    """Relative error of the total."""
    return predicted.total / (compiled.arguments + temporaries) - 1


def word_row(case: Case, predicted: MemoryForecast, compiled: Compiled) -> str:
    cells = [case.name, predicted.moment.name.lower(), word(predicted.arguments)]
    cells += [f"{predicted.arguments / compiled.arguments - 1:+.2%}", word(predicted.temporaries)]
    cells.append(word(compiled.alive))
    if case.chips is None:
        cells.append(f"{predicted.temporaries / compiled.alive - 1:+.1%}")
    else:
        cells.append(word(compiled.allocated))
    cells += [word(predicted.total), f"{compare(predicted, compiled, compiled.alive):+.1%}"]
    if case.chips is not None:
        others = (compiled.allocated, compiled.temporaries)
        cells += [f"{compare(predicted, compiled, size):+.1%}" for size in others]
    return "| " + " | ".join(cells) + " |"


def word(size: int) -> str:
    return f"{size / MIB:,.1f}"


def recall(path: Path | None, case: Case) -> Compiled:
    """What the compiler said of a case, from the file if it is there."""
    if path is None:
        return compile_case(case)
    known = json.loads(path.read_text()) if path.exists() else {}
    key = hashlib.sha256(repr((case, case.read())).encode()).hexdigest()
    if key not in known:
        known[key] = asdict(compile_case(case))
        path.write_text(json.dumps(known, indent=1))
    return Compiled(**known[key])


if __name__ == "__main__":
    raise SystemExit(main())
