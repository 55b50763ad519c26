"""What loss scaling and the test for finite numbers cost, in CPU-seconds a step.

    python scripts/benchmark_loss_scale.py [--rounds 15] [--steps 4]

Compiles the fp16 step on 8 simulated devices (fsdp=4 tensor=2) as it is and with parts taken out, runs all of
them in turn, a few steps each and in an order that turns round, and prints the median of the ratios:
  with scaling    as it is
  no scaling      a factor of None: gradients neither scaled nor unscaled, no scale in the state that moves
  no test         the same, and the update always made: no branch, no count of what is not finite
"""

import argparse
import statistics
import time
from dataclasses import replace
from typing import Any

PARTS = ("with scaling", "no scaling", "no test")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=4)
    args = parser.parse_args()
    from jaxscale.config import parse_config
    from jaxscale.mesh import simulate_devices

    config = parse_config(
        {
            "run_dir": "unused", "steps": 1000, "mesh": {"fsdp": 4, "tensor": 2},
            "batch": {"sequences": 16, "microbatches": 2, "length": 128},
            "model": {
                "family": "llama", "layers": 4, "embed": 256, "heads": 8, "kv_heads": 4, "mlp": 1024,
                "vocab": 8192,
            },
            "precision": "fp16",
        },
        origin="benchmark",
    )  # fmt: skip
    simulate_devices(config.mesh)
    programs = {part: make_program(config, part) for part in PARTS}
    seconds = measure(programs, args.rounds, args.steps)
    print(f"{'':<16}{'CPU-seconds a step':>20}")
    for part in PARTS:
        print(f"{part:<16}{statistics.median(seconds[part]):>20.3f}")
    for other in PARTS[1:]:
        pairs = [a / b for a, b in zip(seconds[PARTS[0]], seconds[other], strict=True)]
        print(f"{PARTS[0]} / {other}: {statistics.median(pairs):.3f}")


def make_program(config: Any, part: str) -> list[Any]:
    """[compiled step, its state, its batch], warmed up."""
    import jax
    import numpy as np

    from jaxscale.numerics.draw import make_key
    from jaxscale.training import step as step_module
    from jaxscale.training.setup import find_mesh, make_setup
    from jaxscale.verify.oracle import place_batch

    config, mesh = find_mesh(replace(config))
    if part != PARTS[0]:
        object.__setattr__(config, "loss_scale", None)  # what no configuration can ask for
    setup = make_setup(config, mesh, 8192)
    right = step_module.lax.cond
    if part == "no test":
        step_module.lax.cond = lambda _, update, skip, *operands: update(*operands)
    try:
        program = setup.compile_step()
    finally:
        step_module.lax.cond = right
    batch = config.batch
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 8192, (batch.sequences, batch.length)).astype(np.int32)
    arrays = dict.fromkeys(("tokens", "labels"), tokens)
    arrays["positions"] = np.broadcast_to(np.arange(batch.length, dtype=np.int32), tokens.shape)
    arrays |= {"segments": np.ones_like(tokens), "weights": np.ones(tokens.shape, np.float32)}
    state = setup.compile_init()(make_key(0))
    placed = place_batch(setup, arrays)
    for _ in range(2):
        state, metrics = program(state, placed)
    jax.block_until_ready(metrics)
    return [program, state, placed]


def measure(programs: dict[str, list[Any]], rounds: int, steps: int) -> dict[str, list[float]]:
    import jax

    seconds: dict[str, list[float]] = {part: [] for part in programs}
    order = list(programs)
    for _ in range(rounds):
        for part in order:
            program, state, batch = programs[part]
            start = time.process_time()
            for _ in range(steps):
                state, metrics = program(state, batch)
                jax.block_until_ready(metrics)
            seconds[part].append((time.process_time() - start) / steps)
            programs[part][1] = state
        order = order[1:] + order[:1]
    return seconds


if __name__ == "__main__":
    main()
