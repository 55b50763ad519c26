"""What the compiled step does, read from the compiled program, and what a skipped step leaves alone."""

import math
import time
from dataclasses import dataclass

import chex
import jax
import numpy as np
import pytest

from jaxscale.numerics.draw import make_key
from jaxscale.sharding.collectives import read_collectives
from jaxscale.sharding.zero import spec_axes
from jaxscale.training.setup import Compiled, Setup
from jaxscale.training.state import TrainState
from tests.tiny import make_batch, make_config, make_tiny_setup, place_batch, relative_errors, run_steps

MESH = {"data": 2, "fsdp": 2, "tensor": 2}


@dataclass(frozen=True)
class Programs:
    """A setup with its two programs, compiled once for all tests here."""

    setup: Setup
    init: Compiled
    step: Compiled

    def make_state(self) -> TrainState:
        return self.init(make_key(0))


@pytest.fixture(scope="module")
def programs() -> Programs:
    setup = make_tiny_setup(make_config(mesh=MESH, batch={"microbatches": 4}))
    return Programs(setup, setup.compile_init(), setup.compile_step())


def count_gradient_elements(setup: Setup) -> int:
    """Elements of all gradients on one device."""
    leaves = zip(jax.tree.leaves(setup.model.shapes), jax.tree.leaves(setup.layouts.gradients), strict=True)
    return sum(math.prod(sharding.shard_shape(leaf.shape)) for leaf, sharding in leaves)


def count_laid_elements(setup: Setup, axis: str) -> int:
    """Elements on one device, once gathered over an axis, of the parameters kept in shards over it."""
    return sum(
        math.prod(used.shard_shape(leaf.shape))
        for leaf, kept, used in zip(
            jax.tree.leaves(setup.model.shapes),
            jax.tree.leaves(setup.layouts.params),
            jax.tree.leaves(setup.layouts.weights),
            strict=True,
        )
        if axis in spec_axes(kept.spec)
    )


@pytest.mark.smoke
def test_gradients_are_reduced_over_data_once_a_step(programs: Programs) -> None:
    collectives = read_collectives(programs.step.as_text(), programs.setup.mesh)
    over_data = [each for each in collectives if "data" in each.axes]
    assert {each.loop_depth for each in over_data} == {0}, "traffic over data stands in a loop"
    reduced = [each for each in over_data if each.kind == "all-reduce" and each.axes == ("data",)]
    # Loss and weight are the two beside the gradients, and the norm has a few: nothing is sent twice.
    extra = sum(each.elements for each in reduced) - count_gradient_elements(programs.setup)
    assert 2 <= extra < 10
    gathered = [each for each in over_data if each.kind == "all-gather"]
    assert sum(each.elements for each in gathered) == count_laid_elements(programs.setup, "data")
    # What is left over `data` is the gradient norm and, in the branch of a skipped step, a count a leaf.
    others = [each for each in over_data if each not in reduced and each not in gathered]
    assert sum(each.elements for each in others) < 20 + len(programs.setup.layouts.leaves)
    inside = [each for each in collectives if each.loop_depth > 0]
    assert inside, "fsdp and tensor traffic belongs in the loops"


def test_state_is_donated_and_laid_out_as_asked(programs: Programs) -> None:
    state = programs.make_state()
    asked = programs.setup.shardings
    for _ in range(3):
        before = state
        state, _ = programs.step(state, make_batch(programs.setup, 0))
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(before))
        laid = jax.tree.map(
            lambda leaf, sharding: leaf.sharding.is_equivalent_to(sharding, leaf.ndim), state, asked
        )
        assert all(jax.tree.leaves(laid))
    per_device = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(state))
    whole = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    assert per_device < 1.2 * whole / 8, "silent replication: data, fsdp and tensor lay an eighth on each"


def test_only_metrics_come_back(programs: Programs) -> None:
    _, metrics = programs.step(programs.make_state(), make_batch(programs.setup, 0))
    assert metrics.pop("nonfinite").shape == (len(programs.setup.layouts.leaves),)
    assert all(value.shape == () for value in metrics.values())


@pytest.mark.parametrize("spoil", ["nothing counted", "infinite parameter"])
def test_a_skipped_step_changes_nothing_but_position_and_counts(programs: Programs, spoil: str) -> None:
    state, _ = programs.step(programs.make_state(), make_batch(programs.setup, 0))
    batch = make_batch(programs.setup, 1)
    if spoil == "nothing counted":
        batch["weights"] = batch["weights"] * 0
    else:
        scale = state.params["final_norm"]["scale"].at[0].set(np.inf)
        state.params["final_norm"]["scale"] = jax.device_put(
            scale, programs.setup.layouts.params["final_norm"]["scale"]
        )
    before = jax.tree.map(np.asarray, state)
    state, metrics = programs.step(state, batch)
    assert bool(metrics["skipped"])
    after = jax.tree.map(np.asarray, state)
    for name in ("params", "moments", "updates", "trained_sequences"):
        chex.assert_trees_all_equal(getattr(after, name), getattr(before, name))
    assert after.sequences == before.sequences + 32
    assert after.skips == before.skips + 1
    assert after.skips_in_row == 1
    if spoil == "nothing counted":
        state, metrics = programs.step(state, make_batch(programs.setup, 1))
        assert int(state.skips_in_row) == 0
        assert int(state.updates) == 2


def test_windows_without_counted_labels_are_as_if_left_out() -> None:
    """One sequence, one microbatch, one data shard without a label: equal to the mean over the others."""
    setup = make_tiny_setup(make_config(mesh={"data": 4}, batch={"microbatches": 4}))
    batch = {name: np.asarray(array).reshape(32, 32) for name, array in make_batch(setup, 0).items()}
    batch["weights"] = np.ones((32, 32), np.float32)
    batch["weights"][:8] = 0  # the first microbatch
    batch["weights"][8:10] = 0  # the first data shard of the second
    batch["weights"][20] = 0
    _, metrics = setup.compile_step()(setup.compile_init()(make_key(0)), place_batch(setup, batch))
    plain = make_tiny_setup(make_config())
    filled = {name: array.copy() for name, array in batch.items()}
    filled["labels"][batch["weights"] == 0] = 0
    _, expected = plain.compile_step()(plain.compile_init()(make_key(0)), place_batch(plain, filled))
    assert np.isfinite(float(metrics["loss"]))
    np.testing.assert_allclose(float(metrics["loss"]), float(expected["loss"]), rtol=2e-6)
    np.testing.assert_allclose(float(metrics["grad_norm"]), float(expected["grad_norm"]), rtol=2e-6)
    assert float(metrics["counted_tokens"]) == batch["weights"].sum()


def test_clipping_is_that_of_the_one_gradient() -> None:
    """Half of the first norm as the limit: the same update on a mesh as on one device, and a smaller one."""
    limit = float(run_steps(make_config(), 1).grad_norms[0]) / 2
    reference = run_steps(make_config(optimizer={"clip_norm": limit}), 2)
    clipped = run_steps(make_config(mesh=MESH, optimizer={"clip_norm": limit}, batch={"microbatches": 4}), 2)
    assert max(relative_errors(clipped.params, reference.params).values()) <= 1e-5
    np.testing.assert_allclose(clipped.grad_norms, reference.grad_norms, rtol=2e-6)
    assert reference.grad_norms[0] == pytest.approx(2 * limit), "the norm is that before clipping"


@pytest.mark.full
def test_compile_time_does_not_grow_with_depth() -> None:
    """32 layers within 1.2 times of 4: the best of three tries each, CPU seconds, compilation cache off."""

    def compile_seconds(layers: int) -> float:
        setup = make_tiny_setup(make_config(mesh=MESH, model={"layers": layers}, batch={"microbatches": 4}))
        start = time.process_time()
        setup.compile_step()
        return time.process_time() - start

    before = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        compile_seconds(4)
        tries = [(compile_seconds(4), compile_seconds(32)) for _ in range(3)]
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
    shallow, deep = (min(column) for column in zip(*tries, strict=True))
    print(f"4 layers {shallow:.2f} CPU-s, 32 layers {deep:.2f} CPU-s, ratio {deep / shallow:.3f}")
    assert deep <= 1.2 * shallow
