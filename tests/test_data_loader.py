"""The order of sequences, and batches on devices."""

import threading
from collections import Counter
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxscale.config.errors import UserError
from jaxscale.data import loader
from jaxscale.data.loader import BatchLoader, evaluation_batches
from jaxscale.data.order import SequenceOrder, _Turns
from jaxscale.data.windows import Window, make_empty_window

LENGTH = 4
# The first sequences of seed 5 over 23 and 1000 windows with weights 1 and 2: runs in progress rely on them.
GOLDEN = [(0, 11), (1, 21), (1, 786), (0, 13), (1, 822), (1, 363), (0, 10), (1, 498), (1, 249)]


class Numbered:
    """Windows whose every token is the index asked for; remembers what was asked."""

    def __init__(self, count: int = 10**9) -> None:
        self.count = count
        self.asked: list[int] = []

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Window:
        self.asked.append(index)
        window = make_empty_window(LENGTH)
        window["tokens"] = np.full(LENGTH, index, np.int32)
        window["weights"] = np.ones(LENGTH, np.float32)
        return window

    def with_length(self, length: int) -> "Numbered":
        return self


class Ordered(Numbered):
    """Windows named by the place where an order of 23 examples sends them."""

    def __init__(self) -> None:
        super().__init__()
        self._order = SequenceOrder([23], [1.0], seed=0)

    def __getitem__(self, index: int) -> Window:
        return super().__getitem__(self._order[index][1])


def make_sharding(shape: tuple[int, int], *axes: str) -> NamedSharding:
    devices = np.array(jax.devices()[: shape[0] * shape[1]]).reshape(shape)
    mesh = Mesh(devices, ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    return NamedSharding(mesh, P(None, *(axes or ("data",))))


def load(rows: Any, count: int, **options: Any) -> list[list[int]]:
    """The ids of each of `count` batches, in batch order."""
    options = {"sequences": 4, "microbatches": 1, "sharding": make_sharding((1, 1))} | options
    with BatchLoader(rows, **options) as batches:
        return [ids_of(next(batches)) for _ in range(count)]


def ids_of(batch: dict[str, jax.Array]) -> list[int]:
    return np.asarray(batch["tokens"])[:, :, 0].ravel().tolist()


def flatten(batches: list[list[int]]) -> list[int]:
    return [index for batch in batches for index in batch]


# ---------------------------------------------------------------------------------------------- order


def test_each_epoch_is_another_permutation() -> None:
    order = SequenceOrder([23], [1.0], seed=0)
    epochs = [tuple(order[epoch * 23 + place][1] for place in range(23)) for epoch in range(8)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(23))] * 8
    assert len(set(epochs)) == 8


def test_the_order_of_a_seed_never_changes_between_versions() -> None:
    order = SequenceOrder([23, 1000], [1.0, 2.0], seed=5)
    assert [order[sequence] for sequence in range(9)] == GOLDEN


def test_neighbouring_seeds_share_no_epoch() -> None:
    epochs: Counter = Counter()
    for seed in range(4):
        order = SequenceOrder([23], [1.0], seed)
        for epoch in range(4):
            epochs[tuple(order[epoch * 23 + place][1] for place in range(23))] += 1
    assert set(epochs.values()) == {1}


@pytest.mark.parametrize("seed", [0, 2**31, 2**32 - 1])
def test_far_sequences_cost_no_walk_through_the_near_ones(seed: int) -> None:
    order = SequenceOrder([23], [1.0], seed)
    epoch = 10**14
    assert sorted(order[epoch * 23 + place][1] for place in range(23)) == list(range(23))


def test_a_mixture_keeps_exact_shares_all_along() -> None:
    turns = _Turns([1.0, 1.009, 0.1])  # grain's own mix gives 1 : 1 : 0.1
    drawn = [turns[sequence] for sequence in range(21_090)]
    for source, share in enumerate([10_000, 10_090, 1_000]):
        places = [place for place, (drawn_source, _) in enumerate(drawn) if drawn_source == source]
        assert abs(len(places) - share) <= 2
        assert [drawn[place][1] for place in places] == list(range(len(places)))
        assert max(np.diff(places)) <= 2 * 21_090 / share  # turns, not blocks


def test_each_source_of_a_mixture_repeats_on_its_own() -> None:
    order = SequenceOrder([30, 50], [3.0, 1.0], seed=0)
    drawn = [order[sequence] for sequence in range(240)]
    for source, count in enumerate([30, 50]):
        windows = [window for drawn_source, window in drawn if drawn_source == source]
        epochs = [windows[start : start + count] for start in range(0, len(windows) - count + 1, count)]
        assert len(epochs) == {0: 6, 1: 1}[source]
        assert all(sorted(epoch) == list(range(count)) for epoch in epochs)


# ------------------------------------------------------------------------------------------- batches


def test_resuming_at_every_step_continues_the_same_ids() -> None:
    whole = load(Ordered(), 20)
    assert len(set(map(tuple, whole))) == 20
    assert sorted(flatten(whole)[:23]) == sorted(flatten(whole)[23:46]) == list(range(23))
    for step in range(1, 20):
        assert load(Ordered(), 20 - step, start_sequence=4 * step) == whole[step:]


def test_another_batch_size_continues_at_the_same_sequence() -> None:
    before = flatten(load(Numbered(), 5, sequences=8))
    after = flatten(load(Numbered(), 2, sequences=16, start_sequence=40))
    assert before + after == list(range(72))


@pytest.mark.parametrize("microbatches", [1, 2, 4])
@pytest.mark.parametrize("shape", [(1, 1), (2, 1), (2, 4), (1, 8)])
def test_ids_do_not_depend_on_mesh_or_microbatches(shape: tuple[int, int], microbatches: int) -> None:
    batches = load(Ordered(), 4, sequences=8, microbatches=microbatches, sharding=make_sharding(shape))
    assert batches == load(Ordered(), 4, sequences=8)


def test_batches_have_the_promised_shape_and_layout() -> None:
    sharding = make_sharding((2, 2))
    with BatchLoader(
        Numbered(), sequences=12, microbatches=3, sharding=sharding, start_sequence=100
    ) as batches:
        batch = next(batches)
    for name, array in batch.items():
        assert array.shape == (3, 4, LENGTH), name
        assert array.sharding.is_equivalent_to(sharding, 3)
        assert array.dtype == (np.float32 if name == "weights" else np.int32)
    rows = 100 + np.arange(12).reshape(3, 4, 1)
    np.testing.assert_array_equal(batch["tokens"], np.broadcast_to(rows, (3, 4, LENGTH)))


def test_data_shards_are_disjoint_and_tensor_replicas_equal() -> None:
    [batch] = load_arrays(make_sharding((2, 4)), 1)
    whole = ids_of(batch)
    by_rows: dict[tuple, set] = {}
    for shard in batch["tokens"].addressable_shards:
        rows = (shard.index[1].start, shard.index[1].stop)
        by_rows.setdefault(rows, set()).add(tuple(np.asarray(shard.data)[:, :, 0].ravel().tolist()))
    assert [len(replicas) for replicas in by_rows.values()] == [1, 1]
    first, second = (next(iter(replicas)) for replicas in by_rows.values())
    assert set(first) & set(second) == set()
    assert sorted(first + second) == sorted(whole)


def load_arrays(sharding: NamedSharding, count: int) -> list[dict[str, jax.Array]]:
    with BatchLoader(Numbered(), sequences=8, microbatches=2, sharding=sharding) as batches:
        return [next(batches) for _ in range(count)]


def test_the_sequence_dim_can_be_sharded_too() -> None:
    sharding = make_sharding((2, 2), "data", "tensor")
    [batch] = load_arrays(sharding, 1)
    np.testing.assert_array_equal(batch["tokens"], load_arrays(make_sharding((1, 1)), 1)[0]["tokens"])


class HalfOfTheDevices:
    """A sharding as one of two processes sees it."""

    def __init__(self, sharding: NamedSharding, process: int) -> None:
        self._sharding = sharding
        self._own = list(sharding.mesh.devices[process].ravel())
        self.num_devices = sharding.num_devices

    def addressable_devices_indices_map(self, shape: tuple[int, ...]) -> dict:
        indices = self._sharding.devices_indices_map(shape)
        return {device: indices[device] for device in self._own}


def test_each_of_two_processes_reads_only_its_own_rows_and_each_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def make_own_shards(shape, sharding, callback):
        return [callback(index) for index in sharding.addressable_devices_indices_map(shape).values()]

    monkeypatch.setattr(loader.jax, "make_array_from_callback", make_own_shards)
    asked = []
    for process in (0, 1):
        rows = Numbered()
        sharding = HalfOfTheDevices(make_sharding((2, 4)), process)
        with BatchLoader(rows, sequences=8, microbatches=2, sharding=sharding) as batches:
            shards = next(batches)["tokens"]
        asked.append(rows.asked[:4])
        assert sorted(set(rows.asked)) == sorted(rows.asked)  # five arrays, four replicas: read once
        assert all(np.array_equal(shard, shards[0]) for shard in shards)
    assert [sorted(rows) for rows in asked] == [[0, 1, 4, 5], [2, 3, 6, 7]]


def test_an_error_while_reading_ahead_surfaces_in_next_at_its_batch() -> None:
    class Broken(Numbered):
        def __getitem__(self, index: int) -> Window:
            if index >= 8:
                raise OSError("disk gone")
            return super().__getitem__(index)

    with BatchLoader(Broken(), sequences=4, microbatches=1, sharding=make_sharding((1, 1))) as batches:
        assert [ids_of(next(batches)) for _ in range(2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
        with pytest.raises(OSError, match="disk gone"):
            next(batches)
        with pytest.raises(StopIteration):
            next(batches)


def test_two_batches_are_read_ahead_and_close_stops_the_thread() -> None:
    rows = Numbered()
    batches = BatchLoader(rows, sequences=4, microbatches=1, sharding=make_sharding((1, 1)))
    next(batches)
    batches.close()
    assert set(rows.asked) <= set(range(12))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("batch-loader")]
    assert list(batches) == []
    batches.close()


def test_reading_goes_on_while_the_step_runs() -> None:
    third_is_read = threading.Event()

    class Signalling(Numbered):
        def __getitem__(self, index: int) -> Window:
            if index == 8:
                third_is_read.set()
            return super().__getitem__(index)

    with BatchLoader(Signalling(), sequences=4, microbatches=1, sharding=make_sharding((1, 1))) as batches:
        next(batches)
        assert third_is_read.wait(timeout=10)


def test_sequences_that_do_not_divide_into_microbatches_are_refused() -> None:
    with pytest.raises(UserError, match=r"batch\.sequences 4 .*batch\.microbatches 3"):
        load(Numbered(), 1, microbatches=3)


# ---------------------------------------------------------------------------------------- evaluation


@pytest.mark.parametrize(
    ("total", "count", "expected"), [(10, 5, [0, 2, 4, 6, 8]), (3, 64, [0, 1, 2]), (7, 7, list(range(7)))]
)
def test_evaluation_counts_each_chosen_window_once(total: int, count: int, expected: list[int]) -> None:
    for _ in range(2):
        sharding = make_sharding((2, 1))
        batches = list(
            evaluation_batches(Numbered(total), count, sequences=4, microbatches=2, sharding=sharding)
        )
        assert {batch["tokens"].shape for batch in batches} == {(2, 2, LENGTH)}
        tokens, weights = (
            np.concatenate([np.asarray(batch[name])[:, :, 0].ravel() for batch in batches])
            for name in ("tokens", "weights")
        )
        assert tokens[weights > 0].tolist() == expected
        segments = np.concatenate([np.asarray(batch["segments"])[:, :, 0].ravel() for batch in batches])
        assert not segments[weights == 0].any()
