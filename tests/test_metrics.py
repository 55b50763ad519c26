"""Records are a contract, a resumed run has each step once, and the console says what happened."""

import io
import json
import math
import os
import re
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jaxscale.config.errors import UserError
from jaxscale.metrics import (
    EvalRecord,
    JsonlSink,
    LiveConsole,
    PlainConsole,
    SilentConsole,
    Sinks,
    StepRecord,
    TensorBoardSink,
    model_flops_per_token,
    model_flops_utilisation,
    open_console,
    peak_flops_per_second,
)


def make_step(step: int, **changes: Any) -> StepRecord:
    values: dict[str, Any] = {
        "step": step,
        "sequences": 8 * step,
        "tokens": 512 * step,
        "loss": 5.0 - 0.001 * step,
        "grad_norm": 1.25,
        "lr": 3e-4,
        "step_seconds": 0.5,
        "tokens_per_second": 1024.0,
        "mfu": None,
        "skipped": False,
    }
    return StepRecord(**(values | changes))


def make_eval(step: int, loss: float = 4.0) -> EvalRecord:
    return EvalRecord(step=step, tokens=512 * step, loss=loss, counted_tokens=4096)


def read_lines(path: Path) -> list[dict[str, Any]]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def write_steps(path: Path, steps: range, *, resume_step: int = 0) -> None:
    sink = JsonlSink(path, resume_step=resume_step)
    for step in steps:
        sink.write(make_step(step))
    sink.close()


def test_the_field_names_are_the_contract():
    assert list(json.loads(make_step(1).to_json())) == [
        "kind",
        "step",
        "sequences",
        "tokens",
        "loss",
        "grad_norm",
        "lr",
        "step_seconds",
        "tokens_per_second",
        "mfu",
        "loss_scale",
        "skipped",
        "balance",
        "router_z",
        "router_entropy",
        "drop_fraction",
        "load_max",
        "load_min",
        "bias_min",
        "bias_max",
    ]
    assert json.loads(make_eval(2, loss=0.0).to_json()) == {
        "kind": "eval",
        "step": 2,
        "tokens": 1024,
        "loss": 0.0,
        "perplexity": 1.0,
        "counted_tokens": 4096,
    }


def test_numbers_survive_exactly_and_those_not_finite_become_null(tmp_path):
    loss = 5.123456955  # no short decimal
    sink = JsonlSink(tmp_path / "metrics.jsonl", resume_step=0)
    sink.write(make_step(1, loss=loss))
    sink.write(make_step(2, loss=math.nan, grad_norm=math.inf, skipped=True))
    sink.write(make_eval(2, loss=1e4))
    sink.write(make_eval(2, loss=math.nan))
    sink.close()
    first, skipped, large, bad = read_lines(tmp_path / "metrics.jsonl")
    assert first["loss"] == loss
    assert first["mfu"] is None
    assert (skipped["loss"], skipped["grad_norm"], skipped["skipped"], skipped["lr"]) == (
        None,
        None,
        True,
        3e-4,
    )
    assert (large["loss"], large["perplexity"]) == (1e4, None)
    assert (bad["loss"], bad["perplexity"]) == (None, None)


def test_each_line_is_on_disk_once_written(tmp_path):
    sink = JsonlSink(tmp_path / "runs" / "metrics.jsonl", resume_step=0)
    for step in (1, 2):
        sink.write(make_step(step))
        assert [line["step"] for line in read_lines(tmp_path / "runs" / "metrics.jsonl")] == list(
            range(1, step + 1)
        )
    sink.close()
    sink.close()


@pytest.mark.parametrize("tail", [b"", b'{"kind": "step", "st', b'{"kind": "step", "step": 3}', b"\0\0\0\0"])
def test_a_resumed_run_has_each_step_once_whatever_the_kill_left(tmp_path, tail):
    path = tmp_path / "metrics.jsonl"
    write_steps(path, range(1, 8))
    with path.open("ab") as file:
        file.write(tail)
    before = path.read_bytes().splitlines()[:4]
    write_steps(path, range(5, 11), resume_step=4)
    assert [line["step"] for line in read_lines(path)] == list(range(1, 11))
    assert path.read_bytes().splitlines()[:4] == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_an_evaluation_at_the_resumed_step_stays_and_a_later_one_goes(tmp_path):
    path = tmp_path / "metrics.jsonl"
    sink = JsonlSink(path, resume_step=0)
    for record in (make_eval(0), make_step(1), make_eval(1), make_step(2), make_eval(2)):
        sink.write(record)
    sink.close()
    JsonlSink(path, resume_step=1).close()
    assert [(line["kind"], line["step"]) for line in read_lines(path)] == [
        ("eval", 0),
        ("step", 1),
        ("eval", 1),
    ]
    JsonlSink(path, resume_step=0).close()
    assert path.read_bytes() == b""


def test_dropping_lines_replaces_the_file_at_once_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    write_steps(path, range(1, 5))
    before = path.read_bytes()

    def crash(*_: Any) -> None:
        raise OSError("killed")

    monkeypatch.setattr(Path, "replace", crash)
    with pytest.raises(OSError, match="killed"):
        JsonlSink(path, resume_step=2)
    assert path.read_bytes() == before


def test_a_foreign_line_is_named_and_the_file_left_alone(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_steps(path, range(1, 4))
    lines = path.read_text().splitlines(keepends=True)
    path.write_text(lines[0] + "<<<< HEAD\n" + "".join(lines[1:]))
    before = path.read_bytes()
    with pytest.raises(UserError, match=r"line 2 of .*metrics.jsonl .*<<<< HEAD"):
        JsonlSink(path, resume_step=2)
    assert path.read_bytes() == before


def read_events(path: Path) -> list[Any]:
    """The events of a TensorBoard file: records of length (8 bytes), checksum (4), data, checksum (4)."""
    from tensorboardX.proto.event_pb2 import Event

    data, events = path.read_bytes(), []
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        events.append(Event.FromString(data[12 : 12 + length]))
        data = data[16 + length :]
    return events


def test_tensorboard_gets_every_number_and_is_told_what_a_resumed_run_will_repeat(tmp_path):
    sink = TensorBoardSink(tmp_path, resume_step=4)
    for step in range(5, 105):
        sink.write(make_step(step))
    sink.write(make_eval(104))
    sink.close()
    from tensorboardX.proto.event_pb2 import SessionLog

    (path,) = tmp_path.iterdir()
    events = read_events(path)
    scalars = {
        (value.tag, event.step): value.simple_value for event in events for value in event.summary.value
    }
    assert [scalars["train/loss", step] for step in range(5, 105)] == pytest.approx(
        [5.0 - 0.001 * step for step in range(5, 105)]
    )
    assert scalars["eval/loss", 104] == 4.0
    assert scalars["train/skipped", 50] == 0.0
    assert {tag for tag, _ in scalars if tag.startswith("train/")} == {
        f"train/{name}"
        for name in (
            "sequences",
            "tokens",
            "loss",
            "grad_norm",
            "lr",
            "step_seconds",
            "tokens_per_second",
            "skipped",
        )
    }
    starts = [event.step for event in events if event.session_log.status == SessionLog.START]
    assert starts == [5], "TensorBoard hides steps from 5 on in earlier files"


def test_every_sink_gets_every_record_and_is_closed_though_another_fails():
    class Memory:
        def __init__(self, failure: OSError | None = None) -> None:
            self.records: list[Any] = []
            self.closed = False
            self._failure = failure

        def write(self, record: Any) -> None:
            self.records.append(record)

        def close(self) -> None:
            self.closed = True
            if self._failure is not None:
                raise self._failure

    full, good = Memory(OSError("disk full")), Memory()
    sinks = Sinks(full, good)
    records = [make_step(1), make_eval(1)]
    for record in records:
        sinks.write(record)
    with pytest.raises(OSError, match="disk full"):
        sinks.close()
    assert full.records == good.records == records
    assert full.closed
    assert good.closed
    with pytest.raises(ExceptionGroup, match="several metric files"):
        Sinks(full, full).close()


def test_model_flops_follow_the_palm_formula():
    # llama2-7b: 32 layers, 32 heads of 128, N without the input embedding
    num_matmul_params = 6_738_415_616 - 32_000 * 4096
    flops = model_flops_per_token(num_matmul_params, layers=32, heads=32, head=128, length=4096)
    assert flops == 6 * num_matmul_params + 12 * 32 * 32 * 128 * 4096
    # the published mark of MaxText: 70B on v5p at 65.4 %, from its tokens a second
    flops_70b = model_flops_per_token(68_700_000_000, layers=80, heads=64, head=128, length=4096)
    tokens_per_second = 0.654 * 512 * 459e12 / flops_70b
    mfu = model_flops_utilisation(
        tokens_per_second, flops_70b, devices=512, device_kind="TPU v5p", compute="bf16"
    )
    assert mfu == pytest.approx(0.654)


@pytest.mark.parametrize(
    ("device_kind", "compute", "peak"),
    [
        ("TPU v5p", "bf16", 459e12),
        ("TPU v5 lite", "bf16", 197e12),
        ("TPU v4", "bf16", 275e12),
        ("TPU v6 lite", "bf16", 918e12),
        ("NVIDIA H100 80GB HBM3", "bf16", 989e12),
        ("NVIDIA H200", "bf16", 989e12),
        ("NVIDIA A100-SXM4-80GB", "bf16", 312e12),
        ("Tesla V100-SXM2-16GB", "fp16", 125e12),
        ("Tesla V100-SXM2-16GB", "bf16", None),
        ("NVIDIA H100 80GB HBM3", "fp8", 1979e12),
        ("NVIDIA H200", "fp8", 1979e12),
        ("TPU v5p", "fp8", None),
        ("NVIDIA A100-SXM4-80GB", "fp8", None),
        ("TPU v5p", "fp32", None),
        ("NVIDIA H100 80GB HBM3", "fp32", None),
        ("cpu", "bf16", None),
        ("TPU v99", "bf16", None),
    ],
)
def test_the_peak_is_the_datasheets_or_none(device_kind, compute, peak):
    assert peak_flops_per_second(device_kind, compute) == peak
    mfu = model_flops_utilisation(1e6, 1e9, devices=2, device_kind=device_kind, compute=compute)
    assert mfu == (None if peak is None else pytest.approx(1e15 / (2 * peak)))


def run_plain(**options: Any) -> list[str]:
    stream = io.StringIO()
    console = PlainConsole(stream, **options)
    console.note("8 devices simulated on CPU")
    console.start(steps=40)
    console.eval(make_eval(0, loss=5.5))
    for step in range(1, 41):
        console.step(make_step(step, skipped=True, loss=math.nan) if step == 7 else make_step(step))
        if step % 20 == 0:
            console.eval(make_eval(step))
    console.finish()
    console.finish()
    return stream.getvalue().splitlines()


def test_plain_lines_are_the_first_and_last_step_the_events_and_an_aligned_summary():
    lines = run_plain()
    assert lines[0] == "8 devices simulated on CPU"
    assert [line.split("  ")[0] for line in lines[1 : lines.index("")]] == [
        "eval at step 0",
        "step 1/40",
        "step 7 skipped: loss nan, gradient norm 1.25; a number is not finite",
        "eval at step 20",
        "step 40/40",
        "eval at step 40",
    ]
    summary = lines[lines.index("") + 1 :]
    table = dict(re.split(r"  +", line, maxsplit=1) for line in summary)
    assert table.pop("wall time")
    assert table == {
        "steps": "40 of 40",
        "tokens": "20,480",
        "final loss": "4.9600",
        "first validation loss": "5.5000 at step 0",
        "last validation loss": "4.0000 at step 40",
        "tokens/s after first step": "1,024",
        "skipped steps": "1",
    }
    width = len("tokens/s after first step")
    assert all(line[width : width + 2] == "  " and line[width + 2] != " " for line in summary)


def test_plain_lines_can_come_every_so_many_steps_or_seconds():
    shown = [line.split("  ")[0] for line in run_plain(every_steps=10) if re.match(r"step \d+/", line)]
    assert shown == ["step 1/40", "step 10/40", "step 20/40", "step 30/40", "step 40/40"]
    assert sum(line.startswith("step ") for line in run_plain(every_seconds=0)) == 40


def test_a_run_that_fails_early_can_still_finish():
    stream = io.StringIO()
    for console in (PlainConsole(stream), LiveConsole(stream), SilentConsole()):
        console.finish()
    assert stream.getvalue() == ""
    console = PlainConsole(stream)
    console.start(steps=5)
    console.finish()
    assert "0 of 5" in stream.getvalue()


LIVE_RUN = """
import sys
from jaxscale.metrics import open_console
sys.path.insert(0, sys.argv[1])
from test_metrics import make_eval, make_step
console = open_console()
console.note("[bold]note[/bold] before the start")
console.start(steps=1000, first_step=980)
for step in range(981, 1001):
    console.step(make_step(step))
    if step == 990:
        console.eval(make_eval(step))
        print("printed by another library")
console.finish()
"""


def test_a_terminal_gets_one_live_line_with_everything_else_above_it():
    import pty
    import termios

    terminal, inside = pty.openpty()
    termios.tcsetwinsize(inside, (24, 80))
    process = subprocess.Popen(
        [sys.executable, "-c", LIVE_RUN, str(Path(__file__).parent)],
        stdin=inside,
        stdout=inside,
        stderr=inside,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "80"},
    )
    os.close(inside)
    output = b""
    while chunk := read_terminal(terminal):
        output += chunk
    assert process.wait(timeout=30) == 0
    text = output.decode()
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1, "the cursor is given back"
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)
    lines = [line for line in re.split(r"[\r\n]+", plain) if line]
    assert max(map(len, lines)) <= 80
    assert "[bold]note[/bold] before the start" in lines
    assert any(line.startswith("eval at step 990  loss 4.0000") for line in lines)
    assert "printed by another library" in lines
    assert any(re.match(r"step 990/1,000 .*loss 4\.\d{4}  1.02k tokens/s  .* left$", line) for line in lines)
    assert any(line.startswith("steps in this session      20") for line in lines)


def read_terminal(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # Linux says so, rather than end of file, once the other side has closed
        return b""


def test_the_console_suits_the_stream(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm")
    assert isinstance(open_console(Terminal()), LiveConsole)
    assert isinstance(open_console(io.StringIO()), PlainConsole)
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(open_console(Terminal()), PlainConsole)


def test_importing_metrics_loads_neither_rich_nor_tensorboard_nor_jax():
    code = "import sys, jaxscale.metrics; print({'rich', 'tensorboardX', 'jax'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "set()"
