"""Muon takes whole matrices, layer by layer, however they lie, and sends no more than that needs."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxscale.config import MeshConfig, PrecisionConfig
from jaxscale.mesh import make_mesh
from jaxscale.sharding.collectives import Collective, read_collectives
from jaxscale.sharding.hlo import read_arrays
from jaxscale.sharding.zero import Layouts
from jaxscale.training.matrices import Sides
from jaxscale.training.muon import find_muon_sides, map_matrices, orthogonalise, plan_relay, scale_by_muon
from tests.tiny import make_config, make_tiny_setup, plan_layouts

SHAPES = {
    "up": (6, 16, 32),
    "query": (6, 16, 8, 4),
    "out": (6, 8, 4, 16),
    "down": (4, 24, 16),
    "square": (3, 16, 16),
    "single": (16, 24),
    "expert": (2, 4, 16, 8),
}
RULES = {
    "up": ("layers", "embed", "mlp"),
    "query": ("layers", "embed", "heads", "head"),
    "out": ("layers", "heads", "head", "embed"),
    "down": ("layers", "mlp", "embed"),
    "square": ("layers", "embed", "mlp"),
    "single": ("embed", "mlp"),
    "expert": ("layers", "experts", "embed", "mlp"),
}
MESHES: dict[str, dict[str, int]] = {
    "fsdp8": {"fsdp": 8},
    "tensor8": {"tensor": 8},
    "data8": {"data": 8},
    "data2_fsdp2_tensor2": {"data": 2, "fsdp": 2, "tensor": 2},
    "fsdp4_tensor2": {"fsdp": 4, "tensor": 2},
    "expert2_fsdp4": {"expert": 2, "fsdp": 4},
    "data2_expert2_tensor2": {"data": 2, "expert": 2, "tensor": 2},
}


def draw(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {path: rng.normal(size=shape).astype(np.float32) for path, shape in SHAPES.items()}


@dataclass(frozen=True)
class Laid:
    """Muon's orthogonalisation, compiled for a mesh."""

    layouts: Layouts
    compiled: Any

    @property
    def collectives(self) -> list[Collective]:
        return read_collectives(self.compiled.as_text(), self.layouts.mesh)

    def run(self, arrays: dict[str, np.ndarray]) -> dict[str, jax.Array]:
        placed = {path: jax.device_put(array, self.layouts.moments[path]) for path, array in arrays.items()}
        return self.compiled(placed)


@cache
def lay(mesh: str | None, stage: int = 3) -> Laid:
    axes = MESHES[mesh] if mesh else {}
    count = math.prod(axes.values())
    devices = make_mesh(MeshConfig(**axes), jax.devices()[:count])
    shapes = {path: jax.ShapeDtypeStruct(shape, jnp.float32) for path, shape in SHAPES.items()}
    layouts = plan_layouts(shapes, RULES, devices, stage)
    muon = scale_by_muon(layouts.leaves, layouts, PrecisionConfig(), steps=5)
    arguments = {
        path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=layouts.moments[path])
        for path, leaf in shapes.items()
    }

    def update(x: Any) -> Any:
        return muon.update(x, muon.init(x), x)[0]

    lowered = jax.jit(update, out_shardings=layouts.moments).lower(arguments)
    return Laid(layouts, lowered.compile())


def split(path: str, x: Any) -> np.ndarray:
    """[matrices, rows, columns]."""
    rows, columns = {"query": (16, 32), "out": (32, 16)}.get(path, SHAPES[path][-2:])
    return np.asarray(x, np.float64).reshape(-1, rows, columns)


# --- One device ---------------------------------------------------------------------------------------------


@pytest.mark.smoke
@pytest.mark.parametrize("shape", [(16, 16), (16, 40), (40, 16), (1, 8)])
def test_singular_values_go_to_about_one_and_singular_vectors_stay(shape: tuple[int, int]) -> None:
    x = np.random.default_rng(0).normal(size=shape)
    left, values, right = np.linalg.svd(x, full_matrices=False)
    result = np.asarray(orthogonalise(jnp.asarray(x, jnp.float32), 5), np.float64)
    found = left.T @ result @ right.T
    assert np.abs(found - np.diag(np.diag(found))).max() < 1e-4
    well = values > 0.05 * values.max()  # the iteration lifts smaller ones in more steps
    assert ((np.diag(found)[well] > 0.65) & (np.diag(found)[well] < 1.25)).all(), np.diag(found)


def test_a_gradient_of_zero_stays_zero() -> None:
    assert not np.asarray(orthogonalise(jnp.zeros((4, 6)), 5)).any()


def test_size_does_not_depend_on_the_gradients_size() -> None:
    laid, arrays = lay(None), draw()
    small = laid.run({path: array * np.float32(2.0**-20) for path, array in arrays.items()})
    for path, leaf in laid.run(arrays).items():
        np.testing.assert_allclose(small[path], leaf, rtol=1e-3, atol=1e-4)


def test_each_layers_matrix_is_orthogonal_and_has_the_root_mean_square_of_adamw() -> None:
    for path, leaf in lay(None).run(draw()).items():
        for matrix in split(path, leaf):
            rows, columns = matrix.shape
            values = np.linalg.svd(matrix, compute_uv=False) / (0.2 * math.sqrt(max(rows, columns)))
            assert values.max() < 1.25, path
            assert np.median(values) > 0.65, path
            assert math.sqrt((matrix**2).mean()) == pytest.approx(0.2, rel=0.25), path


def test_layers_do_not_touch_each_other() -> None:
    arrays = draw()
    other = {path: array.copy() for path, array in arrays.items()}
    for array in other.values():
        array[0] *= 3
        array[0, 0] += 1
    first, second = lay(None).run(arrays), lay(None).run(other)
    for path in SHAPES:
        if path != "single":
            np.testing.assert_array_equal(first[path][1:], second[path][1:])
            assert (np.asarray(first[path][0]) != np.asarray(second[path][0])).any()


# --- Every sharding -----------------------------------------------------------------------------------------


def check_equal(mesh: str, stage: int) -> None:
    laid = lay(mesh, stage)
    results, expected = laid.run(draw()), lay(None).run(draw())
    for path, leaf in results.items():
        assert leaf.sharding.is_equivalent_to(laid.layouts.moments[path], leaf.ndim)
        np.testing.assert_allclose(leaf, expected[path], rtol=0, atol=2e-6, err_msg=path)


@pytest.mark.smoke
@pytest.mark.parametrize("mesh", ["fsdp8", "tensor8", "data2_fsdp2_tensor2", "data2_expert2_tensor2"])
def test_any_mesh_equals_one_device(mesh: str) -> None:
    check_equal(mesh, 3)


@pytest.mark.full
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("mesh", MESHES)
def test_any_mesh_and_stage_equals_one_device(mesh: str, stage: int) -> None:
    check_equal(mesh, stage)


@pytest.mark.parametrize("mesh", ["fsdp8", "data2_fsdp2_tensor2"])
def test_no_device_holds_more_than_its_layers_and_one_matrix(mesh: str) -> None:
    """No array of the program is as large as all layers of a leaf."""
    laid = lay(mesh)
    largest = max(math.prod(shape) for _, shape in read_arrays(laid.compiled.as_text()))
    whole = max(math.prod(shape) for shape in SHAPES.values())
    matrix = max(math.prod(split(path, np.zeros(shape)).shape[1:]) for path, shape in SHAPES.items())
    assert matrix <= largest <= 2 * matrix < whole


@pytest.mark.parametrize("mesh", ["fsdp8", "data2_fsdp2_tensor2"])
def test_traffic_is_exchanges_and_gathers_of_one_matrix(mesh: str) -> None:
    laid = lay(mesh)
    sizes = laid.layouts.mesh.shape
    sent: dict[tuple, int] = {}
    for each in laid.collectives:
        assert each.kind in ("all-to-all", "all-gather"), f"{each.kind} is not called for"
        assert each.trips is not None
        key = each.axes, each.kind
        sent[key] = sent.get(key, 0) + each.elements * each.trips
    expected: dict[tuple, int] = {}
    for path, shape in SHAPES.items():
        sharding = laid.layouts.moments[path]
        sides = find_muon_sides(laid.layouts.leaves[path])
        assert sides is not None
        relay = plan_relay(shape, sides, sharding)
        local = math.prod(sharding.shard_shape(shape)[dim] for dim in (*sides.rows, *sides.columns))
        ways = math.prod(sizes[axis] for axis in relay.exchanged)
        assert relay.matrices == relay.turns * ways
        if relay.exchanged:
            key = relay.exchanged, "all-to-all"
            expected[key] = expected.get(key, 0) + 2 * relay.matrices * local
        if relay.gathered:
            _, rows, columns = sides.count(shape)
            key = relay.gathered, "all-gather"
            expected[key] = expected.get(key, 0) + relay.turns * rows * columns
    assert sent == expected


# --- The plan -----------------------------------------------------------------------------------------------

STACKED = Sides((0,), (1,), (2,))


@pytest.mark.parametrize(
    ("layers", "mesh", "exchanged", "gathered", "turns"),
    [
        (8, {"fsdp": 8}, ("fsdp",), (), 1),
        (32, {"fsdp": 8}, ("fsdp",), (), 4),
        (30, {"fsdp": 8}, ("fsdp",), (), 4),  # padded to 32
        (4, {"data": 2, "fsdp": 2, "tensor": 2}, ("data", "fsdp"), ("tensor",), 1),
        (3, {"data": 2, "fsdp": 2, "tensor": 2}, ("data", "fsdp"), ("tensor",), 1),
        (2, {"fsdp": 4, "tensor": 2}, ("tensor",), ("fsdp",), 1),
        (1, {"fsdp": 4, "tensor": 2}, (), ("fsdp", "tensor"), 1),
        (8, {}, (), (), 8),
    ],
)
def test_the_plan_leaves_a_device_the_fewest_matrices(
    layers: int, mesh: dict[str, int], exchanged: tuple, gathered: tuple, turns: int
) -> None:
    devices = jax.devices()[: math.prod(mesh.values())]
    spec = PartitionSpec("pipe", ("fsdp", "data", "expert"), "tensor")
    sharding = NamedSharding(make_mesh(MeshConfig(**mesh), devices), spec)
    relay = plan_relay((layers, 16, 16), STACKED, sharding)
    assert (relay.exchanged, relay.gathered, relay.turns) == (exchanged, gathered, turns)


@pytest.mark.parametrize(
    "spec",
    [
        PartitionSpec(None, ("fsdp", "data"), "tensor"),
        PartitionSpec(None, ("data", "fsdp"), "tensor"),
        PartitionSpec(None, "tensor", ("fsdp", "data")),
        PartitionSpec("data", "fsdp", "tensor"),
        PartitionSpec("fsdp", None, ("tensor", "data")),
        PartitionSpec(),
    ],
    ids=str,
)
@pytest.mark.parametrize("layers", [2, 6])
def test_a_matrix_is_whole_and_in_order_and_comes_back_to_its_place(spec: PartitionSpec, layers: int) -> None:
    """Each matrix is multiplied by weights of its places, which shows any part that is somewhere else."""
    sharding = NamedSharding(make_mesh(MeshConfig(data=2, fsdp=2, tensor=2)), spec)
    x = np.arange(layers * 8 * 8, dtype=np.float32).reshape(layers, 8, 8)
    weights = np.arange(64, dtype=np.float32).reshape(8, 8)

    def visit(matrix: jax.Array) -> jax.Array:
        return matrix * weights + matrix.sum()

    visited: Callable[[Any], Any] = jax.jit(
        lambda x: map_matrices(visit, x, STACKED, sharding), out_shardings=sharding
    )
    expected = x * weights + x.sum((1, 2), keepdims=True)
    np.testing.assert_array_equal(visited(jax.device_put(x, sharding)), expected)


def test_tables_heads_norms_and_biases_of_a_decoder_are_not_muons() -> None:
    setup = make_tiny_setup(make_config(model={"family": "gpt2", "kv_heads": 8}))
    moved = {path for path, leaf in setup.layouts.leaves.items() if find_muon_sides(leaf)}
    kernels = {path for path in setup.layouts.leaves if path.startswith("layers") and "kernel" in path}
    assert moved == kernels
    assert len(moved) == 6
