"""The decoder against a plain float64 reading of the papers, and what must not change its numbers."""

import hashlib
import re
from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxscale.config import parse_config
from jaxscale.mesh import axis_sizes, make_mesh
from jaxscale.models.build import build_decoder, shape_decoder, split_decoder
from jaxscale.models.decoder import Tokens
from jaxscale.models.rotary import make_rotation, rotate
from jaxscale.numerics.draw import make_key
from jaxscale.sharding.rules import iterate_leaves
from jaxscale.training.setup import make_setup

VOCAB, LENGTH, EPS = 130, 16, 1e-5


def make_config(family="llama", mesh=None, **model):
    sizes = {"layers": 2, "embed": 32, "heads": 4, "mlp": 48, "norm_eps": EPS}
    if family == "llama":
        sizes["kv_heads"] = 2
    tree = {
        "run_dir": "unused",
        "steps": 1,
        "batch": {"sequences": 8, "length": LENGTH},
        "model": {"family": family, **sizes, **model},
        "mesh": mesh or {},
    }
    return parse_config(tree, origin="this test")


def make_shape(family="llama", *, dtype="float32", cross_documents=False, **model):
    shape = shape_decoder(make_config(family, **model), vocab=VOCAB, platform="cpu")
    return replace(shape, dtype=jnp.dtype(dtype), cross_documents=cross_documents)


def draw_params(shape, seed=0):
    """Random numbers for every leaf, biases and the table's padding too, so that each one matters or not."""
    generator = np.random.default_rng(seed)

    def draw(path, leaf):
        name = jax.tree_util.keystr(path, simple=True, separator="/").rpartition("/")[2]
        std = {"kernel": shape.embed**-0.5, "table": 0.5, "scale": 0.2, "bias": 0.2}[name]
        return jnp.asarray(generator.normal(size=leaf.shape) * std + (name == "scale"), jnp.float32)

    return jax.tree_util.tree_map_with_path(draw, split_decoder(shape)[1])


def make_tokens(batch=2):
    """Each row two documents, the second from a place that moves with the row; positions restart."""
    ids_BT = np.random.default_rng(1).integers(0, VOCAB, (batch, LENGTH))
    starts = 5 + 3 * np.arange(batch)[:, None]
    places = np.arange(LENGTH)
    positions_BT = np.where(places < starts, places, places - starts)
    segments_BT = np.where(places < starts, 1, 2)
    return Tokens(*(jnp.asarray(a, jnp.int32) for a in (ids_BT, positions_BT, segments_BT)))


@cache
def make_forward(shape):
    """Compiled (params, tokens) -> (final hidden states, logits over the true vocabulary)."""
    definition, _ = split_decoder(shape)

    @jax.jit
    def forward(params, tokens):
        x_BTD, _ = nnx.merge(definition, params)(tokens)
        table_VD = params["embed" if shape.tied else "head"]["table"][: shape.vocab]
        return x_BTD, x_BTD.astype(jnp.float32) @ table_VD.T

    return forward


# The reference: one layer after another, in float64, every formula written out.


def normalise(x_BTD, norm):
    if "bias" in norm:
        centred = x_BTD - x_BTD.mean(-1, keepdims=True)
        return centred / np.sqrt(x_BTD.var(-1, keepdims=True) + EPS) * norm["scale"] + norm["bias"]
    return x_BTD / np.sqrt((x_BTD**2).mean(-1, keepdims=True) + EPS) * norm["scale"]


def project(x, projection, axes=1):
    return np.tensordot(x, projection["kernel"], axes=axes) + projection.get("bias", 0.0)


def turn(x_BTNH, positions_BT, theta):
    """Channels i and i + H/2 are a complex number turned by position · theta^(-2i/H) radians."""
    half = x_BTNH.shape[-1] // 2
    angles_BT1H = positions_BT[:, :, None, None] * theta ** (-np.arange(half) / half)
    turned = (x_BTNH[..., :half] + 1j * x_BTNH[..., half:]) * np.exp(1j * angles_BT1H)
    return np.concatenate([turned.real, turned.imag], axis=-1)


def mix(q_BTNH, k_BTKH, v_BTKH, segments_BT):
    out_BTNH = np.zeros_like(q_BTNH)
    batch, length, heads, head = q_BTNH.shape
    for b, t, n in np.ndindex(batch, length, heads):
        kv = n // (heads // k_BTKH.shape[2])
        seen = [s for s in range(t + 1) if segments_BT[b, s] == segments_BT[b, t]]
        scores = np.exp(k_BTKH[b, seen, kv] @ q_BTNH[b, t, n] / np.sqrt(head))
        out_BTNH[b, t, n] = scores @ v_BTKH[b, seen, kv] / scores.sum()
    return out_BTNH


def activate(x_BTD, mlp):
    if "gate" in mlp:
        gate_BTF = project(x_BTD, mlp["gate"])
        return gate_BTF / (1 + np.exp(-gate_BTF)) * project(x_BTD, mlp["up"])
    up_BTF = project(x_BTD, mlp["up"])
    return 0.5 * up_BTF * (1 + np.tanh(np.sqrt(2 / np.pi) * (up_BTF + 0.044715 * up_BTF**3)))


def compute_reference_logits(params, tokens, shape):
    params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    ids_BT, positions_BT, segments_BT = map(np.asarray, tokens)
    x_BTD = params["embed"]["table"][ids_BT]
    if shape.family == "gpt2":
        x_BTD = x_BTD + params["positions"]["table"][positions_BT]
    for number in range(shape.layers):
        layer = jax.tree.map(lambda leaf, number=number: leaf[number], params["layers"])
        attention, normed = layer["attention"], normalise(x_BTD, layer["attention_norm"])
        q_BTNH, k_BTKH, v_BTKH = (project(normed, attention[name]) for name in ("query", "key", "value"))
        if shape.family == "llama":
            q_BTNH = turn(q_BTNH, positions_BT, shape.rope_theta)
            k_BTKH = turn(k_BTKH, positions_BT, shape.rope_theta)
        x_BTD = x_BTD + project(mix(q_BTNH, k_BTKH, v_BTKH, segments_BT), attention["out"], axes=2)
        mlp = layer["mlp"]
        x_BTD = x_BTD + project(activate(normalise(x_BTD, layer["mlp_norm"]), mlp), mlp["down"])
    head = params["embed" if shape.tied else "head"]["table"]
    return normalise(x_BTD, params["final_norm"]) @ head[: shape.vocab].T


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("family", "model"),
    [
        ("llama", {}),
        ("llama", {"kv_heads": 1, "head": 12, "tied": True, "rope_theta": 500.0}),
        ("gpt2", {}),
        ("gpt2", {"tied": True, "positions": 40}),
    ],
    ids=["llama grouped", "llama one kv head, tied", "gpt2", "gpt2 tied"],
)
def test_logits_equal_the_plain_reading_of_the_papers(family, model):
    shape = make_shape(family, **model)
    params, tokens = draw_params(shape), make_tokens()
    _, logits_BTV = make_forward(shape)(params, tokens)
    expected_BTV = compute_reference_logits(params, tokens, shape)
    assert logits_BTV.shape == (2, LENGTH, VOCAB)
    assert np.abs(expected_BTV).max() > 3, "logits this small would hide faults"
    np.testing.assert_allclose(logits_BTV, expected_BTV, atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_attention_crosses_documents_only_when_asked_to(family):
    shape = make_shape(family, cross_documents=True, layers=1)
    params, tokens = draw_params(shape), make_tokens()
    _, logits_BTV = make_forward(shape)(params, tokens)
    one_document = tokens._replace(segments_BT=jnp.ones_like(tokens.segments_BT))
    np.testing.assert_allclose(logits_BTV, compute_reference_logits(params, one_document, shape), atol=1e-5)


# Rotary positions.


@pytest.mark.parametrize("theta", [10_000.0, 500_000.0])
def test_rotary_angles_are_right_to_a_thousandth_at_position_4095(theta):
    positions = np.array([[1, 257, 4094, 4095]])
    rotation = jax.jit(lambda p: make_rotation(p, 128, theta, "none"))(jnp.asarray(positions, jnp.int32))
    exact = positions[..., None] * theta ** (-np.arange(0, 128, 2) / 128)
    assert {table.dtype for table in rotation} == {jnp.dtype("float32")}
    np.testing.assert_allclose(rotation.cos_BTH, np.cos(exact), atol=1e-3)
    np.testing.assert_allclose(rotation.sin_BTH, np.sin(exact), atol=1e-3)


def test_rotation_of_bf16_heads_is_computed_in_fp32():
    heads = np.random.default_rng(0).normal(size=(1, 3, 2, 64))
    positions = np.array([[257, 4094, 4095]])
    x_BTNH = jnp.asarray(heads, jnp.bfloat16)
    turned = rotate(x_BTNH, make_rotation(jnp.asarray(positions, jnp.int32), 64, 10_000.0, "none"))
    assert turned.dtype == jnp.bfloat16
    exact = turn(np.asarray(x_BTNH, np.float64), positions, 10_000.0)
    # Rounding the result to bf16 is the only error: half a unit of its eighth bit.
    np.testing.assert_allclose(np.asarray(turned, np.float64), exact, rtol=2**-8, atol=2e-3)


def test_bf16_decoder_takes_sines_powers_roots_and_logarithms_in_fp32():
    shape = make_shape(dtype="bfloat16")
    model = build_decoder(shape)
    batch = {
        name: jnp.zeros((2, LENGTH), jnp.int32) for name in ("tokens", "positions", "segments", "labels")
    }
    batch["weights"] = jnp.ones((2, LENGTH))
    text = jax.jit(jax.grad(lambda p: model.sum_losses(p, batch)[0])).lower(model.shapes).as_text()
    for operation in ("cosine", "sine", "power", "rsqrt", "log"):
        types = set(re.findall(rf"stablehlo\.{operation} .*x(\w+)>$", text, flags=re.MULTILINE))
        assert types <= {"f32"}, (operation, types)
    assert "stablehlo.cosine" in text
    assert "stablehlo.rsqrt" in text
    matmuls = re.findall(r"stablehlo\.dot_general .*\(tensor<[\dx]+x(\w+)>, tensor<[\dx]+x(\w+)>", text)
    assert matmuls.count(("bf16", "bf16")) > len(matmuls) / 2, "the model is not in bf16 at all"


def test_llama_3_1_frequencies_follow_the_published_formula():
    """Meta's `apply_scaling`: length 8192, factor 8, waves below 2048 kept, above 8192 stretched."""
    plain = 500_000.0 ** (-np.arange(0, 128, 2) / 128)
    expected = []
    for frequency in plain:
        wavelength = 2 * np.pi / frequency
        if wavelength < 8192 / 4:
            expected.append(frequency)
        elif wavelength > 8192 / 1:
            expected.append(frequency / 8)
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            expected.append((1 - smooth) * frequency / 8 + smooth * frequency)
    cos_H, sin_H = (table[0, 0] for table in make_rotation(jnp.ones((1, 1), jnp.int32), 128, 5e5, "llama3.1"))
    stretched = np.arctan2(sin_H, cos_H)  # the angle of position 1
    np.testing.assert_allclose(stretched, expected, rtol=2e-6)
    ratio = np.array(expected) / plain
    assert (ratio == 1).any()
    assert (ratio == 1 / 8).any()
    assert ((ratio > 1 / 8) & (ratio < 1)).any()


# Packing.


def pack(rows):
    """Rows of documents -> tokens as the loader packs them, padded; every row of LENGTH places."""
    arrays = np.zeros((3, len(rows), LENGTH), np.int32)
    for row, documents in enumerate(rows):
        place = 0
        for number, document in enumerate(documents, start=1):
            stop = place + len(document)
            arrays[:, row, place:stop] = document, range(len(document)), [number] * len(document)
            place = stop
    return Tokens(*map(jnp.asarray, arrays))


def list_losses(logits_TV, document):
    """Cross-entropy of each token of a document that has a successor in it."""
    logits = np.asarray(logits_TV, np.float64)[: len(document) - 1]
    return np.log(np.exp(logits).sum(-1)) - logits[np.arange(len(document) - 1), document[1:]]


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_documents_packed_in_a_window_are_as_apart(family):
    shape = make_shape(family)
    params, forward = draw_params(shape), make_forward(shape)
    generator = np.random.default_rng(2)
    a, b = generator.integers(0, VOCAB, 7), generator.integers(0, VOCAB, 6)
    packed, logits = forward(params, pack([[a, b], []]))
    _, apart = forward(params, pack([[a], [b]]))
    np.testing.assert_allclose(list_losses(logits[0], a), list_losses(apart[0], a), atol=1e-6)
    np.testing.assert_allclose(list_losses(logits[0, 7:], b), list_losses(apart[1], b), atol=1e-6)

    changed_a = a.copy()
    changed_a[2] = (a[2] + 1) % VOCAB
    changed, _ = forward(params, pack([[changed_a, b], []]))
    assert np.array_equal(changed[0, 7:13], packed[0, 7:13]), "document B saw document A"
    assert np.array_equal(changed[0, :2], packed[0, :2]), "a token saw a later one"
    assert not np.array_equal(changed[0, 2:7], packed[0, 2:7])


def test_positions_count_from_where_they_are_said_to():
    """A model of learned positions tells a restart from a running count; rotary ones only see distances."""
    restarted = pack([[range(7), range(7, 13)], []])
    running = restarted._replace(positions_BT=jnp.tile(jnp.arange(LENGTH, dtype=jnp.int32), (2, 1)))
    for family, is_same in (("gpt2", False), ("llama", True)):
        shape = make_shape(family)
        params, forward = draw_params(shape), make_forward(shape)
        difference = np.abs(forward(params, restarted)[1] - forward(params, running)[1])[0, 7:13].max()
        assert (difference < 1e-5) == is_same, (family, difference)


# Recomputation and depth.


# Compiled in a hurry: the largest programs of this file run once.
@partial(jax.jit, static_argnums=0, compiler_options={"xla_backend_optimization_level": 0})
def compute_loss_and_gradients(shape, params, batch):
    return jax.value_and_grad(build_decoder(shape).sum_losses, has_aux=True)(params, batch)


def make_batch():
    tokens = make_tokens()
    labels_BT = jnp.asarray(np.random.default_rng(3).integers(0, VOCAB, tokens.ids_BT.shape), jnp.int32)
    weights_BT = jnp.ones(labels_BT.shape).at[:, -1].set(0.0)
    names = ("tokens", "positions", "segments", "labels", "weights")
    return dict(zip(names, (*tokens, labels_BT, weights_BT), strict=True))


def test_loss_is_the_sum_of_the_reference_cross_entropies():
    shape, batch = make_shape(), make_batch()
    params = draw_params(shape)
    (loss, _), _ = compute_loss_and_gradients(shape, params, batch)
    logits_BTV = compute_reference_logits(
        params, Tokens(batch["tokens"], batch["positions"], batch["segments"]), shape
    )
    label_BT = np.take_along_axis(logits_BTV, np.asarray(batch["labels"])[..., None], axis=-1)[..., 0]
    losses_BT = np.log(np.exp(logits_BTV).sum(-1)) - label_BT
    np.testing.assert_allclose(loss, (losses_BT * batch["weights"]).sum(), rtol=2e-6)


def test_program_handed_to_the_compiler_is_as_long_for_32_layers_as_for_4():
    batch, sizes = make_batch(), {}
    for layers in (4, 32):
        shape = make_shape(layers=layers)
        lowered = compute_loss_and_gradients.lower(shape, split_decoder(shape)[1], batch)
        sizes[layers] = len(lowered.as_text("hlo").splitlines())
    assert abs(sizes[32] / sizes[4] - 1) < 0.05, sizes


# Initial weights.


def make_init(mesh):
    """The run's own initialiser on a mesh over as many devices as it needs; shards narrower than a vector."""
    config = make_config(mesh=mesh, kv_heads=4, embed=32, mlp=32, tied=True)
    count = np.prod(list(axis_sizes(config.mesh).values()))
    return make_setup(config, make_mesh(config.mesh, jax.devices()[:count]), VOCAB).compile_init()


def hash_leaves(params):
    return {
        path: hashlib.sha256(np.asarray(leaf).tobytes()).hexdigest() for path, leaf in iterate_leaves(params)
    }


@pytest.fixture(scope="module")
def init_on_one_device():
    return make_init({})


@pytest.mark.parametrize(
    "mesh", [{"data": 8}, {"fsdp": 8}, {"tensor": 4, "data": 2}], ids=["data=8", "fsdp=8", "tensor=4 data=2"]
)
def test_initial_weights_are_the_same_bits_on_every_mesh(mesh, init_on_one_device):
    expected = hash_leaves(init_on_one_device(make_key(0)).params)
    assert hash_leaves(make_init(mesh)(make_key(0)).params) == expected


def test_initial_weights_change_with_the_seed_and_only_with_it(init_on_one_device):
    first, again, other = (hash_leaves(init_on_one_device(make_key(seed)).params) for seed in (0, 0, 1))
    assert first == again
    drawn = {path for path in first if path.endswith(("kernel", "table"))}
    assert {path for path in first if first[path] != other[path]} == drawn


def test_random_numbers_come_from_threefry_drawn_alike_on_every_mesh():
    assert str(jax.random.key_impl(make_key(0))) == "threefry2x32"
    assert jax.config.jax_threefry_partitionable


def test_initial_padding_of_the_vocabulary_is_zero_and_layers_differ(init_on_one_device):
    params = jax.tree.map(np.asarray, init_on_one_device(make_key(0)).params)
    table = params["embed"]["table"]
    assert table.shape[0] == 256
    assert not table[VOCAB:].any()
    assert table[:VOCAB].any(axis=-1).all()
    kernel = params["layers"]["attention"]["query"]["kernel"]
    assert not np.array_equal(kernel[0], kernel[1])
    np.testing.assert_allclose(kernel.std(), kernel.shape[1] ** -0.5, rtol=0.1)
