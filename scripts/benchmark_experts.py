"""A step with experts against a dense one of as many active parameters, in CPU-seconds.

    python scripts/benchmark_experts.py [--rounds 9] [--steps 2] [--exchanges capacity dropless]

Compiles on 8 simulated devices (expert=4 fsdp=2) a dense decoder with an MLP of 1024 channels, and one with 8
experts of 512 of which a token takes two, capacity 1.25; runs them in turn, a few steps each and in an order
that turns round, and prints the medians and the ratios to the dense one, each of one round. The shape is that
of the peers' figures in docs/benchmarks.md: 4 layers, embed 256, 8 heads (4 kv), vocabulary 8192, length 128,
16 sequences, bf16 over fp32 parameters, full remat.
"""

import argparse
import statistics
import time
from typing import Any

VOCAB = 8192
TREE: dict[str, Any] = {
    "run_dir": "unused",
    "steps": 1000,
    "mesh": {"expert": 4, "fsdp": 2},
    "batch": {"sequences": 16, "microbatches": 1, "length": 128},
    "model": {"family": "llama", "layers": 4, "embed": 256, "heads": 8, "kv_heads": 4, "mlp": 1024},
    "precision": "bf16",
    "remat": "full",
}
MOE = {"experts": 8, "top_k": 2, "mlp": 512, "capacity_factor": 1.25}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--exchanges", nargs="+", default=["capacity", "dropless"])
    args = parser.parse_args()
    from jaxscale.config import parse_config
    from jaxscale.mesh import simulate_devices

    simulate_devices(parse_config(TREE, origin="benchmark").mesh)
    programs = {"dense": make_program(TREE)}
    for exchange in args.exchanges:
        programs[exchange] = make_program({**TREE, "moe": {**MOE, "exchange": exchange}})
    seconds = measure(programs, args.rounds, args.steps)
    print(f"{'':<12}{'CPU-seconds a step':>20}{'to dense':>10}   to dense in each round")
    for name, times in seconds.items():
        ratios = [a / b for a, b in zip(times, seconds["dense"], strict=True)]
        each = "  ".join(f"{ratio:.3f}" for ratio in ratios)
        print(f"{name:<12}{statistics.median(times):>20.3f}{statistics.median(ratios):>10.3f}   {each}")


def make_program(tree: dict[str, Any]) -> list[Any]:
    """[compiled step, its state, its batch], warmed up."""
    import jax
    import numpy as np

    from jaxscale.config import parse_config
    from jaxscale.numerics.draw import make_key
    from jaxscale.training.setup import find_mesh, make_setup
    from jaxscale.verify.oracle import place_batch

    config, mesh = find_mesh(parse_config(tree, origin="benchmark"))
    setup = make_setup(config, mesh, VOCAB)
    program, state = setup.compile_step(), setup.compile_init()(make_key(0))
    shape = (config.batch.sequences, config.batch.length)
    tokens = np.random.default_rng(0).integers(0, VOCAB, shape).astype(np.int32)
    arrays = dict.fromkeys(("tokens", "labels"), tokens)
    arrays["positions"] = np.broadcast_to(np.arange(config.batch.length, dtype=np.int32), shape)
    arrays |= {"segments": np.ones_like(tokens), "weights": np.ones(shape, np.float32)}
    placed = place_batch(setup, arrays)
    for _ in range(2):
        state, metrics = program(state, placed)
    jax.block_until_ready(metrics)
    return [program, state, placed]


def measure(programs: dict[str, list[Any]], rounds: int, steps: int) -> dict[str, list[float]]:
    import jax

    seconds: dict[str, list[float]] = {name: [] for name in programs}
    order = list(programs)
    for _ in range(rounds):
        for name in order:
            program, state, batch = programs[name]
            start = time.process_time()
            for _ in range(steps):
                state, metrics = program(state, batch)
                jax.block_until_ready(metrics)
            seconds[name].append((time.process_time() - start) / steps)
            programs[name][1] = state
        order = order[1:] + order[:1]
    return seconds


if __name__ == "__main__":
    main()
