"""Wires of mesh axes and times of collectives, held against the worked examples of the sources."""

import math
import random

import numpy as np
import pytest
from jax._src import mesh_utils

from jaxscale.mesh import AXES
from jaxscale.planning.hardware import parse_slice
from jaxscale.planning.torus import assign_axes, is_split
from jaxscale.planning.wires import COLLECTIVES, collective_seconds, place_axes, wire_of

US = 1e-6


def seconds(kind: str, sent_bytes: float, chips: str, axes: tuple[str, ...], **sizes: int) -> float:
    """Without latency."""
    wire = wire_of(parse_slice(chips), sizes, axes)
    times = 2 if kind == "all-reduce" else 1
    return collective_seconds(kind, sent_bytes, wire) - times * wire.latency_seconds


def list_meshes(devices: int, axes: int):
    if axes == 1:
        yield (devices,)
        return
    for size in range(1, devices + 1):
        if devices % size == 0:
            yield from ((size, *rest) for rest in list_meshes(devices // size, axes - 1))


DIMS = [(4, 4, 1), (8, 16, 1), (16, 16, 1), (4, 4, 4), (4, 4, 8), (8, 8, 12), (2, 2, 1, 2), (4, 4, 4, 2)]


@pytest.mark.parametrize("dims", DIMS)
def test_axes_lie_on_the_torus_as_jax_lays_them(dims):
    devices = math.prod(dims)
    torus = np.arange(devices).reshape(dims)
    meshes = list(list_meshes(devices, len(AXES)))
    for sizes in random.Random(0).sample(meshes, min(60, len(meshes))):
        _, theirs = mesh_utils._create_device_mesh_for_nd_torus(torus, sizes, allow_split_physical_axes=True)
        assert np.array_equal(np.array(assign_axes(dims, sizes)).T, theirs), sizes
        try:
            mesh_utils._create_device_mesh_for_nd_torus(torus, sizes)
            assert not is_split(dims, sizes), sizes
        except NotImplementedError:
            assert is_split(dims, sizes), sizes


# Scaling book, "Sharded matrices", questions 1 and 2 and the example of v5e; exact where the book rounds
# (n-1)/n up to 1.


def test_gathers_over_one_and_two_dims_of_a_torus_take_what_the_scaling_book_says():
    whole = 2 * 1024 * 4096
    cube = {"data": 4, "fsdp": 4, "tensor": 4}
    one = seconds("all-gather", whole / 4, "v4:4x4x4", ("fsdp",), **cube)
    assert one == pytest.approx(whole / 4 / 9e10 * 3 / 4)
    assert one / (3 / 4) == pytest.approx(23 * US, rel=0.02)
    two = seconds("all-gather", whole, "v4:4x4x4", ("data", "fsdp"), **cube)
    assert two / (15 / 16) == pytest.approx(46 * US, rel=0.02)
    three = seconds("all-gather", whole, "v4:4x4x4", AXES, **cube)
    assert three == pytest.approx(whole * 63 / 64 / (3 * 9e10))


def test_a_line_sends_one_way():
    whole = 34e6
    on_line = seconds("all-gather", whole, "v5e:4x4", ("tensor",), fsdp=4, tensor=4)
    assert on_line == pytest.approx(3 * whole / 4 / 4.5e10)
    assert on_line == pytest.approx(560 * US, rel=0.02), "the book's"
    on_ring = seconds("all-gather", whole, "v5e:16x16", ("tensor",), fsdp=16, tensor=16)
    assert on_ring == pytest.approx(whole * 15 / 16 / 9e10)
    whole_slice = seconds("all-gather", whole, "v5e:4x4", ("fsdp",), fsdp=16)
    assert whole_slice == pytest.approx(whole * 15 / 16 / (2 * 4.5e10)), "both dims, one way each"


def test_an_axis_with_part_of_a_dim_has_part_of_its_links():
    # Of a dim of 16, tensor has neighbours 4 by 4, and fsdp every fourth device all the way round.
    places = place_axes(parse_slice("v5e:16x16"), {"data": 16, "fsdp": 4, "tensor": 4})
    assert places["tensor"].bytes_per_second == pytest.approx(4.5e10), "a line of 4"
    assert places["fsdp"].bytes_per_second == pytest.approx(9e10 / 4), "a ring that 4 groups share"
    assert places["data"].bytes_per_second == pytest.approx(9e10)
    joined = wire_of(parse_slice("v5e:16x16"), {"data": 16, "fsdp": 4, "tensor": 4}, ("fsdp", "tensor"))
    assert joined.bytes_per_second == pytest.approx(9e10)
    apart = wire_of(
        parse_slice("v5e:16x16"), {"data": 2, "fsdp": 2, "expert": 4, "tensor": 16}, ("data", "expert")
    )
    assert apart.bytes_per_second == pytest.approx(9e10 / 2), "fsdp lies between them"


def test_an_exchange_on_a_ring_takes_a_quarter_of_a_gather():
    for chips, sizes, ring in (
        ("v5e:16x16", {"fsdp": 16, "tensor": 16}, 16),
        ("v4:4x4x4", {"data": 16, "tensor": 4}, 4),
    ):
        whole = 1e9
        gather = seconds("all-gather", whole, chips, ("tensor",), **sizes) * ring / (ring - 1)
        exchange = seconds("all-to-all", whole / ring, chips, ("tensor",), **sizes)
        assert exchange == pytest.approx(gather / 4)
    # A line of 4: 2 devices send half of what they hold over the one link in the middle.
    assert seconds("all-to-all", 1e9, "v5e:4x4", ("tensor",), fsdp=4, tensor=4) == pytest.approx(1e9 / 4.5e10)


# Scaling book, "GPUs": pop quiz 1, and the formulas of cross-node collectives.


def test_a_node_of_gpus_takes_what_the_scaling_book_says():
    whole = 2 * 1024 * 16384
    measured = 0.82  # the book's 370 of 450 GB/s, which its formulas leave out
    assert seconds("all-gather", whole, "h100:8", ("fsdp",), fsdp=8) * measured == pytest.approx(
        65 * US, rel=0.01
    )
    exchange = seconds("all-to-all", whole / 8, "h100:8", ("expert",), expert=8)
    assert exchange * measured == pytest.approx(whole * 7 / (450e9 * 64))


def test_between_nodes_the_adapters_of_a_node_work_together():
    whole = 1e9
    unit = seconds("all-gather", whole, "h100:32x8", ("fsdp",), fsdp=256)
    assert unit == pytest.approx(whole * 31 / (32 * 400e9))
    # With tensor=8 inside, each GPU has its own group of 32 and one adapter for it.
    sharded = seconds("all-gather", whole / 8, "h100:32x8", ("fsdp",), fsdp=32, tensor=8)
    assert sharded == pytest.approx(whole / 8 * 31 / 32 / 50e9)
    # tensor=2 leaves 4 of a node to fsdp.
    places = place_axes(parse_slice("h100:32x8"), {"fsdp": 128, "tensor": 2})
    assert [(level.name, level.size) for level in places["fsdp"].levels] == [("NVLink", 4), ("network", 32)]
    exchange = seconds("all-to-all", 1e9, "h100:4x8", ("expert",), expert=32)
    assert exchange == pytest.approx(1e9 * 3 / 4 / 50e9)


def test_groups_that_straddle_nodes_go_over_the_network():
    places = place_axes(parse_slice("h100:3x8"), {"data": 8, "tensor": 3})
    assert [(level.name, level.size) for level in places["tensor"].levels] == [("network", 3)]


def test_names_and_sizes_of_wires():
    places = place_axes(parse_slice("a100:4x8"), {"data": 4, "tensor": 8})
    assert {axis: wire.name for axis, wire in places.items()} == {
        "pipe": "none",
        "data": "network",
        "fsdp": "none",
        "expert": "none",
        "tensor": "NVLink",
    }
    assert places["tensor"].bytes_per_second == pytest.approx(300e9)
    assert places["data"].bytes_per_second == pytest.approx(25e9)
    memory = place_axes(parse_slice("cpu:8"), {"data": 8})["data"]
    assert (memory.name, memory.has_speed) == ("memory", False)
    assert place_axes(parse_slice("v5p:4x4x4"), {"fsdp": 64})["fsdp"].name == "ICI"


@pytest.mark.parametrize("chips", ["v5p:4x4x4", "v5e:8x8", "h100:8x8"])
def test_conventions_of_amounts(chips):
    """An all-reduce is counted twice and is a scatter and a gather; a scatter takes what a gather takes."""
    take = {kind: seconds(kind, 1e9, chips, ("fsdp",), fsdp=64) for kind in COLLECTIVES[:5]}
    assert take["reduce-scatter"] == take["all-gather"]
    both = seconds("all-reduce", 2e9, chips, ("fsdp",), fsdp=64)
    assert both == pytest.approx(take["all-gather"] + take["reduce-scatter"])
    assert take["ragged-all-to-all"] == take["all-to-all"]
    assert collective_seconds("all-gather", 1e9, wire_of(parse_slice(chips), {"fsdp": 64}, ("data",))) == 0


def test_small_messages_wait_for_their_hops():
    ring = wire_of(parse_slice("v4:4x4x4"), {"data": 16, "tensor": 4}, ("tensor",))
    assert collective_seconds("all-gather", 256, ring) == pytest.approx(2 * US, rel=0.01), (
        "the book's question 3"
    )
    line = wire_of(parse_slice("v5e:4x4"), {"fsdp": 4, "tensor": 4}, ("tensor",))
    assert line.latency_seconds == pytest.approx(3 * US)
    assert collective_seconds("all-reduce", 2, line) == pytest.approx(6 * US, rel=0.01)
    nodes = wire_of(parse_slice("h100:8x8"), {"fsdp": 64}, ("fsdp",))
    assert nodes.latency_seconds == pytest.approx(3 * 0.6 * US + 3 * 5 * US)


def test_a_neighbour_is_one_link_away():
    assert seconds_of_permute("v5p:4x4x4", pipe=4, tensor=16) == pytest.approx(1e9 / 9e10, rel=1e-3)
    assert seconds_of_permute("h100:8x8", pipe=8, tensor=8) == pytest.approx(1e9 / 50e9, rel=1e-3)
    assert seconds_of_permute("h100:8", pipe=4, tensor=2) == pytest.approx(1e9 / (0.82 * 450e9), rel=1e-3)


def seconds_of_permute(chips: str, **sizes: int) -> float:
    return collective_seconds("collective-permute", 1e9, wire_of(parse_slice(chips), sizes, ("pipe",)))


def test_two_devices_of_a_chip_are_joined_by_the_link_between_its_cores():
    # JAX lays tensor along x; fsdp has y and the cores, and half of what it gathers comes along y.
    places = place_axes(parse_slice("tpu7x:2x2x1"), {"fsdp": 4, "tensor": 2})
    assert places["tensor"].bytes_per_second == pytest.approx(45e9)
    assert places["fsdp"].bytes_per_second == pytest.approx(3 / 4 * 1e9 / (1e9 / 2 / (2 * 45e9)))
    cores = place_axes(parse_slice("tpu7x:1x1x1"), {"tensor": 2})
    assert cores["tensor"].bytes_per_second == pytest.approx(540e9)
