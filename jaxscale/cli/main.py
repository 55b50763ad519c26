"""`jaxscale COMMAND ...`: parses arguments, says what the user can mend, returns the exit code.

Exit codes: 0 done; 2 the user can mend it (a message, no traceback); 3 training stopped because numbers went
bad; 75 stopped on request with everything saved, run again to go on.
"""

import argparse
import importlib
import sys
from collections.abc import Sequence
from types import ModuleType

import jaxscale
from jaxscale.config.errors import UserError

# Each command is a module of this package with `add_arguments(parser)`, `run(args) -> exit code` and a
# docstring. Modules import JAX and the rest only when they run, so that mistakes are answered at once.
COMMANDS = ("train", "generate", "eval")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; the return value is the exit code."""
    parser = argparse.ArgumentParser(
        prog="jaxscale", description="Train large models in JAX by declaring where tensors live."
    )
    parser.add_argument("--version", action="version", version=f"jaxscale {jaxscale.__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    modules: dict[str, ModuleType] = {}
    for name in COMMANDS:
        modules[name] = importlib.import_module(f"jaxscale.cli.{name}")
        summary = (modules[name].__doc__ or "").splitlines()[0].rstrip(".")
        modules[name].add_arguments(
            subparsers.add_parser(name, help=summary, description=modules[name].__doc__)
        )
    args = parser.parse_args(argv)
    try:
        return modules[args.command].run(args)
    except UserError as error:
        print(f"jaxscale: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
