"""What a new user gets wrong, through the real command: exit code 2 and one message, at once.

Every message names the configuration key and the numbers, and says what to do.
"""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from jaxscale.config import dump_config, load_config

ROOT = Path(__file__).parents[1]
PROMISED_SECONDS = 15
HANG_SECONDS = 180  # on a busy machine; a command that needs longer is killed and fails its test

RUN = """\
run_dir: run
steps: 2
batch: {sequences: 8, length: 16}
model: {family: llama, layers: 1, embed: 16, heads: 4, kv_heads: 2, mlp: 32}
data: {source: text, paths: [corpus.txt]}
"""
MODEL = """\
import jax.numpy as jnp
import jaxscale as js


def make_model(vocab, length, rule="table", pair=True):
    def loss(params, batch, keys_B):
        losses = params["table"][batch["tokens"]].sum(-1) * batch["weights"]
        return (losses.sum(), batch["weights"].sum()) if pair else losses.mean()

    def init(key):
        return {"table": jnp.zeros((vocab, 16))}

    return js.from_functions(init, loss, rules=js.Rules({rule: ("positions", "embed")}))
"""
EIGHT_DEVICES = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}


@dataclass(frozen=True)
class Case:
    """A command line, and what its message has to say."""

    arguments: tuple[str, ...]
    said: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)


def _train(*overrides: str, said: tuple[str, ...], environment: Mapping[str, str] | None = None) -> Case:
    return Case(("train", "run.yaml", *overrides), said, environment or {})


CASES = {
    # The configuration
    "unknown key": _train(
        "optimizer.learning_rat=1e-3",
        said=("optimizer.learning_rat: no such field (value 0.001)", "did you mean optimizer.peak_lr?"),
    ),
    "wrong type": _train(
        "optimizer.peak_lr=fast", said=("optimizer.peak_lr: 'fast': must be a valid number",)
    ),
    "bad choice": _train(
        "remat=Full",
        said=(
            "remat.policy: 'Full' is not one of 'none', 'attention', 'matmuls' or 'full'",
            "did you mean full?",
        ),
    ),
    "field of another optimizer": _train(
        "optimizer={name: lion, momentum: 0.95, eps: 1e-6}",
        said=(
            "optimizer.momentum: 0.95: lion does not read it; leave it out, or set optimizer.name=sgd",
            "optimizer.eps: 1e-06: lion does not read it",
        ),
    ),
    "optimizer that is not there": _train(
        "optimizer.name=moun", said=("optimizer.name: 'moun' is not one of 'adamw'", "did you mean muon?")
    ),
    "optimizer from Python on the command line": _train(
        "optimizer={name: python}", said=("optimizer.name is python", "Trainer", "optimizer.name=adamw")
    ),
    "override without a value": _train("mesh.fsdp", said=("'mesh.fsdp'", "section.field=value")),
    "missing configuration": Case(
        ("train", "rum.yaml"), ("rum.yaml: no such configuration file", "did you mean run.yaml?")
    ),
    "folder as configuration": Case(("train", "folder"), ("folder: is a folder",)),
    # The mesh
    "mesh of another size": _train(
        "mesh.data=4",
        "mesh.tensor=4",
        said=("data=4", "tensor=4", "product of the axes is 16", "8 device(s)", "set one axis to -1"),
        environment=EIGHT_DEVICES,
    ),
    "two open axes": _train("mesh.data=-1", "mesh.tensor=-1", said=("data and tensor are -1", "at most one")),
    "open axis with a remainder": _train(
        "mesh.data=-1", "mesh.tensor=3", said=("data is -1", "8 % 3 = 2"), environment=EIGHT_DEVICES
    ),
    "axis of nothing": _train("mesh.data=0", said=("mesh.data is 0", "at least one device")),
    "more sequences than a run counts": _train(
        "steps=2B", said=("steps=2000000000", "counts up to 4294967295", "run shorter")
    ),
    "pipeline": _train("mesh.pipe=2", said=("mesh.pipe is 2", "no pipeline schedules", "mesh.pipe=1")),
    "no such platform": _train(
        said=("JAX cannot start", "Unset JAX_PLATFORMS"), environment={"JAX_PLATFORMS": "abacus"}
    ),
    "evaluation of nothing": _train(
        "data.validation_fraction=0",
        "eval.every_steps=2",
        said=("eval.every_steps=2", "data.validation_fraction=0", "eval.every_steps=0"),
    ),
    # Sizes against the mesh and each other
    "key/value heads over tensor": _train(
        "mesh.tensor=4", said=("layers/attention/key/kernel", "kv_heads=2 does not divide by tensor=4")
    ),
    "everything that does not divide": _train(
        "mesh.tensor=4",
        "mesh.fsdp=2",
        "model.mlp=30",
        "model.embed=17",
        "model.head=4",
        said=("kv_heads=2", "mlp=30 does not divide by tensor=4", "28 and 32", "embed=17", "fsdp=2"),
    ),
    "layers, batch, heads and rules at once": _train(
        "mesh.data=3",
        "mesh.tensor=4",
        "model.kv_heads=3",
        "strategy={mlp: tensr, hedas: tensor}",
        said=(
            "does not divide over mesh.data=3",
            "model.heads=4 does not divide by model.kv_heads=3",
            "kv_heads=3 does not divide by tensor=4",
            "'tensr'",
            "did you mean 'tensor'",
            "hedas",
        ),
    ),
    "two dims over one axis": _train(
        "strategy={embed: tensor}", said=("embed", "mlp", "axis tensor", "layers/mlp/up/kernel")
    ),
    "replicated, but not by name": _train("strategy={mlp: []}", said=("strategy.mlp", "`replicated`")),
    "model file that is not there": _train(
        "model={file: modle.py}", said=("modle.py", "there is no file", "model.py")
    ),
    "factory that is not there": _train(
        "model={file: model.py, factory: make_modle}", said=("make_modle", "did you mean make_model?")
    ),
    "rules that do not fit": _train(
        "model={file: model.py, arguments: {rule: tabel}}",
        said=("table (", "tabel", "no rule", "matches no parameter"),
    ),
    "loss without its pair": _train(
        "model={file: model.py, arguments: {pair: false}}",
        said=("model.py", "returned float32[]", "two scalars"),
    ),
    "inspect": Case(("inspect", "run.yaml", "mesh.tensor=4"), ("kv_heads=2 does not divide by tensor=4",)),
    "picture into nowhere": Case(("inspect", "run.yaml", "--png", "nowhere/a.png"), ("no folder nowhere",)),
    "verify": Case(("verify", "run.yaml", "model.kv_heads=3"), ("does not divide by model.kv_heads=3",)),
    "devices to verify on": Case(("verify", "run.yaml", "--devices", "0"), ("--devices 0",)),
    "batch over data": _train(
        "mesh.data=3", said=("batch.sequences=8", "does not divide over mesh.data=3", "multiple of 3")
    ),
    "microbatches": _train(
        "batch.microbatches=3",
        said=("batch.sequences=8 does not divide by batch.microbatches=3", "nearest multiple is 9"),
    ),
    "query heads to key/value heads": _train(
        "model.kv_heads=3", said=("model.heads=4 does not divide by model.kv_heads=3",)
    ),
    "experts": _train(
        "mesh.expert=4",
        "model.layers=3",
        "moe={experts: 6, top_k: 8, first_dense: 1, every: 4, groups: 4}",
        said=(
            "4 problem(s)",
            "moe.top_k=8 is more than moe.experts=6",
            "2 layers (model.layers=3 - moe.first_dense=1) do not divide by moe.every=4",
            "moe.experts=6 do not divide by moe.groups=4",
            "experts=6 does not divide by expert=4",
        ),
    ),
    "fields of experts that nothing reads": _train(
        "moe={experts: 4, top_k: 2, overflow: reroute, priority: probability, bias_freeze_tokens: 1M}",
        said=(
            "moe.overflow=reroute is for tokens that find no room",
            "moe.priority=probability is for tokens that find no room",
            "moe.bias_freeze_tokens=1000000 is for a bias, and moe.balance=loss has none",
        ),
    ),
    "one expert's weight among the kept": _train(
        "moe={experts: 4, top_k: 1, first_dense: 1}",
        said=(
            "moe.router=softmax_kept with moe.top_k=1",
            "use moe.router=softmax",
            "moe.first_dense=1 leaves none of model.layers=1",
        ),
    ),
    "longer than the positions": _train(
        "model.positions=8", said=("batch.length=16 is longer than model.positions=8",)
    ),
    "kernel of another platform": _train(
        "model.attention=splash", said=("model.attention", "'splash'", "cpu", "'xla'")
    ),
    # Data
    "missing file of text": _train(
        "data.paths=[nowhere.txt]", said=("data.paths: there is no file nowhere.txt", "correct the path")
    ),
    "pattern without a match": _train(
        "data.paths=['*.nothing']", said=("data.paths: the pattern *.nothing matches no file",)
    ),
    "folder of text": _train("data.paths=[folder]", said=("folder is a folder", "folder/**/*.txt")),
    "no paths": _train("data.paths=[]", said=("data.source text needs files", "set data.paths")),
    "empty corpus": _train(
        "data.paths=[empty.txt]",
        said=("the corpus is empty", "empty.txt", "point data.paths at files with text"),
    ),
    "short corpus": _train(
        "data.paths=[short.txt]", said=("fewer than one window of 16 tokens", "lower batch.length")
    ),
    "corpus shorter than a batch": _train(
        "batch.sequences=4096", said=("fewer than batch.sequences 4096", "give more text")
    ),
    "token ids outside the vocabulary": _train(
        "data.source=tokens",
        "data.paths=[tokens.npy]",
        "data.tokenizer=none",
        "model.vocab=100",
        said=("tokens.npy: token id 100 at offset 100 is outside the vocabulary [0, 100)", "model.vocab"),
    ),
    "vocabulary below the tokenizer's": _train("model.vocab=100", said=("model.vocab is 100", "257 tokens")),
    "missing tokenizer": _train("data.tokenizer=nowhere.json", said=("data.tokenizer", "nowhere.json")),
    "missing JSONL field": _train(
        "data.source=jsonl",
        "data.paths=[rows.jsonl]",
        said=("rows.jsonl:1: no field 'text' (fields: content)", "set data.field"),
    ),
    # The run directory
    "file as run_dir": _train("run_dir=corpus.txt", said=("run_dir=corpus.txt is a file", "name a folder")),
    "run_dir below a file": _train(
        "run_dir=corpus.txt/run", said=("run_dir=corpus.txt/run cannot be written", "name a folder")
    ),
    "run_dir with other things": _train(
        "run_dir=folder", said=("run_dir=folder holds files but no run", "new or empty folder")
    ),
    "run with other mathematics": _train(
        "run_dir=other_run",
        said=("other_run", "seed: the run has 7, asked is 0", "differ in 1 field(s)", "another run_dir"),
    ),
    # Commands that read a run
    "generate without a run": Case(
        ("generate", "folder", "--prompt", "x"), ("folder: no run here", "name the run_dir")
    ),
    "eval without a run": Case(("eval", "folder"), ("folder: no run here", "name the run_dir")),
    "generate before the first checkpoint": Case(
        ("generate", "other_run", "--prompt", "x"),
        ("other_run/tokenizer holds no tokenizer", "train the run first"),
    ),
    "eval before the first checkpoint": Case(("eval", "other_run"), ("other_run", "no complete checkpoint")),
    "empty prompt": Case(("generate", "other_run", "--prompt", ""), ("--prompt is empty",)),
    "no tokens": Case(("generate", "other_run", "--prompt", "x", "--tokens", "0"), ("--tokens 0",)),
}


@dataclass(frozen=True)
class Ending:
    """How a command ended."""

    exit_code: int
    stdout: str
    stderr: str
    elapsed_seconds: float
    cpu_seconds: float
    load: float
    """Processes that wanted to run, a processor."""


def _make_files(folder: Path) -> None:
    (folder / "run.yaml").write_text(RUN, encoding="utf-8")
    (folder / "corpus.txt").write_text("All happy families are alike. " * 300, encoding="utf-8")
    (folder / "model.py").write_text(MODEL, encoding="utf-8")
    (folder / "empty.txt").touch()
    (folder / "short.txt").write_text("too short", encoding="utf-8")
    (folder / "rows.jsonl").write_text(json.dumps({"content": "words"}) + "\n", encoding="utf-8")
    np.save(folder / "tokens.npy", np.arange(1000, dtype=np.uint16))
    (folder / "folder").mkdir()
    (folder / "folder" / "notes.txt").touch()
    (folder / "other_run").mkdir()
    other = load_config(folder / "run.yaml", ["run_dir=other_run", "seed=7"])
    (folder / "other_run" / "config.yaml").write_text(dump_config(other), encoding="utf-8")


def _make_environment(added: Mapping[str, str]) -> dict[str, str]:
    """A shell in which nobody has touched JAX, apart from what is added."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XLA_"))}
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return plain | {"PYTHONPATH": path} | dict(added)


def _run_command(folder: Path, name: str, case: Case) -> Ending:
    command = [sys.executable, "-m", "jaxscale.cli.main", *case.arguments]
    outputs = [folder / f"{name.replace('/', ' ')}.{stream}" for stream in ("stdout", "stderr")]
    started = time.monotonic()
    with outputs[0].open("wb") as stdout, outputs[1].open("wb") as stderr:
        process = subprocess.Popen(
            command, cwd=folder, env=_make_environment(case.environment), stdout=stdout, stderr=stderr
        )
        watchdog = threading.Timer(HANG_SECONDS, process.kill)
        watchdog.start()
        _, status, usage = os.wait4(process.pid, 0)  # unlike `wait`, tells the CPU seconds of this process
        watchdog.cancel()
        process.returncode = os.waitstatus_to_exitcode(status)
    return Ending(
        exit_code=process.returncode,
        stdout=outputs[0].read_text(encoding="utf-8"),
        stderr=outputs[1].read_text(encoding="utf-8"),
        elapsed_seconds=time.monotonic() - started,
        cpu_seconds=usage.ru_utime + usage.ru_stime,
        load=os.getloadavg()[0] / (os.cpu_count() or 1),
    )


@pytest.fixture(scope="module")
def endings(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[str, Ending]:
    """Every asked-for command, two at a time."""
    folder = tmp_path_factory.mktemp("mistakes")
    _make_files(folder)
    asked = [
        item.callspec.params["name"]
        for item in request.session.items
        if item.path == Path(__file__) and hasattr(item, "callspec") and "name" in item.callspec.params
    ]
    names = list(dict.fromkeys(asked))
    with ThreadPoolExecutor(max_workers=2) as pool:
        ended = pool.map(lambda name: _run_command(folder, name, CASES[name]), names)
        return dict(zip(names, ended, strict=True))


@pytest.mark.parametrize("name", CASES)
def test_a_mistake_is_answered_with_one_message_and_exit_code_2(endings, name):
    ending = endings[name]
    assert ending.exit_code == 2, ending
    assert "Traceback" not in ending.stdout + ending.stderr
    assert ending.stderr.count("jaxscale: ") == 1, ending.stderr
    message = ending.stderr.partition("jaxscale: ")[2]
    for part in CASES[name].said:
        assert part in message


@pytest.mark.parametrize("name", CASES)
def test_a_mistake_is_answered_within_15_seconds(endings, name):
    """Longer by as much as the machine has more to do than processors to do it."""
    ending = endings[name]
    assert ending.cpu_seconds < PROMISED_SECONDS
    assert ending.elapsed_seconds < PROMISED_SECONDS * max(1.0, ending.load)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "required: COMMAND"),
        (("trian",), "invalid choice: 'trian'"),
        (("train",), "required: config"),
        (("generate", "folder"), "required: --prompt"),
        (("generate", "folder", "--prompt", "x", "--tokens", "many"), "invalid int value: 'many'"),
    ],
)
def test_an_incomplete_command_line_is_answered_with_its_usage(tmp_path, arguments, said):
    ending = _run_command(tmp_path, "usage", Case(arguments, ()))
    assert ending.exit_code == 2
    assert ending.stderr.startswith("usage: jaxscale")
    assert said in ending.stderr
    assert "Traceback" not in ending.stderr


def test_mistakes_in_the_configuration_are_found_before_jax_is_imported(tmp_path):
    code = (
        "import sys\n"
        "from jaxscale.cli.main import main\n"
        "code = main(['train', 'nowhere.yaml'])\n"
        "print(code, sorted({'jax', 'flax', 'numpy'} & set(sys.modules)))\n"
    )
    environment = _make_environment({})
    shown = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
    )
    assert shown.stdout.strip() == "2 []", shown.stderr
