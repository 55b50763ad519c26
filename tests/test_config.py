"""The configuration: what is refused and how it is said, what is read back, what a run survives."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from jaxscale.config import (
    Config,
    UserError,
    check_same_mathematics,
    dump_config,
    flatten_config,
    load_config,
)

pytestmark = pytest.mark.smoke

SMALLEST = """\
run_dir: runs/smallest
steps: 10
batch: {sequences: 4, length: 8}
model: {family: llama, layers: 1, embed: 8, heads: 2, mlp: 16}
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "run.yaml"
    file.write_text(SMALLEST, encoding="utf-8")
    return file


def _refusal(path: Path, *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        load_config(path, overrides)
    return str(caught.value)


def _load_with(path: Path, addition: str) -> Config:
    path.write_text(SMALLEST + addition, encoding="utf-8")
    return load_config(path)


# Names


@pytest.mark.parametrize(
    ("addition", "field", "suggestion"),
    [
        ("optimizer: {learning_rat: 3e-4}", "optimizer.learning_rat", "optimizer.peak_lr"),
        ("optimizer: {lr: 3e-4}", "optimizer.lr", "optimizer.peak_lr"),
        ("optimizer: {peak-lr: 3e-4}", "optimizer.peak-lr", "optimizer.peak_lr"),
        ("optimiser: {peak_lr: 3e-4}", "optimiser", "optimizer"),
        ("peak_lr: 3e-4", "peak_lr", "optimizer.peak_lr"),
        ("lr: 3e-4", "lr", "optimizer.peak_lr"),
        ("peak-lr: 3e-4", "peak-lr", "optimizer.peak_lr"),
        ("kv-heads: 2", "kv-heads", "model.kv_heads"),
        ("microbatches: 2", "microbatches", "batch.microbatches"),
        ("optimizer: {sequences: 4}", "optimizer.sequences", "batch.sequences"),
        ("stop-after-steps: 3", "stop-after-steps", "stop_after_steps"),
        ("mesh: {tensr: 2}", "mesh.tensr", "mesh.tensor"),
        (
            "data: {mixture: [{source: text, wait: 2, weight: 1}]}",
            "data.mixture.0.wait",
            "data.mixture.weight",
        ),
    ],
)
def test_an_unknown_name_is_refused_with_the_place_it_may_belong_to(path, addition, field, suggestion):
    with pytest.raises(UserError) as caught:
        _load_with(path, addition)
    message = str(caught.value)
    assert f"{field}: no such field" in message
    assert message.endswith(f"did you mean {suggestion}?")


def test_a_name_that_resembles_nothing_is_answered_with_the_fields_there_are(path):
    message = _refusal(path, "xyzzy=1")
    assert "xyzzy: no such field (value 1); the fields here are run_dir, seed, steps, " in message


def test_all_problems_of_a_file_come_in_one_message(path):
    with pytest.raises(UserError) as caught:
        _load_with(path, "seed: -1\nmesh: {data: x}\nzero: {stage: 4}\nremat: all\n")
    message = str(caught.value)
    assert "4 problem(s)" in message
    for field in ("seed: -1", "mesh.data: 'x'", "zero.stage: 4", "remat.policy: 'all'"):
        assert field in message


# Files


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"steps: 1\nseed: 1\nsteps: 2\n", 'line 3: found duplicate key "steps"'),
        (b"mesh: {data: 1, data: 2}\n", 'line 1: found duplicate key "data"'),
        (b"", "is empty; a configuration is a mapping"),
        (b"# nothing but a comment\n", "is empty; a configuration is a mapping"),
        (b"- steps: 1\n", "is a list; a configuration is a mapping"),
        (b"steps 100\n", "is text; a configuration is a mapping"),
        (
            b"mesh:\n\tdata: 2\n",
            "line 2: found character '\\t' that cannot start any token; indent with spaces",
        ),
        (b"run_dir: caf\xe9\n", "not UTF-8 text (byte 12); save the configuration as UTF-8"),
        (b"mesh: {data: 2\n", "not valid YAML: line 2"),
        (b"steps: 1\n---\nsteps: 2\n", "not valid YAML: line 2"),
        (b"run_dir: !!python/name:os.system\n", "not valid YAML: line 1"),
        (b"steps: 10\n", "run_dir: is required and has no value"),
        (b"1: 2\n", "Keys should be strings"),
    ],
)
def test_a_file_that_is_no_configuration_is_refused_by_name(path, content, said):
    path.write_bytes(content)
    message = _refusal(path)
    assert message.startswith(f"{path}: ")
    assert said in message


def test_a_missing_file_is_refused_with_a_similar_one(path):
    message = _refusal(path.with_name("rum.yaml"))
    assert "rum.yaml: no such configuration file; did you mean" in message
    assert message.endswith(f"{path}?")
    assert _refusal(path.parent / "nowhere" / "run.yaml").endswith("no such configuration file")


def test_a_folder_is_refused(path):
    assert _refusal(path.parent) == f"{path.parent}: is a folder; name the YAML file in it"


# Values


@pytest.mark.parametrize(
    ("override", "field", "expected"),
    [
        ("optimizer.peak_lr=1e-4", "optimizer.peak_lr", 0.0001),
        ("optimizer.peak_lr='1e-4'", "optimizer.peak_lr", 0.0001),
        ("optimizer.peak_lr=1", "optimizer.peak_lr", 1.0),
        ("steps=1e3", "steps", 1000),
        ("steps=1_000", "steps", 1000),
        ("steps=010", "steps", 10),
        ("optimizer.warmup_tokens=100k", "optimizer.warmup_tokens", 100_000),
        ("optimizer.warmup_tokens=2.5M", "optimizer.warmup_tokens", 2_500_000),
        ("optimizer.warmup_tokens=1.001k", "optimizer.warmup_tokens", 1001),
        ("optimizer.warmup_tokens=3B", "optimizer.warmup_tokens", 3 * 10**9),
        ("optimizer.warmup_tokens=15.6T", "optimizer.warmup_tokens", 156 * 10**11),
        ("mesh.data='8'", "mesh.data", 8),
        ("mesh.data=-1", "mesh.data", -1),
        ("model.tied='False'", "model.tied", False),
        ("model.tied=off", "model.tied", False),
        ("model.tied=true", "model.tied", True),
        ("optimizer.clip_norm=null", "optimizer.clip_norm", None),
        ("precision=bf16", "precision.compute", "bf16"),
        ("data.paths=[a.txt, b.txt]", "data.paths", ("a.txt", "b.txt")),
        ("run_dir=runs/a=b", "run_dir", "runs/a=b"),
    ],
)
def test_a_value_is_read_as_what_it_says(path, override, field, expected):
    found = flatten_config(load_config(path, [override]))[field]
    assert found == expected
    assert type(found) is type(expected)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("optimizer.peak_lr=fast", "optimizer.peak_lr: 'fast': must be a valid number"),
        ("optimizer.peak_lr=-1", "optimizer.peak_lr: -1: must be greater than or equal to 0"),
        ("optimizer.peak_lr=.nan", "optimizer.peak_lr: nan: must be a finite number"),
        ("optimizer.peak_lr=nan", "optimizer.peak_lr: 'nan': must be a finite number"),
        ("optimizer.peak_lr=.inf", "optimizer.peak_lr: inf: must be a finite number"),
        ("optimizer.peak_lr=true", "optimizer.peak_lr: True: a number is needed here"),
        ("optimizer.beta2=1", "optimizer.beta2: 1: must be less than 1"),
        ("steps=1.5", "steps: 1.5: a count is a whole number"),
        ("steps=0", "steps: 0: must be greater than 0"),
        ("steps=yes", "steps: 'yes': must be a valid integer"),
        ("steps=1:30", "steps: '1:30': must be a valid integer"),
        ("steps=1e400", "steps: inf: a count is a whole number"),
        ("steps=true", "steps: True: a number is needed here"),
        ("optimizer.warmup_tokens=1.0005k", "optimizer.warmup_tokens: '1.0005k': a count is a whole number"),
        ("optimizer.warmup_tokens=manyk", "a number followed by k, M, B or T"),
        ("optimizer.warmup_tokens=infk", "optimizer.warmup_tokens: 'infk': a count is a whole number"),
        ("optimizer.warmup_tokens=-5k", "optimizer.warmup_tokens: '-5k': must be greater than or equal to 0"),
        ("seed=4294967296", "seed: 4294967296: must be less than 4294967296"),
        ("run_dir=", "run_dir: None: must be a valid string"),
        ("run_dir=''", "run_dir: '': String should have at least 1 character"),
        ("mesh.data=-2", "mesh.data: -2: must be greater than or equal to -1"),
        ("mesh.data=2.5", "mesh.data: 2.5: must be a valid integer"),
        ("mesh=4", "mesh: 4 is not a section"),
        ("model.tied=2", "model.tied: 2: must be a valid boolean"),
        ("model.family=lama", "model.family: 'lama' is not one of 'llama' or 'gpt2'; did you mean llama?"),
        (
            "remat=Full",
            "remat.policy: 'Full' is not one of 'none', 'attention', 'matmuls' or 'full'; did you mean full?",
        ),
        ("precision=fp4", "precision.compute: 'fp4' is not one of 'fp32', 'bf16', 'fp16' or 'fp8'"),
        ("zero.stage=4", "zero.stage: 4 is not one of 0, 1, 2 or 3"),
        ("zero.stage=true", "zero.stage: True: a number is needed here"),
        ("data.paths=a.txt", "data.paths: 'a.txt' is not a list; write [a.txt]"),
        ("data.paths=3", "data.paths: 3 is not a list"),
    ],
)
def test_a_value_that_says_nothing_sensible_is_refused_with_its_field(path, override, said):
    assert said in _refusal(path, override)


# Overrides


def test_an_override_wins_over_the_file_and_the_last_override_over_the_others(path):
    config = load_config(path, ["steps=20", "mesh.data=2", "steps=30"])
    assert (config.steps, config.mesh.data, config.batch.sequences) == (30, 2, 4)


def test_an_override_adds_to_a_short_precision(path):
    path.write_text(SMALLEST + "precision: bf16\n", encoding="utf-8")
    precision = load_config(path, ["precision.moments=bf16"]).precision
    assert (precision.compute, precision.params, precision.moments) == ("bf16", "fp32", "bf16")


@pytest.mark.parametrize("override", ["mesh.fsdp", "=4", "mesh.=4", ".mesh=4", "mesh..fsdp=4"])
def test_an_override_without_name_or_value_is_refused_with_its_form(path, override):
    assert _refusal(path, override) == (
        f"{override!r}: an override has the form section.field=value, such as mesh.fsdp=4"
    )


def test_an_override_below_a_value_is_refused(path):
    assert _refusal(path, "steps.x=3") == "'steps.x=3': steps is a value (10), not a section"


def test_an_override_of_broken_yaml_is_refused(path):
    assert "the value is not valid YAML" in _refusal(path, "data.paths=[a")


# Round trip


def test_a_dumped_configuration_loads_to_an_equal_one(path, tmp_path):
    config = load_config(
        path,
        [
            "run_dir='runs/a: b # ü'",
            "optimizer.peak_lr=1e-4",
            "optimizer.eps=1.0e-15",
            "optimizer.clip_norm=null",
            "precision=bf16",
            "mesh.data=-1",
            "data.mixture=[{source: text, paths: ['*.txt'], weight: 0.1}, {source: jsonl, weight: 3}]",
            "stop_after_steps=7",
        ],
    )
    dumped = tmp_path / "dumped.yaml"
    dumped.write_text(dump_config(config), encoding="utf-8")
    assert load_config(dumped) == config


@pytest.mark.parametrize(
    "text", ["8", "1e3", "null", "yes", "0x1", "a" * 150, "a b " * 60 + "c", " x ", "a\nb", "'"]
)
def test_text_is_dumped_as_text_whatever_it_looks_like(path, tmp_path, text):
    config = replace(load_config(path), run_dir=text)
    dumped = tmp_path / "dumped.yaml"
    dumped.write_text(dump_config(config), encoding="utf-8")
    assert load_config(dumped).run_dir == text


def test_a_dumped_configuration_has_every_field(path):
    dumped = dump_config(load_config(path))
    for field in flatten_config(load_config(path)):
        assert f"{field.rpartition('.')[2]}:" in dumped


# Descriptions


def _describe_fields() -> dict[str, Any]:
    schema = TypeAdapter(Config).json_schema()
    sections = {"Config": schema} | schema["$defs"]
    return {
        f"{section}.{name}": field
        for section, content in sections.items()
        for name, field in content["properties"].items()
    }


def test_every_field_is_described_and_every_section_too():
    undescribed = [
        path
        for path, field in _describe_fields().items()
        if not field.get("description") and "$ref" not in field
    ]
    assert undescribed == []
    for name, section in TypeAdapter(Config).json_schema()["$defs"].items():
        assert section["description"].endswith("."), name


UNITS = (
    *("devices", "steps", "updates", "sequences", "tokens", "channels", "heads", "blocks", "microbatches"),
    *("experts", "layers", "groups", "choices"),
    *("checkpoints", "fraction", "share", "no unit", "per update", "per unit of", "gradient norm"),
)


def test_the_description_of_a_number_says_what_it_counts():
    numbers = {
        path: field["description"].lower()
        for path, field in _describe_fields().items()
        if {"integer", "number"} & {option.get("type") for option in [field, *field.get("anyOf", ())]}
    }
    assert len(numbers) > 30
    for choice in ("Config.seed", "ZeroConfig.stage"):  # they name something and count nothing
        del numbers[choice]
    assert [path for path, said in numbers.items() if not any(unit in said for unit in UNITS)] == []


# What a run survives

MOE = "moe={experts: 4, top_k: 2, balance: loss, balance_scope: SCOPE}"


@pytest.mark.parametrize(
    "override",
    [
        "run_dir=elsewhere",
        "stop_after_steps=3",
        "mesh.fsdp=4",
        "mesh.tensor=2",
        "zero.stage=1",
        "batch.microbatches=4",
        "remat=full",
        "checkpoint.every_steps=7",
        "checkpoint.keep=1",
        "eval.every_steps=2",
        "eval.sequences=8",
        "nonfinite.limit=5",
        "model.attention=xla",
        "data.cache_dir=elsewhere",
    ],
)
def test_a_run_goes_on_where_only_place_and_time_change(path, override):
    before, after = load_config(path), load_config(path, [override])
    assert before != after
    check_same_mathematics(before, after)


@pytest.mark.parametrize(
    ("override", "field"),
    [
        ("seed=1", "seed"),
        ("steps=20", "steps"),
        ("batch.sequences=8", "batch.sequences"),
        ("batch.length=16", "batch.length"),
        ("model.layers=2", "model.layers"),
        ("model.tied=true", "model.tied"),
        ("model.vocab=300", "model.vocab"),
        ("data.tokenizer=train:300", "data.tokenizer"),
        ("data.mixture=[{source: text, paths: [a], weight: 1}]", "data.mixture"),
        ("data.cross_documents=true", "data.cross_documents"),
        ("optimizer.peak_lr=1e-3", "optimizer.peak_lr"),
        ("optimizer.schedule=wsd", "optimizer.schedule"),
        ("optimizer.clip_norm=null", "optimizer.clip_norm"),
        ("precision=bf16", "precision.compute"),
        ("precision.moments=bf16", "precision.moments"),
    ],
)
def test_other_mathematics_are_refused_by_field_and_both_values(path, override, field):
    before, after = load_config(path), load_config(path, [override])
    old, new = flatten_config(before)[field], flatten_config(after)[field]
    with pytest.raises(UserError) as caught:
        check_same_mathematics(before, after)
    message = str(caught.value)
    assert "differ in 1 field(s)" in message
    assert f"{field}: the run has {old!r}, asked is {new!r}" in message
    assert "another run_dir" in message


@pytest.mark.parametrize("override", ["moe.eval_capacity_factor=4", "mesh.expert=2"])
def test_a_run_with_experts_goes_on_over_another_expert_axis_and_evaluates_otherwise(path, override):
    before = load_config(path, [MOE.replace("SCOPE", "sequence")])
    after = load_config(path, [MOE.replace("SCOPE", "sequence"), override])
    assert before != after
    check_same_mathematics(before, after)


@pytest.mark.parametrize(
    "field",
    ["experts=8", "top_k=3", "capacity_factor=2", "exchange=capacity", "balance_coef=0.1", "jitter=0.01"],
)
def test_experts_and_routers_belong_to_the_mathematics(path, field):
    before = load_config(path, [MOE.replace("SCOPE", "sequence")])
    after = load_config(path, [MOE.replace("SCOPE", "sequence"), f"moe.{field}"])
    with pytest.raises(UserError, match=rf"differ in 1 field\(s\)\n  moe.{field.split('=')[0]}: the run has"):
        check_same_mathematics(before, after)
    with pytest.raises(UserError, match="moe"):
        check_same_mathematics(load_config(path), before)


@pytest.mark.parametrize("scope", ["sequence", "microbatch", "step"])
def test_microbatches_belong_to_the_mathematics_where_a_loss_takes_its_fractions_of_one(path, scope):
    def load(*overrides):
        return load_config(path, [MOE.replace("SCOPE", scope), *overrides])

    if scope != "microbatch":
        check_same_mathematics(load(), load("batch.microbatches=4"))
        return
    with pytest.raises(UserError, match=r"batch\.microbatches: the run has 1, asked is 4"):
        check_same_mathematics(load(), load("batch.microbatches=4"))
    for lossless in ("moe.balance=bias", "moe.balance_coef=0"):
        check_same_mathematics(load(lossless), load(lossless, "batch.microbatches=4"))


def test_all_changed_mathematics_are_named_at_once_and_free_fields_are_not(path):
    before = load_config(path)
    after = load_config(path, ["seed=1", "model.layers=2", "mesh.data=4"])
    with pytest.raises(UserError) as caught:
        check_same_mathematics(before, after)
    message = str(caught.value)
    assert "differ in 2 field(s)" in message
    assert "seed:" in message
    assert "model.layers:" in message
    assert "mesh" not in message


@pytest.mark.parametrize("schedule", ["constant", "cosine", "wsd"])
def test_more_steps_are_the_same_run_only_where_the_rate_does_not_look_at_the_end(path, schedule):
    before = load_config(path, [f"optimizer.schedule={schedule}"])
    after = replace(before, steps=20)
    if schedule == "constant":
        check_same_mathematics(before, after)
        check_same_mathematics(after, before)
    else:
        with pytest.raises(UserError, match="steps: the run has 10, asked is 20"):
            check_same_mathematics(before, after)


def test_more_steps_are_another_run_where_the_warm_up_was_cut_short_by_the_end(path):
    """Ten steps of 32 tokens are fewer than the warm-up, which then ends with the run."""
    before = load_config(path, ["optimizer.schedule=constant", "optimizer.warmup_tokens=321"])
    with pytest.raises(UserError, match="steps: the run has 10, asked is 20"):
        check_same_mathematics(before, replace(before, steps=20))
    whole = load_config(path, ["optimizer.schedule=constant", "optimizer.warmup_tokens=320"])
    check_same_mathematics(whole, replace(whole, steps=20))
