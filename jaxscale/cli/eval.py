"""Loss of a run's newest checkpoint on its validation text.

The mean is exact over the counted tokens: every sequence counts once, whatever the batch.
"""

import argparse
import json
import math


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", help="folder of a run")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="such as mesh.fsdp=4")
    parser.add_argument("--step", type=int, help="checkpoint to evaluate (default: the newest)")
    parser.add_argument("--sequences", type=int, help="validation sequences (default: all)")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def run(args: argparse.Namespace) -> int:
    from jaxscale.cli.devices import prepare_devices
    from jaxscale.config import UserError, check_same_mathematics, load_config
    from jaxscale.training.run_dir import open_run, open_run_data

    if args.sequences is not None and args.sequences < 1:
        raise UserError(f"--sequences {args.sequences}: at least one sequence is evaluated")
    run_dir, saved = open_run(args.run_dir)
    config = load_config(run_dir.config, args.overrides)
    check_same_mathematics(saved, config)
    prepare_devices(config.mesh)

    from jaxscale.training.loop import evaluate
    from jaxscale.training.setup import find_mesh, make_setup
    from jaxscale.training.weights import forget_optimizer, load_params

    config, mesh = find_mesh(config)
    data = open_run_data(config, run_dir)
    if not len(data.validation):
        raise UserError("data.validation_fraction=0: this run has no validation text to evaluate on")
    setup = make_setup(forget_optimizer(config), mesh, data.vocab)
    step, params, routers = load_params(run_dir, setup, args.step)
    count = args.sequences or len(data.validation)
    loss_sum, counted = evaluate(setup, data, setup.compile_evaluation(), params, routers, count)
    loss = loss_sum / max(counted, 1.0)
    result = {
        "step": step,
        "loss": loss,
        "perplexity": math.exp(min(loss, 700.0)),
        "counted_tokens": round(counted),
    }
    if args.json:
        print(json.dumps(result))
    else:
        for name, value in result.items():
            shown = f"{value:.4f}" if isinstance(value, float) else f"{value:,}"
            print(f"{name.replace('_', ' '):<15} {shown}")
    return 0
