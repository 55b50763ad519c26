"""Eight simulated devices, one compilation cache, warnings as errors."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxscale.config import MeshConfig
from jaxscale.mesh import simulate_devices

simulate_devices(MeshConfig(data=8))
# Programs compiled once serve later runs of the suite; entries are keyed by program, version and flags.
CACHE = Path(
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parents[1] / ".cache" / "xla"))
)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.5")


@pytest.fixture(autouse=True, scope="session")
def _own_cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Corpora tokenised by tests stay out of the user's cache."""
    before = os.environ.get("XDG_CACHE_HOME")
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))
    yield
    if before is None:
        del os.environ["XDG_CACHE_HOME"]
    else:
        os.environ["XDG_CACHE_HOME"] = before
