"""What the compiled step sends, against the closed forms, in elements a device and step.

Over the simulated mesh the CPU compiler's habits are taken into account (`jaxscale.training.traffic`); for
H100 the figures are ZeRO's own: 2 Psi a step for stages 0 to 2 and 3 Psi for stage 3 with one
microbatch, and what follows for several.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import jax
import pytest

from jaxscale.config import Config, parse_config
from jaxscale.inspection.traffic import NEGLIGIBLE, TOLERANCE, tabulate_traffic
from jaxscale.mesh import make_mesh
from jaxscale.sharding.collectives import read_collectives
from jaxscale.sharding.rules import iterate_leaves
from jaxscale.training.setup import Setup, make_setup
from jaxscale.training.traffic import expected_traffic
from tests.chips import describe_gpu, describe_tpu

VOCAB = 1024
MESHES: dict[str, dict[str, int]] = {
    "fsdp8": {"fsdp": 8},
    "data2_fsdp4": {"data": 2, "fsdp": 4},
    "tensor8": {"tensor": 8},
    "data2_fsdp2_tensor2": {"data": 2, "fsdp": 2, "tensor": 2},
    "data2_fsdp2_expert2": {"data": 2, "fsdp": 2, "expert": 2},
}
Row = tuple[tuple[str, ...], str]


def make_traffic_config(
    mesh: Mapping[str, int], stage: int, microbatches: int, *, precision: str, **sections: Any
) -> Config:
    tree = {
        "run_dir": "unused",
        "steps": 1000,
        "mesh": mesh,
        "zero": {"stage": stage, **sections.pop("zero", {})},
        "batch": {"sequences": 8 * microbatches, "microbatches": microbatches, "length": 128},
        "model": {"family": "llama", "layers": 3, "embed": 256, "heads": 8, "head": 64, "mlp": 512},
        "precision": precision,
        **sections,
    }
    return parse_config(tree, origin="test")


def measure_traffic(setup: Setup) -> Counter[Row]:
    collectives = read_collectives(setup.compile_step().as_text(), setup.mesh)
    sent: Counter[Row] = Counter()
    for row in tabulate_traffic(collectives):
        assert row.elements is not None
        sent[row.axes, row.kind] = row.elements
    return sent


def expect_traffic(setup: Setup) -> Counter[Row]:
    expected: Counter[Row] = Counter()
    for row in expected_traffic(setup):
        expected[row.axes, row.kind] += row.elements
    return expected


def check_traffic(setup: Setup) -> Counter[Row]:
    """Every row of either side is within 5 % of the other; returns what was measured."""
    sent, expected = measure_traffic(setup), expect_traffic(setup)
    negligible = NEGLIGIBLE * sum(sent.values())
    for row in sent | expected:
        difference = abs(sent[row] - expected[row])
        assert difference <= max(TOLERANCE * expected[row], negligible), (row, sent[row], expected[row])
    return sent


def make_cpu_setup(config: Config) -> Setup:
    return make_setup(config, make_mesh(config.mesh), VOCAB)


@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_each_axis_carries_what_the_closed_form_says(stage: int, microbatches: int) -> None:
    mesh = MESHES["data2_fsdp2_tensor2"]
    check_traffic(make_cpu_setup(make_traffic_config(mesh, stage, microbatches, precision="fp32")))


@pytest.mark.parametrize("mesh", [name for name in MESHES if name != "data2_fsdp2_tensor2"])
def test_every_mesh_carries_what_the_closed_form_says(mesh: str) -> None:
    check_traffic(make_cpu_setup(make_traffic_config(MESHES[mesh], 3, 4, precision="fp32", remat="full")))


def test_weights_that_are_kept_gathered_cross_fsdp_once_a_step() -> None:
    config = make_traffic_config(MESHES["fsdp8"], 3, 4, precision="fp32", zero={"keep_gathered": True})
    setup = make_cpu_setup(config)
    sent = check_traffic(setup)
    elements = sum(leaf.size for leaf in jax.tree.leaves(setup.model.shapes))
    assert sent[("fsdp",), "all-gather"] == pytest.approx(elements, rel=0.01)
    config = make_traffic_config(MESHES["fsdp8"], 3, 4, precision="fp32")
    assert measure_traffic(make_cpu_setup(config))[("fsdp",), "all-gather"] > 3 * elements


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "muon": {"name": "muon"},
    "adafactor": {"name": "adafactor", "min_factored": 16},
}


def make_optimizer_config(mesh: str, name: str, precision: str, **sections: Any) -> Config:
    return make_traffic_config(
        MESHES[mesh], 3, 1, precision=precision, optimizer=OPTIMIZERS[name], **sections
    )


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_update_sends_what_its_closed_form_says(name: str) -> None:
    """3 layers over 4 devices: padded to 4 where they are exchanged."""
    setup = make_cpu_setup(make_optimizer_config("data2_fsdp2_tensor2", name, "fp32"))
    sent = check_traffic(setup)
    if name == "muon":
        tokens = sum(row.elements for row in expected_traffic(setup) if row.what == "embedded tokens")
        kernels = sum(
            leaf.size
            for path, leaf in iterate_leaves(setup.model.shapes)
            if path.startswith("layers") and path.endswith("kernel")
        )
        whole = sum(count for (_, kind), count in sent.items() if kind == "all-to-all") - tokens
        assert whole == pytest.approx(2 * kernels / 8 * 4 / 3, rel=0.01)


@pytest.mark.full
@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_update_sends_what_its_closed_form_says_in_every_stage(name: str, stage: int) -> None:
    for mesh in MESHES:
        check_traffic(make_cpu_setup(make_optimizer_config(mesh, name, "fp32", zero={"stage": stage})))


@pytest.mark.chips
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("mesh", MESHES)
def test_h100_sends_what_an_update_calls_for(mesh: str, name: str) -> None:
    config = make_optimizer_config(mesh, name, "bf16")
    check_traffic(make_setup(config, describe_gpu(8, **MESHES[mesh]), VOCAB))


@pytest.mark.chips
@pytest.mark.parametrize("mesh", ["fsdp8", "data2_fsdp2_tensor2"])
def test_v5p_orthogonalises_whole_layers_after_an_exchange(mesh: str) -> None:
    """A TPU has habits with reductions; what Muon adds is exact."""
    sent = [
        measure_traffic(make_setup(each, describe_tpu("v5p:2x2x2", **MESHES[mesh]), VOCAB))
        for each in (
            make_optimizer_config(mesh, "muon", "bf16"),
            make_traffic_config(MESHES[mesh], 3, 1, precision="bf16"),
        )
    ]
    setup = make_setup(
        make_optimizer_config(mesh, "muon", "bf16"), describe_tpu("v5p:2x2x2", **MESHES[mesh]), VOCAB
    )
    added = Counter(sent[0])
    added.subtract(sent[1])
    expected: Counter[Row] = Counter()
    for row in expected_traffic(setup):
        if "orthogonalise" in row.what:
            expected[row.axes, row.kind] += row.elements
    assert expected
    for row in added | expected:
        assert abs(added[row] - expected[row]) <= TOLERANCE * expected[row] + 1000, (row, added, expected)


@pytest.mark.chips
@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("mesh", MESHES)
def test_h100_sends_what_zero_says(mesh: str, stage: int, microbatches: int) -> None:
    config = make_traffic_config(MESHES[mesh], stage, microbatches, precision="bf16")
    setup = make_setup(config, describe_gpu(8, **MESHES[mesh]), VOCAB)
    sent = check_traffic(setup)
    if mesh != "fsdp8":
        return
    elements = sum(leaf.size for leaf in jax.tree.leaves(setup.model.shapes))
    gathered, scattered = sent[("fsdp",), "all-gather"], sent[("fsdp",), "reduce-scatter"]
    if stage == 0:
        assert sent[("fsdp",), "all-reduce"] == pytest.approx(2 * elements, rel=0.01)
    if stage == 1:
        assert gathered + scattered == pytest.approx(2 * elements, rel=0.01)
    if stage == 2:
        assert gathered == pytest.approx(elements, rel=0.01)
