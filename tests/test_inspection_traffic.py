"""Collectives of a compiled step against the closed forms, on made-up collectives."""

from typing import Any

import pytest

from jaxscale.inspection.traffic import compare_traffic, tabulate_expected, tabulate_traffic, warn_of_formats
from jaxscale.sharding.collectives import Collective
from jaxscale.training.traffic import ExpectedTraffic


def make_collective(kind: str, elements: int, **changes: Any) -> Collective:
    given = {
        "axes": ("fsdp",),
        "group_size": 4,
        "dtypes": ("f32",),
        "bytes": 4 * elements,
        "trips": 3,
        "loop_depth": 1,
        "in_branch": False,
        "name": f"{kind}.1",
        "op_name": "jit(step)/dot",
        "source": "model.py:7",
    }
    return Collective(kind=kind, elements=elements, **{**given, **changes})


@pytest.mark.parametrize(
    ("kind", "sent"),
    [("all-reduce", 200), ("all-gather", 100), ("reduce-scatter", 400), ("all-to-all", 100)],
)
def test_elements_sent_are_counted_as_in_zero(kind: str, sent: int) -> None:
    """Sizes in the program are of the result: a reduce-scatter over 4 keeps a quarter of what it scatters."""
    [row] = tabulate_traffic([make_collective(kind, 100)])
    assert (row.count, row.elements, row.bytes) == (3, 3 * sent, 12 * sent)


def test_unknown_trips_are_unknown_and_groups_of_one_send_nothing() -> None:
    unknown, alone = make_collective("all-gather", 1, trips=None), make_collective("all-reduce", 1, axes=())
    [row] = tabulate_traffic([unknown, make_collective("all-gather", 1), alone])
    assert (row.count, row.elements, row.bytes) == (None, None, None)


def compare(collectives: list[Collective], expected: list[ExpectedTraffic]) -> list[str]:
    rows = tabulate_traffic(collectives)
    return compare_traffic(collectives, rows, tabulate_expected(expected, rows, 2), ("fsdp",))


@pytest.mark.parametrize(
    ("elements", "passes"), [(1000, True), (960, True), (1040, True), (940, False), (1060, False)]
)
def test_traffic_may_be_5_percent_from_the_closed_form(elements: int, passes: bool) -> None:
    expected = [ExpectedTraffic(("fsdp",), "all-gather", 2000, "forward")]
    expected += [ExpectedTraffic(("fsdp",), "all-gather", 1000, "backward")]
    warnings = compare([make_collective("all-gather", elements)], expected)
    assert (warnings == []) == passes


def test_a_difference_names_its_largest_operations_and_their_source_lines() -> None:
    collectives = [
        make_collective("all-gather", size, name=f"all-gather.{size}", source=f"model.py:{size}")
        for size in (10, 500, 20, 300, 40)
    ]
    expected = [ExpectedTraffic(("fsdp",), "all-gather", 1000, "weights, forward and backward")]
    [warning] = compare(collectives, expected)
    for words in ("fsdp", "2,610", "1,000", "+161%", "weights, forward and backward", "and 2 smaller"):
        assert words in warning
    assert warning.index("model.py:500") < warning.index("model.py:300") < warning.index("model.py:40")


def test_traffic_that_is_expected_and_not_there_is_a_warning() -> None:
    [warning] = compare([], [ExpectedTraffic(("data",), "all-reduce", 10, "gradients")])
    assert "sends 0 elements" in warning


def test_a_widened_wire_is_one_warning() -> None:
    collectives = [make_collective("all-gather", size) for size in (10, 20, 30)]
    assert len(warn_of_formats(collectives, "bf16", "cpu")) == 1
    assert warn_of_formats(collectives, "fp32", "cpu") == []
    narrow = [*collectives, make_collective("all-gather", 5, dtypes=("bf16",))]
    assert warn_of_formats(narrow, "bf16", "tpu") == []


def test_expected_bytes_have_the_width_on_the_wire() -> None:
    rows = tabulate_traffic([make_collective("all-gather", 100)])
    expected = [ExpectedTraffic(("fsdp",), kind, 50, "w") for kind in ("all-gather", "all-reduce")]
    assert [row.bytes for row in tabulate_expected(expected, rows, 2)] == [200, 100]


def test_traffic_that_nothing_calls_for_is_a_warning_where_all_is_predicted() -> None:
    expected = [ExpectedTraffic(("fsdp",), "all-gather", 3000, "weights")]
    gather = make_collective("all-gather", 1000)
    [warning] = compare([gather, make_collective("all-to-all", 100)], expected)
    assert "all-to-all over fsdp" in warning
    assert "none is called for" in warning
    assert compare([gather, make_collective("all-to-all", 100, axes=("tensor",))], expected) == []


def test_differences_of_scalars_are_not_worth_a_word() -> None:
    expected = [ExpectedTraffic(("fsdp",), "all-gather", 300_000, "weights")]
    assert (
        compare([make_collective("all-gather", 100_000), make_collective("all-reduce", 10)], expected) == []
    )
