"""State on the host, compiled for TPU v5p: none of it is left on the device but what is in flight."""

from collections import Counter
from typing import Any

import pytest

from jaxscale.config import parse_config
from jaxscale.sharding.collectives import read_collectives
from jaxscale.sharding.host_moves import read_host_moves
from jaxscale.training.offload import expect_host_traffic
from jaxscale.training.setup import Setup, make_setup
from tests.chips import describe_tpu

pytestmark = pytest.mark.chips

MESH = {"data": 2, "fsdp": 2}
LAYERS, EMBED, MLP = 8, 512, 1408


@pytest.fixture(scope="module")
def compiled() -> dict[str, tuple[Setup, Any]]:
    made = {}
    both = {"optimizer_state": True, "master_weights": True}
    for way, offload, precision in (
        ("off", {}, "bf16"),
        ("moments", {"optimizer_state": True}, "bf16"),
        ("both", both, "bf16"),
        ("off_fp8", {}, "fp8"),
        ("both_fp8", both, "fp8"),
    ):
        tree = {
            "run_dir": "unused",
            "steps": 1000,
            "mesh": MESH,
            "batch": {"sequences": 8, "microbatches": 2, "length": 256},
            "model": {
                "family": "llama",
                "layers": LAYERS,
                "embed": EMBED,
                "heads": 4,
                "mlp": MLP,
                "vocab": 512,
            },
            "precision": precision,
            "remat": "full",
            "offload": offload,
        }
        setup = make_setup(parse_config(tree, origin="test"), describe_tpu("v5p:2x2x1", **MESH), 512)
        made[way] = (setup, setup.compile_step())
    return made


@pytest.mark.parametrize(("way", "without"), [("moments", "off"), ("both", "off"), ("both_fp8", "off_fp8")])
def test_state_leaves_the_device_but_for_the_layer_in_flight(compiled: Any, way: str, without: str) -> None:
    plain = compiled[without][1].memory_analysis()
    setup, program = compiled[way]
    memory = program.memory_analysis()
    held = expect_host_traffic(setup.abstract_state).held
    saved = plain.argument_size_in_bytes - memory.argument_size_in_bytes
    assert plain.host_argument_size_in_bytes == plain.host_temp_size_in_bytes == 0
    assert memory.host_argument_size_in_bytes == pytest.approx(held, rel=0.01)
    assert saved == pytest.approx(held, rel=0.01)
    # Moments and master weights of a layer, the slice that goes back beside the one that comes.
    window = 2 * held / LAYERS
    grown = memory.temp_size_in_bytes - plain.temp_size_in_bytes
    assert grown < window, f"{grown:,} bytes more of temporaries, {window:,} are two layers' state"


@pytest.mark.parametrize("way", ["moments", "both"])
def test_the_update_is_in_place_on_the_host(compiled: Any, way: str) -> None:
    """A scan that returns the new slices would hold the state twice."""
    memory = compiled[way][1].memory_analysis()
    assert memory.host_temp_size_in_bytes == 0
    assert memory.host_alias_size_in_bytes == memory.host_output_size_in_bytes > 0


@pytest.mark.parametrize("way", ["off", "moments", "both", "both_fp8"])
def test_the_compiled_step_moves_what_the_closed_form_says(compiled: Any, way: str) -> None:
    setup, program = compiled[way]
    moves, expected = read_host_moves(program.as_text()), expect_host_traffic(setup.abstract_state)
    assert moves.to_device == pytest.approx(expected.to_device, rel=0.01)
    assert moves.to_host == pytest.approx(expected.to_host, rel=0.01)


@pytest.mark.parametrize(("way", "without"), [("both", "off"), ("both_fp8", "off_fp8")])
def test_what_comes_from_the_host_is_gathered_as_without(compiled: Any, way: str, without: str) -> None:
    """In the compute format: it is cast as it comes."""
    gathered = []
    for each in (way, without):
        setup, program = compiled[each]
        formats: Counter[tuple[str, ...]] = Counter()
        for row in read_collectives(program.as_text(), setup.mesh):
            if row.kind == "all-gather":
                formats[row.dtypes] += row.bytes * row.trips
        gathered.append(formats)
    assert gathered[0] == gathered[1]
    assert ("f32",) not in gathered[0]
