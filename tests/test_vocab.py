"""Embedding and cross-entropy over a sharded, padded vocabulary equal the plain formulas on every mesh."""

import math
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxscale.config import MeshConfig
from jaxscale.mesh import axis_sizes, make_mesh
from jaxscale.parallel import vocab as vocab_module
from jaxscale.parallel.vocab import embed_tokens, sum_token_losses

BATCH, LENGTH, EMBED = 8, 6, 8
VOCAB, ROWS = 257, 384
TOKENS = BATCH * LENGTH
FEW_LOGITS = 2 * ROWS  # makes every device of every mesh below visit its tokens in chunks

ONE_DEVICE = MeshConfig()
MESHES = {
    "one device": ONE_DEVICE,
    "fsdp=4 tensor=2": MeshConfig(fsdp=4, tensor=2),
    "tensor=8": MeshConfig(tensor=8),  # its last two vocabulary shards are nothing but padding
    "data=2 fsdp=2 tensor=2": MeshConfig(data=2, fsdp=2, tensor=2),
    # The table is whole on expert, and expert stays automatic: its gradient is summed over it in the region.
    "expert=2 fsdp=2 tensor=2": MeshConfig(expert=2, fsdp=2, tensor=2),
}
on_every_mesh = pytest.mark.parametrize("config", MESHES.values(), ids=MESHES.keys())


def make_inputs(dtype=jnp.float32, logit_scale=1.0):
    """Hidden states, table, labels and weights; what no result may depend on holds garbage."""
    generator = np.random.default_rng(0)
    x_BTD = generator.normal(size=(BATCH, LENGTH, EMBED)) * logit_scale
    table_VD = generator.normal(size=(ROWS, EMBED))  # padding rows too: they must not be seen
    labels_BT = generator.integers(0, VOCAB, (BATCH, LENGTH))
    labels_BT[0, :2] = 0, VOCAB - 1
    weights_BT = generator.choice([0.5, 1.0, 3.0], (BATCH, LENGTH))
    weights_BT[:, 2] = 0
    labels_BT[:, 2] = [-1, 2**31 - 1, -(2**31), VOCAB, ROWS - 1, ROWS, 5, -ROWS]
    return (
        jnp.asarray(x_BTD, dtype),
        jnp.asarray(table_VD, dtype),
        jnp.asarray(labels_BT, jnp.int32),
        jnp.asarray(weights_BT, jnp.float32),
    )


@jax.jit
@partial(jax.value_and_grad, argnums=(0, 1))
def compute_plain_loss(x_BTD, table_VD, labels_BT, weights_BT):
    logits_BTV = x_BTD.astype(jnp.float32) @ table_VD[:VOCAB].astype(jnp.float32).T
    labels_BT = jnp.where(weights_BT > 0, labels_BT, 0)
    label_logit_BT = jnp.take_along_axis(logits_BTV, labels_BT[..., None], axis=-1)[..., 0]
    return (weights_BT * (jax.nn.logsumexp(logits_BTV, axis=-1) - label_logit_BT)).sum()


def make_run(config):
    """A device mesh, a placement of inputs as training has them, and a wrapper of functions of them.

    As in the training step, `data` is manual in an outer region, over which values are summed; other axes
    are automatic. The inputs are (array over the batch, table, further arrays over the batch).
    """
    sizes = axis_sizes(config)
    mesh = make_mesh(config, jax.devices()[: math.prod(sizes.values())])

    def lay(over_batch, table_VD, *more):
        def put(x, *spec):
            return jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))

        return [
            put(x, ("data", "fsdp")) if i != 1 else put(x, "tensor", "fsdp")
            for i, x in enumerate((over_batch, table_VD, *more))
        ]

    def wrap(function, count, out_specs):
        if config.data == 1:
            return function
        batch = PartitionSpec("data")
        in_specs = (batch, PartitionSpec(), *[batch] * (count - 2))
        return jax.shard_map(
            function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, axis_names={"data"}, check_vma=False
        )

    return mesh, lay, wrap


def compile_loss(config, inputs):
    """Inputs laid over a mesh, and the compiled (x, table, labels, weights) -> (loss, (d_x, d_table))."""
    mesh, lay, wrap = make_run(config)

    def compute(x_BTD, table_VD, labels_BT, weights_BT):
        loss, (dx_BTD, d_table_VD) = jax.value_and_grad(sum_token_losses, argnums=(0, 1))(
            x_BTD, table_VD, labels_BT, weights_BT, VOCAB
        )
        if config.data > 1:
            loss, d_table_VD = jax.lax.psum((loss, d_table_VD.astype(jnp.float32)), "data")
        return loss, (dx_BTD, d_table_VD)

    out_specs = (PartitionSpec(), (PartitionSpec("data"), PartitionSpec()))
    laid = lay(*inputs)
    with jax.set_mesh(mesh):
        return laid, jax.jit(wrap(compute, 4, out_specs)).lower(*laid).compile()


def largest_array(compiled):
    """Elements of the largest array on a device that the compiled program mentions."""
    shapes = re.findall(r"\b(?:f32|bf16)\[([\d,]+)\]", compiled.as_text())
    return max(math.prod(map(int, shape.split(","))) for shape in shapes)


@pytest.mark.smoke
def test_loss_and_gradients_equal_the_plain_formula_on_one_device():
    inputs = make_inputs()
    laid, compiled = compile_loss(ONE_DEVICE, inputs)
    check_loss(compiled(*laid), inputs)


def check_loss(got, inputs):
    loss, (dx_BTD, d_table_VD) = got
    expected_loss, (expected_dx_BTD, expected_d_table_VD) = compute_plain_loss(*inputs)
    assert loss.dtype == jnp.float32
    np.testing.assert_allclose(loss, expected_loss, rtol=2e-6)
    np.testing.assert_allclose(dx_BTD, expected_dx_BTD, rtol=1e-6, atol=1e-5)
    np.testing.assert_allclose(d_table_VD, expected_d_table_VD, rtol=1e-6, atol=1e-5)
    assert (np.asarray(d_table_VD)[VOCAB:] == 0).all(), "a padding row got a gradient"
    assert (np.asarray(dx_BTD)[np.asarray(inputs[3]) == 0] == 0).all(), "a token of weight 0 got a gradient"


@on_every_mesh
def test_loss_and_gradients_equal_the_plain_formula_in_one_chunk_and_in_many(config, monkeypatch):
    inputs = make_inputs()
    laid, compiled = compile_loss(config, inputs)
    assert "while(" not in compiled.as_text()
    check_loss(compiled(*laid), inputs)

    monkeypatch.setattr(vocab_module, "LOGITS_HELD", FEW_LOGITS)
    laid, compiled = compile_loss(config, inputs)
    assert "while(" in compiled.as_text()
    check_loss(compiled(*laid), inputs)


def test_no_array_of_tokens_times_vocabulary_exists_when_few_logits_may_be_held(monkeypatch):
    inputs = make_inputs()
    _, whole = compile_loss(ONE_DEVICE, inputs)
    assert largest_array(whole) == TOKENS * ROWS, "the check below would see such an array"

    monkeypatch.setattr(vocab_module, "LOGITS_HELD", FEW_LOGITS)
    _, chunked = compile_loss(ONE_DEVICE, inputs)
    assert largest_array(chunked) == ROWS * EMBED, "nothing but the table is large"


def test_value_without_gradient_is_the_same_loss(monkeypatch):
    inputs = make_inputs()
    expected = compute_plain_loss(*inputs)[0]
    for held in (vocab_module.LOGITS_HELD, FEW_LOGITS):
        monkeypatch.setattr(vocab_module, "LOGITS_HELD", held)
        loss = jax.jit(lambda *inputs: sum_token_losses(*inputs, VOCAB))(*inputs)
        np.testing.assert_allclose(loss, expected, rtol=2e-6)


def test_gradient_scales_with_the_cotangent():
    inputs = make_inputs()
    scaled = jax.jit(jax.grad(lambda *inputs: -2.5 * sum_token_losses(*inputs, VOCAB), argnums=(0, 1)))(
        *inputs
    )
    for got, plain in zip(scaled, compute_plain_loss(*inputs)[1], strict=True):
        np.testing.assert_allclose(got, -2.5 * plain, atol=1e-5)


@pytest.mark.parametrize("config", [ONE_DEVICE, MeshConfig(tensor=8)], ids=["one device", "tensor=8"])
def test_zero_head_gives_the_logarithm_of_the_true_vocabulary_and_weight_zero_everywhere_gives_zero(config):
    x_BTD, table_VD, labels_BT, weights_BT = make_inputs()
    labels_BT = jnp.clip(labels_BT, 0, VOCAB - 1)
    laid, compiled = compile_loss(
        config, (x_BTD, jnp.zeros_like(table_VD), labels_BT, jnp.ones_like(weights_BT))
    )
    loss, _ = compiled(*laid)
    np.testing.assert_allclose(loss / TOKENS, math.log(VOCAB), rtol=1e-6)

    x, table, labels, weights = laid
    loss, _ = compiled(x, table, labels, jnp.zeros_like(weights).at[3, 4].set(1.0))
    np.testing.assert_allclose(loss, math.log(VOCAB), rtol=np.finfo(np.float32).eps)
    loss, gradients = compiled(x, table, labels, jnp.zeros_like(weights))
    assert loss == 0
    assert all((np.asarray(gradient) == 0).all() for gradient in gradients)


@pytest.mark.parametrize(
    "config",
    [ONE_DEVICE, MeshConfig(fsdp=4, tensor=2), MeshConfig(data=2, fsdp=2, tensor=2)],
    ids=["one device", "fsdp=4 tensor=2", "data=2 fsdp=2 tensor=2"],
)
def test_bf16_states_give_fp32_losses_finite_at_any_magnitude_of_logits(config):
    laid, compiled = None, None
    for scale in (1.0, 30.0, 1e4):
        inputs = make_inputs(jnp.bfloat16, scale)
        if compiled is None:
            laid, compiled = compile_loss(config, inputs)
        x_BTD = jax.device_put(inputs[0], laid[0].sharding)
        loss, (dx_BTD, d_table_VD) = compiled(x_BTD, *laid[1:])
        logits_BTV = np.asarray(inputs[0], np.float32) @ np.asarray(inputs[1], np.float32).T
        assert scale == 1.0 or np.abs(logits_BTV).max() > 80

        expected_loss, (expected_dx_BTD, expected_d_table_VD) = compute_plain_loss(*inputs)
        assert loss.dtype == jnp.float32
        assert dx_BTD.dtype == jnp.bfloat16
        np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
        for got, expected in ((dx_BTD, expected_dx_BTD), (d_table_VD, expected_d_table_VD)):
            expected = np.asarray(expected, np.float32)
            np.testing.assert_allclose(
                np.asarray(got, np.float32), expected, atol=np.abs(expected).max() * 2e-2
            )


def compile_embedding(config, inputs, dtype):
    """Compiled (direction, table, tokens) -> (embedded, d_table of <embedded, direction>)."""
    mesh, lay, wrap = make_run(config)

    def compute(direction_BTD, table_VD, tokens_BT):
        x_BTD, pull_back = jax.vjp(lambda table_VD: embed_tokens(table_VD, tokens_BT, dtype), table_VD)
        (d_table_VD,) = pull_back(direction_BTD)
        if config.data > 1:
            d_table_VD = jax.lax.psum(d_table_VD, "data")
        return x_BTD, d_table_VD

    laid = lay(*inputs)
    with jax.set_mesh(mesh):
        return laid, jax.jit(wrap(compute, 3, (PartitionSpec("data"), PartitionSpec()))).lower(
            *laid
        ).compile()


@on_every_mesh
def test_embedding_takes_rows_and_adds_gradients_of_repeated_tokens(config):
    generator = np.random.default_rng(1)
    table_VD = generator.normal(size=(ROWS, EMBED)).astype(np.float32)
    tokens_BT = generator.integers(0, VOCAB, (BATCH, LENGTH)).astype(np.int32)
    tokens_BT[:, 0], tokens_BT[0, 1:3] = 7, (0, ROWS - 1)
    direction_BTD = generator.normal(size=(BATCH, LENGTH, EMBED)).astype(np.float32)
    laid, compiled = compile_embedding(config, (direction_BTD, table_VD, tokens_BT), jnp.dtype("float32"))
    x_BTD, d_table_VD = compiled(*laid)

    expected_d_table_VD = np.zeros_like(table_VD)
    np.add.at(expected_d_table_VD, tokens_BT, direction_BTD)
    assert np.array_equal(x_BTD, table_VD[tokens_BT])
    np.testing.assert_allclose(d_table_VD, expected_d_table_VD, atol=2e-6)


@pytest.mark.parametrize(
    "config", [ONE_DEVICE, MeshConfig(fsdp=4, tensor=2)], ids=["one device", "fsdp=4 tensor=2"]
)
def test_embedding_in_bf16_adds_its_gradient_in_fp32(config):
    """In bf16 a sum of ones would stop at 256."""
    tokens_BT = np.full((BATCH, 125), 300, np.int32)
    direction_BTD = jnp.ones((BATCH, 125, EMBED), jnp.bfloat16)
    table_VD = np.random.default_rng(2).normal(size=(ROWS, EMBED)).astype(np.float32)
    laid, compiled = compile_embedding(config, (direction_BTD, table_VD, tokens_BT), jnp.dtype("bfloat16"))
    x_BTD, d_table_VD = compiled(*laid)

    assert x_BTD.dtype == jnp.bfloat16
    assert np.array_equal(x_BTD, jnp.asarray(table_VD, jnp.bfloat16)[tokens_BT])
    assert d_table_VD.dtype == jnp.float32
    assert (np.asarray(d_table_VD)[300] == BATCH * 125).all()
    assert np.count_nonzero(np.asarray(d_table_VD).any(axis=-1)) == 1
