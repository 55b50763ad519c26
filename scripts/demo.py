"""What `scripts/demo` runs after installation: train, compare with the unigram entropy, generate."""

import json
import subprocess
import sys
from pathlib import Path

from jaxscale.config import Config, UserError, load_config
from jaxscale.data.dataset import open_data
from jaxscale.data.windows import unigram_entropy_nats

CONFIG = "configs/tiny.yaml"
PROMPT = "def "


def main() -> int:
    overrides = ["run_dir=runs/demo", *sys.argv[1:]]
    try:
        config = load_config(CONFIG, overrides)
    except UserError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 2
    mesh = config.mesh
    print(
        f"Training {CONFIG} on a simulated mesh data={mesh.data} fsdp={mesh.fsdp} tensor={mesh.tensor}, "
        f"{config.batch.microbatches} microbatches a step:\n"
        f"  jaxscale train {CONFIG} {' '.join(overrides)}\n",
        flush=True,
    )
    if code := run_command("train", CONFIG, *overrides):
        return code
    report_losses(config)
    print(f"\nWhat the model writes after {PROMPT!r}:\n", flush=True)
    if code := run_command(
        "generate", config.run_dir, "--prompt", PROMPT, "--tokens", "240", "--temperature", "0.6"
    ):
        return code
    print(f"\nThe run is in {config.run_dir}/. Worth trying next, with .venv/bin on your PATH:")
    print(f"  jaxscale generate {config.run_dir} --prompt 'class ' --temperature 0.5")
    print(f"  jaxscale eval {config.run_dir} mesh.data=1 mesh.fsdp=4 mesh.tensor=1")
    print(f"  jaxscale train {CONFIG} run_dir=runs/longer steps=1000 mesh.data=4 mesh.tensor=1")
    return 0


def run_command(*arguments: str) -> int:
    return subprocess.run([sys.executable, "-m", "jaxscale.cli.main", *arguments]).returncode


def report_losses(config: Config) -> None:
    lines = (Path(config.run_dir) / "metrics.jsonl").read_text().splitlines()
    losses = [record["loss"] for record in map(json.loads, lines) if record["kind"] == "eval"]
    data = open_data(config.data, length=config.batch.length, seed=config.seed)
    entropy = unigram_entropy_nats(data.validation)
    print("\nIn nats a byte, on validation text:")
    print(f"  unigram entropy of the text   {entropy:.3f}")
    print(f"  first validation loss         {losses[0]:.3f}")
    print(
        f"  last validation loss          {losses[-1]:.3f}, {1 - losses[-1] / entropy:.0%} below the entropy"
    )


if __name__ == "__main__":
    sys.exit(main())
