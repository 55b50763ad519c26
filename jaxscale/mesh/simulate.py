"""Simulated devices: the same command runs on a laptop, whose CPU is split into as many as the mesh needs."""

import os
import re

from jaxscale.config import MeshConfig
from jaxscale.mesh.mesh import count_asked

_COUNT_FLAG = "xla_force_host_platform_device_count"

# The CPU backend ends the process when one simulated device is late to a collective (after 40 s by
# default), which two busy cores reach easily while nothing is wrong.
_PATIENCE_FLAGS = {
    "xla_cpu_collective_call_warn_stuck_timeout_seconds": 600,
    "xla_cpu_collective_call_terminate_timeout_seconds": 1800,
    "xla_cpu_collective_timeout_seconds": 1800,
}


def simulate_devices(mesh: MeshConfig) -> None:
    """Makes the CPU backend show as many devices as the mesh needs; other XLA_FLAGS are kept.

    Has to run before JAX starts a backend, and does nothing to accelerators. A count that the user set in
    XLA_FLAGS stands; an axis of -1 then takes what is left of it.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    wanted = {_COUNT_FLAG: count_asked(mesh)} | _PATIENCE_FLAGS
    added = [f"--{name}={value}" for name, value in wanted.items() if not _has_flag(flags, name)]
    os.environ["XLA_FLAGS"] = " ".join([flags, *added]).strip()


def _has_flag(flags: str, name: str) -> bool:
    return re.search(rf"(^|\s)--{name}(=|\s|$)", flags) is not None
