"""What number formats do to a loss: the model of configs/tiny.yaml, the same run in each format, three seeds.

    python scripts/study_precision.py [--steps 300] [--seeds 0 1 2] [--png docs/precision.png]

Runs on one device, prints a table and draws the losses. Exits with 1 where a format ends more than 2 % from
fp32. The training loss is the mean of the last 20 steps, whose batches are the same in every format;
validation is in the format too, but for fp8, whose weights are evaluated in bf16.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

FORMATS = ("fp32", "bf16", "fp16", "fp8")
LAST_STEPS = 20
BAR = 0.02
ROOT = Path(__file__).parents[1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=300, help=f"at least {LAST_STEPS}")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--png", type=Path, default=ROOT / "docs" / "precision.png")
    args = parser.parse_args()
    runs = {(seed, name): train_run(name, seed, args.steps) for seed in args.seeds for name in FORMATS}
    worst = print_table(runs, args.seeds)
    draw(runs, args.seeds, args.png)
    print(f"drawn in {args.png}; the largest difference from fp32 is {worst:.2%}, the bar {BAR:.0%}")
    return 0 if worst <= BAR else 1


def train_run(precision: str, seed: int, steps: int) -> dict[str, list[float]]:
    """Training losses of all steps, and validation losses."""
    from jaxscale.config import load_config
    from jaxscale.training.loop import train

    with tempfile.TemporaryDirectory() as folder:
        config = load_config(
            ROOT / "configs" / "tiny.yaml",
            [
                f"run_dir={folder}/run", f"seed={seed}", f"steps={steps}", f"precision={precision}",
                "mesh.data=1", "mesh.fsdp=1", "mesh.tensor=1", "batch.sequences=8", "batch.microbatches=2",
                f"checkpoint.every_steps={steps}", f"eval.every_steps={steps}",
            ],
        )  # fmt: skip
        result = train(config)
        lines = [json.loads(line) for line in result.run_dir.metrics.read_text().splitlines()]
    losses = [line["loss"] for line in lines if line["kind"] == "step"]
    skips = sum(line["skipped"] for line in lines if line["kind"] == "step")
    print(f"seed {seed} {precision}: {losses[-1]:.4f}, {skips} skipped", file=sys.stderr, flush=True)
    return {"train": losses, "eval": [line["loss"] for line in lines if line["kind"] == "eval"]}


def average_last(losses: list[float]) -> float:
    return sum(losses[-LAST_STEPS:]) / len(losses[-LAST_STEPS:])


def print_table(runs: dict[tuple[int, str], dict[str, list[float]]], seeds: list[int]) -> float:
    """Returns the largest relative difference from fp32."""
    print("| seed | format | training loss | from fp32 | validation loss | from fp32 |")
    print("|---|---|---|---|---|---|")
    worst = 0.0
    for seed in seeds:
        base = runs[seed, "fp32"]
        for name in FORMATS:
            run, cells = runs[seed, name], []
            for ours, theirs in (
                (average_last(run["train"]), average_last(base["train"])),
                (run["eval"][-1], base["eval"][-1]),
            ):
                worst = max(worst, abs(ours / theirs - 1))
                cells += [f"{ours:.4f}", "" if name == "fp32" else f"{ours / theirs - 1:+.2%}"]
            print(f"| {seed} | {name} | " + " | ".join(cells) + " |")
    return worst


def draw(runs: dict[tuple[int, str], dict[str, list[float]]], seeds: list[int], png: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import numpy as np

    figure, (above, below) = plt.subplots(2, 1, figsize=(8, 6), sharex=True, height_ratios=(2, 1))
    kernel = np.ones(LAST_STEPS) / LAST_STEPS
    for color, name in zip(("black", "C0", "C1", "C2"), FORMATS, strict=True):
        losses = np.array([runs[seed, name]["train"] for seed in seeds])
        base = np.array([runs[seed, "fp32"]["train"] for seed in seeds])
        steps = np.arange(1, losses.shape[1] + 1)
        above.plot(steps, losses.mean(0), label=name, color=color, linewidth=1)
        if name != "fp32":
            smooth = [np.convolve(each, kernel, "valid") for each in (losses / base - 1) * 100]
            below.plot(steps[LAST_STEPS - 1 :], np.mean(smooth, 0), label=name, color=color, linewidth=1.2)
            for each in smooth:
                below.plot(steps[LAST_STEPS - 1 :], each, color=color, linewidth=0.5, alpha=0.5)
    below.axhline(0, color="black", linewidth=0.5)
    above.set_ylabel("training loss, nats a byte")
    above.set_title(f"configs/tiny.yaml on one device, mean of {len(seeds)} seeds")
    above.legend()
    below.set_ylabel(f"from fp32, %\n(mean of {LAST_STEPS} steps)")
    below.set_xlabel("step")
    below.legend()
    figure.tight_layout()
    figure.savefig(png, dpi=110)


if __name__ == "__main__":
    sys.exit(main())
