"""Text that a run's newest checkpoint writes after a prompt."""

import argparse
import json
import sys


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", help="folder of a run")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="mesh.tensor=N: over N devices")
    parser.add_argument("--prompt", required=True, help="text to continue")
    parser.add_argument("--tokens", type=int, default=200, help="most tokens to write (default 200)")
    parser.add_argument(
        "--temperature", type=float, default=0.8, help="0: always the likeliest (default 0.8)"
    )
    parser.add_argument("--top-k", type=int, help="draw among so many likeliest tokens only")
    parser.add_argument("--seed", type=int, default=0, help="seed of the draws (default 0)")
    parser.add_argument("--step", type=int, help="checkpoint to use (default: the newest)")
    parser.add_argument("--json", action="store_true", help="print prompt, text and step as JSON")


def run(args: argparse.Namespace) -> int:
    from jaxscale.cli.devices import prepare_devices
    from jaxscale.config import MeshConfig, ModelConfig, UserError, load_config
    from jaxscale.training.run_dir import open_run

    _check_arguments(args)
    run_dir, _ = open_run(args.run_dir)
    config = load_config(run_dir.config, [*_one_device(), *args.overrides])
    if config.mesh != MeshConfig(tensor=config.mesh.tensor):
        raise UserError(f"{' '.join(args.overrides)}: one text is generated over mesh.tensor only")
    if not isinstance(config.model, ModelConfig):
        raise UserError(f"{args.run_dir} holds a model of your own; generate knows our decoders only")
    prepare_devices(config.mesh)

    import jax

    from jaxscale.data.tokenizer import load_tokenizer
    from jaxscale.mesh import make_mesh
    from jaxscale.models.build import split_decoder
    from jaxscale.models.model import NO_INPUTS
    from jaxscale.models.sampling import sample_tokens
    from jaxscale.numerics.draw import make_key
    from jaxscale.training.routers import make_inputs
    from jaxscale.training.setup import make_setup
    from jaxscale.training.weights import forget_optimizer, load_params

    tokenizer = load_tokenizer(run_dir.tokenizer)
    if tokenizer is None:
        raise UserError(f"{run_dir.tokenizer} holds no tokenizer; train the run first")
    prompt = tokenizer.encode(args.prompt)
    mesh = make_mesh(config.mesh, jax.devices()[: config.mesh.tensor])
    setup = make_setup(forget_optimizer(config), mesh, config.model.vocab or tokenizer.vocab_size)
    assert setup.shape is not None
    if config.model.family == "gpt2" and len(prompt) + args.tokens > setup.shape.positions:
        raise UserError(
            f"the prompt's {len(prompt)} tokens and --tokens {args.tokens} are more than the "
            f"{setup.shape.positions} positions this model has learned; lower --tokens"
        )
    step, params, routers = load_params(run_dir, setup, args.step)
    with jax.set_mesh(mesh):
        tokens = sample_tokens(
            split_decoder(setup.shape)[0],
            params,
            prompt,
            count=args.tokens,
            temperature=args.temperature,
            top_k=args.top_k,
            key=make_key(args.seed),
            end_id=tokenizer.end_id,
            routers=make_inputs(setup.model.routers, routers) or NO_INPUTS,
        )
        if args.json:
            print(json.dumps({"step": step, "prompt": args.prompt, "text": tokenizer.decode(list(tokens))}))
            return 0
        sys.stdout.write(args.prompt)
        written = ""
        ids: list[int] = []
        for token in tokens:
            ids.append(token)
            text = tokenizer.decode(ids).rstrip("\ufffd")  # a character whose bytes are not all there yet
            sys.stdout.write(text[len(written) :])
            sys.stdout.flush()
            written = text
    print()
    return 0


def _check_arguments(args: argparse.Namespace) -> None:
    from jaxscale.config import UserError

    if not args.prompt:
        raise UserError("--prompt is empty; give at least one character to continue")
    if args.tokens < 1:
        raise UserError(f"--tokens {args.tokens}: at least one token is written")
    if args.temperature < 0:
        raise UserError(f"--temperature {args.temperature}: is 0 or more")
    if args.top_k is not None and args.top_k < 1:
        raise UserError(f"--top-k {args.top_k}: is 1 or more")
    if args.seed < 0:
        raise UserError(f"--seed {args.seed}: is 0 or more")


def _one_device() -> list[str]:
    return [f"mesh.{axis}=1" for axis in ("pipe", "data", "fsdp", "expert", "tensor")]
