"""`jaxscale COMMAND ...`: parses arguments, says what the user can mend, returns the exit code.

Exit codes: 0 done; 1 `verify` found a difference; 2 the user can mend it (a message, no traceback);
3 training stopped because numbers went bad; 75 stopped on request with everything saved, run again to go on.
"""

import argparse
import importlib
import sys
from collections.abc import Mapping, Sequence
from types import ModuleType

import jaxscale
from jaxscale.config.errors import UserError

# Each command is a module of this package with `add_arguments(parser)`, `run(args) -> exit code` and a
# docstring. Modules import JAX and the rest only when they run, so that mistakes are answered at once.
COMMANDS = ("train", "inspect", "verify", "generate", "eval")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; the return value is the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    modules = {name: importlib.import_module(f"jaxscale.cli.{name}") for name in COMMANDS}
    name = _make_parser(modules).parse_args(words[:1]).command
    parser = argparse.ArgumentParser(prog=f"jaxscale {name}", description=modules[name].__doc__)
    modules[name].add_arguments(parser)
    # Intermixed, so that key=value may also follow an option; subparsers cannot do that.
    args = parser.parse_intermixed_args(words[1:])
    try:
        return modules[name].run(args)
    except UserError as error:
        print(f"jaxscale: {error}", file=sys.stderr)
        return 2


def _make_parser(modules: Mapping[str, ModuleType]) -> argparse.ArgumentParser:
    """Knows the commands and their summaries, not their arguments."""
    parser = argparse.ArgumentParser(
        prog="jaxscale", description="Train large models in JAX by declaring where tensors live."
    )
    parser.add_argument("--version", action="version", version=f"jaxscale {jaxscale.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, module in modules.items():
        commands.add_parser(name, help=(module.__doc__ or "").splitlines()[0].rstrip("."), add_help=False)
    return parser


if __name__ == "__main__":
    sys.exit(main())
