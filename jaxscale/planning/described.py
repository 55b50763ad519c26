"""Devices of chips that are not here: their real compilers run on any Linux machine.

TPU: `libtpu` compiles for a topology that it is told by name. GPU: XLA's CUDA plugin compiles for a card of
which a text holds the numbers (`targets/*.txtpb`), without a driver and without CUDA's libraries; of NVIDIA's
own only cuDNN is needed, which makes the attention kernel. No array can be made on such devices: programs are
lowered from abstract shapes.
"""

import importlib.metadata
import importlib.util
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import jax
from jax.experimental import topologies

from jaxscale.config import UserError

ChipPlatform = Literal["tpu", "gpu"]

_TARGETS = Path(__file__).with_name("targets")

# What each platform's compiler is made of: what Python imports, and what the package is called.
_COMPILERS = {
    "tpu": {"libtpu": "libtpu"},
    "gpu": {"jax_cuda13_plugin": "jax-cuda13-plugin", "nvidia.cudnn": "nvidia-cudnn-cu13"},
}

_ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    # Of the machine that libtpu takes itself to be on; what it compiles for is told by the topology.
    "TPU_ACCELERATOR_TYPE": "v5p-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
}

# Chips that share a host, by which libtpu cuts a topology into processes: 2x2 on every TPU from v4 on.
_HOST_BOUNDS = (2, 2, 1)


def prepare_description() -> None:
    """Sets what libtpu and JAX read from the environment. Call before JAX starts a backend.

    Without it JAX looks for chips on this machine, libtpu asks for a cloud machine's metadata and prints that
    there are none, and its lock file stops every second process. What the user has set stands.
    """
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if os.environ["JAX_PLATFORMS"] == "cpu":
        jax.config.update("jax_platforms", "cpu")  # JAX has read the variable when it was imported
    # The CUDA compiler writes programs to JAX's cache that it cannot read back, with a warning for each.
    jax.config.update("jax_enable_compilation_cache", False)


def find_compiler(platform: ChipPlatform) -> str | None:
    """The installed compiler of a platform, such as `libtpu 0.0.42.1`; None where a part of it is missing."""
    if _list_missing(platform):
        return None
    packages = _COMPILERS[platform].values()
    return ", ".join(f"{package} {importlib.metadata.version(package)}" for package in packages)


def _list_missing(platform: ChipPlatform) -> list[str]:
    return [package for module, package in _COMPILERS[platform].items() if not _is_installed(module)]


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # not even the package around it
        return False


def list_gpu_targets() -> tuple[str, ...]:
    """GPUs that can be described by name."""
    return tuple(sorted(path.stem for path in _TARGETS.glob("*.txtpb")))


def describe_devices(platform: ChipPlatform, chip: str, topology: Sequence[int]) -> list[jax.Device]:
    """Devices to make a mesh of; a chip is one device, on TPU v4 and TPU7x two.

    Args:
      chip: of TPUs libtpu's name, such as `v5e`, `v5p`, `v6e`; of GPUs one of `list_gpu_targets()`.
      topology: of TPUs the chips along each dim of the torus, as (4, 4, 4) or (16, 16); of GPUs (nodes, chips
        a node).

    Raises:
      UserError: the platform's compiler is not installed, or knows no such chip or topology.
    """
    if missing := _list_missing(platform):
        raise UserError(
            f"{chip}: compiling for a {platform.upper()} that is not here needs {' and '.join(missing)}, not "
            f"installed; get what is missing with pip install 'jaxscale[plan-{platform}]'"
        )
    sizes = "x".join(str(size) for size in topology)
    if not topology or min(topology) < 1:
        raise UserError(f"{chip}:{sizes}: every size of a topology is at least 1")
    return _describe_tpus(chip, topology) if platform == "tpu" else _describe_gpus(chip, topology)


def _describe_tpus(chip: str, topology: Sequence[int]) -> list[jax.Device]:
    name = f"{chip}:{'x'.join(str(size) for size in topology)}"
    # Fewer chips than a host has are described as one host of just these.
    padded = (*topology, 1, 1)[: len(_HOST_BOUNDS)]
    bounds = [min(bound, size) for bound, size in zip(_HOST_BOUNDS, padded, strict=True)]
    try:
        return topologies.get_topology_desc(
            platform="tpu", topology_name=name, chips_per_host_bounds=bounds
        ).devices
    except jax.errors.JaxRuntimeError as error:
        raise UserError(
            f"{name}: the TPU compiler knows no such chips ({_say_shortly(error)}); name a chip such as v5e, "
            "v5p or v6e, with sizes along the first two dims that are 1 or even"
        ) from None


def _describe_gpus(chip: str, topology: Sequence[int]) -> list[jax.Device]:
    known = list_gpu_targets()
    if chip not in known:
        raise UserError(f"{chip}: no GPU of this name is described; known are {', '.join(known)}")
    if len(topology) != 2:
        sizes = "x".join(str(size) for size in topology)
        raise UserError(f"{chip}:{sizes}: GPUs are NODESxCHIPS, two sizes, such as {chip}:2x8")
    nodes, chips = topology
    devices = topologies.get_topology_desc(
        platform="cuda",
        topology_name=chip,
        target_config=(_TARGETS / f"{chip}.txtpb").read_text(encoding="utf-8"),
        topology=f"1x{nodes}x{chips}",
    ).devices
    assert len(devices) == math.prod(topology)
    return devices


def _say_shortly(error: Exception) -> str:
    return str(error).splitlines()[0]
