"""Checkpoints: any mesh, bit for bit; never an unfinished one; never a lost error."""

import errno
import json
import re
import shutil
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxscale.checkpoint import Checkpoints
from jaxscale.checkpoint import folder as disk
from jaxscale.config.errors import UserError


@jax.tree_util.register_dataclass
@dataclass
class State:
    params: dict[str, Any]
    moments: dict[str, Any]
    step: jax.Array
    skipped: jax.Array
    loss_scale: jax.Array


def make_mesh(sizes: dict[str, int]) -> jax.sharding.Mesh:
    count = int(np.prod(list(sizes.values())))
    return jax.make_mesh(
        tuple(sizes.values()),
        tuple(sizes),
        axis_types=(AxisType.Auto,) * len(sizes),
        devices=jax.devices()[:count],
    )


def lay_out(mesh: jax.sharding.Mesh, *kernel_dims: str | None) -> State:
    """Shapes, dtypes and shardings of a small state; the kernels are laid out as asked, the rest is whole."""

    def leaf(shape: tuple[int, ...], dtype: Any, *dims: str | None) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec(*dims)))

    def kernels(dtype: Any) -> dict[str, Any]:
        return {
            "mlp": {"up": leaf((16, 8), dtype, *kernel_dims), "bias": leaf((8,), dtype)},
            "blocks": [leaf((8, 4), jnp.bfloat16, *kernel_dims), leaf((8, 4), jnp.bfloat16, *kernel_dims)],
        }

    return State(
        params=kernels(jnp.float32),
        moments=kernels(jnp.float32),
        step=leaf((), jnp.uint32),
        skipped=leaf((), jnp.int32),
        loss_scale=leaf((), jnp.float32),
    )


def make_state(abstract: State, seed: int = 0) -> State:
    random = np.random.default_rng(seed)

    def fill(leaf: jax.ShapeDtypeStruct) -> jax.Array:
        values = random.standard_normal(leaf.shape) * 1000
        return jax.device_put(np.asarray(values).astype(leaf.dtype), leaf.sharding)

    return jax.tree.map(fill, abstract)


def read_bytes(tree: Any) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


@pytest.fixture
def eight() -> State:
    return lay_out(make_mesh({"data": 8}), "data")


@pytest.fixture
def one() -> State:
    return lay_out(make_mesh({"data": 1}))


MESHES = [
    pytest.param({"fsdp": 4, "tensor": 2}, ("fsdp", "tensor"), id="fsdp4-tensor2"),
    pytest.param({"data": 2}, ("data",), id="2-devices"),
    pytest.param({"data": 1}, (), id="1-device"),
]


@pytest.mark.parametrize(("sizes", "dims"), MESHES)
def test_a_state_is_restored_bit_for_bit_onto_any_mesh(tmp_path, eight, sizes, dims):
    state = make_state(eight)
    saved = Checkpoints(tmp_path / "checkpoints", keep=2)
    saved.save(3, state, wait=True)
    saved.close()

    wanted = lay_out(make_mesh(sizes), *dims)
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=2)
    assert checkpoints.latest_step() == 3
    restored = checkpoints.restore(3, wanted)
    checkpoints.close()

    assert jax.tree.structure(restored) == jax.tree.structure(wanted)
    assert read_bytes(restored) == read_bytes(state)
    for leaf, want in zip(jax.tree.leaves(restored), jax.tree.leaves(wanted), strict=True):
        assert (leaf.dtype, leaf.shape, leaf.sharding) == (want.dtype, want.shape, want.sharding)
        assert leaf.committed


def test_weights_alone_are_restored_onto_one_device(tmp_path, eight, one, monkeypatch):
    state = make_state(eight)
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(7, state, wait=True)
    params = checkpoints.restore_params(7, one.params)
    blocks = checkpoints.restore_params(7, one.params["blocks"], subtree="params/blocks")
    checkpoints.close()
    assert jax.tree.structure(params) == jax.tree.structure(one.params)
    assert read_bytes(params) == read_bytes(state.params)
    assert read_bytes(blocks) == read_bytes(state.params["blocks"])
    assert all(len(leaf.devices()) == 1 for leaf in jax.tree.leaves(params))


def test_a_state_donated_right_after_save_is_stored_as_it_was(tmp_path):
    mesh = make_mesh({"data": 8})
    laid_over, whole = NamedSharding(mesh, PartitionSpec("data")), NamedSharding(mesh, PartitionSpec())
    shardings = {"laid_over": laid_over, "whole": whole, "step": whole}
    abstract = {
        "laid_over": jax.ShapeDtypeStruct((1 << 20,), jnp.float32, sharding=laid_over),
        "whole": jax.ShapeDtypeStruct((1 << 18,), jnp.float32, sharding=whole),
        "step": jax.ShapeDtypeStruct((), jnp.uint32, sharding=whole),
    }
    state = jax.jit(
        lambda: jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), abstract),
        out_shardings=shardings,
    )()
    advance = jax.jit(
        lambda tree: jax.tree.map(lambda leaf: leaf + jnp.ones((), leaf.dtype), tree),
        donate_argnums=0,
        out_shardings=shardings,
    )
    checkpoints = Checkpoints(tmp_path, keep=10)
    for step in range(1, 13):
        state = advance(state)
        if step % 3 == 0:
            checkpoints.save(step, state)
    checkpoints.wait()
    for step in (3, 6, 9, 12):
        restored = checkpoints.restore(step, abstract)
        assert {name: set(np.unique(leaf).tolist()) for name, leaf in restored.items()} == {
            "laid_over": {step},
            "whole": {step},
            "step": {step},
        }
    checkpoints.close()


def test_restored_arrays_can_be_donated_like_fresh_ones(tmp_path, eight):
    state = make_state(eight)
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(1, state, wait=True)
    restored = checkpoints.restore(1, eight)
    checkpoints.close()

    buffers = [
        shard.data.unsafe_buffer_pointer()
        for leaf in jax.tree.leaves(restored)
        for shard in leaf.addressable_shards
    ]
    assert len(buffers) == len(set(buffers)), "two shards share memory"
    advance = jax.jit(
        lambda tree: jax.tree.map(lambda leaf: leaf + jnp.ones((), leaf.dtype), tree),
        donate_argnums=0,
        out_shardings=jax.tree.map(lambda leaf: leaf.sharding, eight),
    )
    fresh = make_state(eight)
    for _ in range(4):
        before, restored, fresh = restored, advance(restored), advance(fresh)
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(before))
    assert read_bytes(restored) == read_bytes(fresh)


def test_the_newest_are_kept_and_an_older_one_goes_only_after_a_newer_is_complete(
    tmp_path, eight, monkeypatch
):
    state = make_state(eight)
    complete_before_deletion = []
    delete = disk.delete_all_but_newest

    def watch(folder: Path, keep: int) -> None:
        complete_before_deletion.append(disk.list_complete_steps(folder))
        delete(folder, keep)

    monkeypatch.setattr(disk, "delete_all_but_newest", watch)
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (1, 2, 3, 4):
        checkpoints.save(step, state)
    checkpoints.close()
    assert complete_before_deletion == [[1], [1, 2], [1, 2, 3], [2, 3, 4]]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["3", "4"]


def test_an_unfinished_folder_named_like_a_step_is_never_a_checkpoint(tmp_path, eight):
    state = make_state(eight)
    checkpoints = Checkpoints(tmp_path, keep=2)
    assert checkpoints.latest_step() is None
    checkpoints.save(3, state, wait=True)
    (tmp_path / "4").mkdir()
    shutil.copytree(tmp_path / "3", tmp_path / "5")  # a copy says it is step 3
    shutil.copytree(tmp_path / "3", tmp_path / "6")
    (tmp_path / "6" / disk.MARKER).unlink()
    shutil.copytree(tmp_path / "3", tmp_path / "7")
    (tmp_path / "7" / disk.MARKER).write_text('{"format": 1, "st')
    (tmp_path / "8").write_text("a file")

    assert checkpoints.latest_step() == 3
    assert checkpoints.incomplete_steps() == [4, 5, 6, 7]
    with pytest.raises(UserError, match=r"step 4 .* was never finished; .*: 3$"):
        checkpoints.restore(4, eight)
    with pytest.raises(UserError, match=r"step 9 .* does not exist"):
        checkpoints.restore(9, eight)

    other = make_state(eight, seed=1)
    checkpoints.save(4, other)  # what a killed run left of this step is replaced
    checkpoints.save(6, state)
    checkpoints.close()
    assert disk.list_complete_steps(tmp_path) == [4, 6]
    assert read_bytes(checkpoints.restore(4, eight)) == read_bytes(other)


def test_a_save_is_not_the_latest_before_it_is_complete(tmp_path, eight, monkeypatch):
    may_mark = threading.Event()
    mark = disk.mark_complete

    def hold(*arguments: Any) -> None:
        assert may_mark.wait(timeout=20)
        mark(*arguments)

    monkeypatch.setattr(disk, "mark_complete", hold)
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(1, make_state(eight))
    assert checkpoints.latest_step() is None
    may_mark.set()
    checkpoints.wait()
    assert checkpoints.latest_step() == 1
    checkpoints.close()


def test_leftovers_of_a_killed_run_go_when_the_next_one_saves_but_not_when_it_reads(tmp_path, eight):
    leftovers = [tmp_path / "8.orbax-checkpoint-tmp", tmp_path / "2.deleting"]
    for leftover in leftovers:
        (leftover / "state").mkdir(parents=True)
    checkpoints = Checkpoints(tmp_path, keep=1)
    assert checkpoints.latest_step() is None
    assert all(leftover.exists() for leftover in leftovers)
    checkpoints.save(9, make_state(eight), wait=True)
    checkpoints.close()
    assert [path.name for path in tmp_path.iterdir()] == ["9"]


def test_a_stored_step_is_never_replaced(tmp_path, eight):
    first, second = make_state(eight, seed=1), make_state(eight, seed=2)
    checkpoints = Checkpoints(tmp_path, keep=3)
    checkpoints.save(5, first)
    for step in (5, 4):
        with pytest.raises(UserError, match=f"cannot save step {step} .* step 5 is stored there already"):
            checkpoints.save(step, second)
    assert read_bytes(checkpoints.restore(5, eight)) == read_bytes(first)
    checkpoints.close()


def test_differences_name_the_leaves_and_both_values(tmp_path, eight):
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(1, make_state(eight), wait=True)

    wanted = lay_out(make_mesh({"data": 8}), "data")
    whole = wanted.step.sharding
    wanted.params["mlp"]["up"] = jax.ShapeDtypeStruct((16, 8), jnp.bfloat16, sharding=whole)
    wanted.params["mlp"]["bias"] = jax.ShapeDtypeStruct((9,), jnp.float32, sharding=whole)
    wanted.params["mlp"]["gate"] = jax.ShapeDtypeStruct((2,), jnp.float32, sharding=whole)
    del wanted.moments["blocks"]
    with pytest.raises(UserError) as caught:
        checkpoints.restore(1, wanted)
    lines = {line.strip() for line in str(caught.value).splitlines()}
    assert {
        "params/mlp/up: stored float32[16,8], needed bfloat16[16,8]",
        "params/mlp/bias: stored float32[8], needed float32[9]",
        "params/mlp/gate: not stored, needed float32[2]",
        "moments/blocks/0: stored bfloat16[8,4], not needed",
        "moments/blocks/1: stored bfloat16[8,4], not needed",
    } <= lines
    assert len(lines) == 7
    with pytest.raises(UserError, match="params/mlp/gate: not stored"):
        checkpoints.restore_params(1, wanted.params)
    checkpoints.close()


def test_a_checkpoint_can_be_looked_into_without_restoring(tmp_path, eight):
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(1, make_state(eight), wait=True)
    checkpoints.close()
    leaves = {name: str(leaf) for name, leaf in checkpoints.read_leaves(1).items()}
    assert leaves["params/blocks/0"] == "bfloat16[8,4]"
    assert leaves["step"] == "uint32[]"
    assert len(leaves) == 11
    assert json.loads((tmp_path / "1" / disk.MARKER).read_text())["step"] == 1


def test_a_save_that_fails_in_the_background_is_raised_by_the_next_call_and_once(
    tmp_path, eight, monkeypatch
):
    state = make_state(eight)
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(1, state, wait=True)

    def fail(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    for call in (lambda: checkpoints.save(3, state), checkpoints.wait):
        with monkeypatch.context() as patch:
            patch.setattr(disk, "mark_complete", fail)
            checkpoints.save(2, state)
            with pytest.raises(
                UserError, match=r"step 2 was not saved .* No space left .* complete checkpoint is 1"
            ):
                call()
    checkpoints.wait()
    assert checkpoints.latest_step() == 1
    assert read_bytes(checkpoints.restore(1, eight)) == read_bytes(state)

    checkpoints.save(3, state, wait=True)  # a passing fault: saving works again
    with monkeypatch.context() as patch:
        patch.setattr(disk, "mark_complete", fail)
        checkpoints.save(4, state)
        with pytest.raises(UserError, match="step 4 was not saved"):
            checkpoints.close()
    assert disk.list_complete_steps(tmp_path) == [3]


STORAGE_FAULT = """
import resource, sys
from pathlib import Path
import jax, numpy as np
from jaxscale.checkpoint import Checkpoints
from jaxscale.config.errors import UserError

state = {"a": jax.numpy.asarray(np.random.default_rng(0).standard_normal(1 << 16, np.float32))}
abstract = {"a": jax.ShapeDtypeStruct((1 << 16,), np.float32, sharding=state["a"].sharding)}
checkpoints = Checkpoints(sys.argv[1], keep=1)
checkpoints.save(1, state, wait=True)
"""

FULL_DISK = """
limits = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
checkpoints.save(2, state)
try:
    checkpoints.wait()
except UserError as error:
    print(error)
resource.setrlimit(resource.RLIMIT_FSIZE, limits)
assert np.array_equal(checkpoints.restore(1, abstract)["a"], state["a"])
checkpoints.save(2, state)
checkpoints.close()
"""

LOST_FILES = """
for data in Path(sys.argv[1], "1", "state", "d").iterdir():
    data.unlink()
try:
    checkpoints.restore(1, abstract)
except UserError as error:
    print(error)
checkpoints.close()
"""


def run_storage_fault(script: str, folder: Path) -> str:
    """Runs in a process of its own: after a fault orbax leaves callbacks that complain when collected."""
    command = [sys.executable, "-c", STORAGE_FAULT + script, str(folder)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_a_disk_that_takes_no_more_is_the_users_error_and_spares_the_stored_checkpoint(tmp_path):
    message = run_storage_fault(FULL_DISK, tmp_path)
    assert re.match(r"the checkpoint of step 2 was not saved .*File too large", message), message
    assert "the newest complete checkpoint is 1." in message
    assert [path.name for path in tmp_path.iterdir()] == ["2"]


def test_lost_files_are_the_users_error(tmp_path):
    message = run_storage_fault(LOST_FILES, tmp_path)
    assert re.match(r"the checkpoint of step 1 .* cannot be read: ", message), message
    assert f"delete {tmp_path / '1'} to go on from an older step" in message


def test_a_folder_that_cannot_be_written_is_the_users_error(tmp_path, eight):
    (tmp_path / "checkpoints").write_text("in the way")
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=1)
    with pytest.raises(UserError, match=r"step 1 was not saved .*checkpoints"):
        checkpoints.save(1, make_state(eight), wait=True)
    checkpoints.close()


def test_files_that_vanish_during_a_save_are_noticed(tmp_path, eight, monkeypatch):
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=1)
    mark = disk.mark_complete

    def remove_first(folder: Path, *arguments: Any) -> None:
        shutil.rmtree(folder)
        mark(folder, *arguments)

    monkeypatch.setattr(disk, "mark_complete", remove_first)
    checkpoints.save(1, make_state(eight))
    with pytest.raises(UserError, match="step 1 was not saved"):
        checkpoints.close()
