"""The device mesh: five named axes, never absent, slowest wire first."""

import math
from collections.abc import Sequence
from dataclasses import fields

import jax
from jax.sharding import AxisType, Mesh

from jaxscale.config import MeshConfig, UserError

AXES = ("pipe", "data", "fsdp", "expert", "tensor")
BATCH_AXES = ("data", "fsdp", "expert")  # the axes a batch lies over


def axis_sizes(mesh: MeshConfig) -> dict[str, int]:
    return {item.name: getattr(mesh, item.name) for item in fields(mesh)}


def count_asked(mesh: MeshConfig) -> int:
    """Devices that a mesh asks for; an axis of -1 counts as one."""
    return math.prod(abs(size) for size in axis_sizes(mesh).values()) or 1


def resolve_mesh(asked: MeshConfig, device_count: int) -> MeshConfig:
    """Fills in the one axis that may be -1 and checks that the product is the number of devices.

    Raises:
      UserError: an axis is 0, two are -1, the product does not match, or an axis has nothing behind it yet.
    """
    sizes = axis_sizes(asked)
    shown = " ".join(f"{name}={size}" for name, size in sizes.items())
    if zeros := [name for name, size in sizes.items() if size == 0]:
        raise UserError(
            f"mesh.{zeros[0]} is 0: an axis has at least one device, or is -1 for all that are left"
        )
    open_axes = [name for name, size in sizes.items() if size == -1]
    if len(open_axes) > 1:
        raise UserError(f"mesh {shown}: {' and '.join(open_axes)} are -1, at most one axis may be")
    known = math.prod(size for size in sizes.values() if size != -1)
    if open_axes:
        if device_count % known:
            raise UserError(
                f"mesh {shown}: {open_axes[0]} is -1 but the {device_count} device(s) found do not divide "
                f"by the other axes' product {known} ({device_count} % {known} = {device_count % known}); "
                f"choose axes whose product divides {device_count}"
            )
        sizes[open_axes[0]] = device_count // known
    elif known != device_count:
        raise UserError(
            f"mesh {shown}: the product of the axes is {known}, but {device_count} device(s) were found; "
            f"make the product {device_count}, or set one axis to -1"
        )
    if sizes["pipe"] > 1:
        raise UserError(
            f"mesh.pipe is {sizes['pipe']}: this version has no pipeline schedules; set mesh.pipe=1 and lay "
            "the devices over fsdp or tensor"
        )
    return MeshConfig(**sizes)


def make_mesh(resolved: MeshConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh over all devices (or those given), every axis Auto.

    `jax.make_mesh` makes Explicit axes by default, under which a sharding constraint only asserts.
    """
    sizes = axis_sizes(resolved)
    return jax.make_mesh(
        tuple(sizes[axis] for axis in AXES), AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=devices
    )
