"""The shape of the code: imports go down the floors, files stay small, one place runs the loop."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "jaxscale"

FLOORS = {
    "config": 0,
    "mesh": 0,
    "disk": 0,
    "sharding": 1,
    "metrics": 1,
    "parallel": 2,
    "numerics": 2,
    "models": 3,
    "data": 3,
    "checkpoint": 3,
    "training": 4,
    "compression": 4,
    "planning": 5,
    "report": 5,
    "inspection": 5,
    "verify": 5,
    "cli": 6,
}
NEIGHBOURS = {("mesh", "config")}  # the one import between two packages of a floor
MOST_LINES = 420

SOURCES = sorted(PACKAGE.rglob("*.py"))


def _imports(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, full name) of everything a module imports, wherever in it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            name = "." * node.level + (node.module or "")
            yield from ((node.lineno, f"{name}.{alias.name}") for alias in node.names)


def _find_faults(package: str, source: str) -> list[str]:
    """What a module of a package may not import, as `line: name, reason`."""
    faults = []
    for line, name in _imports(ast.parse(source)):
        parts = name.split(".")
        if name == "jaxscale" and package == "cli":
            continue  # the package's face, which only the top floor may look at
        if name.startswith("."):
            faults.append(f"{line}: {name}, a relative import hides its floor")
        elif parts[0] == "jaxscale" and parts[1:2] != [package]:
            other = parts[1] if len(parts) > 1 else ""
            if other not in FLOORS:
                faults.append(f"{line}: {name}, no package of the floors")
            elif FLOORS[other] >= FLOORS[package] and (package, other) not in NEIGHBOURS:
                faults.append(f"{line}: {name}, floor {FLOORS[other]} from floor {FLOORS[package]}")
        if name.startswith("jaxscale.training.loop") and package != "cli":
            faults.append(f"{line}: {name}, the loop is for commands")
    return faults


def test_every_package_has_a_floor():
    folders = {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert folders <= set(FLOORS)
    assert len(SOURCES) > 30


@pytest.mark.parametrize("package", FLOORS)
def test_imports_go_down_the_floors_only_and_nothing_but_commands_imports_the_loop(package):
    faults = [
        f"{path.relative_to(ROOT)}:{fault}"
        for path in sorted((PACKAGE / package).rglob("*.py"))
        for fault in _find_faults(package, path.read_text(encoding="utf-8"))
    ]
    assert faults == []


@pytest.mark.parametrize(
    ("package", "source", "fault"),
    [
        ("config", "from jaxscale.mesh import AXES", "floor 0 from floor 0"),
        ("sharding", "import jaxscale.metrics", "floor 1 from floor 1"),
        ("models", "def f():\n    from jaxscale.training.state import TrainState", "floor 4 from floor 3"),
        ("models", "from jaxscale import training", "floor 4 from floor 3"),
        ("models", "from ..training import state", "a relative import"),
        ("models", "from jaxscale.helpers import f", "no package of the floors"),
        ("training", "import jaxscale", "no package of the floors"),
        ("verify", "from jaxscale.training.loop import train", "the loop is for commands"),
    ],
)
def test_an_import_upwards_is_found(package, source, fault):
    assert fault in " ".join(_find_faults(package, source))


@pytest.mark.parametrize(
    ("package", "source"),
    [
        ("mesh", "from jaxscale.config import MeshConfig"),
        ("models", "from jaxscale.models.attention import attend\nimport jax"),
        ("cli", "from jaxscale.training.loop import train"),
    ],
)
def test_an_import_downwards_passes(package, source):
    assert _find_faults(package, source) == []


def test_no_file_is_long():
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in SOURCES}
    long = {str(path.relative_to(ROOT)): length for path, length in lengths.items() if length > MOST_LINES}
    assert long == {}


def test_no_file_is_a_drawer_for_everything():
    names = {path.stem for path in SOURCES}
    assert not names & {"utils", "util", "helpers", "common", "misc"}
