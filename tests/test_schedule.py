"""The learning rate follows trained tokens: which update gets which rate, for each schedule."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxscale.config import OptimizerConfig
from jaxscale.training.schedule import learning_rate

STEP_TOKENS = 512
UPDATES = 100
TOTAL_TOKENS = UPDATES * STEP_TOKENS
PEAK = 3e-3


def list_rates(updates=UPDATES + 20, **settings):
    """Rate of updates 1, 2, ... of a run of 100 updates, as the step computes it: from tokens, under jit."""
    config = OptimizerConfig(peak_lr=PEAK, **settings)
    tokens = jnp.arange(1, updates + 1, dtype=jnp.float32) * STEP_TOKENS
    return np.asarray(jax.jit(jax.vmap(lambda t: learning_rate(t, TOTAL_TOKENS, config)))(tokens))


@pytest.mark.smoke
@pytest.mark.parametrize("schedule", ["cosine", "wsd"])
def test_rate_starts_above_zero_peaks_at_the_end_of_warmup_and_ends_at_the_final_rate(schedule):
    rates = list_rates(schedule=schedule, warmup_tokens=10 * STEP_TOKENS, final_lr_fraction=0.25)

    assert rates.dtype == np.float32
    np.testing.assert_allclose(rates[0], PEAK / 10, rtol=1e-6)
    assert rates[9] == np.float32(PEAK), "update 10 completes the warm-up and runs at the peak"
    assert (np.diff(rates[:10]) > 0).all()
    assert rates[8] < rates[9]
    np.testing.assert_allclose(rates[99], PEAK * 0.25, rtol=1e-6)
    assert (rates[100:] == rates[99]).all(), "past the end of the run the rate stays where it ended"
    assert rates[98] > rates[99]


def test_cosine_follows_half_a_cosine_between_warmup_and_the_end():
    rates = list_rates(schedule="cosine", warmup_tokens=20 * STEP_TOKENS, final_lr_fraction=0.1)
    expected = [PEAK * (0.1 + 0.9 * (1 + math.cos(math.pi * (k - 20) / 80)) / 2) for k in range(20, 101)]
    np.testing.assert_allclose(rates[19:100], expected, rtol=2e-6)


def test_wsd_is_flat_until_its_decay_and_then_a_straight_line():
    rates = list_rates(
        schedule="wsd", warmup_tokens=10 * STEP_TOKENS, decay_fraction=0.3, final_lr_fraction=0.0
    )
    assert (rates[9:70] == np.float32(PEAK)).all(), "updates 10 to 70 are stable"
    np.testing.assert_allclose(rates[70:100], PEAK * (1 - np.arange(1, 31) / 30), atol=PEAK * 1e-6)
    assert rates[99] == 0


def test_wsd_decay_longer_than_what_follows_warmup_starts_at_the_peak():
    rates = list_rates(schedule="wsd", warmup_tokens=90 * STEP_TOKENS, decay_fraction=0.5)
    assert rates[89] == np.float32(PEAK)
    np.testing.assert_allclose(rates[94], PEAK * (1 - 0.9 / 2), rtol=1e-5)
    np.testing.assert_allclose(rates[99], PEAK * 0.1, rtol=1e-6)


def test_constant_stays_at_the_peak_after_warmup():
    rates = list_rates(schedule="constant", warmup_tokens=4 * STEP_TOKENS)
    np.testing.assert_allclose(rates[:4], PEAK * np.arange(1, 5) / 4, rtol=1e-6)
    assert (rates[3:] == np.float32(PEAK)).all()


@pytest.mark.parametrize("schedule", ["constant", "cosine", "wsd"])
def test_without_warmup_the_first_update_is_not_at_zero(schedule):
    rates = list_rates(schedule=schedule)
    np.testing.assert_allclose(rates[0], PEAK, rtol=1e-3)


@pytest.mark.parametrize("schedule", ["constant", "cosine", "wsd"])
def test_warmup_longer_than_the_run_rises_to_the_peak_at_its_end(schedule):
    rates = list_rates(schedule=schedule, warmup_tokens=1000 * TOTAL_TOKENS)
    np.testing.assert_allclose(rates[:100], PEAK * np.arange(1, 101) / 100, rtol=1e-6)
    assert (rates[99:] == np.float32(PEAK)).all()


@pytest.mark.parametrize("schedule", ["constant", "cosine", "wsd"])
def test_runs_of_trillions_of_tokens_have_a_schedule(schedule):
    total, warmup = 15 * 10**12, 8 * 10**9
    config = OptimizerConfig(peak_lr=PEAK, schedule=schedule, warmup_tokens=warmup, final_lr_fraction=0.1)
    rate = jax.jit(lambda tokens: learning_rate(tokens, total, config))

    np.testing.assert_allclose(rate(jnp.float32(warmup / 2)), PEAK / 2, rtol=1e-6)
    assert rate(jnp.float32(warmup)) == np.float32(PEAK)
    final = PEAK if schedule == "constant" else PEAK * 0.1
    np.testing.assert_allclose(rate(jnp.float32(total)), final, rtol=1e-6)
