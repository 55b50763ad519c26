"""Meshes of chips that are not here: their compilers run on any Linux machine, the chips are only described.

Needs the packages that `scripts/install_chip_compilers` installs, on PYTHONPATH, and the environment
`TPU_SKIP_MDS_QUERY=1 ALLOW_MULTIPLE_LIBTPU_LOAD=1 JAX_PLATFORMS=cpu`.
"""

import importlib.util
from pathlib import Path

import jax
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh

AXES = ("pipe", "data", "fsdp", "expert", "tensor")

_H100_TARGET_CONFIG = Path(__file__).with_name("h100_target_config.txtpb")


def describe_tpu(chips: str, **axis_sizes: int) -> Mesh:
    """A mesh of described TPUs, as `describe_tpu("v5p:2x2x2", data=2, tensor=4)`; other axes have size 1."""
    _require("libtpu")
    topology = topologies.get_topology_desc(platform="tpu", topology_name=chips)
    return _make_mesh(topology.devices, axis_sizes)


def describe_gpu(count: int, *, nodes: int = 1, **axis_sizes: int) -> Mesh:
    """A mesh of described H100s, `count` a node, as `describe_gpu(8, data=2, tensor=4)`."""
    _require("jax_cuda13_plugin")
    topology = topologies.get_topology_desc(
        platform="cuda",
        topology_name="h100",
        target_config=_H100_TARGET_CONFIG.read_text(),
        topology=f"1x{nodes}x{count}",
    )
    return _make_mesh(topology.devices, axis_sizes)


def _make_mesh(devices: list[jax.Device], axis_sizes: dict[str, int]) -> Mesh:
    unknown = set(axis_sizes) - set(AXES)
    assert not unknown, f"no such mesh axes: {unknown}"
    shape = tuple(axis_sizes.get(axis, 1) for axis in AXES)
    return jax.make_mesh(shape, AXES, devices=devices, axis_types=(AxisType.Auto,) * len(AXES))


def _require(module: str) -> None:
    if importlib.util.find_spec(module) is None:
        raise RuntimeError(
            f"{module} is not installed: run scripts/install_chip_compilers PYTHON FOLDER and put FOLDER on "
            "PYTHONPATH, or run scripts/test --all, which does both"
        )
