"""What lies where, in bytes, and what the compiled step sends over which mesh axis.

Nothing is allocated and no corpus is read. Devices that are not there are simulated; set JAX_PLATFORMS=cpu to
have them simulated where there are real ones too.
"""

import argparse
import io
import json
import os
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from jaxscale.training.setup import Setup


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", help="YAML file, such as configs/tiny.yaml")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="such as mesh.fsdp=4 zero.stage=2")
    parser.add_argument("--json", action="store_true", help="print the report as JSON, and nothing else")
    parser.add_argument("--png", type=Path, metavar="FILE", help="write a picture of the largest parameters")
    parser.add_argument(
        "--no-compile", action="store_true", help="from shapes alone: no temporaries, no collectives"
    )
    parser.add_argument(
        "--remat", action="store_true", help="only each remat policy: memory, and FLOPs computed again"
    )


def run(args: argparse.Namespace) -> int:
    from jaxscale.cli.devices import prepare_devices
    from jaxscale.config import UserError, load_config

    if args.png is not None and not args.png.parent.is_dir():  # said before the compile, not after it
        raise UserError(f"--png {args.png}: there is no folder {args.png.parent}; make it, or name another")
    config = load_config(args.config, args.overrides)
    note = prepare_devices(config.mesh)

    from jaxscale.data.dataset import find_vocab
    from jaxscale.inspection.inspect import inspect_setup
    from jaxscale.inspection.picture import choose_panels
    from jaxscale.inspection.plot import save_png
    from jaxscale.training.setup import find_mesh, make_setup

    config, mesh = find_mesh(config)
    setup = make_setup(config, mesh, find_vocab(config))
    if args.remat:
        return _compare_remat(setup, as_json=args.json)
    inspection = inspect_setup(setup, compile=not args.no_compile, progress=_show_progress)
    panels = choose_panels(inspection.leaves, inspection.mesh)
    if args.png is not None:
        save_png(args.png, panels, inspection.mesh)
    if args.json:
        print(json.dumps(inspection.to_json(), indent=2))
        return _report_errors(inspection.errors)

    from jaxscale.inspection.picture import render_picture
    from jaxscale.inspection.tables import render_tables

    console = _open_console()
    if note:
        console.print(note, style="dim")
    console.print(render_tables(inspection))
    console.print(render_picture(panels, mesh.size))
    if args.png is not None:
        console.print(f"picture: {args.png}", markup=False)
    return _report_errors(inspection.errors)


def _compare_remat(setup: "Setup", *, as_json: bool) -> int:
    from jaxscale.inspection.remat import compare_remat, render_remat

    reports = compare_remat(setup, _show_progress)
    if as_json:
        print(json.dumps([report.to_json() for report in reports], indent=2))
    else:
        _open_console().print(render_remat(reports, setup.platform))
    return 0


def _open_console() -> "Console":
    from rich.console import Console

    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that knows no line drawing
    return Console(highlight=False, width=_choose_width())


def _report_errors(errors: Sequence[str]) -> int:
    for error in errors:
        print(f"jaxscale: {error}; constrain it over axes that divide it", file=sys.stderr)
    return 2 if errors else 0


def _choose_width() -> int | None:
    """Wide enough for the tables where there is no terminal to ask; None asks it."""
    return None if sys.stdout.isatty() or "COLUMNS" in os.environ else 120


def _show_progress(line: str) -> AbstractContextManager[object]:
    if not sys.stderr.isatty():
        return nullcontext()
    from rich.console import Console

    return Console(stderr=True).status(line)
