"""Meshes of chips that are not here, by the module that `jaxscale plan` describes them with.

Needs the packages that `scripts/install_chip_compilers` installs, on PYTHONPATH, and the environment
`TPU_SKIP_MDS_QUERY=1 ALLOW_MULTIPLE_LIBTPU_LOAD=1 JAX_PLATFORMS=cpu`.
"""

import jax
from jax.sharding import Mesh

from jaxscale.config import MeshConfig
from jaxscale.mesh import make_mesh
from jaxscale.planning.described import describe_devices


def describe_tpu(chips: str, **axis_sizes: int) -> Mesh:
    """A mesh of described TPUs, as `describe_tpu("v5p:2x2x2", data=2, tensor=4)`; other axes have size 1."""
    chip, _, topology = chips.partition(":")
    return _make_mesh(describe_devices("tpu", chip, [int(size) for size in topology.split("x")]), axis_sizes)


def describe_gpu(count: int, *, nodes: int = 1, chip: str = "h100", **axis_sizes: int) -> Mesh:
    """A mesh of described GPUs, `count` a node, as `describe_gpu(8, data=2, tensor=4)`."""
    return _make_mesh(describe_devices("gpu", chip, (nodes, count)), axis_sizes)


def _make_mesh(devices: list[jax.Device], axis_sizes: dict[str, int]) -> Mesh:
    return make_mesh(MeshConfig(**axis_sizes), devices)
