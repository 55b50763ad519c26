"""The loss of tokens: a sum and a weight, of the tokens that count and no others."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxscale.config import MeshConfig, UserError
from jaxscale.mesh import make_mesh
from jaxscale.models.losses import token_cross_entropy

VOCAB = 264


def _draw_logits(dtype=jnp.float32):
    logits_BTV = 3 * jax.random.normal(jax.random.key(0), (4, 8, VOCAB), dtype)
    rng = np.random.default_rng(0)
    batch = {
        "labels": jnp.asarray(rng.integers(0, VOCAB, (4, 8)), jnp.int32),
        "weights": jnp.asarray(rng.random((4, 8)) < 0.5, jnp.float32),
    }
    return logits_BTV, batch


def test_token_cross_entropy_is_the_weighted_sum():
    logits_BTV, batch = _draw_logits()
    weights_BT = batch["weights"] * 0.25
    total, weight = token_cross_entropy(logits_BTV, batch["labels"], weights_BT)
    exact = np.asarray(logits_BTV, np.float64)
    log_probs = exact - np.log(np.exp(exact).sum(-1, keepdims=True))
    picked = np.take_along_axis(log_probs, np.asarray(batch["labels"])[..., None], -1)[..., 0]
    np.testing.assert_allclose(total, -(picked * np.asarray(weights_BT)).sum(), rtol=1e-6)
    np.testing.assert_allclose(weight, np.asarray(weights_BT).sum(), rtol=1e-6)


def test_token_cross_entropy_sums_in_fp32():
    logits_BTV, batch = _draw_logits(jnp.bfloat16)
    total, weight = token_cross_entropy(logits_BTV, batch["labels"], batch["weights"])
    wide, _ = token_cross_entropy(logits_BTV.astype(jnp.float32), batch["labels"], batch["weights"])
    assert (total.dtype, weight.dtype) == (jnp.float32, jnp.float32)
    np.testing.assert_allclose(total, wide, rtol=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_tokens_of_weight_zero_leak_neither_into_the_loss_nor_the_gradient(bad):
    logits_BTV, batch = _draw_logits()
    weights_BT = batch["weights"].at[0].set(0.0)  # a whole sequence, and others' tokens
    uncounted = (weights_BT == 0)[..., None]
    labels_BT = jnp.where(weights_BT == 0, -100, batch["labels"])

    def sum_losses(logits_BTV):
        return token_cross_entropy(logits_BTV, labels_BT, weights_BT)[0]

    clean, clean_gradient = jax.value_and_grad(sum_losses)(logits_BTV)
    total, gradient = jax.value_and_grad(sum_losses)(jnp.where(uncounted, bad, logits_BTV))
    np.testing.assert_array_equal(total, clean)
    np.testing.assert_array_equal(gradient, clean_gradient)
    assert float(jnp.abs(jnp.where(uncounted, gradient, 0)).max()) == 0


def test_a_batch_without_a_counted_token_is_zero():
    logits_BTV, batch = _draw_logits()
    total, weight = token_cross_entropy(logits_BTV * jnp.nan, batch["labels"], batch["weights"] * 0)
    assert (float(total), float(weight)) == (0.0, 0.0)


@pytest.mark.parametrize("label", [-1, -100, VOCAB])
def test_a_counted_label_outside_the_vocabulary_is_nan(label):
    logits_BTV, batch = _draw_logits()
    labels_BT = batch["labels"].at[1, 2].set(label)
    weights_BT = batch["weights"].at[1, 2].set(1.0)
    assert np.isnan(token_cross_entropy(logits_BTV, labels_BT, weights_BT)[0])
    assert np.isfinite(token_cross_entropy(logits_BTV, labels_BT, weights_BT.at[1, 2].set(0.0))[0])


def test_labels_shifted_once_more_are_refused():
    logits_BTV, batch = _draw_logits()
    with pytest.raises(UserError, match="do not shift them"):
        token_cross_entropy(logits_BTV[:, :-1], batch["labels"], batch["weights"])


def test_a_vocabulary_over_tensor_stays_where_it_lies():
    logits_BTV, batch = _draw_logits()
    mesh = make_mesh(MeshConfig(data=2, tensor=4))
    logits_sharding = NamedSharding(mesh, PartitionSpec("data", None, "tensor"))
    rows = NamedSharding(mesh, PartitionSpec("data"))
    compiled = (
        jax.jit(
            jax.value_and_grad(token_cross_entropy, has_aux=True),
            in_shardings=(logits_sharding, rows, rows),
            out_shardings=((NamedSharding(mesh, PartitionSpec()),) * 2, logits_sharding),
        )
        .lower(logits_BTV, batch["labels"], batch["weights"])
        .compile()
    )
    text = compiled.as_text()
    assert "all-reduce" in text
    assert "gather(" not in text  # neither all-gather nor a lookup
    assert f"{4 // 2},8,{VOCAB // 4}" in text
