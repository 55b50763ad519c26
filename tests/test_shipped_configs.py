"""No false alarm: what is shipped passes `verify` and gives `inspect` nothing to warn of."""

from pathlib import Path

import pytest

from jaxscale.config import load_config
from jaxscale.data.dataset import find_vocab
from jaxscale.inspection.inspect import inspect_setup
from jaxscale.training.setup import find_mesh, make_setup
from jaxscale.verify import verify_model

CONFIGS = sorted((Path(__file__).parents[1] / "configs").glob("*.yaml"))
# On the eight devices of the test process; the meshes that the files name have up to 1,024.
MESHES = (
    {"fsdp": 8},
    {"fsdp": 2, "tensor": 4},
    {"data": 2, "fsdp": 2, "tensor": 2},
    {"fsdp": 2, "expert": 4},
)


@pytest.mark.full
@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_shipped_configuration_reduced_passes_verify(path: Path) -> None:
    verification = verify_model(load_config(path), reduce=True)
    failed = [result for result in verification.results if not result.ok]
    assert verification.ok, failed
    worst = max(result.grad_error for result in verification.results)
    print(f"{path.stem}: {len(verification.results)} cases, worst gradient {worst:.1e}")


@pytest.mark.full
@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_shipped_configuration_gives_inspect_nothing_to_warn_of(path: Path, mesh: dict[str, int]) -> None:
    sizes = {"pipe": 1, "data": 1, "fsdp": 1, "expert": 1, "tensor": 1} | mesh
    overrides = [f"mesh.{axis}={size}" for axis, size in sizes.items()]
    config, device_mesh = find_mesh(load_config(path, overrides))
    inspection = inspect_setup(make_setup(config, device_mesh, find_vocab(config)))
    assert inspection.errors == ()
    said = [warning for warning in inspection.warnings if "no collective travels in" not in warning]
    assert said == []
    assert inspection.collectives
