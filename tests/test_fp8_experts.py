"""fp8 matmuls of experts: a batch of matrices, or rows sorted by matrix; alone, and in a region on a mesh."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from jaxscale.mesh import make_mesh, resolve_mesh
from jaxscale.numerics.fp8 import E4M3, E5M2, Scales, einsum_fp8, find_amax, find_scale, quantise
from jaxscale.parallel.scales import copy_scales, scales_spec
from jaxscale.sharding.activations import run_per_shard
from tests.test_fp8 import draw, make_scales, widen
from tests.tiny import make_config

BATCHED, GROUPED = "GRD,GDF->GRF", "RD,GDF->RF"
SIZES = np.array([5, 0, 7, 3], np.int32)  # 15 of 20 rows
ROWS = 20


def run_vjp(
    equation: str, x: jax.Array, kernels: tuple[jax.Array, ...], scales: tuple[Scales, ...], **options: Any
) -> tuple[Any, Callable]:
    dynamic, sizes = options.get("dynamic", False), options.get("sizes")
    kernels_fp8 = tuple(quantise(k, s.kernel, E4M3) for k, s in zip(kernels, scales, strict=True))

    def run(x: jax.Array, kernels: tuple, scales: tuple[Scales, ...]) -> tuple:
        equations = (equation,) * len(kernels)
        return einsum_fp8(equations, dynamic, x, kernels, kernels_fp8, scales, sizes_G=sizes)

    return jax.vjp(run, x, kernels, scales)


def in_fp8(x: jax.Array, scale: float | jax.Array, dtype: Any) -> np.ndarray:
    return widen(quantise(x, jnp.float32(scale), dtype)) / float(scale)


def pick_rows() -> np.ndarray:
    """Which matrix each row belongs to, one-hot [G, R]; rows beyond the groups to none."""
    owner = np.repeat(np.arange(len(SIZES)), SIZES)
    return (np.pad(owner, (0, ROWS - owner.size), constant_values=-1) == np.arange(len(SIZES))[:, None]) * 1.0


@pytest.mark.smoke
def test_a_batch_of_matrices_is_that_of_the_fp8_numbers_exactly() -> None:
    x, kernel, dy = (
        draw(seed, *shape, dtype=jnp.float32)
        for seed, shape in enumerate([(4, 8, 64), (4, 64, 32), (4, 8, 32)])
    )
    (y,), backward = run_vjp(BATCHED, x, (kernel,), (make_scales(64, 32, 1024),))
    dx, (dkernel,), (seen,) = backward((dy,))
    x_fp8, kernel_fp8, dy_fp8 = in_fp8(x, 32, E4M3), in_fp8(kernel, 64, E4M3), in_fp8(dy, 1024, E5M2)
    close = partial(np.testing.assert_allclose, rtol=0, atol=2e-5)
    close(y, np.einsum(BATCHED, x_fp8, kernel_fp8))
    close(dx, np.einsum("GRF,GDF->GRD", dy_fp8, kernel_fp8))
    close(dkernel, np.einsum("GRD,GRF->GDF", x_fp8, dy_fp8))
    assert (seen.kernel, seen.activation, seen.gradient) == (0, jnp.abs(x).max(), jnp.abs(dy).max())


@pytest.mark.smoke
@pytest.mark.parametrize("garbage", [np.inf, np.nan, 1e6])
@pytest.mark.parametrize("dynamic", [False, True])
def test_sorted_rows_are_that_of_the_fp8_numbers_exactly_whatever_lies_beyond_them(
    garbage: float, dynamic: bool
) -> None:
    x, kernel, dy = (
        draw(seed, *shape, dtype=jnp.float32)
        for seed, shape in enumerate([(ROWS, 64), (len(SIZES), 64, 32), (ROWS, 32)])
    )
    used, pick = int(SIZES.sum()), pick_rows()
    scales = make_scales(64, 32, 1024)
    if dynamic:
        found = (find_scale(find_amax(t[:used]), dtype) for t, dtype in ((x, E4M3), (dy, E5M2)))
        scales = Scales(scales.kernel, *found)
    given = make_scales(64, 1, 1) if dynamic else scales
    dirty_x, dirty_dy = (t.at[used:].set(garbage) for t in (x, dy))
    (y,), backward = run_vjp(GROUPED, dirty_x, (kernel,), (given,), dynamic=dynamic, sizes=jnp.asarray(SIZES))
    dx, (dkernel,), (seen,) = backward((dirty_dy,))
    x_fp8, kernel_fp8 = in_fp8(x, scales.activation, E4M3), in_fp8(kernel, 64, E4M3)
    dy_fp8 = in_fp8(dy, scales.gradient, E5M2)
    close = partial(np.testing.assert_allclose, rtol=0, atol=2e-5)
    close(y[:used], np.einsum("GR,RD,GDF->RF", pick, x_fp8, kernel_fp8)[:used])
    close(dx[:used], np.einsum("GR,RF,GDF->RD", pick, dy_fp8, kernel_fp8)[:used])
    close(dkernel, np.einsum("GR,RD,RF->GDF", pick, x_fp8, dy_fp8))
    np.testing.assert_array_equal(dkernel[1], 0)  # nobody chose it
    assert seen.activation == jnp.abs(x[:used]).max()
    assert seen.gradient == jnp.abs(dy[:used]).max()


def test_both_forms_share_an_input_among_kernels_as_a_dense_matmul_does() -> None:
    """One matrix a group, one group: the three forms are one."""
    x, kernels = draw(0, 24, 16), (draw(1, 16, 24), draw(2, 16, 24, std=0.02))
    scales = (make_scales(64, 32, 2**12), make_scales(4096, 32, 2**20))
    dys = (draw(3, 24, 24, std=1.0), draw(4, 24, 24, std=0.01))
    stacked = tuple(kernel[None] for kernel in kernels)
    found = []
    for equation, x_in, kernels_in, dys_in, sizes in (
        ("RD,DF->RF", x, kernels, dys, None),
        (BATCHED, x[None], stacked, tuple(dy[None] for dy in dys), None),
        (GROUPED, x, stacked, dys, jnp.array([24])),
    ):
        results, backward = run_vjp(equation, x_in, kernels_in, scales, sizes=sizes)
        found.append([widen(a).squeeze() for a in jax.tree.leaves((results, backward(dys_in)))])
    for dense, *others in zip(*found, strict=True):
        for other in others:
            np.testing.assert_array_equal(other, dense)


EXPERTS, PER_EXPERT, EMBED, MLP = 4, 8, 32, 64
EXPERT_MESH = {"expert": 2, "fsdp": 2, "tensor": 2}
# With the axis that is manual around the experts' region: gradients wait, unreduced, in one over `expert`.
MESHES = [
    ({"expert": 4}, None),
    (EXPERT_MESH, None),
    (EXPERT_MESH, "expert"),
    ({"fsdp": 4, "tensor": 2}, None),
]
ROWS_SPEC = PartitionSpec("expert", "fsdp")
KERNEL_SPECS = {
    "up": PartitionSpec("expert", None, "tensor"),
    "gate": PartitionSpec("expert", None, "tensor"),
    "down": PartitionSpec("expert", "tensor", None),
}


def make_experts(
    form: str, dynamic: bool, mesh: Mesh, outer: str | None = None
) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """A loss of up and gate, then down, of every expert in a region, and what they make of the rows.

    Of rows [experts, rows of each, embed], gradients of the rows that flow in, kernels, their fp8 copies, and
    their scales; each device's part over `outer`, an axis that a region around it has made manual.
    """

    def inside(*spec: str | None) -> PartitionSpec:
        return PartitionSpec(*(None if axis == outer else axis for axis in spec))

    copies = {name: inside("fsdp", *spec) for name, spec in KERNEL_SPECS.items()}

    def multiply(x: jax.Array, kernels: dict, kernels_fp8: dict, scales: dict, *names: str) -> tuple:
        options = {"sizes_G": jnp.full(x.shape[0], x.shape[1])} if form == GROUPED else {}
        results = einsum_fp8(
            (form,) * len(names),
            dynamic,
            x.reshape(-1, x.shape[-1]) if options else x,
            tuple(kernels[name][0] for name in names),
            tuple(kernels_fp8[name][0] for name in names),
            tuple(Scales(*scales[name][0]) for name in names),
            axes=("fsdp", "expert", "tensor"),
            **options,
        )
        return tuple(y.reshape(*x.shape[:2], -1) for y in results)

    def run(x: jax.Array, *arrays: dict) -> jax.Array:
        up, gate = multiply(x, *arrays, "up", "gate")
        return multiply(jax.nn.silu(gate) * up, *arrays, "down")[0][None]

    def copy(kernels: dict[str, jax.Array]) -> dict[str, jax.Array]:
        return {
            name: lax.with_sharding_constraint(
                jnp.broadcast_to(kernel, (mesh.shape["fsdp"], *kernel.shape)), copies[name]
            )
            for name, kernel in kernels.items()
        }

    def sum_losses(
        x: jax.Array, dy: jax.Array, kernels: dict, kernels_fp8: dict, scales: dict
    ) -> tuple[jax.Array, jax.Array]:
        region = run_per_shard(
            run,
            in_specs=(inside(*ROWS_SPEC), copies, copies, {name: scales_spec() for name in scales}),
            out_specs=inside("tensor", *ROWS_SPEC),
        )
        scale_copies = {name: copy_scales(jnp.stack(each)) for name, each in scales.items()}
        y = region(x, copy(kernels), copy(kernels_fp8), scale_copies).sum(0)
        return (y * dy).sum(), y

    return sum_losses


def run_experts(
    form: str, dynamic: bool, sizes: dict[str, int], outer: str | None = None
) -> dict[str, np.ndarray]:
    """All that comes out of experts on a mesh, forward and backward; one row has the largest number."""
    mesh = make_mesh(resolve_mesh(make_config(mesh=sizes).mesh, int(np.prod([*sizes.values()]))))
    std = jnp.array([1, 0.1, 3, 0.01])[:, None, None]
    x = (draw(0, EXPERTS, PER_EXPERT, EMBED, dtype=jnp.float32) * std).at[2, 5, 3].set(20)
    shapes = {"up": (EMBED, MLP), "gate": (EMBED, MLP), "down": (MLP, EMBED)}
    kernels = {
        name: draw(seed, EXPERTS, *shape, dtype=jnp.float32, std=0.2)
        for seed, (name, shape) in enumerate(shapes.items(), start=1)
    }
    dy = draw(4, EXPERTS, PER_EXPERT, EMBED, dtype=jnp.float32)
    others = make_scales(1, 1, 1) if dynamic else make_scales(1, 2, 2)
    scales = {
        name: others._replace(kernel=find_scale(find_amax(kernel), E4M3)) for name, kernel in kernels.items()
    }
    kernels_fp8 = {name: quantise(kernel, scales[name].kernel, E4M3) for name, kernel in kernels.items()}

    def differentiate(*arrays: Any) -> tuple:
        sum_losses = jax.checkpoint(make_experts(form, dynamic, mesh, outer))
        gradients, y = jax.grad(sum_losses, argnums=(0, 2, 4), has_aux=True)(*arrays)
        return (y, *gradients)

    def differentiate_part(*arrays: Any) -> tuple:
        y, dx, dkernels, amaxes = differentiate(*arrays)
        return y, dx, dkernels, lax.pmax(amaxes, outer)

    if outer is not None:
        part, whole = PartitionSpec(outer), PartitionSpec()
        run = jax.shard_map(
            differentiate_part,
            mesh=mesh,
            in_specs=(part, part, part, part, whole),
            out_specs=(part, part, part, whole),
            axis_names={outer},
            check_vma=False,
        )
    with jax.set_mesh(mesh):
        y, dx, dkernels, amaxes = jax.jit(run if outer else differentiate)(
            x, dy, kernels, kernels_fp8, scales
        )
    found = {"y": y, "dx": dx} | {f"d_{name}": dkernel for name, dkernel in dkernels.items()}
    found |= {f"amax_{name}": jnp.stack(amax) for name, amax in amaxes.items()}
    return {name: np.asarray(each) for name, each in found.items()}


@pytest.mark.parametrize(
    ("form", "dynamic"),
    [
        (BATCHED, False),
        (GROUPED, True),
        pytest.param(BATCHED, True, marks=pytest.mark.full),
        pytest.param(GROUPED, False, marks=pytest.mark.full),
    ],
)
def test_numbers_and_magnitudes_are_those_of_one_device_on_every_mesh(form: str, dynamic: bool) -> None:
    whole = run_experts(form, dynamic, {})
    assert whole["amax_up"][1] == 20
    assert np.all(whole["amax_down"][1:] > 0)
    for mesh, outer in MESHES:
        parts = run_experts(form, dynamic, mesh, outer)
        for name, expected in whole.items():
            np.testing.assert_allclose(
                parts[name],
                expected,
                rtol=1e-6,
                atol=1e-6 * np.abs(expected).max(),
                err_msg=f"{name} {mesh} {outer}",
            )


def test_both_forms_have_the_same_numbers() -> None:
    batched, grouped = (run_experts(form, True, EXPERT_MESH) for form in (BATCHED, GROUPED))
    for name, expected in batched.items():
        np.testing.assert_allclose(
            grouped[name], expected, rtol=1e-6, atol=1e-6 * np.abs(expected).max(), err_msg=name
        )
