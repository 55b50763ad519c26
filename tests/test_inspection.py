"""What `jaxscale inspect` says is what lies there: bytes, replication, traffic, pictures."""

import json
import math
import os
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec
from rich.console import Console

from jaxscale.cli.main import main
from jaxscale.config import UserError, load_config
from jaxscale.inspection.inspect import (
    describe_activation,
    find_activation_errors,
    inspect_setup,
    wanted_axes,
    warn_of_replication,
)
from jaxscale.inspection.picture import choose_panels, render_picture
from jaxscale.inspection.plot import save_png
from jaxscale.inspection.report import Inspection, LeafReport, StateBytes, sum_bytes
from jaxscale.inspection.tables import render_tables
from jaxscale.inspection.traffic import tabulate_expected
from jaxscale.inspection.weigh import weigh_leaves
from jaxscale.mesh import AXES, axis_sizes
from jaxscale.models.build import build_decoder, complete_shape
from jaxscale.sharding.activations import Observation
from jaxscale.sharding.parts import measure_part
from jaxscale.sharding.rules import iterate_leaves
from jaxscale.training.optimizer import make_optimizer
from jaxscale.training.optimizer_layout import describe_optimizer
from jaxscale.training.setup import Setup
from jaxscale.training.traffic import ExpectedTraffic
from tests.tiny import make_config, make_tiny_setup, plan_layouts

CONFIGS = Path(__file__).parents[1] / "configs"
MESH = {"data": 2, "fsdp": 2, "tensor": 2}
ZERO_PRECISION = {"compute": "bf16", "accumulate": "bf16"}  # the 2 + 2 + 12 bytes of the paper


@pytest.fixture(scope="module")
def setup() -> Setup:
    return make_tiny_setup(make_config(mesh=MESH, batch={"microbatches": 4}, precision="bf16"))


@pytest.fixture(scope="module")
def inspection(setup: Setup) -> Inspection:
    return inspect_setup(setup)


def inspect_shapes(**sections: Any) -> Inspection:
    return inspect_setup(make_tiny_setup(make_config(**sections)), compile=False)


def count_parameters(inspection: Inspection) -> int:
    return sum(math.prod(leaf.shape) for leaf in inspection.leaves)


# --- The report ---------------------------------------------------------------------------------------------


@pytest.mark.smoke
def test_json_has_the_promised_keys(inspection: Inspection) -> None:
    report = json.loads(json.dumps(inspection.to_json()))
    promised = {"mesh", "leaves", "bytes_per_device", "collectives", "expected_collectives", "warnings"}
    assert promised <= report.keys()
    assert report["mesh"] == {"pipe": 1, "data": 2, "fsdp": 2, "expert": 1, "tensor": 2}
    kinds = {"parameters", "gradients", "optimizer", "host"}
    assert report["bytes_per_device"].keys() == kinds | {"temporaries", "total"}
    leaf = next(each for each in report["leaves"] if each["path"] == "layers/mlp/up/kernel")
    assert leaf["shape"] == [2, 32, 64]
    assert leaf["dtype"] == "float32"
    assert leaf["dims"] == [["layers", []], ["embed", ["fsdp", "data"]], ["mlp", ["tensor"]]]
    assert leaf["rule"] == "layers/mlp/up/kernel"
    assert leaf["bytes_per_device"].keys() == kinds
    assert leaf["replicated_over"] == ["data"], "weights in use and accumulators are whole on data"
    assert leaf["replication_bytes"] == (2 + 4) * 2 * 32 * 64 // 4 // 2
    assert report["collectives"]
    for row in report["collectives"]:
        assert {"axis", "kind", "count", "bytes"} <= row.keys()
        assert set(row["axis"].split("+")) <= set(AXES)


def test_totals_are_the_sums_of_what_the_shards_of_each_tree_take(
    setup: Setup, inspection: Inspection
) -> None:
    """Asked of JAX: shapes of the shards of parameters, weights, accumulators and optimizer state."""

    def weigh(tree: Any, shardings: Any, itemsize: Any) -> int:
        leaves = zip(iterate_leaves(tree), jax.tree.leaves(shardings), strict=True)
        return sum(
            math.prod(sharding.shard_shape(leaf.shape)) * itemsize(path) for (path, leaf), sharding in leaves
        )

    shapes, layouts, state = setup.model.shapes, setup.layouts, setup.abstract_state
    moments = sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(state.moments)
    )
    masters = weigh(shapes, layouts.params, lambda path: 0 if "norm" in path else 4)
    uncast = [path for path, _ in iterate_leaves(shapes) if "norm" in path]
    assert uncast, "the test needs a leaf that is not cast"
    total = inspection.state_bytes
    assert total.parameters == weigh(shapes, layouts.weights, lambda path: 4 if "norm" in path else 2)
    assert total.gradients == weigh(shapes, layouts.gradients, lambda _: 4)
    # A norm is used as it is kept, but where its two layouts differ there are two arrays.
    kept, used = dict(iterate_leaves(layouts.params)), dict(iterate_leaves(layouts.weights))
    shape_of = {path: leaf.shape for path, leaf in iterate_leaves(shapes)}
    masters += sum(
        4 * math.prod(kept[path].shard_shape(shape_of[path]))
        for path in uncast
        if not kept[path].is_equivalent_to(used[path], len(shape_of[path]))
    )
    counters = 5 * 4  # updates, skips, skips in a row, sequences, trained sequences
    assert total.optimizer == moments + masters + counters


def test_the_total_is_the_peak_of_the_compiled_step(setup: Setup, inspection: Inspection) -> None:
    assert inspection.memory is not None
    state = sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(setup.abstract_state)
    )
    batch = 5 * 4 * 32 * 32 // 4  # five arrays of 32 sequences of 32 tokens, over data and fsdp
    assert inspection.memory.arguments == pytest.approx(state + batch, abs=256)
    assert inspection.memory.outputs < 1024, "the state is donated: only metrics are new"
    assert inspection.temporary_bytes is not None
    assert inspection.temporary_bytes > 0
    assert inspection.total_bytes == inspection.memory.peak
    assert inspection.total_bytes == inspection.state_bytes.total + inspection.temporary_bytes


def test_activations_are_asked_of_the_compiler(inspection: Inspection) -> None:
    assert inspection.activations
    assert all(each.is_as_asked for each in inspection.activations)
    assert all(each.bytes_got == each.bytes_asked for each in inspection.activations)


def test_an_activation_that_lies_otherwise_is_an_error_with_its_bytes(setup: Setup) -> None:
    asked = PartitionSpec("fsdp", None, "tensor")
    whole = NamedSharding(setup.mesh, PartitionSpec("fsdp"))
    dims, shape = ("batch", "length", "mlp"), (8, 32, 64)
    seen = describe_activation(Observation(dims, shape, "bfloat16", asked, whole))
    [warning] = find_activation_errors([seen])
    for words in ("batch length mlp", f"{2 * 8 * 32 * 64 // 4:,}", f"{2 * 8 * 32 * 64 // 2:,}"):
        assert words in warning
    right = NamedSharding(setup.mesh, asked)
    assert (
        find_activation_errors([describe_activation(Observation(dims, shape, "bfloat16", asked, right))])
        == []
    )


def test_without_a_compile_the_bytes_are_the_same_and_the_rest_is_null(
    setup: Setup, inspection: Inspection
) -> None:
    report = inspect_setup(setup, compile=False).to_json()
    compiled = inspection.to_json()
    assert report["leaves"] == compiled["leaves"]
    assert report["bytes_per_device"]["temporaries"] is None
    assert report["collectives"] is None
    assert report["memory"] is None


# --- ZeRO's table -------------------------------------------------------------------------------------------

ZERO_BYTES = {  # stage -> bytes a parameter on each of N devices: weights, accumulators, optimizer
    0: lambda n: (2, 2, 12),
    1: lambda n: (2, 2, 12 / n),
    2: lambda n: (2, 2 / n, 12 / n),
    3: lambda n: (2 / n, 2 / n, 12 / n),
}


def list_remainder(inspection: Inspection) -> StateBytes:
    """What leaves cost that are whole on `fsdp` though their stage lays such state over it."""
    stage = inspection.zero_stage
    whole = sum_bytes(leaf.replication for leaf in inspection.leaves if "fsdp" in leaf.kept_whole_on)
    return StateBytes(
        parameters=whole.parameters if stage >= 3 else 0,
        gradients=whole.gradients if stage >= 2 else 0,
        optimizer=whole.optimizer if stage >= 1 else 0,
    )


@pytest.mark.parametrize("stage", ZERO_BYTES)
def test_bytes_a_device_are_those_of_zeros_table(stage: int) -> None:
    inspection = inspect_shapes(mesh={"fsdp": 8}, zero={"stage": stage}, precision=ZERO_PRECISION)
    total, remainder = inspection.state_bytes, list_remainder(inspection)
    expected = [rate * count_parameters(inspection) for rate in ZERO_BYTES[stage](8)]
    found = [
        total.parameters - remainder.parameters,
        total.gradients - remainder.gradients,
        total.optimizer - remainder.optimizer,
    ]
    assert found == pytest.approx(expected, rel=0.02)
    assert remainder.total < 0.05 * total.total


def test_bf16_weights_over_fp32_accumulators_take_18_bytes_a_parameter() -> None:
    inspection = inspect_shapes(precision="bf16")
    assert inspection.state_bytes.total == pytest.approx(18 * count_parameters(inspection), rel=0.02)


def test_fp32_weights_are_the_masters_until_they_lie_otherwise() -> None:
    """One device keeps 4 + 4 + 8 bytes a parameter; in stage 1 the gathered weights are a second copy."""
    alone = inspect_shapes()
    assert alone.state_bytes.parameters == 4 * count_parameters(alone)
    assert alone.state_bytes.optimizer == 8 * count_parameters(alone) + alone.counter_bytes
    spread = inspect_shapes(mesh={"fsdp": 8}, zero={"stage": 1})
    count = count_parameters(spread)
    assert spread.state_bytes.parameters == 4 * count
    expected = 12 * count / 8 + list_remainder(spread).optimizer
    assert spread.state_bytes.optimizer == pytest.approx(expected, rel=0.005)


# Rajbhandari 2020: devices -> GB a device for stages 0 to 3, of models of 7.5B, 128B and 1T parameters.
PAPER_MODELS = {
    "7.5B": {"layers": 36, "embed": 4096, "heads": 32, "mlp": 10923, "vocab": 61000},
    "128B": {"layers": 70, "embed": 12288, "heads": 96, "mlp": 32768, "vocab": 96000},
    "1T": {"layers": 127, "embed": 25600, "heads": 160, "mlp": 68267, "vocab": 48000},
}
PAPER_VECTORS = [
    ("7.5B", 64, (120, 31.4, 16.6, 1.9)),
    ("7.5B", 4, (120, 52.5, 41.3, 30)),
    ("128B", 64, (2048, 536, 284, 32)),
    ("1T", 1024, (16000, 4012, 2014, 15.6)),
]


@pytest.mark.parametrize(("size", "devices", "gigabytes"), PAPER_VECTORS)
def test_the_papers_vectors_come_from_shapes_alone(
    size: str, devices: int, gigabytes: tuple[float, ...]
) -> None:
    """On a described mesh: there are eight devices here, and no array is made."""
    model = {"family": "llama", "tied": True, "kv_heads": None, **PAPER_MODELS[size]}
    config = make_config(model=model, precision=ZERO_PRECISION)
    decoder = build_decoder(complete_shape(config, vocab=model["vocab"], platform="cpu"))
    mesh = AbstractMesh((1, 1, devices, 1, 1), AXES)
    count = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(decoder.shapes))
    assert count == pytest.approx({"7.5B": 7.5e9, "128B": 128e9, "1T": 1e12}[size], rel=0.002)
    for stage, expected in enumerate(gigabytes):
        layouts = plan_layouts(decoder.shapes, decoder.rules, mesh, stage)
        optimizer = make_optimizer(config.optimizer, config.precision, layouts.leaves)
        state, _ = describe_optimizer(optimizer, decoder.shapes, layouts)
        leaves, _ = weigh_leaves(layouts, state, config.precision)
        found = sum_bytes(leaf.bytes_per_device for leaf in leaves).total / 1e9
        # Half a unit of the last printed digit, and 2 %.
        assert abs(found - expected) <= 0.05 + 0.02 * expected, (stage, found)


@pytest.mark.parametrize(
    "optimizer", [optax.sgd(1.0), optax.lion(1.0), optax.adafactor(1.0, min_dim_size_to_factor=16)]
)
def test_optimizer_state_of_any_kind_belongs_to_its_parameter(
    setup: Setup, optimizer: optax.GradientTransformation
) -> None:
    state, _ = describe_optimizer(optimizer, setup.model.shapes, setup.layouts)
    leaves, counters = weigh_leaves(setup.layouts, state, make_config().precision)
    masters = sum(
        4 * math.prod(sharding.shard_shape(leaf.shape))
        for leaf, sharding, weight in zip(
            *map(jax.tree.leaves, (setup.model.shapes, setup.layouts.params, setup.layouts.weights)),
            strict=True,
        )
        if not sharding.is_equivalent_to(weight, len(leaf.shape))
    )
    whole = sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in state)
    assert sum_bytes(leaf.bytes_per_device for leaf in leaves).optimizer + counters == whole + masters
    assert counters <= 8


# --- Replication --------------------------------------------------------------------------------------------


def test_planted_replication_is_a_warning_with_its_bytes() -> None:
    inspection = inspect_shapes(mesh={"fsdp": 8}, strategy={"embed": "replicated"})
    leaf = next(each for each in inspection.leaves if each.path == "layers/mlp/up/kernel")
    assert leaf.replicated_over == ("fsdp",)
    size_bytes = 2 * 32 * 64 * (4 + 4 + 8)
    assert leaf.bytes_per_device.total == size_bytes
    assert leaf.replication.total == size_bytes * 7 // 8
    [warning] = [each for each in inspection.warnings if each.startswith(leaf.path)]
    assert "whole on fsdp" in warning
    assert "embed=32" in warning
    assert f"{size_bytes * 7 // 8:,} bytes a device" in warning
    assert leaf.path in render_plain(inspection).partition("Replicated")[2]


def test_a_dim_that_tensor_does_not_cut_is_a_warning() -> None:
    inspection = inspect_shapes(mesh={"tensor": 4}, strategy={"mlp": "replicated"})
    assert sum("whole on tensor" in each for each in inspection.warnings) == 3
    assert all("layers/mlp/" in each for each in inspection.warnings)


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_no_leaf_of_a_shipped_configuration_is_silently_replicated(path: Path) -> None:
    config = load_config(str(path), [])
    sizes = [8 if size == -1 else size for size in axis_sizes(config.mesh).values()]
    mesh = AbstractMesh(tuple(sizes), AXES)
    decoder = build_decoder(complete_shape(config, vocab=config.model.vocab or 384, platform="cpu"))
    layouts = plan_layouts(decoder.shapes, decoder.rules, mesh, config.zero.stage)
    state, _ = describe_optimizer(
        make_optimizer(config.optimizer, config.precision, layouts.leaves), decoder.shapes, layouts
    )
    leaves, _ = weigh_leaves(layouts, state, config.precision)
    assert warn_of_replication(leaves, wanted_axes(config.zero.stage)) == []


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_what_a_stage_leaves_whole_is_listed_and_is_no_warning(stage: int) -> None:
    inspection = inspect_shapes(
        mesh=MESH, zero={"stage": stage}, model={"embed": 128, "mlp": 256}, precision="bf16"
    )
    assert inspection.warnings == ()
    leaf = next(each for each in inspection.leaves if each.path == "layers/mlp/up/kernel")
    assert leaf.whole_on["parameters"] == (("data", "fsdp") if stage < 3 else ("data",))
    assert leaf.whole_on["gradients"] == (("data", "fsdp") if stage < 2 else ("data",))
    assert leaf.whole_on["optimizer"] == (("data", "fsdp") if stage < 1 else ())


# --- For a person -------------------------------------------------------------------------------------------


def render_plain(inspection: Inspection, width: int = 100) -> str:
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        console.print(render_tables(inspection))
    return capture.get()


def test_tables_fit_100_columns_and_name_every_leaf(inspection: Inspection) -> None:
    text = render_plain(inspection)
    assert max(map(len, text.splitlines())) <= 100
    rows = [line.split() for line in text.splitlines()]
    for leaf in inspection.leaves:
        assert any(row[:1] == [leaf.path] for row in rows), leaf.path
    total = next(row for row in rows if row[:1] == ["total"])
    assert total[1] == f"{inspection.state_bytes.parameters / 1024:,.2f}"
    for words in ("data 2 × fsdp 2 × tensor 2 = 8 devices", "ZeRO stage 3", "KiB a device", "temporaries"):
        assert words in text


def test_a_difference_stands_beside_what_is_expected(inspection: Inspection) -> None:
    rows = inspection.collectives or ()
    gathers = next(row for row in rows if row.kind == "all-gather" and row.elements)
    [expected] = tabulate_expected(
        [ExpectedTraffic(gathers.axes, gathers.kind, 2 * (gathers.elements or 0), "w")], rows, 2
    )
    text = render_plain(replace(inspection, expected_collectives=(expected,)))
    [line] = [line for line in text.splitlines() if f"{expected.elements:,}" in line]
    assert f"{gathers.elements:,}" in line
    assert "-50.0%" in line


@pytest.mark.parametrize("stage", [0, 3])
def test_the_picture_says_who_keeps_which_part(stage: int) -> None:
    """Asked of JAX: devices of a cell are exactly those with that cell's slice of the array."""
    setup = make_tiny_setup(make_config(mesh=MESH, zero={"stage": stage}))
    inspection = inspect_setup(setup, compile=False)
    shardings = dict(iterate_leaves(setup.layouts.params))
    shapes = {leaf.path: leaf.shape for leaf in inspection.leaves}
    number = {device: at for at, device in enumerate(setup.mesh.devices.flat)}
    panels = choose_panels(inspection.leaves, inspection.mesh)
    assert len(panels) == 6
    for panel in panels:
        slices: dict[Any, list[int]] = {}
        for device, index in shardings[panel.paths[0]].devices_indices_map(shapes[panel.paths[0]]).items():
            key = tuple((part.start or 0) for part in index)
            slices.setdefault(key, []).append(number[device])
        in_order = [tuple(sorted(slices[key])) for key in sorted(slices)]
        assert [cell for row in panel.holders for cell in row] == in_order, panel.title


def test_the_picture_of_many_devices_leaves_the_middle_out() -> None:
    leaf = LeafReport(
        path="table",
        shape=(1024, 512),
        dtype="float32",
        dims=(("vocab", ("tensor",)), ("embed", ("fsdp",))),
        rule="table",
        kept_whole_on=("data",),
        bytes_per_device=StateBytes(),
        whole_on={},
        replication=StateBytes(),
    )
    panels = choose_panels([leaf], {"pipe": 1, "data": 2, "fsdp": 32, "expert": 1, "tensor": 4})
    console = Console(width=100, color_system=None)
    with console.capture() as capture:
        console.print(render_picture(panels, 256))
    text = capture.get()
    assert "a device has 1/128, each part is on 2 devices" in text
    assert "down: vocab 1,024 over tensor 4" in text
    assert "across: embed 512 over fsdp 32" in text
    assert "0 128" in text
    assert "127 255" in text
    assert "..." in text


def test_the_png_is_written_or_refused(inspection: Inspection, tmp_path: Path) -> None:
    panels = choose_panels(inspection.leaves, inspection.mesh)
    save_png(tmp_path / "picture", panels, inspection.mesh)
    assert (tmp_path / "picture").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(UserError, match=r"--png .*absent/picture\.png"):
        save_png(tmp_path / "absent" / "picture.png", panels, inspection.mesh)


# --- The command --------------------------------------------------------------------------------------------


def test_the_command_prints_tables_and_a_picture(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    png = tmp_path / "tiny.png"
    config = str(CONFIGS / "tiny.yaml")
    assert main(["inspect", config, "--no-compile", "--png", str(png), "zero.stage=2"]) == 0
    text = capsys.readouterr().out
    for words in (
        "ZeRO stage 2",
        "layers/mlp/up/kernel",
        "down: embed 128",
        "without a compile",
        "No warnings",
    ):
        assert words in text
    assert png.exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tiny.png"], "inspecting starts no run"


def test_the_command_tells_what_the_user_can_mend(capsys: pytest.CaptureFixture[str]) -> None:
    config = str(CONFIGS / "tiny.yaml")
    assert main(["inspect", config, "--no-compile", "model.mlp=345"]) == 2
    message = capsys.readouterr().err
    assert "345" in message
    assert "tensor" in message
    assert main(["inspect", config, "--png", "absent/tiny.png"]) == 2
    assert "absent/tiny.png" in capsys.readouterr().err


def test_llama3_70b_on_256_devices_takes_under_30_seconds_and_no_weights() -> None:
    """Through the real command, nothing cached. CPU seconds, since other work on the machine lengthens the
    rest; peak memory, since a single whole leaf of the largest kind takes 75 GB in fp32."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("XLA_", "JAX_"))}
    command = [
        sys.executable,
        "-m",
        "jaxscale.cli.main",
        "inspect",
        str(CONFIGS / "llama3_70b.yaml"),
        "--json",
    ]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert math.prod(report["mesh"].values()) == 256
    assert sum(math.prod(leaf["shape"]) for leaf in report["leaves"]) == 70_553_706_496
    assert report["collectives"]
    cpu_seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert cpu_seconds < 30
    assert after.ru_maxrss < 4e6, "KiB"


def test_a_part_of_an_array_is_measured_as_jax_cuts_it(setup: Setup) -> None:

    sharding = NamedSharding(setup.mesh, PartitionSpec(("fsdp", "data"), None, "tensor"))
    part = measure_part((8, 3, 6), np.float32, sharding)
    assert part.bytes == 4 * math.prod(sharding.shard_shape((8, 3, 6)))
    assert (part.whole_on, part.copies) == ((), 1)
    whole = measure_part((8,), np.float32, NamedSharding(setup.mesh, PartitionSpec("tensor")))
    assert (whole.bytes, whole.whole_on, whole.copies) == (16, ("data", "fsdp"), 4)
