"""The device mesh, real or simulated."""

from jaxscale.mesh.mesh import AXES, BATCH_AXES, axis_sizes, count_asked, make_mesh, resolve_mesh
from jaxscale.mesh.simulate import simulate_devices

__all__ = ["AXES", "BATCH_AXES", "axis_sizes", "count_asked", "make_mesh", "resolve_mesh", "simulate_devices"]
