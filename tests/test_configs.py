"""Every shipped configuration loads, has the published size, and fits the machine it names.

Sizes and training of those with experts stand in `tests/test_expert_configs.py`.
"""

from pathlib import Path

import pytest

from jaxscale.config import Config, load_config
from jaxscale.mesh import BATCH_AXES, axis_sizes, resolve_mesh
from jaxscale.models.build import build_decoder, count_parameters, shape_decoder
from jaxscale.models.shape import DecoderShape
from jaxscale.sharding.rules import iterate_leaves, lay_leaves

pytestmark = pytest.mark.smoke

CONFIGS = Path(__file__).parents[1] / "configs"

# GPT-2 and GPT-3, per layer: 12·d² in matrices, 9·d in their biases, 4·d in two norms; then the tables of
# tokens and positions, and a last norm of 2·d. GPT-3's published 175.0B is rounded: with the head tied to the
# embedding, as published, the shape gives 174.6B; a head of its own would make it 175.2B (+ 50,257·12,288).
# Llama, per layer: query and out 2·d², key and value 2·d·K·H, three MLP matrices 3·d·f, two norms 2·d; then
# two tables of tokens, and a last norm of d.
PUBLISHED_PARAMETERS = {
    "gpt2_124m": 12 * (12 * 768**2 + 13 * 768) + (50257 + 1024) * 768 + 2 * 768,
    "gpt3_175b": 96 * (12 * 12288**2 + 13 * 12288) + (50257 + 2048) * 12288 + 2 * 12288,
    "llama2_7b": 32 * (4 * 4096**2 + 3 * 4096 * 11008 + 2 * 4096) + 2 * 32000 * 4096 + 4096,
    "llama3_8b": 32 * (2 * 4096**2 + 2 * 4096 * 8 * 128 + 3 * 4096 * 14336 + 2 * 4096)
    + (2 * 128256 + 1) * 4096,
    "llama3_70b": 80 * (2 * 8192**2 + 2 * 8192 * 8 * 128 + 3 * 8192 * 28672 + 2 * 8192)
    + (2 * 128256 + 1) * 8192,
    "llama3_405b": 126 * (2 * 16384**2 + 2 * 16384 * 8 * 128 + 3 * 16384 * 53248 + 2 * 16384)
    + (2 * 128256 + 1) * 16384,
}
STATED_PARAMETERS = {
    "gpt2_124m": 124_439_808,
    "gpt3_175b": 174_604_259_328,
    "llama2_7b": 6_738_415_616,
    "llama3_8b": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
    "llama3_405b": 405_853_388_800,
}
# Devices of the machine that the heading names, and another mesh that such a model is often laid on.
MACHINES = {
    "tiny": (8, {"fsdp": 4, "tensor": 2}),
    "gpt2_124m": (8, {"fsdp": 8, "tensor": 4}),
    "gpt3_175b": (512, {"fsdp": 128, "tensor": 16}),
    "llama2_7b": (8, {"fsdp": 64, "tensor": 8}),
    "llama3_8b": (64, {"fsdp": 64, "tensor": 8}),
    "llama3_70b": (256, {"fsdp": 64, "tensor": 8}),
    "llama3_405b": (1024, {"fsdp": 64, "tensor": 8}),
    "tiny_moe": (8, {"fsdp": 2, "expert": 2, "tensor": 2}),
    "mixtral_8x7b": (64, {"fsdp": 16, "expert": 8, "tensor": 8}),
    "switch_base_64": (8, {"data": 4, "expert": 16, "tensor": 4}),
    "deepseek_v3": (1024, {"fsdp": 32, "expert": 32, "tensor": 8}),
}
WITH_EXPERTS = {"tiny_moe", "mixtral_8x7b", "switch_base_64", "deepseek_v3"}
PEAK_LR = {
    "gpt2_124m": 6e-4,
    "gpt3_175b": 0.6e-4,
    "llama2_7b": 3e-4,
    "llama3_8b": 3e-4,
    "llama3_70b": 1.5e-4,
    "llama3_405b": 8e-5,
}
TOKENS_IN_ALL = {
    "gpt2_124m": 10e9,
    "gpt3_175b": 300e9,
    "llama2_7b": 2e12,
    "llama3_8b": 15e12,
    "llama3_70b": 15e12,
    "llama3_405b": 15.6e12,
}
TOKENS_A_BATCH = {
    "gpt2_124m": 0.5e6,
    "gpt3_175b": 3.2e6,
    "llama2_7b": 4e6,
    "llama3_8b": 4e6,
    "llama3_70b": 4e6,
    "llama3_405b": 16e6,
}


def _load(name: str) -> Config:
    return load_config(CONFIGS / f"{name}.yaml")


def _shape(config: Config) -> DecoderShape:
    return shape_decoder(config, vocab=config.model.vocab or 257, platform="cpu")


def test_every_shipped_configuration_is_tested_here():
    assert {path.stem for path in CONFIGS.iterdir()} == set(MACHINES)
    assert set(STATED_PARAMETERS) == set(PUBLISHED_PARAMETERS) == set(MACHINES) - WITH_EXPERTS - {"tiny"}
    assert {name for name in MACHINES if _load(name).moe} == WITH_EXPERTS


@pytest.mark.parametrize("name", MACHINES)
def test_a_configuration_loads_and_says_how_to_run_it(name):
    config = _load(name)
    assert config.run_dir == f"runs/{name}"
    heading = (CONFIGS / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
    assert heading[0].startswith(f"# jaxscale train configs/{name}.yaml")
    assert len(heading) <= 45, "a configuration fits a screen"


@pytest.mark.parametrize("name", STATED_PARAMETERS)
def test_a_published_model_has_its_published_number_of_parameters(name):
    counted = count_parameters(_shape(_load(name)))
    assert counted == STATED_PARAMETERS[name] == PUBLISHED_PARAMETERS[name]
    assert f"{counted:,} parameters" in (CONFIGS / f"{name}.yaml").read_text(encoding="utf-8")


def test_gpt3_with_a_head_of_its_own_is_the_175_2_billion_sometimes_quoted():
    config = load_config(CONFIGS / "gpt3_175b.yaml", ["model.tied=false"])
    assert count_parameters(_shape(config)) == 174_604_259_328 + 50_257 * 12_288 == 175_221_817_344


@pytest.mark.parametrize("name", MACHINES)
def test_the_batch_and_the_rules_fit_the_named_machine_and_another_mesh(name):
    config = _load(name)
    devices, other = MACHINES[name]
    model = build_decoder(_shape(config))
    named = axis_sizes(resolve_mesh(config.mesh, devices))
    for sizes in (named, dict.fromkeys(named, 1) | other):
        leaves, problems = lay_leaves(model.shapes, model.rules, sizes)
        assert problems == []
        assert set(leaves) == {path for path, _ in iterate_leaves(model.shapes)}
    rows, left = divmod(config.batch.sequences, config.batch.microbatches)
    assert left == 0
    ways = 1
    for axis in BATCH_AXES:
        ways *= named[axis]
    assert rows % ways == 0


@pytest.mark.parametrize("name", STATED_PARAMETERS)
def test_training_settings_are_the_published_ones(name):
    config = _load(name)
    batch_tokens = config.batch.sequences * config.batch.length
    assert batch_tokens == pytest.approx(TOKENS_A_BATCH[name], rel=0.05)
    assert config.steps * batch_tokens == pytest.approx(TOKENS_IN_ALL[name], rel=1e-3)
    optimizer = config.optimizer
    assert optimizer.peak_lr == PEAK_LR[name]
    assert (optimizer.beta1, optimizer.beta2, optimizer.weight_decay) == (0.9, 0.95, 0.1)
    assert (optimizer.clip_norm, optimizer.schedule) == (1.0, "cosine")
    if name.startswith("gpt"):
        assert optimizer.warmup_tokens == 375_000_000
    else:
        steps = {"llama2_7b": 2000}.get(name, 8000)
        assert optimizer.warmup_tokens == pytest.approx(steps * batch_tokens, rel=5e-3)
    assert config.model.rope_theta == (500_000 if name.startswith("llama3") else 10_000)
    assert (config.model.rope_scaling == "llama3.1") == (name == "llama3_405b")
