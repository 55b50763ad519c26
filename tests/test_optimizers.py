"""Each optimizer against its paper's formula, written out in fp64 numpy, and the formats of its state."""

from collections.abc import Callable, Mapping
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

from jaxscale.config import OptimizerConfig, PrecisionConfig, UserError, parse_config
from jaxscale.config.optimizers import READ_FIELDS
from jaxscale.mesh import AXES
from jaxscale.numerics.draw import make_key
from jaxscale.sharding.rules import REPLICATED, Leaf, iterate_leaves, lay_leaves
from jaxscale.training.matrices import find_sides
from jaxscale.training.moments import round_stochastically, store_moments
from jaxscale.training.optimizer import adopt_optimizer, make_optimizer
from tests.tiny import TREE

SHAPES = {
    "layers": {
        "up": {"kernel": (3, 4, 6), "bias": (3, 6)},
        "query": {"kernel": (3, 4, 2, 5)},
        "out": {"kernel": (3, 2, 5, 4)},
        "norm": {"scale": (3, 4)},
    },
    "embed": {"table": (9, 4)},
    "mixer": {"kernel": (5, 5)},
    "decay": {"log": (4, 2)},
}
RULES = {
    "layers/up/kernel": ("layers", "embed", "mlp"),
    "layers/up/bias": ("layers", "mlp"),
    "layers/query/kernel": ("layers", "embed", "heads", "head"),
    "layers/out/kernel": ("layers", "heads", "head", "embed"),
    "layers/norm/scale": ("layers", "norm"),
    "embed/table": ("vocab", "embed"),
    "mixer/kernel": ("embed", "mlp"),
    "decay/log": REPLICATED,
}
RATES = (0.1, 0.2, 0.05, 0.1)
# Path -> (dims that number its matrices, rows, columns); the other leaves are no matrices.
SIDES = {
    "layers/up/kernel": ((0,), (1,), (2,)),
    "layers/query/kernel": ((0,), (1,), (2, 3)),
    "layers/out/kernel": ((0,), (1, 2), (3,)),
    "embed/table": ((), (0,), (1,)),
    "mixer/kernel": ((), (0,), (1,)),
}
Arrays = dict[str, np.ndarray]
Formula = Callable[[str, np.ndarray, np.ndarray, dict[str, Any], int], np.ndarray]


def draw(seed: int) -> Any:
    rng = np.random.default_rng(seed)

    def make(shape: tuple[int, ...]) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    return jax.tree.map(make, SHAPES, is_leaf=lambda node: isinstance(node, tuple))


LEAVES, PROBLEMS = lay_leaves(draw(0), RULES, dict.fromkeys(AXES, 1))
assert not PROBLEMS


def flatten(tree: Any) -> Arrays:
    return {path: np.asarray(leaf, np.float64) for path, leaf in iterate_leaves(tree)}


def run_optimizer(config: OptimizerConfig, **precision: str) -> tuple[Arrays, Any]:
    """Parameters and state after an update at each of RATES, as the step makes them."""
    optimizer = make_optimizer(config, PrecisionConfig(**precision), LEAVES)
    params = draw(100)
    state = optimizer.init(params)
    update = jax.jit(optimizer.update)
    for count, rate in enumerate(RATES, 1):
        updates, state = update(draw(count), state, params)
        params = jax.tree.map(lambda p, u, rate=rate: p - rate * u, params, updates)
    return flatten(params), state


def run_formula(formula: Formula, decay: float) -> Arrays:
    """The same with a formula: (path, gradient, parameter, memory of the leaf, count) -> update."""
    params = flatten(draw(100))
    memories: dict[str, dict[str, Any]] = {path: {} for path in params}
    for count, rate in enumerate(RATES, 1):
        for path, g in flatten(draw(count)).items():
            update = formula(path, g, params[path], memories[path], count)
            if path in SIDES:
                update = update + decay * params[path]
            params[path] = params[path] - rate * update
    return params


def adamw(beta1: float, beta2: float, eps: float) -> Formula:
    """Loshchilov and Hutter 2019, algorithm 2."""

    def update(path: str, g: np.ndarray, p: np.ndarray, memory: dict, count: int) -> np.ndarray:
        memory["m"] = beta1 * memory.get("m", 0) + (1 - beta1) * g
        memory["v"] = beta2 * memory.get("v", 0) + (1 - beta2) * g**2
        return memory["m"] / (1 - beta1**count) / (np.sqrt(memory["v"] / (1 - beta2**count)) + eps)

    return update


def lion(beta1: float, beta2: float) -> Formula:
    """Chen 2023, algorithm 2."""

    def update(path: str, g: np.ndarray, p: np.ndarray, memory: dict, count: int) -> np.ndarray:
        m = memory.get("m", 0)
        memory["m"] = beta2 * m + (1 - beta2) * g
        return np.sign(beta1 * m + (1 - beta1) * g)

    return update


def sgd(momentum: float, nesterov: bool) -> Formula:
    """Sutskever 2013 in the form of PyTorch: the buffer is a sum, not a mean."""

    def update(path: str, g: np.ndarray, p: np.ndarray, memory: dict, count: int) -> np.ndarray:
        memory["m"] = momentum * memory.get("m", 0) + g
        return g + momentum * memory["m"] if nesterov else memory["m"]

    return update


def take_matrices(path: str, x: np.ndarray) -> np.ndarray:
    """[matrices, rows, columns] of a leaf that has sides."""
    stacked, rows, columns = SIDES[path]
    sizes = [int(np.prod([x.shape[dim] for dim in dims])) for dims in (stacked, rows, columns)]
    return x.reshape(sizes)  # the dims stand in this order in every leaf here


def newton_schulz(x: np.ndarray, steps: int) -> np.ndarray:
    """Jordan 2024, as it stands in his post, in fp64."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = x / (np.linalg.norm(x) + 1e-7)
    is_tall = x.shape[0] > x.shape[1]
    x = x.T if is_tall else x
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if is_tall else x


def muon(momentum: float, nesterov: bool, steps: int, rest: Formula, ratio: float, decay: float) -> Formula:
    """Liu 2025, eq. 1 and 4; everything that is no matrix within the model by `rest`."""
    sums = sgd(momentum, nesterov)

    def update(path: str, g: np.ndarray, p: np.ndarray, memory: dict, count: int) -> np.ndarray:
        if path not in SIDES or path == "embed/table":
            decayed = decay * p if path in SIDES else 0.0
            return ratio * (rest(path, g, p, memory, count) + decayed) - decayed  # decay is added outside
        total = take_matrices(path, sums(path, g, p, memory, count))
        factor = 0.2 * np.sqrt(max(total.shape[1:]))
        return factor * np.stack([newton_schulz(each, steps) for each in total]).reshape(g.shape)

    return update


def adafactor(
    exponent: float, limit: float, min_factored: int, scaled: bool, beta1: float, eps: float = 1e-30
) -> Formula:
    """Shazeer and Stern 2018, algorithms 4 and 5, layer by layer."""

    def divide(g: np.ndarray, memory: dict, count: int, factored: bool) -> np.ndarray:
        decay, square = 1 - count**-exponent, g**2 + eps
        if not factored:
            memory["v"] = decay * memory.get("v", 0) + (1 - decay) * square
            return g / np.sqrt(memory["v"])
        memory["r"] = decay * memory.get("r", 0) + (1 - decay) * square.mean(1)
        memory["c"] = decay * memory.get("c", 0) + (1 - decay) * square.mean(0)
        return g / np.sqrt(np.outer(memory["r"], memory["c"]) / memory["r"].mean())

    def update(path: str, g: np.ndarray, p: np.ndarray, memory: dict, count: int) -> np.ndarray:
        stacked = 1 if path.startswith("layers") else 0
        if path in SIDES:
            parts, held = take_matrices(path, g), take_matrices(path, p)
        else:
            parts, held = (x.reshape((-1, *x.shape[1:]) if stacked else (1, *x.shape)) for x in (g, p))
        results = []
        for index, (part, parameter) in enumerate(zip(parts, held, strict=True)):
            factored = path in SIDES and min(part.shape) >= min_factored
            u = divide(part, memory.setdefault(index, {}), count, factored)
            u = u / max(1.0, np.sqrt((u**2).mean()) / limit)
            results.append(u * max(1e-3, np.sqrt((parameter**2).mean())) if scaled else u)
        u = np.stack(results).reshape(g.shape)
        memory["m"] = beta1 * memory.get("m", 0) + (1 - beta1) * u
        return memory["m"]

    return update


CASES: dict[str, tuple[OptimizerConfig, Formula]] = {
    "adamw": (
        OptimizerConfig(beta1=0.8, beta2=0.9, eps=1e-3, weight_decay=0.3),
        adamw(0.8, 0.9, 1e-3),
    ),
    "lion": (OptimizerConfig(name="lion", weight_decay=0.3), lion(0.9, 0.99)),
    "sgd": (OptimizerConfig(name="sgd", weight_decay=0.3), sgd(0.9, False)),
    "sgd nesterov": (
        OptimizerConfig(name="sgd", momentum=0.8, nesterov=True, weight_decay=0.3),
        sgd(0.8, True),
    ),
    "sgd plain": (OptimizerConfig(name="sgd", momentum=0, weight_decay=0.3), sgd(0.0, False)),
    "adafactor": (
        OptimizerConfig(name="adafactor", min_factored=4, weight_decay=0.3),
        adafactor(0.8, 1.0, 4, True, 0.0),
    ),
    "adafactor otherwise": (
        OptimizerConfig(
            name="adafactor",
            min_factored=5,
            decay_exponent=0.5,
            clip_rms=0.5,
            scale_by_parameter=False,
            beta1=0.9,
            eps=1e-4,
            weight_decay=0.3,
        ),
        adafactor(0.5, 0.5, 5, False, 0.9, 1e-4),
    ),
    "muon": (
        OptimizerConfig(name="muon", weight_decay=0.3, adamw_lr_ratio=0.5),
        muon(0.95, True, 5, adamw(0.9, 0.95, 1e-8), 0.5, 0.3),
    ),
    "muon otherwise": (
        OptimizerConfig(name="muon", weight_decay=0.3, momentum=0.8, nesterov=False, ns_steps=3, beta2=0.9),
        muon(0.8, False, 3, adamw(0.9, 0.9, 1e-8), 1.0, 0.3),
    ),
}


@pytest.mark.smoke
@pytest.mark.parametrize("name", CASES)
def test_updates_equal_the_papers_formula(name: str) -> None:
    config, formula = CASES[name]
    params, _ = run_optimizer(config)
    expected = run_formula(formula, 0.3)
    for path, leaf in params.items():
        np.testing.assert_allclose(leaf, expected[path], rtol=2e-5, atol=5e-6, err_msg=path)


def test_adafactor_of_single_matrices_is_optax_adafactor() -> None:
    config = OptimizerConfig(name="adafactor", min_factored=4, weight_decay=0.0)
    theirs = optax.adafactor(None, min_dim_size_to_factor=4)
    params = {path: leaf for path, leaf in draw(100).items() if path != "layers"}
    ours = make_optimizer(config, PrecisionConfig(), LEAVES)
    states = ours.init(params), theirs.init(params)
    for count in range(1, 4):
        gradients = {path: leaf for path, leaf in draw(count).items() if path != "layers"}
        (left, first), (right, second) = (
            each.update(gradients, state, params) for each, state in zip((ours, theirs), states, strict=True)
        )
        states = first, second
        for path in ("embed", "mixer"):
            [a], [b] = jax.tree.leaves(left[path]), jax.tree.leaves(right[path])
            np.testing.assert_allclose(a, -b, rtol=1e-5, atol=1e-7)


def test_muon_is_for_matrices_within_the_model() -> None:
    _, state = run_optimizer(OptimizerConfig(name="muon"))
    owners = {
        label: {
            end
            for path, leaf in iterate_leaves(state.inner_states[label])
            for end in LEAVES
            if path.endswith(end)
        }
        for label in ("muon", "adamw")
    }
    assert owners["muon"] == SIDES.keys() - {"embed/table"}
    assert owners["adamw"] == LEAVES.keys() - owners["muon"]


@pytest.mark.parametrize(
    ("dims", "shape", "found"),
    [
        (("layers", "experts", "embed", "mlp"), (2, 3, 4, 5), (6, 4, 5)),
        (("layers", "kv_heads", "head", "embed"), (2, 3, 4, 5), (2, 12, 5)),
        (("embed", "mlp"), (4, 5), (1, 4, 5)),
        (("embed", "heads", "mlp"), (4, 2, 5), None),  # three sides
        (("layers", "mlp"), (2, 5), None),
        (("layers", "head", "embed"), (2, 4, 5), (2, 4, 5)),
        (("norm", "embed"), (4, 5), None),
    ],
)
def test_sides_of_a_matrix_follow_from_its_dims(
    dims: tuple[str, ...], shape: tuple[int, ...], found: tuple[int, int, int] | None
) -> None:
    sides = find_sides(Leaf("kernel", shape, np.dtype("float32"), "kernel", dims, PartitionSpec()))
    assert (sides.count(shape) if sides else None) == found


# --- Formats ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in READ_FIELDS if name != "python"])
@pytest.mark.parametrize("params", ["fp32", "bf16"])
def test_state_has_the_format_asked_for_whatever_the_parameters(name: str, params: str) -> None:
    own = {"adafactor": {"min_factored": 4, "beta1": 0.9}}.get(name, {})
    config = OptimizerConfig(name=name, **own)
    tree = draw(100)
    if params == "bf16":
        tree = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), tree)
    for moments, dtype in (("fp32", jnp.float32), ("bf16", jnp.bfloat16)):
        optimizer = make_optimizer(config, PrecisionConfig(moments=moments, params=params), LEAVES)
        state = optimizer.init(tree)
        updates, after = jax.jit(optimizer.update)(draw(1), state, tree)
        chex.assert_trees_all_equal_shapes_and_dtypes(state, after)
        floats = {
            path: leaf.dtype
            for path, leaf in iterate_leaves(after)
            if jnp.issubdtype(leaf.dtype, jnp.floating)
        }
        kept = {path for path in floats if "rows" in path or "columns" in path or "whole" in path}
        assert bool(kept) == (name == "adafactor")
        assert {floats[path] for path in floats if path not in kept} == {jnp.dtype(dtype)}
        assert {floats[path] for path in kept} <= {jnp.dtype(jnp.float32)}
        assert {leaf.dtype for leaf in jax.tree.leaves(updates)} == {jnp.dtype(jnp.float32)}


BYTES_A_PARAMETER = {  # of a stacked matrix 3 x 256 x 512, (fp32, bf16)
    "adamw": (8, 4),
    "lion": (4, 2),
    "sgd": (4, 2),
    "muon": (4, 2),
    "adafactor": (4 * (256 + 512) / (256 * 512),) * 2,
}


@pytest.mark.parametrize("name", BYTES_A_PARAMETER)
def test_state_takes_the_bytes_that_the_docs_say(name: str) -> None:
    shapes = {"up": jax.ShapeDtypeStruct((3, 256, 512), jnp.float32)}
    leaves, _ = lay_leaves(shapes, {"up": ("layers", "embed", "mlp")}, dict.fromkeys(AXES, 1))
    for moments, expected in zip(("fp32", "bf16"), BYTES_A_PARAMETER[name], strict=True):
        optimizer = make_optimizer(OptimizerConfig(name=name), PrecisionConfig(moments=moments), leaves)
        state = jax.eval_shape(optimizer.init, shapes)
        held = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state) if leaf.ndim)
        assert held / shapes["up"].size == expected


def test_rounding_is_right_in_the_mean_and_leaves_what_bf16_can_say() -> None:
    x = jnp.float32(1 + 1 / 512 + 1 / 2048)  # 5/16 between two numbers of bf16, 1 and 1 + 1/128
    rounded = round_stochastically(jnp.full((100_000,), x), make_key(1)).astype(jnp.float32)
    assert set(np.unique(rounded)) == {1.0, 1 + 1 / 128}
    assert abs(float(rounded.mean()) - float(x)) < 4 * (1 / 128) * 0.5 / 100_000**0.5
    exact = jnp.asarray([0.0, -0.0, 1.5, -3e38, 1e-30, jnp.inf, -jnp.inf, jnp.nan], jnp.bfloat16)
    again = round_stochastically(exact.astype(jnp.float32), make_key(2))
    np.testing.assert_array_equal(again.astype(jnp.float32), exact.astype(jnp.float32))
    negative = round_stochastically(jnp.full((100_000,), -x), make_key(3)).astype(jnp.float32)
    assert abs(float(negative.mean()) + float(x)) < 4 * (1 / 128) * 0.5 / 100_000**0.5


def follow_decay(beta2: float, steps: int, *, nearest: bool) -> float:
    """Second moment over its true value, after gradients have become ten times smaller."""
    inner = optax.scale_by_rms(decay=beta2)
    params = {"w": jnp.zeros((4096,))}
    if nearest:
        optimizer = optax.GradientTransformation(
            lambda params: jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), inner.init(params)),
            lambda g, state, params: jax.tree.map(
                lambda leaf: leaf.astype(jnp.bfloat16) if leaf.ndim else leaf,
                inner.update(g, jax.tree.map(lambda leaf: leaf.astype(jnp.float32), state), params),
            ),
        )
    else:
        optimizer = store_moments(inner, jnp.dtype(jnp.bfloat16))

    def advance(count: Any, state: Any) -> Any:
        gradient = jnp.where(count < steps // 10, 1.0, 0.1)
        return optimizer.update({"w": jnp.full((4096,), gradient)}, state, params)[1]

    state = jax.lax.fori_loop(0, steps, advance, optimizer.init(params))
    first = steps // 10
    true = (1 - beta2**first) * beta2 ** (steps - first) + 0.01 * (1 - beta2 ** (steps - first))
    [moment] = [leaf for leaf in jax.tree.leaves(state) if leaf.ndim]
    return float(moment.astype(jnp.float32).mean()) / true


@pytest.mark.parametrize(("beta2", "steps", "stuck"), [(0.999, 4000, 13.35), (0.95, 1000, 1.056)])
def test_a_second_moment_in_bf16_decays_as_it_should(beta2: float, steps: int, stuck: float) -> None:
    """Rounded to nearest it stays for ever where beta2 is 0.999, and is off by 5.6 % at 0.95."""
    assert follow_decay(beta2, steps, nearest=False) == pytest.approx(1.0, abs=0.01)
    assert follow_decay(beta2, steps, nearest=True) == pytest.approx(stuck, rel=1e-3)


# --- The configuration --------------------------------------------------------------------------------------


def parse_optimizer(**fields: Any) -> OptimizerConfig:
    return parse_config({**TREE, "optimizer": fields}, origin="test").optimizer


def test_a_field_that_is_left_out_has_the_optimizers_own_value() -> None:
    assert parse_optimizer().beta2 == 0.95
    assert parse_optimizer(name="lion").beta2 == 0.99
    assert parse_optimizer(name="lion").eps is None
    assert parse_optimizer(name="lion", eps=None, beta2=None).beta2 == 0.99
    assert (parse_optimizer(name="python").peak_lr, parse_optimizer(name="python").schedule) == (
        1,
        "constant",
    )
    assert parse_optimizer(name="python", peak_lr=0.1).peak_lr == 0.1


@pytest.mark.parametrize("name", READ_FIELDS)
def test_every_field_that_is_not_read_is_refused(name: str) -> None:
    values: Mapping[str, Any] = {
        field: value for each in READ_FIELDS.values() for field, value in each.items()
    }
    for field, value in values.items():
        if field in READ_FIELDS[name] or field in READ_FIELDS["python"]:
            assert getattr(parse_optimizer(name=name, **{field: value}), field) == value
            continue
        with pytest.raises(UserError, match=rf"optimizer\.{field}: {value}: {name} does not read it; leave"):
            parse_optimizer(name=name, **{field: value})


def test_an_optimizer_from_python_and_the_configuration_have_to_agree() -> None:
    with pytest.raises(UserError, match="no optimizer comes from Python"):
        make_optimizer(OptimizerConfig(name="python"), PrecisionConfig(), LEAVES)
    with pytest.raises(UserError, match=r"optimizer\.name is lion, and another"):
        adopt_optimizer(OptimizerConfig(name="lion"), PrecisionConfig(), optax.sgd(1.0))
    with pytest.raises(UserError, match=r"precision\.moments=fp32"):
        adopt_optimizer(OptimizerConfig(name="python"), PrecisionConfig(moments="bf16"), optax.sgd(1.0))
