"""Models of one's own: what an adapter makes of a module, and what it refuses."""

import math
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from jax.sharding import NamedSharding, PartitionSpec

from jaxscale.config import MeshConfig, UserError
from jaxscale.mesh import make_mesh
from jaxscale.models.adapters import check_losses, from_functions, from_linen, from_nnx
from jaxscale.models.losses import token_cross_entropy
from jaxscale.models.model import Model
from jaxscale.sharding.rules import REPLICATED, Rules, iterate_leaves
from jaxscale.training.setup import make_setup
from tests.tiny import VOCAB, make_batch, make_config, relative_errors

ROOT = Path(__file__).parents[1]
PADDED = VOCAB + -VOCAB % 8
RULES = {
    "embed/embedding": ("vocab", "embed"),
    "layers/*/kernel": ("embed", "mlp"),
    "layers/*/bias": ("mlp",),
}


def _kernel_init(names):
    return nnx.with_partitioning(nnx.initializers.lecun_normal(), names)


class NnxModel(nnx.Module):
    """A list of layers, annotated kernels, a tied head, a constant, dropout with streams of its own."""

    def __init__(self, rngs, *, layers=2, rate=0.3):
        self.embed = nnx.Embed(PADDED, 16, rngs=rngs)
        self.layers = nnx.List(
            [nnx.Linear(16, 16, kernel_init=_kernel_init(("embed", "mlp")), rngs=rngs) for _ in range(layers)]
        )
        self.head = self.embed
        self.dropout = nnx.Dropout(rate, rngs=rngs)
        self.scale = jnp.linspace(0.5, 1.5, 16)

    def __call__(self, tokens, *, deterministic, rngs=None):
        x = self.embed(tokens) * self.scale
        for layer in self.layers:
            x = x + self.dropout(nnx.gelu(layer(x)), deterministic=deterministic, rngs=rngs)
        return self.head.attend(x)


class LinenModel(linen.Module):
    """Boxed parameters, some with logical names, and dropout."""

    rate: float = 0.3

    @linen.compact
    def __call__(self, tokens, deterministic=True):
        boxed = linen.with_partitioning(linen.initializers.normal(0.3), ("vocab", "embed"))
        embed = linen.Embed(PADDED, 16, embedding_init=boxed, name="embed")
        x = embed(tokens)
        logical = linen.with_logical_partitioning(linen.initializers.normal(0.3), ("embed", "mlp"))
        for layer in range(2):
            h = linen.gelu(linen.Dense(16, kernel_init=logical, name=f"layers_{layer}")(x))
            x = x + linen.Dropout(self.rate, deterministic=deterministic)(h)
        return embed.attend(x)


LINEN_RULES = {
    "embed/embedding": ("vocab", "embed"),
    "layers_*/kernel": ("embed", "mlp"),
    "layers_*/bias": ("mlp",),
}


def nnx_loss(model, batch, keys_B):
    def run(tokens_T, key):
        rngs = None if key is None else nnx.Rngs(dropout=key)
        return model(tokens_T, deterministic=key is None, rngs=rngs)

    logits_BTV = jax.vmap(run)(batch["tokens"], keys_B)
    return token_cross_entropy(logits_BTV, batch["labels"], batch["weights"])


def linen_loss(apply, batch, keys_B):
    def run(tokens_T, key):
        return apply(tokens_T, deterministic=key is None, rngs=None if key is None else {"dropout": key})

    logits_BTV = jax.vmap(run)(batch["tokens"], keys_B)
    return token_cross_entropy(logits_BTV, batch["labels"], batch["weights"])


def init_functions(key):
    keys = jax.random.split(key, 3)
    layers = [{"kernel": jax.random.normal(k, (16, 16)) / 4, "bias": jnp.zeros(16)} for k in keys[1:]]
    return {"embed": {"embedding": jax.random.normal(keys[0], (PADDED, 16))}, "layers": tuple(layers)}


def functions_loss(params, batch, keys_B):
    def run(tokens_T, key):
        x = params["embed"]["embedding"][tokens_T]
        for number, layer in enumerate(params["layers"]):
            h = jax.nn.gelu(x @ layer["kernel"] + layer["bias"])
            if key is not None:
                h *= jax.random.bernoulli(jax.random.fold_in(key, number), 0.7, h.shape) / 0.7
            x = x + h
        return x @ params["embed"]["embedding"].T

    logits_BTV = jax.vmap(run)(batch["tokens"], keys_B)
    return token_cross_entropy(logits_BTV, batch["labels"], batch["weights"])


MODELS = {
    "nnx": lambda: from_nnx(NnxModel, nnx_loss, rules=RULES),
    "linen": lambda: from_linen(LinenModel(), linen_loss, rules=LINEN_RULES),
    "functions": lambda: from_functions(init_functions, functions_loss, rules=RULES),
}


def _draw_batch(sequences=4, length=8, seed=0):
    rng = np.random.default_rng(seed)
    shape = (sequences, length)
    return {
        "tokens": jnp.asarray(rng.integers(0, VOCAB, shape), jnp.int32),
        "labels": jnp.asarray(rng.integers(0, VOCAB, shape), jnp.int32),
        "positions": jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), shape),
        "segments": jnp.ones(shape, jnp.int32),
        "weights": jnp.asarray(rng.random(shape) < 0.5, jnp.float32),
    }


def _keys(sequences=4, seed=1):
    return jax.random.split(jax.random.key(seed), sequences)


def _paths(model: Model) -> dict[str, tuple[int, ...]]:
    return {path: leaf.shape for path, leaf in iterate_leaves(model.shapes)}


# What an adapter makes


@pytest.mark.parametrize("kind", MODELS)
def test_parameters_are_nested_dicts_of_shapes_with_string_keys(kind):
    model = MODELS[kind]()

    def check(node):
        if isinstance(node, dict):
            assert all(type(key) is str for key in node)
            for child in node.values():
                check(child)
        else:
            assert type(node) is jax.ShapeDtypeStruct

    check(model.shapes)
    separator = "_" if kind == "linen" else "/"
    layers = {
        f"layers{separator}{number}/{name}": shape
        for number in range(2)
        for name, shape in (("kernel", (16, 16)), ("bias", (16,)))
    }
    assert _paths(model) == {"embed/embedding": (PADDED, 16), **layers}


@pytest.mark.parametrize("kind", MODELS)
def test_init_makes_what_the_shapes_promise_on_a_mesh_and_without_one(kind):
    model = MODELS[kind]()
    params = jax.jit(model.init)(jax.random.key(3))
    assert jax.tree.map(lambda a: (a.shape, a.dtype), params) == jax.tree.map(
        lambda a: (a.shape, a.dtype), model.shapes
    )
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    with jax.set_mesh(mesh):
        laid = jax.jit(model.init, out_shardings=NamedSharding(mesh, PartitionSpec()))(jax.random.key(3))
    jax.tree.map(np.testing.assert_array_equal, laid, params)
    other = jax.jit(model.init)(jax.random.key(4))
    assert float(jnp.abs(other["embed"]["embedding"] - params["embed"]["embedding"]).max()) > 0.01


@pytest.mark.parametrize("phase", ["evaluation", "training"])
@pytest.mark.parametrize("kind", MODELS)
def test_loss_and_gradients_are_those_of_the_module_itself(kind, phase):
    model, batch, keys = MODELS[kind](), _draw_batch(), _keys() if phase == "training" else None
    params = jax.jit(model.init)(jax.random.key(0))

    def run_module(params):
        if kind == "nnx":
            module = NnxModel(nnx.Rngs(5))
            module.embed.embedding.set_value(params["embed"]["embedding"])
            for number, layer in enumerate(module.layers):
                layer.kernel.set_value(params["layers"][str(number)]["kernel"])
                layer.bias.set_value(params["layers"][str(number)]["bias"])
            return nnx_loss(module, batch, keys)
        if kind == "linen":
            return linen_loss(lambda *a, **k: LinenModel().apply({"params": params}, *a, **k), batch, keys)
        return functions_loss({**params, "layers": [params["layers"][n] for n in "01"]}, batch, keys)

    with nnx.use_eager_sharding(False):
        expected = jax.jit(jax.value_and_grad(run_module, has_aux=True))(params)
    actual = jax.jit(jax.value_and_grad(model.sum_losses, has_aux=True))(params, batch, keys)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6), actual, expected)


@pytest.mark.parametrize("kind", MODELS)
def test_dropout_from_keys_of_sequences_does_not_depend_on_the_grouping(kind):
    model, batch, keys = MODELS[kind](), _draw_batch(), _keys()
    params = jax.jit(model.init)(jax.random.key(0))
    sum_losses = jax.jit(model.sum_losses)
    whole = sum_losses(params, batch, keys)
    halves = [
        sum_losses(params, {name: a[part] for name, a in batch.items()}, keys[part])
        for part in (slice(0, 2), slice(2, 4))
    ]
    np.testing.assert_allclose(whole[0], halves[0][0] + halves[1][0], rtol=1e-6)
    np.testing.assert_allclose(whole[1], halves[0][1] + halves[1][1])
    assert abs(float(whole[0] - sum_losses(params, batch, _keys(seed=2))[0])) > 1e-3
    assert abs(float(whole[0] - sum_losses(params, batch, None)[0])) > 1e-3


@pytest.mark.parametrize(
    "kind",
    ["nnx", pytest.param("linen", marks=pytest.mark.full), pytest.param("functions", marks=pytest.mark.full)],
)
def test_embedding_and_dropout_are_the_same_on_a_mesh_of_eight(kind):
    """The table over `vocab` and `embed`, gradients in groups, through the step that `train` compiles."""
    model = MODELS[kind]()
    results = []
    for mesh, microbatches in (({}, 1), ({"data": 2, "fsdp": 2, "tensor": 2}, 2)):
        config = make_config(mesh=mesh, batch={"sequences": 8, "microbatches": microbatches, "length": 8})
        devices = jax.devices()[: math.prod(mesh.values())]
        setup = make_setup(config, make_mesh(config.mesh, devices), VOCAB, model)
        state = setup.compile_init()(jax.random.key(0))
        _, metrics, gradients = setup.compile_step(with_gradients=True)(state, make_batch(setup, 0))
        results.append((metrics, jax.tree.map(np.asarray, gradients)))
    (metrics, gradients), (reference_metrics, reference) = results[1], results[0]
    np.testing.assert_allclose(metrics["loss"], reference_metrics["loss"], rtol=2e-6)
    np.testing.assert_allclose(metrics["grad_norm"], reference_metrics["grad_norm"], rtol=2e-6)
    assert max(relative_errors(gradients, reference).values()) < 1e-5


def test_rules_flops_and_reduction_reach_the_model():
    model = from_functions(
        init_functions, functions_loss, rules=Rules(RULES), flops_per_token=lambda length: 6.0 * length
    )
    assert isinstance(model.rules, Rules)
    assert dict(model.rules) == RULES
    assert model.flops_per_token is not None
    assert model.flops_per_token(7) == 42
    assert model.reduction == "groups"


def test_numbers_of_python_become_arrays_of_the_promised_dtype():
    model = from_functions(
        lambda key: {"a": 1.0, "b": jnp.ones(3, jnp.bfloat16)}, _pair, rules={"*": REPLICATED}
    )
    params = model.init(jax.random.key(0))
    assert (params["a"].dtype, params["b"].dtype) == (jnp.float32, jnp.bfloat16)
    assert not params["a"].weak_type


def test_adapters_leave_jax_unstarted(tmp_path):
    """Simulated devices have to be asked for before JAX starts, and a script makes its model before that."""
    code = (
        "from tests.test_adapters import MODELS\n"
        "from jax._src import xla_bridge\n"
        "from jaxscale.models.adapters import check_losses\n"
        "for make in MODELS.values():\n"
        "    check_losses(make(), length=8)\n"
        "print('started' if xla_bridge._backends else 'unstarted')\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    shown = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert shown.stdout.strip() == "unstarted", shown.stderr


# What an adapter refuses


def _pair(params, batch, keys_B):
    return batch["weights"].sum(), batch["weights"].sum()


class BatchNormModel(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.BatchNorm(4, rngs=rngs)


class CacheModel(nnx.Module):
    def __init__(self, rngs):
        self.cache = nnx.Cache(jnp.zeros(4))


class CountingModel(nnx.Module):
    def __init__(self, rngs):
        self.step = nnx.Param(jnp.zeros((), jnp.int32))


class LinenBatchNorm(linen.Module):
    @linen.compact
    def __call__(self, tokens):
        return linen.BatchNorm(use_running_average=False)(tokens.astype(jnp.float32)[..., None])


REFUSED = {
    "NNX batch statistics": (
        lambda: from_nnx(BatchNormModel, _pair, rules={}),
        ("BatchNormModel holds 2 variable(s)", "norm/mean: BatchStat", "norm/var: BatchStat", "LayerNorm"),
    ),
    "NNX cache": (lambda: from_nnx(CacheModel, _pair, rules={}), ("cache: Cache", "only to generate")),
    "NNX parameter of integers": (
        lambda: from_nnx(CountingModel, _pair, rules={}),
        ("1 parameter(s) are no floats", "step: int32[]", "constants"),
    ),
    "NNX instance": (
        lambda: from_nnx(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), _pair, rules={}),
        ("an instance of Linear", "lambda rngs: Linear(..., rngs=rngs)"),
    ),
    "NNX maker of something else": (
        lambda: from_nnx(lambda rngs: {"a": 1}, _pair, rules={}),
        ("returned a dict with a", "flax.nnx.Module"),
    ),
    "NNX maker without rngs": (
        lambda: from_nnx(lambda: None, _pair, rules={}),
        ("() is called with (rngs)", "too many positional arguments"),
    ),
    "Linen module in from_nnx": (
        lambda: from_nnx(LinenModel(), _pair, rules={}),
        ("a LinenModel", "jaxscale.from_linen"),
    ),
    "Linen class in from_nnx": (
        lambda: from_nnx(LinenModel, _pair, rules={}),
        ("LinenModel, a Linen module", "jaxscale.from_linen"),
    ),
    "Linen class": (
        lambda: from_linen(LinenModel, _pair, rules={}),
        ("the class LinenModel", "pass an instance"),
    ),
    "NNX module in from_linen": (
        lambda: from_linen(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), _pair, rules={}),
        ("not a Linear", "from_nnx"),
    ),
    "Linen collections": (
        lambda: from_linen(LinenBatchNorm(), _pair, rules={}),
        ("LinenBatchNorm has the collection(s) batch_stats beside params", "LayerNorm"),
    ),
    "Linen init without params": (
        lambda: from_linen(LinenModel(), _pair, rules={}, init=lambda key: {"weights": jnp.ones(2)}),
        ("a dict with weights without a collection 'params'", "module.init"),
    ),
    "loss without keys": (
        lambda: from_functions(init_functions, lambda params, batch: (1.0, 1.0), rules={}),
        ("(params, batch) is called with (params, batch, keys_B)", "change its parameters"),
    ),
    "loss that is no function": (
        lambda: from_functions(init_functions, 3, rules={}),
        ("3 is no function of (params, batch, keys_B)",),
    ),
    "init without a key": (
        lambda: from_functions(lambda **_: {}, _pair, rules={}),
        ("is called with (key)", "change its parameters"),
    ),
    "integer parameter": (
        lambda: from_functions(lambda key: {"a": {"b": jnp.ones(3, int)}, "c": jnp.ones(2)}, _pair, rules={}),
        ("1 parameter(s) are no floats", "a/b: int32[3]"),
    ),
    "no parameters": (
        lambda: from_functions(lambda key: {}, _pair, rules={}),
        ("a dict with nothing in it", "a tree of named arrays"),
    ),
    "one bare array": (
        lambda: from_functions(lambda key: jnp.ones(3), _pair, rules={}),
        ("float32[3]", "a tree of named arrays"),
    ),
    "two parameters of one path": (
        lambda: from_functions(lambda key: {"a/b": jnp.ones(2), "a": {"b": jnp.ones(2)}}, _pair, rules={}),
        ("the path a/b", "rename them"),
    ),
    "a parameter inside another": (
        lambda: from_functions(lambda key: {"a/b": jnp.ones(2), "a": jnp.ones(2)}, _pair, rules={}),
        ("the path a;", "rename them"),
    ),
    "rules that are no table": (
        lambda: from_functions(lambda key: {"a": jnp.ones(2)}, _pair, rules=[("a", "embed")]),
        ("rules are a table",),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_adapter_refuses_by_name_and_says_what_to_do(name):
    make, said = REFUSED[name]
    with pytest.raises(UserError) as caught:
        make()
    for part in said:
        assert part in str(caught.value)


LOSSES = {
    "a mean": (lambda p, b, k: b["weights"].mean(), "float32[]"),
    "losses of tokens": (lambda p, b, k: (b["weights"], b["weights"].sum()), "(float32[2, 8], float32[])"),
    "three numbers": (lambda p, b, k: (1.0, 2.0, 3.0), "(1.0, 2.0, 3.0)"),
    "metrics": (lambda p, b, k: (b["weights"].sum(), {"weight": 1}), "(float32[], a dict with weight)"),
    "nothing": (lambda p, b, k: None, "None"),
    "complex": (lambda p, b, k: (1j * b["weights"].sum(), b["weights"].sum()), "(complex64[], float32[])"),
    "a pair in training alone": (lambda p, b, k: None if k is None else (1.0, 1.0), "None"),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_that_returns_no_pair_of_scalars_is_refused_before_any_compile(name):
    loss, said = LOSSES[name]
    model = from_functions(lambda key: {"a": jnp.ones(2)}, loss, rules={"a": REPLICATED})
    with pytest.raises(UserError) as caught:
        check_losses(model, length=8)
    assert f"returned {said};" in str(caught.value)
    assert "two scalars, (sum of losses, sum of weights)" in str(caught.value)


def test_a_model_made_by_hand_is_checked_too():
    shapes = {"a": jax.ShapeDtypeStruct((2,), jnp.float32)}
    model = Model(
        shapes=shapes,
        rules=Rules({"a": REPLICATED}),
        init=lambda key: {"a": jnp.ones(2)},
        sum_losses=lambda params, batch, keys_B: params["a"],
    )
    with pytest.raises(UserError, match=r"Model.sum_losses returned float32\[2\]"):
        check_losses(model, length=8)


def test_random_numbers_from_the_modules_own_streams_are_refused():
    """They would be the same in every step, and depend on how the batch lies."""

    def loss(model, batch, keys_B):
        logits_BTV = model(batch["tokens"], deterministic=keys_B is None)
        return token_cross_entropy(logits_BTV, batch["labels"], batch["weights"])

    model = from_nnx(NnxModel, loss, rules=RULES)
    with pytest.raises(UserError) as caught:
        check_losses(model, length=8)
    assert "drew random numbers from its own dropout/rngs" in str(caught.value)
    assert "rngs=nnx.Rngs(key)" in str(caught.value)
