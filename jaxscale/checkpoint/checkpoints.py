"""Checkpoints of a tree of sharded arrays: saved in the background, restored onto any mesh.

The only module that knows orbax (its v0 API). orbax's `AsyncCheckpointer` moves the bytes; which steps
exist, when one is complete and which are kept is decided here and in `folder`, because orbax's
`CheckpointManager` takes an empty folder named like a step for its latest, ignores an older step silently,
and after a failed save forgets good ones. It is imported on first use: that costs 0.2 to 0.8 s.
"""

import shutil
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax

from jaxscale.checkpoint import folder as disk
from jaxscale.checkpoint.leaves import (
    LeafType,
    describe_differences,
    describe_leaves,
    name_leaves,
)
from jaxscale.config.errors import UserError
from jaxscale.sharding.rules import nest_by_name

_ITEM = "state"

# How a write or a read fails: the file system, or tensorstore, which reports every error as a ValueError.
_STORAGE_ERRORS = (OSError, ValueError)


def _own_memory(array: jax.Array) -> jax.Array:
    """The same array with memory of its own on each device.

    On CPU a device may look into the host buffer the file was read into, and all replicas into the same
    one; a step cannot update such memory in place. Other devices always hold a copy.
    """
    device: Any = next(iter(array.devices()))
    if device.platform != "cpu":
        return array
    return jax.device_put(array, array.sharding, may_alias=False)


class Checkpoints:
    """The checkpoints of one run, in one folder on a local or shared file system.

    Opening changes nothing on disk, so a run's checkpoints may be read while it trains. One run at a time
    may save. In a run of several processes every process makes the same calls.
    """

    def __init__(self, folder: str | Path, *, keep: int) -> None:
        """`keep`: newest checkpoints kept; an older one is deleted only once a newer one is complete."""
        assert keep > 0
        self.folder = Path(folder).absolute()
        self._keep = keep
        self._orbax: tuple[Any, Any] | None = None
        self._leftovers_deleted = False
        self._publisher = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._saving: tuple[int, Future[None]] | None = None

    def latest_step(self) -> int | None:
        """The newest complete checkpoint; None where there is none. One still being saved does not count."""
        return max(disk.list_complete_steps(self.folder), default=None)

    def incomplete_steps(self) -> list[int]:
        """Steps that have a folder but no complete checkpoint; a run that passes over them should say so."""
        return disk.list_incomplete_steps(self.folder)

    def read_leaves(self, step: int) -> dict[str, LeafType]:
        """Names, shapes and dtypes stored at a step. Needs no devices. Raises UserError if it is not
        complete."""
        return disk.read_leaves(self.folder, step)

    def save(self, step: int, state: Any, *, wait: bool = False) -> None:
        """Saves a pytree of jax Arrays; writes in the background.

        Returns as soon as `state` may be donated: what is written is the state at the call. With `wait`,
        returns once the checkpoint is complete and durable. Waits first for the save before this one.

        Raises UserError if this or a newer step is stored already, or if this save or the one before it
        failed.
        """
        self.wait()
        self._refuse_stored_step(step)
        leaves = name_leaves(state)
        for name, leaf in leaves.items():
            assert isinstance(leaf, jax.Array), f"{name} is {type(leaf).__name__}, not a jax Array"
        try:
            orbax, checkpointer = self._open_for_writing()
            item = orbax.args.PyTreeSave(nest_by_name(leaves))
            # force: a folder of this step without our marker is left over from a kill, and is replaced.
            checkpointer.save(self.folder / str(step), args=orbax.args.Composite(**{_ITEM: item}), force=True)
        except _STORAGE_ERRORS as error:
            raise self._failed_save(step, error) from error
        self._saving = (step, self._publisher.submit(self._publish, step, describe_leaves(leaves)))
        if wait:
            self.wait()

    def wait(self) -> None:
        """Returns once no save is under way. Raises UserError if one failed, once for each failure."""
        if self._saving is None:
            return
        (step, saving), self._saving = self._saving, None
        try:
            saving.result()
        except _STORAGE_ERRORS as error:
            raise self._failed_save(step, error) from error

    def close(self) -> None:
        """Waits for the last save and frees the threads. Raises UserError if that save failed."""
        try:
            self.wait()
        finally:
            self._publisher.shutdown()
            if self._orbax is not None:
                self._orbax[1].close()
                self._orbax = None

    def restore(self, step: int, abstract_state: Any) -> Any:
        """The state as it was saved, bit for bit, laid out as asked: the mesh it was saved on does not
        matter.

        `abstract_state`: the state's tree with a `jax.ShapeDtypeStruct` that has a sharding at each leaf.
        Returns the same tree of fresh arrays; nothing else holds them, so they may be donated.

        Raises UserError if the step is not complete, cannot be read, or differs in names, shapes or dtypes.
        """
        return self._restore(step, abstract_state, prefix="")

    def restore_params(self, step: int, abstract_params: Any, *, subtree: str = "params") -> Any:
        """As `restore`, but only the leaves under one name of the state; the others are not read."""
        return self._restore(step, abstract_params, prefix=f"{subtree}/")

    def _restore(self, step: int, abstract: Any, *, prefix: str) -> Any:
        self.wait()
        wanted = {prefix + name: leaf for name, leaf in name_leaves(abstract).items()}
        for name, leaf in wanted.items():
            assert leaf.sharding is not None, f"{name} is restored without a sharding"
        stored = {name: leaf for name, leaf in self.read_leaves(step).items() if name.startswith(prefix)}
        differences = describe_differences(stored, describe_leaves(wanted))
        if differences:
            raise UserError(
                f"the checkpoint of step {step} in {self.folder} is not of this model or optimizer:\n"
                f"{differences}\n"
                "go on with the configuration it was saved with, or start afresh in another run_dir"
            )
        arrays = name_leaves(self._read_arrays(step, wanted))
        fresh = [_own_memory(arrays.pop(name)) for name in wanted]
        return jax.tree.unflatten(jax.tree.structure(abstract), fresh)

    def _read_arrays(self, step: int, wanted: Mapping[str, jax.ShapeDtypeStruct]) -> Any:
        orbax, checkpointer = self._open()
        target = nest_by_name(wanted)
        item = orbax.args.PyTreeRestore(
            item=target,
            restore_args=orbax.checkpoint_utils.construct_restore_args(target),
            partial_restore=True,
        )
        try:
            return checkpointer.restore(self.folder / str(step), args=orbax.args.Composite(**{_ITEM: item}))[
                _ITEM
            ]
        except _STORAGE_ERRORS as error:
            raise UserError(
                f"the checkpoint of step {step} in {self.folder} cannot be read: {error}. "
                f"If its files are damaged, delete {self.folder / str(step)} to go on from an older step"
            ) from error

    def _publish(self, step: int, leaves: Mapping[str, LeafType]) -> None:
        """In the background: waits for the files of one save, marks it complete, then deletes what is too
        old."""
        self._open()[1].wait_until_finished()
        if jax.process_index() == 0:
            disk.mark_complete(self.folder, step, leaves)
            disk.delete_all_but_newest(self.folder, self._keep)

    def _refuse_stored_step(self, step: int) -> None:
        latest = self.latest_step()
        if latest is not None and step <= latest:
            raise UserError(
                f"cannot save step {step} in {self.folder}: step {latest} is stored there already, and a "
                "checkpoint is never replaced; continue from the newest, delete the newer ones, or choose "
                "another run_dir"
            )

    def _failed_save(self, step: int, error: Exception) -> UserError:
        existing = next(path for path in (self.folder, *self.folder.parents) if path.exists())
        free_gib = shutil.disk_usage(existing).free / 2**30
        return UserError(
            f"the checkpoint of step {step} was not saved in {self.folder}: {error}. {free_gib:.1f} GiB are "
            f"free there; the newest complete checkpoint is {self.latest_step()}. Make room or mend the "
            "permissions, then run the same command again to go on from that one"
        )

    def _open(self) -> tuple[Any, Any]:
        """orbax, and its checkpointer for this folder."""
        if self._orbax is None:
            import orbax.checkpoint as orbax

            self._orbax = (orbax, orbax.AsyncCheckpointer(orbax.CompositeCheckpointHandler()))
        return self._orbax

    def _open_for_writing(self) -> tuple[Any, Any]:
        if not self._leftovers_deleted and jax.process_index() == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
            disk.delete_leftovers(self.folder)
        self._leftovers_deleted = True
        return self._open()
