"""Windows by hand: labels, weights, segments, positions, and the split."""

from itertools import pairwise

import numpy as np
import pytest

from jaxscale.data.cache import TokenisedCorpus
from jaxscale.data.windows import (
    DocumentStream,
    JoinedWindows,
    Windows,
    make_empty_window,
    split_at,
    unigram_entropy_nats,
)

END = 0  # also what padding is filled with: masking must go by place


def make_corpus(*documents: list[int]) -> TokenisedCorpus:
    offsets = np.cumsum([0, *map(len, documents)]).astype(np.int64)
    return TokenisedCorpus(np.concatenate(documents).astype(np.uint16), offsets)


class PlainStream(DocumentStream):
    """A stream whose documents stand in the order given."""

    def __init__(self, *documents: list[int]) -> None:
        super().__init__(make_corpus([token for document in documents for token in document]))
        self.bounds = np.cumsum([0, *map(len, documents)]).astype(np.int64)
        self._shifts = np.zeros(len(documents), np.int64)


def windows_over(stream: DocumentStream, length: int, **options: bool) -> Windows:
    return Windows(stream, 0, len(stream), length, **options)


def lists_of(window: dict[str, np.ndarray]) -> dict[str, list]:
    return {name: array.tolist() for name, array in window.items()}


def random_documents(count: int, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [[*rng.integers(1, 50, rng.integers(0, 9)).tolist(), END] for _ in range(count)]


def test_windows_by_hand() -> None:
    windows = windows_over(PlainStream([5, 6, 7, END], [8, END], [9, 4, END]), 4)
    assert len(windows) == 2
    assert lists_of(windows[0]) == {
        "tokens": [5, 6, 7, END],
        "labels": [6, 7, END, 8],
        "positions": [0, 1, 2, 3],
        "segments": [1, 1, 1, 1],
        "weights": [1, 1, 1, 0],  # the end token is a target; the next document's first token is not
    }
    assert lists_of(windows[1]) == {
        "tokens": [8, END, 9, 4],
        "labels": [END, 9, 4, END],
        "positions": [0, 1, 0, 1],
        "segments": [1, 1, 2, 2],
        "weights": [1, 0, 1, 1],
    }
    dtypes = {name: array.dtype.name for name, array in windows[0].items()}
    assert dtypes.pop("weights") == "float32"
    assert set(dtypes.values()) == {"int32"}


def test_last_window_is_padded_and_positions_restart_at_a_window() -> None:
    windows = windows_over(PlainStream([5, 6, 7, 8, 9, END], [3, END]), 5)
    assert len(windows) == 2
    assert lists_of(windows[1]) == {
        "tokens": [END, 3, END, 0, 0],
        "labels": [3, END, 0, 0, 0],
        "positions": [0, 0, 1, 0, 0],
        "segments": [1, 2, 2, 0, 0],
        "weights": [0, 1, 0, 0, 0],
    }


def test_positions_need_not_restart_and_segments_may_cross_but_weights_stay() -> None:
    stream = PlainStream([5, END], [6, 7, END], [8, END])
    plain = windows_over(stream, 6)[0]
    crossing = windows_over(stream, 6, cross_documents=True)[0]
    running = windows_over(stream, 6, restart_positions=False)[0]
    assert crossing["segments"].tolist() == [1] * 6
    assert running["positions"].tolist() == list(range(6))
    assert running["segments"].tolist() == plain["segments"].tolist() == [1, 1, 2, 2, 2, 3]
    for window in (crossing, running):
        np.testing.assert_array_equal(window["weights"], plain["weights"])
        np.testing.assert_array_equal(window["labels"], plain["labels"])
    np.testing.assert_array_equal(crossing["positions"], plain["positions"])
    assert windows_over(stream, 9, cross_documents=True)[0]["segments"].tolist() == [1] * 7 + [0] * 2


def test_a_window_of_one_token_documents_counts_no_label() -> None:
    window = windows_over(PlainStream(*[[END]] * 5), 4)[0]
    assert window["weights"].tolist() == [0, 0, 0, 0]
    assert window["segments"].tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize("length", [1, 2, 3, 7, 16, 1000])
def test_each_real_target_counts_once_though_padding_looks_like_the_end_token(length: int) -> None:
    documents = random_documents(40)
    windows = windows_over(DocumentStream(make_corpus(*documents)), length)
    counted = [
        label
        for window in map(windows.__getitem__, range(len(windows)))
        for label, weight in zip(window["labels"], window["weights"], strict=True)
        if weight
    ]
    targets = [token for document in documents for token in document[1:]]
    assert sorted(counted) == sorted(targets)


@pytest.mark.parametrize("length", [1, 3, 8, 50])
def test_windows_equal_a_slow_reading_of_the_stream(length: int) -> None:
    documents = random_documents(30, seed=3)
    stream = DocumentStream(make_corpus(*documents))
    order = stream_order(stream, documents)
    flat = [(token, number, place) for number, d in enumerate(order) for place, token in enumerate(d)]
    start, stop = 5, len(flat) - 3
    windows = Windows(stream, start, stop, length)
    for index in range(len(windows)):
        begin = start + index * length
        part = flat[begin : min(begin + length + 1, stop)]
        window = windows[index]
        for place, (token, number, position) in enumerate(part[:length]):
            assert window["tokens"][place] == token
            assert window["segments"][place] == number - part[0][1] + 1
            assert window["positions"][place] == min(position, place)
        for place, (before, after) in enumerate(pairwise(part)):
            assert window["labels"][place] == after[0]
            assert window["weights"][place] == (before[1] == after[1])


def stream_order(stream: DocumentStream, documents: list[list[int]]) -> list[list[int]]:
    tokens, numbers = stream.read(0, len(stream))
    found = [tokens[numbers == number].tolist() for number in range(len(documents))]
    assert sorted(found) == sorted(documents)
    return found


def test_documents_are_shuffled_the_same_way_each_time() -> None:
    documents = [[number, END] for number in range(1, 101)]
    first, again = (stream_order(DocumentStream(make_corpus(*documents)), documents) for _ in range(2))
    assert first == again
    assert first != documents
    moved = [abs(place - (document[0] - 1)) for place, document in enumerate(first)]
    assert np.mean(moved) > 20  # 33 on average for a random order


def test_training_and_validation_share_no_token_and_cover_all() -> None:
    documents = [[number] for number in range(1, 101)]  # each token names itself
    stream = DocumentStream(make_corpus(*documents))
    cut = split_at(stream, 0.25)
    seen = []
    for start, stop in ((0, cut), (cut, 100)):
        windows = Windows(stream, start, stop, 8)
        read = {
            int(v)
            for w in map(windows.__getitem__, range(len(windows)))
            for v in [*w["tokens"], *w["labels"]]
        }
        seen.append(read - {0})
    assert cut == 75
    assert seen[0] & seen[1] == set()
    assert seen[0] | seen[1] == set(range(1, 101))


def test_a_single_document_is_cut_at_its_tail() -> None:
    stream = DocumentStream(make_corpus(list(range(1, 102))))
    cut = split_at(stream, 0.1)
    assert cut == 91
    assert Windows(stream, cut, len(stream), 3)[0]["tokens"].tolist() == [92, 93, 94]
    assert split_at(stream, 0.0) == 101


def test_reading_outside_is_an_error() -> None:
    windows = windows_over(PlainStream([1, 2, 3]), 2)
    joined = JoinedWindows((windows, windows))
    for index in (-1, 1):
        with pytest.raises(IndexError):
            windows[index]
    for index in (-1, 2):
        with pytest.raises(IndexError):
            joined[index]
    assert len(Windows(windows.stream, 2, 3, 2)) == 0


def test_joined_windows_stand_one_split_after_another() -> None:
    first, second = windows_over(PlainStream([1, 2, 3, 4, 5]), 2), windows_over(PlainStream([6, 7, 8]), 2)
    joined = JoinedWindows((first, second))
    assert [joined[index]["tokens"].tolist() for index in range(len(joined))] == [[1, 2], [3, 4], [6, 7]]


def test_unigram_entropy_counts_counted_labels_only() -> None:
    # Labels that count: 1 1 2 END of the first document and 2 END of the second; 9 starts documents only.
    stream = PlainStream([9, 1, 1, 2, END], [9, 2, END])
    shares = np.array([2, 2, 2]) / 6
    expected = -(shares * np.log(shares)).sum()
    for length in (1, 3, 100):
        assert unigram_entropy_nats(windows_over(stream, length)) == pytest.approx(expected, abs=1e-12)
    doubled = JoinedWindows((windows_over(stream, 3), windows_over(stream, 3)))
    assert unigram_entropy_nats(doubled) == pytest.approx(expected, abs=1e-12)
    uniform = windows_over(PlainStream(list(range(257))), 16)
    assert unigram_entropy_nats(uniform) == pytest.approx(np.log(256), abs=1e-12)
    with pytest.raises(ValueError, match="no label counts"):
        unigram_entropy_nats(windows_over(PlainStream([END], [END]), 4))


def test_an_empty_window_counts_nothing() -> None:
    window = make_empty_window(3)
    real = windows_over(PlainStream([1, 2, 3, END]), 3)[0]
    assert {n: (a.dtype, a.shape) for n, a in window.items()} == {
        n: (a.dtype, a.shape) for n, a in real.items()
    }
    assert not any(array.any() for array in window.values())
