"""The reference, plain formulas on one device, and what a case of the real step did.

The reference shares the model's sums of losses, the optimizer's formula and the schedule with the step, and
nothing else: no mesh, no step code, and no microbatches unless a balance loss is over each of them. So a
fault that is the same on every mesh is found too.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxscale.config import Config
from jaxscale.models.model import RouterInputs
from jaxscale.numerics.draw import make_key
from jaxscale.numerics.policy import matmul_precision
from jaxscale.sharding.rules import iterate_leaves, map_leaves
from jaxscale.training.optimizer_layout import find_owner
from jaxscale.training.routers import RouterState, start_routers
from jaxscale.training.schedule import learning_rate
from jaxscale.training.setup import Compiled, Setup
from jaxscale.training.state import TrainState
from jaxscale.training.step import batch_sharding
from jaxscale.verify.batches import Arrays

STEPS = 3
DISTURBANCE = 0.02  # standard deviation
SHAKE = 40  # roundings of each weight, standard deviation: many times what a router's logits are off by
COMPARED_STEPS = (1, 3)  # whose gradients are compared, leaf by leaf

Leaves = dict[str, np.ndarray]  # by path


@dataclass(frozen=True)
class Trace:
    """What three steps did; `gradients` by step (from 1), those of the mean loss before clipping."""

    losses: np.ndarray
    grad_norms: np.ndarray
    counted_tokens: np.ndarray
    gradients: dict[int, Leaves]
    initial: Leaves
    params: Leaves
    moments: Leaves
    routers: Leaves
    """What a run keeps of its routers; nothing without a bias."""
    loads: np.ndarray | None
    """Choices that fell on each expert [steps, layers, experts]; None for a dense model."""
    problems: tuple[str, ...] = ()
    """Layouts and counters that are not as they should be."""


@dataclass(frozen=True)
class Reference:
    """Makes the trace that every case has to repeat."""

    setup: Setup
    """On one device, stage 0, one microbatch, no remat."""
    batches: list[Arrays]
    step: Callable[..., Any]
    initial: Any

    def trace(self, clip_norm: float | None, *, shake: float = 0.0) -> Trace:
        """Three steps; before the first, each weight is moved at random by so many of its roundings."""
        params, moments, bias = self._start()
        params = _shake(params, shake) if shake else params
        history, gradients, loads = [], {}, []
        for number, batch in enumerate(self.batches, 1):
            limit = np.inf if clip_norm is None else clip_norm
            rate = find_rate(self.setup, number)
            done = self.step(params, moments, bias, batch, number, rate, limit)
            params, moments, bias = done.params, done.moments, done.bias
            history.append([float(done.loss), float(done.grad_norm), float(done.counted_tokens)])
            gradients[number] = collect(done.gradients)
            if done.load is not None:
                loads.append(np.asarray(done.load))
        losses, norms, counted = np.array(history).T
        return Trace(
            losses,
            norms,
            counted,
            gradients,
            collect(self.initial),
            collect(params),
            collect(moments),
            collect({} if bias is None else {"bias": bias}),
            np.stack(loads) if loads else None,
        )

    def _start(self) -> tuple[Any, Any, Any]:
        """Parameters, optimizer state and the routers' bias before the first step."""
        moments = jax.jit(self.setup.optimizer.init)(self.initial)
        routers = disturb_routers(start_routers(self.setup.model.routers))
        return disturb(self.initial), moments, None if routers is None else routers.bias

    def is_near_tie(self, clip_norm: float | None, loads: np.ndarray | None) -> bool:
        """Whether some token chooses between experts that score so alike that rounding may decide.

        Args:
          loads: of the trace with this way of clipping, which shakes of either sign have to repeat.
        """
        if loads is None:
            return False
        shaken = (self.trace(clip_norm, shake=shake) for shake in (SHAKE, -SHAKE))
        return any(trace.loads is None or (trace.loads != loads).any() for trace in shaken)

    def find_mask_problem(self) -> str | None:
        """A label that the mask takes out must not matter."""
        batch = self.batches[0]
        other = {**batch, "labels": np.where(batch["weights"] > 0, batch["labels"], batch["tokens"])}
        results = [self.step(*self._start(), each, 1, jnp.float32(0), np.inf) for each in (batch, other)]
        loss, other_loss = (result.loss for result in results)
        if float(loss) == float(other_loss):
            return None
        return (
            f"the loss changes from {float(loss):.9g} to {float(other_loss):.9g} when labels of weight 0 "
            "change: the model's loss reads labels that batch['weights'] takes out"
        )


def _shake(params: Any, shake: float) -> Any:
    def move(path: str, leaf: Any) -> Any:
        values = np.asarray(leaf)
        noise = np.random.default_rng(list(path.encode())).standard_normal(values.shape)
        return (values * (1 + shake * np.finfo(values.dtype).eps * noise)).astype(values.dtype)

    return map_leaves(move, params)


def find_rate(setup: Setup, step: int) -> jax.Array:
    """Learning rate of step `step`, counted from 1."""
    config = setup.config
    tokens_a_step = config.batch.sequences * config.batch.length
    tokens = jnp.float32(step * config.batch.sequences) * config.batch.length
    return jnp.float32(learning_rate(tokens, config.steps * tokens_a_step, config.optimizer))


def make_reference(setup: Setup, batches: list[Arrays], parts: int = 1) -> Reference:
    """Compiles nothing yet but the initialiser, whose very weights the reference starts from."""
    state = setup.compile_init()(make_key(setup.config.seed))
    initial = jax.tree.map(np.asarray, state.params)
    return Reference(setup, batches, jax.jit(make_plain_step(setup, parts)), initial)


class PlainStep(NamedTuple):
    """What one step of the reference makes of parameters, optimizer state and the routers' bias."""

    params: Any
    moments: Any
    bias: Any
    loss: jax.Array
    grad_norm: jax.Array
    counted_tokens: jax.Array
    gradients: Any
    load: Any
    """Choices that fell on each expert [layers, experts]; None for a dense model."""


def make_plain_step(setup: Setup, parts: int = 1) -> Callable[..., PlainStep]:
    """A step as a textbook has it: gradient of a quotient of sums, clipped, given to the optimizer.

    Args:
      parts: how many pieces the batch is cut into, each with a balance loss of its own.
    """
    config, model, optimizer = setup.config, setup.model, setup.optimizer

    def find_objective(params: Any, bias: Any, batch: Any, keys_B: Any) -> tuple[jax.Array, tuple]:
        options = {} if model.routers is None else {"routers": RouterInputs(bias)}
        cut = jax.tree.map(lambda a: a.reshape(parts, -1, *a.shape[1:]), (batch, keys_B))
        sums = jax.lax.map(lambda part: model.sum_losses(params, *part, **options), cut)
        loss_sum, weight, *rest = jax.tree.map(lambda a: a.sum(0), sums)
        loss = loss_sum / weight
        if config.moe is None:
            return loss, (loss, weight, None)
        (experts,) = rest
        penalty = config.moe.z_coef * experts.z.sum()
        if config.moe.has_loss:
            penalty += config.moe.balance_coef * experts.balance.sum()
        return loss + penalty / (batch["segments"] > 0).sum(), (loss, weight, experts.load)

    def step(
        params: Any, moments: Any, bias: Any, batch: Any, number: Any, rate: Any, limit: Any
    ) -> PlainStep:
        first = jnp.uint32(config.batch.sequences) * (jnp.asarray(number, jnp.uint32) - 1)
        numbers = first + jnp.arange(config.batch.sequences, dtype=jnp.uint32)
        keys_B = jax.vmap(lambda each: jax.random.fold_in(make_key(config.seed), each))(numbers)
        with matmul_precision(config.precision):
            differentiate = jax.grad(find_objective, has_aux=True)
            gradients, (loss, weight, load) = differentiate(params, bias, batch, keys_B)
        norm = jnp.sqrt(sum(jnp.sum(jnp.square(g)) for g in jax.tree.leaves(gradients)))
        clipped = jax.tree.map(lambda g: g * jnp.minimum(1.0, limit / norm), gradients)
        updates, moments = optimizer.update(clipped, moments, params)
        params = jax.tree.map(lambda p, u: p - rate * u, params, updates)
        if bias is not None:
            bias = _move_bias(config, bias, load, number)
        return PlainStep(params, moments, bias, loss, norm, weight, gradients, load)

    return step


def _move_bias(config: Config, bias_LE: Any, load_LE: Any, number: Any) -> jax.Array:
    """Down where an expert had more than its share of step `number`, up where it had less."""
    moe, batch = config.moe, config.batch
    assert moe is not None
    share_L1 = load_LE.sum(1, keepdims=True) / moe.experts
    moved_LE = bias_LE - moe.bias_rate * (load_LE > share_L1) + moe.bias_rate * (load_LE < share_L1)
    if moe.bias_freeze_tokens is None:
        return moved_LE
    trained_tokens = (number - 1) * batch.sequences * batch.length
    return jnp.where(trained_tokens < moe.bias_freeze_tokens, moved_LE, bias_LE)


def trace_case(setup: Setup, batches: list[Arrays], init: Compiled) -> Trace:
    """Runs the programs that `train` compiles; `init` is `setup.compile_init()`.

    Raises:
      UserError: a layout that was asked for cannot be had, or is not what the compiler made.
    """
    state = init(make_key(setup.config.seed))
    initial = collect(state.params)
    state = replace(state, params=disturb(state.params), routers=disturb_routers(state.routers))
    step = setup.compile_step(with_gradients=True)
    history, gradients, loads, problems = [], {}, [], []
    for number, arrays in enumerate(batches, 1):
        state, metrics, gradient = step(state, place_batch(setup, arrays))
        history.append([float(metrics[name]) for name in ("loss", "grad_norm", "counted_tokens")])
        gradients[number] = collect(gradient)
        if "load" in metrics:
            loads.append(_count_load(setup, metrics["load"], arrays))
        if number in COMPARED_STEPS:
            problems += [f"after step {number}, {problem}" for problem in find_misplaced(setup, state)]
    problems += _find_wrong_counts(setup, state)
    losses, norms, counted = np.array(history).T
    return Trace(
        losses,
        norms,
        counted,
        gradients,
        initial,
        collect(state.params),
        collect(state.moments),
        collect({} if state.routers is None else state.routers._asdict()),
        np.stack(loads) if loads else None,
        tuple(problems),
    )


def _count_load(setup: Setup, load: jax.Array, arrays: Arrays) -> np.ndarray:
    """Choices, from the multiples of an even share that a step reports."""
    routers = setup.model.routers
    assert routers is not None
    even = (arrays["segments"] > 0).sum() * routers.top_k / routers.experts
    return np.rint(np.asarray(load, np.float64) * even)


def disturb_routers(state: RouterState | None) -> RouterState | None:
    """`disturb` for the bias, which a run starts with zeros."""
    return None if state is None else RouterState(**disturb(state._asdict()))


def disturb(params: Any) -> Any:
    """Moves leaves that start as one number everywhere (zeros, ones) a little, alike on every mesh.

    While a bias or the last projection of a block is zero, much else is zero with it, and no fault shows.
    """

    def move(path: str, leaf: Any) -> Any:
        values = np.asarray(leaf)
        if not np.issubdtype(values.dtype, np.floating) or (values != values.flat[0]).any():
            return leaf
        rng = np.random.default_rng(list(path.encode()))
        moved = values + (DISTURBANCE * rng.standard_normal(values.shape)).astype(values.dtype)
        return jax.device_put(moved, leaf.sharding) if isinstance(leaf, jax.Array) else moved

    return map_leaves(move, params)


def place_batch(setup: Setup, arrays: Arrays) -> dict[str, jax.Array]:
    """Arrays [sequences, length] as a step takes them."""
    batch, sharding = setup.config.batch, batch_sharding(setup.layouts)
    shape = (batch.microbatches, batch.sequences // batch.microbatches, batch.length)
    return {name: jax.device_put(array.reshape(shape), sharding) for name, array in arrays.items()}


def find_misplaced(setup: Setup, state: TrainState) -> list[str]:
    """Leaves of parameters and optimizer state that do not lie as asked, or not like their parameter."""
    asked = {"parameter": setup.shardings.params, "optimizer state": setup.shardings.moments}
    problems = []
    for kind, tree in (("parameter", state.params), ("optimizer state", state.moments)):
        wanted = dict(iterate_leaves(asked[kind]))
        problems += [
            _word_misplaced(kind, path, leaf, wanted[path])
            for path, leaf in iterate_leaves(tree)
            if not leaf.sharding.is_equivalent_to(wanted[path], leaf.ndim)
        ]
    shapes = dict(iterate_leaves(setup.model.shapes))
    layouts = dict(iterate_leaves(setup.layouts.params))
    for path, leaf in iterate_leaves(state.moments):
        owner = find_owner(path, shapes)
        if owner is None or leaf.shape != shapes[owner].shape:
            continue
        like_owner = layouts[owner].with_memory_kind(leaf.sharding.memory_kind)
        if not leaf.sharding.is_equivalent_to(like_owner, leaf.ndim):
            problems.append(_word_misplaced("optimizer state", path, leaf, layouts[owner]))
    return list(dict.fromkeys(problems))


def _word_misplaced(kind: str, path: str, leaf: jax.Array, wanted: Any) -> str:
    held, meant = leaf.addressable_shards[0].data.nbytes, wanted.shard_shape(leaf.shape)
    meant_bytes = int(np.prod(meant)) * leaf.dtype.itemsize
    got = getattr(leaf.sharding, "spec", leaf.sharding)
    return (
        f"{kind} {path} lies as {got}, {held:,} bytes a device, in place of {wanted.spec}, "
        f"{meant_bytes:,} bytes"
    )


def _find_wrong_counts(setup: Setup, state: TrainState) -> list[str]:
    sequences = STEPS * setup.config.batch.sequences
    expected = {"updates": STEPS, "skips": 0, "sequences": sequences, "trained_sequences": sequences}
    return [
        f"the state counts {int(getattr(state, name))} {name} after {STEPS} steps, not {count}"
        for name, count in expected.items()
        if int(getattr(state, name)) != count
    ]


def collect(tree: Any) -> Leaves:
    """Every leaf, whole, on the host."""
    return {path: np.asarray(leaf) for path, leaf in iterate_leaves(tree)}
