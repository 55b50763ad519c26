"""What experts are worth: configs/tiny_moe.yaml and a dense model of the same active parameters, three seeds.

    python scripts/study_experts.py [--steps 600] [--seeds 0 1 2] [--png docs/experts.png]

Same text, batches, steps and learning rate, on one device; the dense MLP is widened until its model has at
least as many parameters as a token of the other uses. Prints a table and draws the losses. Exits with 1
unless experts end with the lower validation loss for every seed.
"""

import argparse
import json
import resource
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
KINDS = ("dense", "experts")
# Of the MLP, so that the dense model has no fewer parameters than a token uses of the other: 128 channels are
# two experts' 64 each, and three more outweigh a router.
DENSE_MLP = 131
SMOOTHED_STEPS = 20


@dataclass(frozen=True)
class Run:
    losses: list[float]
    """Training losses of all steps, nats a byte."""
    eval_steps: list[int]
    evals: list[float]
    """Validation losses, nats a byte."""
    drop_fraction: float | None
    """Mean of the last steps."""
    cpu_seconds_a_step: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=600, help=f"at least {SMOOTHED_STEPS}")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--png", type=Path, default=ROOT / "docs" / "experts.png")
    args = parser.parse_args()
    print_sizes()
    runs = {(seed, kind): train_run(kind, seed, args.steps) for seed in args.seeds for kind in KINDS}
    gains = print_table(runs, args.seeds)
    draw(runs, args.seeds, args.png)
    print(f"drawn in {args.png}; experts are ahead by {min(gains):.4f} to {max(gains):.4f} nats a byte")
    return 0 if min(gains) > 0 else 1


def make_overrides(kind: str) -> list[str]:
    one_device = ["mesh.fsdp=1", "mesh.expert=1", "batch.sequences=8", "batch.microbatches=1"]
    return one_device + (["moe=null", f"model.mlp={DENSE_MLP}"] if kind == "dense" else [])


def print_sizes() -> None:
    from jaxscale.config import load_config
    from jaxscale.models.build import count_parameters, shape_decoder

    print("| model | parameters | a token uses |")
    print("|---|---|---|")
    active = {}
    for kind in KINDS:
        config = load_config(ROOT / "configs" / "tiny_moe.yaml", make_overrides(kind))
        shape = shape_decoder(config, vocab=257, platform="cpu")
        active[kind] = count_parameters(shape, active=True)
        print(f"| {kind} | {count_parameters(shape):,} | {active[kind]:,} |")
    assert active["dense"] >= active["experts"]
    print(flush=True)


def train_run(kind: str, seed: int, steps: int) -> Run:
    from jaxscale.config import load_config
    from jaxscale.training.loop import train

    with tempfile.TemporaryDirectory() as folder:
        every = max(steps // 6, 1)
        own = [f"run_dir={folder}/run", f"seed={seed}", f"steps={steps}"]
        own += [f"checkpoint.every_steps={steps}", f"eval.every_steps={every}", "eval.sequences=256"]
        config = load_config(ROOT / "configs" / "tiny_moe.yaml", own + make_overrides(kind))
        start = resource.getrusage(resource.RUSAGE_SELF)
        result = train(config)
        end = resource.getrusage(resource.RUSAGE_SELF)
        lines = [json.loads(line) for line in result.run_dir.metrics.read_text().splitlines()]
    taken, evals = ([line for line in lines if line["kind"] == each] for each in ("step", "eval"))
    drops = [line.get("drop_fraction") for line in taken[-SMOOTHED_STEPS:]]
    seconds = end.ru_utime + end.ru_stime - start.ru_utime - start.ru_stime
    run = Run(
        losses=[line["loss"] for line in taken],
        eval_steps=[line["step"] for line in evals],
        evals=[line["loss"] for line in evals],
        drop_fraction=None if drops[0] is None else sum(drops) / len(drops),
        cpu_seconds_a_step=seconds / steps,
    )
    print(f"seed {seed} {kind}: {run.evals[-1]:.4f}, {seconds:.0f} CPU-seconds", file=sys.stderr, flush=True)
    return run


def print_table(runs: dict[tuple[int, str], Run], seeds: list[int]) -> list[float]:
    """Returns by how much experts end lower, of each seed, in nats a byte."""
    print("| seed | validation loss, dense | experts | difference | dropped choices, last steps |")
    print("|---|---|---|---|---|")
    gains = []
    for seed in seeds:
        dense, experts = (runs[seed, kind] for kind in KINDS)
        gains.append(dense.evals[-1] - experts.evals[-1])
        drops = "" if experts.drop_fraction is None else f"{experts.drop_fraction:.1%}"
        print(f"| {seed} | {dense.evals[-1]:.4f} | {experts.evals[-1]:.4f} | {-gains[-1]:+.4f} | {drops} |")
    return gains


def draw(runs: dict[tuple[int, str], Run], seeds: list[int], png: Path) -> None:
    import numpy as np
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for color, kind in zip(("black", "C0"), KINDS, strict=True):
        losses = np.array([runs[seed, kind].losses for seed in seeds])
        kernel = np.ones(SMOOTHED_STEPS) / SMOOTHED_STEPS
        smooth = np.array([np.convolve(each, kernel, "valid") for each in losses])
        left.plot(np.arange(smooth.shape[1]) + SMOOTHED_STEPS, smooth.mean(0), label=kind, color=color)
        for number, seed in enumerate(seeds):
            run, label = runs[seed, kind], kind if number == 0 else None
            right.plot(run.eval_steps[1:], run.evals[1:], "o-", color=color, label=label, lw=0.8, ms=3)
    left.set_title(f"training, mean of {len(seeds)} seeds and {SMOOTHED_STEPS} steps", fontsize=10)
    left.set_ylim(top=2.6)
    right.set_title(f"validation, {len(seeds)} seeds", fontsize=10)
    for axes in (left, right):
        axes.set_xlabel("step")
        axes.set_ylabel("nats a byte")
        axes.legend()
    figure.suptitle("configs/tiny_moe.yaml and a dense model of the same active parameters")
    figure.savefig(png, dpi=110)


if __name__ == "__main__":
    sys.exit(main())
