"""The table of chips: its own numbers, a user's file over it, and slices by name."""

import subprocess
import sys
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest

from jaxscale.config import UserError
from jaxscale.metrics import peak_flops_per_second
from jaxscale.metrics.chips import Chip, find_chip, load_chips
from jaxscale.planning.hardware import parse_slice


@pytest.fixture
def table(tmp_path):
    def write(text: str) -> Path:
        path = tmp_path / "chips.yaml"
        path.write_text(text)
        return path

    return write


def refuse(call, *args) -> str:
    with pytest.raises(UserError) as caught:
        call(*args)
    return str(caught.value)


def test_every_group_of_numbers_has_its_source_beside_it():
    chips = load_chips()
    groups = [
        getattr(chip, item.name)
        for chip in chips.values()
        for item in fields(Chip)
        if is_dataclass(getattr(chip, item.name))
    ]
    assert len(groups) > 60
    assert all(len(group.source) > 5 for group in groups)
    wanted = ["v4", "v5e", "v5p", "v6e", "tpu7x", "v100", "a100", "a100-40gb", "h100", "h200", "b200"]
    for chip in (chips[name] for name in wanted):
        known = (chip.compute, chip.hbm, chip.hbm.bytes_per_second, chip.torus or chip.node)
        assert all(known), chip.name
        assert chip.hbm_default_bytes <= chip.hbm_usable_bytes
    kinds = [kind for chip in chips.values() for kind in chip.device_kinds]
    assert len(kinds) == len(set(kinds))
    assert chips["cpu"].compute is None, "the simulated mesh has no peak"


def test_numbers_are_those_of_the_datasheets():
    chips = load_chips()
    v5p, h100, a100 = chips["v5p"], chips["h100"], chips["a100"]
    assert v5p.find_peak("bf16") == 459e12
    assert v5p.find_peak("fp8") is None
    assert v5p.find_peak("fp32") == pytest.approx(459e12 / 6)
    assert v5p.hbm_usable_bytes == pytest.approx(95.74 * 2**30)
    assert v5p.hbm.bytes_per_second == 2765e9
    assert v5p.hbm_default_bytes == v5p.hbm_usable_bytes
    assert (h100.find_peak("fp8"), h100.find_peak("fp32"), h100.hbm.bytes_per_second) == (
        1979e12,
        67e12,
        3350e9,
    )
    assert h100.hbm_default_bytes == pytest.approx(0.75 * h100.hbm_usable_bytes)
    assert (a100.node.gpus, a100.node.network_bytes_per_second) == (8, 200e9 / 8)
    assert chips["v100"].find_peak("bf16") is None
    assert peak_flops_per_second("NVIDIA B200", "bf16") == 2250e12, "the same table as for MFU"


def test_metrics_read_no_table_before_it_is_asked_for():
    code = "import sys, jaxscale.metrics; print('jaxscale.metrics.chips' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_a_file_of_the_users_changes_a_chip_and_adds_one(table):
    chips = load_chips(
        table(
            "h100: {price_per_chip_hour: 2.5, node: {gpus: 4, source: our cluster}}\n"
            "mine:\n  platform: gpu\n  device_kinds: [X1]\n"
            "  compute: {bf16: 100e12, matrix_unit: 64, source: measured}\n"
            "  hbm: {bytes: 24e9, usable_bytes: 22Gi, bytes_per_second: 600e9, source: measured}\n"
        )
    )
    h100 = chips["h100"]
    assert (h100.node.gpus, h100.node.link_bytes_per_second, h100.price_per_chip_hour) == (4, 450e9, 2.5)
    assert h100.compute == load_chips()["h100"].compute
    assert load_chips()["h100"].node.gpus == 8, "the table itself stays as it is"
    assert chips["mine"].hbm_usable_bytes == 22 * 2**30
    assert parse_slice("h100:16x4", chips).price_per_hour == 160
    assert parse_slice("h100:16x4").price_per_hour is None


def test_every_problem_of_a_file_is_listed(table):
    path = table(
        "h100: {compute: {bf16: -1, achievable: 1.5, source: x}, "
        "hbm: {bytes: many, source: x}, colour: green}\n"
        "mine: {device_kinds: [X1], node: {gpus: 4}}\n"
    )
    message = refuse(load_chips, path)
    for part in (
        f"{path}: the table of chips has 11 problem(s)",
        "h100.compute.bf16: -1: must be greater than 0",
        "h100.compute.achievable: 1.5",
        "h100.hbm.bytes: 'many'",
        "h100.colour: no such field (value 'green')",
        "mine.platform: is required and has no value",
        "mine.node: {'gpus': 4} has no source; say in `source`",
        "mine.node.link_bytes_per_second: is required",
    ):
        assert part in message


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("a: [", "not valid YAML"),
        ("", "holds no chips"),
        ("h100: 3", "h100: 3 is no chip; write its fields below its name"),
        (
            "h100: {torus: {dims: 2, link_bytes_per_second: 1, hop_seconds: 1, source: x}}",
            "torus and node are both",
        ),
    ],
)
def test_a_file_that_is_no_table_is_refused(table, text, part):
    assert part in refuse(load_chips, table(text))


def test_a_file_that_is_not_there_is_refused(tmp_path):
    assert "cannot be read" in refuse(load_chips, tmp_path / "no.yaml")


def test_an_unknown_chip_names_the_nearest():
    message = refuse(find_chip, "h10", load_chips())
    assert message.startswith("chip 'h10' is not in the table; did you mean h100")
    assert "it has v2, v3, v4" in refuse(find_chip, "zzz", load_chips()).lower()


@pytest.mark.parametrize(
    ("text", "shape", "count", "wraps"),
    [
        ("v5p:4x4x4", (4, 4, 4), 64, (True, True, True)),
        ("v5p:4x4x8", (4, 4, 8), 128, (True, True, True)),
        ("v5p:2x2x4", (2, 2, 4), 16, (False, False, False)),
        ("v5e:16x16", (16, 16), 256, (True, True)),
        ("v5e:8x16", (8, 16), 128, (False, True)),
        ("v6e:4x4", (4, 4), 16, (False, False)),
        ("tpu7x:2x2x1", (2, 2, 1), 8, (False, False, False)),
        ("h100:8x8", (8, 8), 64, ()),
        ("h100:8", (1, 8), 8, ()),
        ("a100:128x8", (128, 8), 1024, ()),
        ("cpu:8", (8,), 8, ()),
    ],
)
def test_slices_by_name(text, shape, count, wraps):
    chips = parse_slice(text)
    assert (chips.shape, chips.count, chips.wraps) == (shape, count, wraps)
    assert parse_slice(str(chips)) == chips


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("v5p", "write the chip, a colon and sizes, such as v5p:4x4x4"),
        ("v5p:", "write the chip, a colon"),
        ("v5p:4xx4", "write the chip, a colon"),
        ("v5p:-4x4x4", "write the chip, a colon"),
        ("v5p:4x4x0", "a size is 0"),
        ("v5e:4x4x4", "3 size(s), but the torus of v5e has 2 dims; write 2 sizes, such as v5e:4x4"),
        ("v5p:64", "1 size(s), but the torus of v5p has 3 dims"),
        ("v6e:16x32", "the largest slice of v6e is 16x16"),
        ("v3:4x4", "does not say how v3 is wired; give `torus`"),
        (
            "h100:2x16",
            "16 GPUs a node, but a node of h100 has 8; write nodes x GPUs a node, such as h100:4x8",
        ),
        ("h100:2x2x2", "3 sizes; GPUs are nodes x GPUs a node"),
        ("l4:8", "does not say how l4 is wired; give `node`"),
        ("cpu:2x4", "write cpu:8"),
        ("v5q:4x4x4", "did you mean v5p"),
    ],
)
def test_what_is_no_slice_is_refused(text, part):
    assert part in refuse(parse_slice, text)
