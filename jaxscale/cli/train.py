"""Run a configuration; continues where its run directory left off.

A signal (SIGTERM, Ctrl-C) finishes the step, saves, and exits with 75; a second one ends at once.
"""

import argparse
import json
import signal
from collections.abc import Callable
from dataclasses import asdict
from types import FrameType


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", help="YAML file, such as configs/tiny.yaml")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="such as mesh.fsdp=4 steps=1000")
    parser.add_argument("--json", action="store_true", help="print the result as JSON, and nothing else")


def run(args: argparse.Namespace) -> int:
    from jaxscale.cli.devices import prepare_devices
    from jaxscale.config import load_config

    config = load_config(args.config, args.overrides)
    note = prepare_devices(config.mesh)

    from jaxscale.metrics import open_console
    from jaxscale.training.loop import train

    console = None if args.json else open_console()
    if console is not None and note:
        console.note(note)
    result = train(config, console, is_stop_requested=_listen_for_signals())
    if args.json:
        print(
            json.dumps(
                {
                    "outcome": result.outcome.name.lower(),
                    "run_dir": str(result.run_dir.path),
                    "step": result.step,
                    "first_eval": asdict(result.first_eval) if result.first_eval else None,
                    "last_eval": asdict(result.last_eval) if result.last_eval else None,
                }
            )
        )
    return int(result.outcome)


def _listen_for_signals() -> Callable[[], bool]:
    """Notes the first SIGTERM or SIGINT, and gives the second its usual, immediate effect."""
    heard: list[int] = []

    def note_signal(number: int, _: FrameType | None) -> None:
        heard.append(number)
        signal.signal(number, signal.SIG_DFL)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, note_signal)
    return lambda: bool(heard)
