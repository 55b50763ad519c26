"""The mesh: sizes that fit the devices, and simulated devices where there are no others."""

import os
import re
import subprocess
import sys

import jax
import pytest
from jax.sharding import AxisType

from jaxscale.config import MeshConfig, UserError
from jaxscale.mesh import AXES, BATCH_AXES, axis_sizes, make_mesh, resolve_mesh, simulate_devices

pytestmark = pytest.mark.smoke


def _refusal(asked: MeshConfig, device_count: int = 8) -> str:
    with pytest.raises(UserError) as caught:
        resolve_mesh(asked, device_count)
    return str(caught.value)


def test_axes_are_those_of_the_configuration_slowest_wire_first():
    assert tuple(axis_sizes(MeshConfig())) == AXES == ("pipe", "data", "fsdp", "expert", "tensor")
    assert set(BATCH_AXES) < set(AXES)


@pytest.mark.parametrize(
    ("asked", "devices", "resolved"),
    [
        (MeshConfig(), 1, MeshConfig()),
        (MeshConfig(data=2, fsdp=2, tensor=2), 8, MeshConfig(data=2, fsdp=2, tensor=2)),
        (MeshConfig(data=-1), 8, MeshConfig(data=8)),
        (MeshConfig(fsdp=-1, tensor=2), 8, MeshConfig(fsdp=4, tensor=2)),
        (MeshConfig(fsdp=-1, tensor=8), 8, MeshConfig(fsdp=1, tensor=8)),
        (MeshConfig(expert=3, tensor=-1), 12, MeshConfig(expert=3, tensor=4)),
    ],
)
def test_an_open_axis_takes_what_the_others_leave(asked, devices, resolved):
    assert resolve_mesh(asked, devices) == resolved


def test_a_product_that_is_not_the_number_of_devices_is_refused_with_axes_product_and_number():
    message = _refusal(MeshConfig(data=4, tensor=4))
    assert "data=4" in message
    assert "tensor=4" in message
    assert "product of the axes is 16" in message
    assert "8 device(s) were found" in message
    assert "make the product 8, or set one axis to -1" in message


def test_fewer_than_all_devices_are_refused_too():
    assert "product of the axes is 4, but 8 device(s)" in _refusal(MeshConfig(data=4))


def test_two_open_axes_are_refused_by_name():
    message = _refusal(MeshConfig(data=-1, tensor=-1))
    assert "data and tensor are -1, at most one axis may be" in message


def test_an_open_axis_that_nothing_whole_is_left_for_is_refused_with_the_remainder():
    message = _refusal(MeshConfig(data=-1, tensor=3))
    assert "data is -1" in message
    assert "8 % 3 = 2" in message
    assert "choose axes whose product divides 8" in message


@pytest.mark.parametrize("axis", AXES)
def test_an_axis_of_no_devices_is_refused_by_name(axis):
    assert _refusal(MeshConfig(**{axis: 0})).startswith(f"mesh.{axis} is 0: ")


def test_a_pipeline_is_refused_as_long_as_there_is_no_schedule_for_it():
    assert "mesh.pipe is 2" in _refusal(MeshConfig(pipe=2, data=4))


def test_every_axis_of_a_mesh_is_there_and_automatic():
    mesh = make_mesh(MeshConfig(data=2, tensor=4))
    assert dict(mesh.shape) == {"pipe": 1, "data": 2, "fsdp": 1, "expert": 1, "tensor": 4}
    assert mesh.axis_types == (AxisType.Auto,) * len(AXES)
    assert mesh.devices.size == jax.device_count() == 8


def test_a_mesh_can_take_fewer_devices_than_there_are():
    mesh = make_mesh(MeshConfig(tensor=2), jax.devices()[:2])
    assert list(mesh.devices.flat) == jax.devices()[:2]


# Simulated devices

COUNT = "--xla_force_host_platform_device_count"


def _flags_after(monkeypatch: pytest.MonkeyPatch, before: str | None, mesh: MeshConfig) -> list[str]:
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    if before is not None:
        monkeypatch.setenv("XLA_FLAGS", before)
    simulate_devices(mesh)
    return os.environ["XLA_FLAGS"].split()


def test_as_many_devices_are_simulated_as_the_mesh_needs(monkeypatch):
    assert f"{COUNT}=8" in _flags_after(monkeypatch, None, MeshConfig(data=2, fsdp=2, tensor=2))


def test_an_open_axis_asks_for_no_more_devices(monkeypatch):
    assert f"{COUNT}=4" in _flags_after(monkeypatch, None, MeshConfig(data=-1, tensor=4))


def test_other_flags_are_kept(monkeypatch):
    before = "--xla_cpu_enable_fast_math=false --xla_dump_to=folder"
    flags = _flags_after(monkeypatch, before, MeshConfig(data=2))
    assert flags[:2] == before.split()
    assert f"{COUNT}=2" in flags


def test_a_count_of_the_user_stands(monkeypatch):
    flags = _flags_after(monkeypatch, f"{COUNT}=16", MeshConfig(data=-1))
    assert [flag for flag in flags if flag.startswith(COUNT)] == [f"{COUNT}=16"]


def test_a_flag_with_a_longer_name_is_no_count_of_the_user(monkeypatch):
    flags = _flags_after(monkeypatch, f"{COUNT}_more=16", MeshConfig(data=2))
    assert f"{COUNT}=2" in flags


def test_a_patience_of_the_user_stands(monkeypatch):
    flag = "--xla_cpu_collective_call_terminate_timeout_seconds"
    flags = _flags_after(monkeypatch, f"{flag}=5", MeshConfig(data=2))
    assert [each for each in flags if each.startswith(flag)] == [f"{flag}=5"]


def test_simulating_twice_changes_nothing_more(monkeypatch):
    once = _flags_after(monkeypatch, None, MeshConfig(data=2))
    simulate_devices(MeshConfig(data=4))
    assert os.environ["XLA_FLAGS"].split() == once


def test_a_plain_shell_gets_the_devices_and_jax_knows_every_flag():
    """In a process of its own, as a backend reads the flags once; XLA ends a process at an unknown flag."""
    code = (
        "from jaxscale.config import MeshConfig\n"
        "from jaxscale.mesh import simulate_devices\n"
        "simulate_devices(MeshConfig(data=3, tensor=2))\n"
        "import jax\n"
        "print('devices', jax.device_count('cpu'))\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    shown = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300, check=True
    )
    assert re.search(r"^devices 6$", shown.stdout, re.MULTILINE)
