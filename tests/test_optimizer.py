"""Clipping, which leaves decay, and where the moments lie; formulas: tests/test_optimizers.py."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxscale.config import MeshConfig, parse_config
from jaxscale.mesh import AXES, make_mesh
from jaxscale.numerics.draw import make_key
from jaxscale.sharding.rules import REPLICATED, iterate_leaves, lay_leaves
from jaxscale.training.optimizer import clip_gradients, find_norm, mask_decay
from jaxscale.training.optimizer_layout import lay_optimizer
from jaxscale.training.setup import make_setup

CONFIG = parse_config(
    {
        "run_dir": "unused",
        "steps": 1,
        "batch": {"sequences": 8, "length": 16},
        "model": {"family": "llama", "layers": 2, "embed": 64, "heads": 4, "mlp": 64, "tied": True},
        "mesh": {"fsdp": 8},
    },
    origin="this test",
)


def make_gradients(seed=0):
    """Gradients of every kind of leaf, with a norm of about 5."""
    generator = np.random.default_rng(seed)
    shapes = {
        "layer": {"kernel": (3, 4), "bias": (4,)},
        "norm": {"scale": (4,), "bias": (4,)},
        "embed": {"table": (3, 2)},
    }
    return jax.tree.map(
        lambda shape: jnp.asarray(generator.normal(size=shape), jnp.float32),
        shapes,
        is_leaf=lambda node: isinstance(node, tuple),
    )


LEAVES, PROBLEMS = lay_leaves(
    make_gradients(),
    {
        "layer/kernel": ("embed", "mlp"),
        "layer/bias": ("mlp",),
        "norm/*": REPLICATED,
        "embed/table": ("vocab", "embed"),
    },
    dict.fromkeys(AXES, 1),
)
assert not PROBLEMS


def compute_norm(gradients):
    return np.sqrt(sum(np.square(np.asarray(g, np.float64)).sum() for g in jax.tree.leaves(gradients)))


@partial(jax.jit, static_argnums=1)
def clip(gradients, limit):
    norm = find_norm(gradients)
    return clip_gradients(gradients, norm, limit), norm


@pytest.mark.smoke
def test_clipping_at_half_the_norm_halves_and_reports_the_norm_before_it():
    gradients = make_gradients()
    norm = compute_norm(gradients)
    clipped, reported = clip(gradients, float(norm / 2))

    np.testing.assert_allclose(reported, norm, rtol=1e-6)
    np.testing.assert_allclose(compute_norm(clipped), norm / 2, rtol=1e-6)
    for got, given in zip(jax.tree.leaves(clipped), jax.tree.leaves(gradients), strict=True):
        np.testing.assert_allclose(got, given / 2, rtol=1e-6)


@pytest.mark.parametrize("limit", [1e9, None])
def test_gradients_within_the_limit_keep_every_bit(limit):
    gradients = make_gradients()
    clipped, reported = clip(gradients, limit)

    np.testing.assert_allclose(reported, compute_norm(gradients), rtol=1e-6)
    for got, given in zip(jax.tree.leaves(clipped), jax.tree.leaves(gradients), strict=True):
        assert np.asarray(got).tobytes() == np.asarray(given).tobytes()


def test_clipping_gradients_of_zero_leaves_them_at_zero():
    clipped, norm = clip(jax.tree.map(jnp.zeros_like, make_gradients()), 1.0)
    assert norm == 0
    assert all((np.asarray(leaf) == 0).all() for leaf in jax.tree.leaves(clipped))


def test_norm_of_bf16_gradients_is_summed_in_fp32():
    gradients = {"kernel": jnp.full((4096,), 0.1, jnp.bfloat16)}
    norm = find_norm(gradients)
    assert norm.dtype == jnp.float32
    np.testing.assert_allclose(norm, compute_norm(gradients), rtol=1e-6)


def test_decay_pulls_on_kernels_and_tables_only():
    marks = dict(iterate_leaves(mask_decay(make_gradients(), LEAVES)))
    assert marks == {
        "layer/kernel": True,
        "layer/bias": False,
        "norm/scale": False,
        "norm/bias": False,
        "embed/table": True,
    }


def test_moments_lie_as_their_parameters_and_each_device_holds_an_eighth():
    setup = make_setup(CONFIG, make_mesh(CONFIG.mesh), vocab=130)
    state = setup.compile_init()(make_key(0))

    params = dict(iterate_leaves(state.params))
    for name in ("mu", "nu"):
        moments = dict(iterate_leaves(optax.tree.get(state.moments, name)))
        assert moments.keys() == params.keys()
        for path, moment in moments.items():
            assert moment.sharding == params[path].sharding, path
            assert not np.asarray(moment).any(), path
        kernel = moments["layers/mlp/up/kernel"]
        assert [shard.data.size for shard in kernel.addressable_shards] == [kernel.size // 8] * 8
    count = optax.tree.get(state.moments, "count")
    assert count.sharding.is_fully_replicated
    assert len(count.sharding.device_set) == 8


@pytest.mark.parametrize(("stage", "state_split", "weights_split"), [(0, 1, 1), (1, 8, 1), (3, 8, 8)])
@pytest.mark.parametrize("mesh", [MeshConfig(fsdp=8), MeshConfig(data=2, fsdp=2, expert=2)], ids=str)
def test_zero_stage_decides_how_far_the_moments_are_split(stage, state_split, weights_split, mesh):
    config = replace(CONFIG, zero=replace(CONFIG.zero, stage=stage), mesh=mesh)
    setup = make_setup(config, make_mesh(config.mesh), vocab=130)
    shardings = lay_optimizer(setup.optimizer, setup.model.shapes, setup.layouts)

    shape = setup.model.shapes["embed"]["table"].shape
    whole = int(np.prod(shape))
    for name in ("mu", "nu"):
        moment = optax.tree.get(shardings, name)["embed"]["table"]
        assert np.prod(moment.shard_shape(shape)) == whole // state_split
    kept, used = (tree["embed"]["table"] for tree in (setup.layouts.params, setup.layouts.weights))
    assert np.prod(kept.shard_shape(shape)) == whole // state_split, "master weights lie like moments"
    assert np.prod(used.shard_shape(shape)) == whole // min(weights_split, mesh.fsdp)
