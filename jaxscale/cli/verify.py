"""Compare the sharded step with one device, on every mesh that the configuration's axes allow.

Simulated devices on this machine's CPU run the programs that train compiles: meshes, ZeRO stages,
microbatches and remat policies, in fp32. Exits with 1 if a case differs.
"""

import argparse
import json
import os
import sys
from contextlib import nullcontext


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", help="YAML file, such as configs/tiny.yaml")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="such as mesh.fsdp=4")
    parser.add_argument("--json", action="store_true", help="print the result as JSON, and nothing else")
    parser.add_argument("--reduce", action="store_true", help="a small decoder of the same kind")
    parser.add_argument("--fp64", action="store_true", help="in fp64, with limits of 1e-10")
    parser.add_argument("--all", action="store_true", help="every combination of settings, not every pair")
    parser.add_argument("--devices", type=int, default=8, help="simulated devices (default: 8)")


def run(args: argparse.Namespace) -> int:
    from jaxscale.config import MeshConfig, UserError, load_config
    from jaxscale.mesh import simulate_devices

    if args.devices < 1:
        raise UserError(f"--devices {args.devices}: at least one device is simulated")
    config = load_config(args.config, args.overrides)
    os.environ["JAX_PLATFORMS"] = "cpu"
    simulate_devices(MeshConfig(data=args.devices))

    from jaxscale.verify import verify_model
    from jaxscale.verify.tables import print_verification, show_progress, word_plan

    if not args.json:
        print(f"verify simulates {args.devices} device(s) on this machine's CPU", file=sys.stderr)
    with nullcontext() if args.json else show_progress(sys.stderr) as tell:
        verification = verify_model(
            config,
            reduce=args.reduce,
            fp64=args.fp64,
            whole_product=args.all,
            device_count=args.devices,
            tell=tell,
            tell_plan=None if args.json else lambda *plan: print(word_plan(*plan), file=sys.stderr),
        )
    if args.json:
        print(json.dumps(verification.to_dict()))
    else:
        print_verification(verification, sys.stdout)
    return 0 if verification.ok else 1
