"""Shipped configurations with experts: parameters, total and for each token, against the published figures.

Counted here from the published sizes alone: a layer's attention, its experts, its router, its norms.
"""

import pytest

from jaxscale.config import load_config
from jaxscale.models.build import count_parameters
from tests.test_configs import CONFIGS, WITH_EXPERTS, _load, _shape

pytestmark = pytest.mark.smoke


def _count(name: str) -> tuple[int, int]:
    shape = _shape(_load(name))
    return count_parameters(shape), count_parameters(shape, active=True)


def _count_mixtral(experts: int) -> int:
    """With so many experts a layer: config.json of mistralai/Mixtral-8x7B-v0.1."""
    embed, mlp, kv = 4096, 14336, 8 * 128
    attention = 2 * embed**2 + 2 * embed * kv
    router, norms = 8 * embed, 2 * embed
    return 32 * (attention + experts * 3 * embed * mlp + router + norms) + 2 * 32_000 * embed + embed


def _count_deepseek(experts: int, attention: int) -> int:
    """With so many experts a layer and parameters of attention: config.json of deepseek-ai/DeepSeek-V3."""
    embed = 7168
    dense, expert = 3 * embed * 18432, 3 * embed * 2048
    moe = (experts + 1) * expert + 256 * embed  # one shared; router
    return 61 * (attention + 2 * embed) + 3 * dense + 58 * moe + 2 * 129_280 * embed + embed


def _count_mla() -> int:
    """A layer's latent attention: queries through 1,536 channels, keys and values through 512 and 64 rotary
    ones, which all heads share (arXiv 2412.19437, section 2.1.1); heads of 128 + 64 and, of values, 128."""
    embed, heads = 7168, 128
    queries = embed * 1536 + 1536 + 1536 * heads * (128 + 64)  # down, norm, up
    keys_values = embed * (512 + 64) + 512 + 512 * heads * (128 + 128)
    return queries + keys_values + heads * 128 * embed


def _count_switch(experts: int) -> int:
    """With so many experts in every second layer: config.json of google/switch-base-64, without biases."""
    embed, layers = 768, 12
    mlp, attention, router = 2 * embed * 3072, 4 * embed**2, 64 * embed
    stack = layers // 2 * (mlp + experts * mlp + router) + layers * (attention + 2 * embed) + embed
    cross = layers * (attention + embed)
    relative_positions = 2 * 32 * 12  # buckets and heads, of each stack's first layer
    return 2 * stack + cross + relative_positions + 32_128 * embed


def test_mixtral_has_its_published_parameters_total_and_for_each_token() -> None:
    assert _count("mixtral_8x7b") == (46_702_792_704, 12_879_925_248)
    assert (_count_mixtral(8), _count_mixtral(2)) == (46_702_792_704, 12_879_925_248)
    assert (round(46_702_792_704 / 1e9, 1), round(12_879_925_248 / 1e9, 1)) == (46.7, 12.9)


def test_deepseek_with_latent_attention_in_place_of_ours_has_its_published_parameters() -> None:
    ours = 4 * 7168 * 128 * 128
    total, active = _count("deepseek_v3")
    assert (total, active) == (_count_deepseek(256, ours), _count_deepseek(8, ours))
    exchanged = 61 * (_count_mla() - ours)
    assert total + exchanged == 671_026_404_352
    # The paper says 671B and 37B, README_WEIGHTS.md of the release 36.7B for each token; both embeddings make
    # 1.85B of ours, and a token looks up one row of the first.
    assert round((total + exchanged) / 1e9) == 671
    assert active + exchanged == 37_552_282_624
    assert round((active + exchanged - 129_280 * 7168) / 1e9) == 37


def test_switch_base_is_one_of_two_stacks_that_make_its_published_parameters() -> None:
    embed, mlp, layers = 768, 3072, 12
    # What GPT-2's blocks have and T5's have not: biases of attention and of norms, those of a dense MLP,
    # learned positions.
    biases = layers * (4 * embed + 2 * embed) + layers // 2 * (mlp + embed) + embed
    total, active = (count - biases - 512 * embed for count in _count("switch_base_64"))
    tokens = 32_128 * embed
    cross = layers * (4 * embed**2 + embed)
    for ours, experts in ((total, 64), (active, 1)):
        assert 2 * (ours - tokens) + cross + 2 * 32 * 12 + tokens == _count_switch(experts)
    assert round(_count_switch(64) / 1e9, 1) == 3.8  # Fedus 2022, table 6


def test_tiny_moe_uses_what_it_has_without_experts_and_its_routers() -> None:
    total, active = _count("tiny_moe")
    dense = count_parameters(_shape(load_config(CONFIGS / "tiny_moe.yaml", ["moe=null"])))
    assert active == dense + 4 * 8 * 64
    assert total == active + 4 * 6 * 3 * 64 * 64  # six experts more a layer
    moe, plain = _load("tiny_moe"), _load("tiny")
    assert (moe.data, moe.batch, moe.optimizer, moe.steps) == (
        plain.data,
        plain.batch,
        plain.optimizer,
        plain.steps,
    )


@pytest.mark.parametrize("name", WITH_EXPERTS - {"tiny_moe"})
def test_the_heading_says_the_parameters_total_and_for_each_token(name: str) -> None:
    lines = (CONFIGS / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
    heading = " ".join(line.removeprefix("# ") for line in lines if line.startswith("#"))
    total, active = _count(name)
    assert f"{total:,} parameters, {active:,} of them for each token" in heading


def test_training_with_experts_is_the_published_one_where_there_is_one() -> None:
    llama, mixtral = _load("llama2_7b"), _load("mixtral_8x7b")  # Mistral publishes none
    assert (mixtral.optimizer, mixtral.steps) == (llama.optimizer, llama.steps)
    assert (mixtral.batch.sequences, mixtral.batch.length) == (llama.batch.sequences, llama.batch.length)

    deepseek = _load("deepseek_v3")
    tokens = deepseek.batch.sequences * deepseek.batch.length
    assert deepseek.batch.sequences == 15360
    assert deepseek.steps * tokens == pytest.approx(14.8e12, rel=1e-4)
    assert deepseek.moe.bias_freeze_tokens == pytest.approx(deepseek.steps * tokens - 500e9, rel=1e-4)
    assert deepseek.optimizer.decay_fraction == pytest.approx(4.8 / 14.8, rel=2e-3)
    assert (deepseek.optimizer.peak_lr, deepseek.optimizer.clip_norm) == (2.2e-4, 1.0)
    assert deepseek.optimizer.warmup_tokens == pytest.approx(2000 * 3072 * 4096, rel=2e-3)

    switch = _load("switch_base_64")
    assert switch.batch.sequences * switch.batch.length == 2**20
    assert switch.steps * 2**20 == pytest.approx(576e9, rel=2e-3)


def test_a_dense_model_uses_all_its_parameters() -> None:
    shape = _shape(load_config(CONFIGS / "tiny.yaml"))
    assert count_parameters(shape, active=True) == count_parameters(shape)
