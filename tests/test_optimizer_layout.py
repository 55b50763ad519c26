"""Every optimizer of optax gets a legal layout from its parameters, in place and for good."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxscale.config import UserError
from jaxscale.numerics.draw import make_key
from jaxscale.sharding.rules import iterate_leaves
from jaxscale.training.optimizer_layout import describe_optimizer
from jaxscale.training.setup import Setup
from tests.tiny import make_batch, make_config, make_tiny_setup, relative_errors

MESH = {"data": 2, "fsdp": 2, "tensor": 2}


def muon() -> optax.GradientTransformation:
    """Muon for the stacked matrices of the layers, Adam for the rest."""
    numbers = optax.contrib.MuonDimensionNumbers

    def choose(params: Any) -> Any:
        def of_leaf(path: Any, leaf: Any) -> Any:
            is_kernel = jax.tree_util.keystr(path, simple=True, separator="/").endswith("mlp/up/kernel")
            return numbers(reduction_axis=1, output_axis=2) if is_kernel else None

        return jax.tree_util.tree_map_with_path(of_leaf, params)

    return optax.contrib.muon(1e-3, muon_weight_dimension_numbers=choose)


OPTIMIZERS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "adamw": lambda: optax.adamw(1e-3),
    "adafactor": lambda: optax.adafactor(1e-3, min_dim_size_to_factor=4, momentum=0.9),
    "lion": lambda: optax.lion(1e-3),
    "muon": muon,
    "sgd": lambda: optax.sgd(1e-3),
    "sgd with momentum": lambda: optax.sgd(1e-3, momentum=0.9, nesterov=True),
    "schedule": lambda: optax.adam(optax.cosine_decay_schedule(1e-3, 100)),
    "average": lambda: optax.chain(optax.scale_by_adam(), optax.ema(0.99)),
    "inject": lambda: optax.inject_hyperparams(optax.adamw)(learning_rate=1e-3),
    "masked": lambda: optax.masked(
        optax.adam(1e-3), lambda params: jax.tree.map(lambda leaf: leaf.ndim > 1, params)
    ),
    "lamb": lambda: optax.lamb(1e-3),
    "schedule free": lambda: optax.contrib.schedule_free_adamw(1e-3),
    "accumulating": lambda: optax.MultiSteps(optax.adam(1e-3), 2).gradient_transformation(),
}


def make_setup_of(optimizer: optax.GradientTransformation, **sections: Any) -> Setup:
    return replace(make_tiny_setup(make_config(**sections)), optimizer=optimizer)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_state_lies_like_the_parameter_it_belongs_to(name: str, stage: int) -> None:
    setup = make_setup_of(OPTIMIZERS[name](), mesh=MESH, zero={"stage": stage})
    leaves, _ = describe_optimizer(setup.optimizer, setup.model.shapes, setup.layouts)
    kept = dict(iterate_leaves(setup.layouts.params))
    shapes = dict(iterate_leaves(setup.model.shapes))
    for leaf in leaves:
        leaf.sharding.shard_shape(leaf.shape)  # raises where the layout is not legal
        if leaf.parameter is not None and leaf.shape == shapes[leaf.parameter].shape:
            assert leaf.sharding.is_equivalent_to(kept[leaf.parameter], len(leaf.shape)), leaf
        if leaf.parameter is None:
            assert np.prod(leaf.shape) < 10, leaf
    total = sum(np.prod(leaf.shape) for leaf in leaves)
    held = sum(np.prod(leaf.sharding.shard_shape(leaf.shape)) for leaf in leaves)
    if total > 1000:
        assert held < 1.2 * total / (2 if stage == 0 else 8), "optimizer state is replicated"


def test_factored_moments_take_the_layout_of_the_dims_they_keep() -> None:
    setup = make_setup_of(OPTIMIZERS["adafactor"](), mesh=MESH)
    leaves, _ = describe_optimizer(setup.optimizer, setup.model.shapes, setup.layouts)
    by_path = {leaf.path: leaf for leaf in leaves}
    [row] = [by_path[path] for path in by_path if path.endswith("v_row/layers/mlp/up/kernel")]
    [column] = [by_path[path] for path in by_path if path.endswith("v_col/layers/mlp/up/kernel")]
    # (layers 2, embed 32, mlp 64) is averaged over mlp and over embed.
    assert {row.shape, column.shape} == {(2, 32), (2, 64)}
    for leaf in (row, column):
        shards = np.prod(leaf.sharding.shard_shape(leaf.shape))
        assert shards == np.prod(leaf.shape) // (4 if leaf.shape == (2, 32) else 2)


@pytest.mark.parametrize("mesh", [MESH, {"fsdp": 8}, {"tensor": 4, "data": 2}, {"data": 8}], ids=str)
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_factored_moments_of_square_matrices_lie_like_their_own_side(mesh: dict, stage: int) -> None:
    """embed = mlp: nothing but the place of a dim says which side it is."""
    config = make_config(
        mesh=mesh,
        zero={"stage": stage},
        model={"mlp": 32},
        optimizer={"name": "adafactor", "min_factored": 8},
    )
    setup = make_tiny_setup(config)
    leaves, _ = describe_optimizer(setup.optimizer, setup.model.shapes, setup.layouts)
    by_path = {leaf.path: leaf for leaf in leaves}
    kept = dict(iterate_leaves(setup.layouts.params))["layers/mlp/up/kernel"].spec
    for part, shape, dim in (("rows", (2, 32, 1), 1), ("columns", (2, 1, 32), 2)):
        [leaf] = [by_path[path] for path in by_path if path.endswith(f"{part}/layers/mlp/up/kernel")]
        assert leaf.shape == shape
        asked = [kept[0], None, None]
        asked[dim] = kept[dim]
        wanted = NamedSharding(setup.mesh, PartitionSpec(*asked))
        assert leaf.sharding.is_equivalent_to(wanted, 3), leaf


@pytest.mark.parametrize("name", ["adafactor", "muon", "lion", "sgd"])
def test_layouts_are_the_same_after_steps_1_and_10_and_numbers_those_of_one_device(name: str) -> None:
    def run(**sections: Any) -> Any:
        setup = make_setup_of(OPTIMIZERS[name](), **sections)
        state = setup.compile_init()(make_key(0))
        step = setup.compile_step()
        for number in range(1, 11):
            state, _ = step(state, make_batch(setup, number))
            if number in (1, 10):
                for leaf, asked in zip(jax.tree.leaves(state), jax.tree.leaves(setup.shardings), strict=True):
                    assert leaf.sharding.is_equivalent_to(asked, leaf.ndim)
        return jax.tree.map(np.asarray, state.params)

    errors = relative_errors(run(mesh=MESH), run())
    assert max(errors.values()) < 1e-5, max(errors, key=errors.__getitem__)


def test_state_that_follows_no_parameter_is_refused_with_its_shape() -> None:
    def init(params: Any) -> Any:
        return {"flat": jnp.zeros(sum(leaf.size for leaf in jax.tree.leaves(params)))}

    flat = optax.GradientTransformation(init, lambda updates, state, params=None: (updates, state))
    setup = make_setup_of(flat, mesh=MESH)
    with pytest.raises(UserError, match=r"flat \(\d+,\)"):
        describe_optimizer(setup.optimizer, setup.model.shapes, setup.layouts)
