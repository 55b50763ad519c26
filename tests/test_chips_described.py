"""Chips that are not here are described in the sizes that people train on, and compile."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxscale.config import UserError
from jaxscale.planning.described import describe_devices, find_compiler, list_gpu_targets
from tests.chips import describe_gpu

pytestmark = pytest.mark.chips


@pytest.mark.parametrize(
    ("chip", "topology", "devices", "kind"),
    [
        ("v4", (2, 2, 1), 8, "TPU v4"),
        ("v5p", (2, 1, 1), 2, "TPU v5"),
        ("v5p", (4, 4, 4), 64, "TPU v5"),
        ("v5p", (8, 8, 8), 512, "TPU v5"),
        ("v5p", (16, 16, 16), 4096, "TPU v5"),
        ("v5e", (1, 1), 1, "TPU v5 lite"),
        ("v5e", (4, 4), 16, "TPU v5 lite"),
        ("v6e", (16, 16), 256, "TPU v6 lite"),
        ("tpu7x", (2, 2, 1), 8, "TPU7x"),
    ],
)
def test_tpus_are_described(chip, topology, devices, kind):
    described = describe_devices("tpu", chip, topology)
    assert (len(described), described[0].device_kind, described[0].platform) == (devices, kind, "tpu")


@pytest.mark.parametrize(("chip", "topology"), [("v9", (2, 2)), ("v5p", (3, 4, 4)), ("v5e", (4,))])
def test_tpus_that_do_not_exist_are_refused(chip, topology):
    with pytest.raises(UserError, match="the TPU compiler knows no such chips"):
        describe_devices("tpu", chip, topology)


@pytest.mark.parametrize("chip", list_gpu_targets())
def test_every_gpu_compiles_a_sharded_matmul_over_1024(chip):
    mesh = describe_gpu(8, nodes=128, chip=chip, fsdp=128, tensor=8)
    assert mesh.devices.flat[0].device_kind.startswith(f"NVIDIA {chip.upper()}")

    def array(spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16, sharding=NamedSharding(mesh, spec))

    lowered = jax.jit(lambda x, w: x @ w).lower(
        array(PartitionSpec("fsdp", "tensor")), array(PartitionSpec("tensor", None))
    )
    assert "all-reduce" in lowered.compile().as_text()


def test_compilers_are_named_with_their_versions():
    assert (find_compiler("tpu") or "").startswith("libtpu ")
    assert "nvidia-cudnn-cu13" in (find_compiler("gpu") or "")
