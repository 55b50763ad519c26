"""jaxscale against a plain hand-written JAX loop of the same shapes, in one run.

    python scripts/benchmark_step.py [--pairs 3] [--microbatches 1] [--steps 12]

Runs `scripts/plain_loop.py` and jaxscale's own training loop in turn, each in a process of its own on 8
simulated devices (fsdp=4 tensor=2), and prints the medians and their ratios:
  CPU-seconds a step          of the process, after two warm-up steps, evaluation and checkpoints off
  process start to first loss wall seconds, with imports, data, compilation and the first step
The shape is that of the peers' figures in docs/benchmarks.md: 4 layers, embed 256, mlp 1024, 8 heads (4 kv),
vocabulary 8192, length 128, 16 sequences, bf16 over fp32 parameters, full remat.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

WARM_UP_STEPS = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--microbatches", type=int, default=1)
    parser.add_argument("--ours", metavar="FOLDER", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.ours:
        print(json.dumps(measure_ours(Path(args.ours), args.steps, args.microbatches)))
        return

    shape = ["--steps", str(args.steps), "--microbatches", str(args.microbatches)]
    results: dict[str, list[dict]] = {"plain loop": [], "jaxscale": []}
    for pair in range(args.pairs):
        with tempfile.TemporaryDirectory() as folder:
            commands = {
                "plain loop": [str(Path(__file__).with_name("plain_loop.py")), *shape],
                "jaxscale": [__file__, "--ours", folder, *shape],
            }
            for name, command in commands.items():
                print(f"pair {pair + 1} of {args.pairs}: {name}", file=sys.stderr)
                done = subprocess.run([sys.executable, *command], check=True, capture_output=True, text=True)
                results[name].append(json.loads(done.stdout.splitlines()[-1]))
    report(results)


def report(results: dict[str, list[dict]]) -> None:
    print(f"{'':<32}{'plain loop':>12}{'jaxscale':>12}{'ratio':>8}   ratio in each pair")
    for title, field in (
        ("CPU-seconds a step", "cpu_seconds_per_step"),
        ("process start to first loss, s", "first_loss_seconds"),
    ):
        plain = [result[field] for result in results["plain loop"]]
        ours = [result[field] for result in results["jaxscale"]]
        pairs = "  ".join(f"{b / a:.3f}" for a, b in zip(plain, ours, strict=True))
        a, b = statistics.median(plain), statistics.median(ours)
        print(f"{title:<32}{a:>12.3f}{b:>12.3f}{b / a:>8.3f}   {pairs}")


def measure_ours(folder: Path, steps: int, microbatches: int) -> dict[str, object]:
    """Trains with jaxscale's own loop, listening as its console; figures as `plain_loop.py` prints them."""
    import numpy as np

    from jaxscale.config import parse_config
    from jaxscale.mesh import simulate_devices
    from jaxscale.metrics import SilentConsole, StepRecord

    class Stopwatch(SilentConsole):
        def __init__(self) -> None:
            self.first_loss_seconds = 0.0
            self.cpu_seconds: list[float] = []
            self.losses: list[float] = []

        def step(self, record: StepRecord) -> None:
            self.first_loss_seconds = self.first_loss_seconds or seconds_since_process_start()
            self.cpu_seconds.append(time.process_time())
            self.losses.append(record.loss)

    tokens = np.random.default_rng(0).integers(0, 8192, 200_000).astype(np.uint16)
    np.save(folder / "tokens.npy", tokens)
    config = parse_config(
        {
            "run_dir": str(folder / "run"),
            "steps": steps + WARM_UP_STEPS,
            "mesh": {"fsdp": 4, "tensor": 2},
            "batch": {"sequences": 16, "microbatches": microbatches, "length": 128},
            "model": {
                "family": "llama", "layers": 4, "embed": 256, "heads": 8, "kv_heads": 4, "mlp": 1024,
                "vocab": 8192,
            },
            "data": {
                "source": "tokens", "paths": [str(folder / "tokens.npy")], "tokenizer": "none",
                "cache_dir": str(folder / "cache"),
            },
            "precision": "bf16",
            "remat": "full",
            "checkpoint": {"every_steps": 0},
        },
        origin="benchmark",
    )  # fmt: skip
    simulate_devices(config.mesh)
    from jaxscale.training.loop import train

    console = Stopwatch()
    train(config, console)
    timed = console.cpu_seconds[WARM_UP_STEPS - 1 :]
    return {
        "first_loss_seconds": console.first_loss_seconds,
        "cpu_seconds_per_step": (timed[-1] - timed[0]) / (len(timed) - 1),
        "losses": console.losses,
    }


def seconds_since_process_start() -> float:
    start_ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - start_ticks / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
