"""Models of your own: a Flax NNX module, a Flax Linen module or a pair of functions becomes a `Model`.

All three bring a loss, called with one microbatch on one group of sequences:

  `batch`: tokens, labels (the next tokens), positions and segments, int32, and weights, fp32; each [B, T].
  `keys_B`: one PRNG key a sequence in training, a function of the seed and the sequence's number; None in
    evaluation. Dropout drawn from them is the same on every mesh, which one key for the whole batch is not.

It returns (sum of losses, sum of weights); `token_cross_entropy` makes such a pair of logits.

The parameters that a run holds are nested dicts with string keys, whatever the model's own tree is made of:
the third of a list of layers is `layers/2`. Rules and checkpoints speak of these paths. Nothing is allocated
here, and JAX is not started: shapes come from `jax.eval_shape`.
"""

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen, nnx
from flax.core import meta
from jax.sharding import AbstractMesh, get_abstract_mesh

from jaxscale.config import UserError
from jaxscale.mesh import BATCH_AXES
from jaxscale.models.model import Batch, Model, Params
from jaxscale.numerics.draw import make_key
from jaxscale.numerics.policy import widen
from jaxscale.sharding.rules import Rules

Dims = Mapping[str, tuple[str, ...]]
Loss = Callable[[Any, Batch, jax.Array | None], tuple[jax.Array, jax.Array]]
Flops = Callable[[int], float]

# [B, T] of the tokens that a Linen module is initialised with, unless told otherwise.
_EXAMPLE_TOKENS = (1, 8)
_NO_MESH = AbstractMesh((), ())


def from_nnx(
    make_module: Callable[[nnx.Rngs], nnx.Module],
    loss: Loss,
    *,
    rules: Dims,
    flops_per_token: Flops | None = None,
) -> Model:
    """A Flax NNX module as a `Model`.

    The module's `nnx.Param`s are the parameters; sharding annotations on them are left aside, since rules
    say where they lie. Arrays that are no variables are constants. Other variables are refused: what changes
    in a forward pass is no part of a step, and whatever `loss` changes in the module is forgotten.

    Dropout draws from the key of each sequence, a sequence at a time:

        def loss(model, batch, keys_B):
            def run(tokens_T, key):  # key is None in evaluation
                rngs = None if key is None else nnx.Rngs(dropout=key)
                return model(tokens_T, deterministic=key is None, rngs=rngs)

            logits_BTV = jax.vmap(run)(batch["tokens"], keys_B)
            return token_cross_entropy(logits_BTV, batch["labels"], batch["weights"])

    Args:
      make_module: the class, or a function, that makes the module of an `nnx.Rngs`. It is called inside
        traces, again for every program.
      loss: (module, batch, keys_B) -> (sum of losses, sum of weights).
      rules: path pattern -> dim names.
      flops_per_token: tokens a sequence -> FLOPs to train on a token; None: mfu is not reported.

    Raises:
      UserError: an instance or a Linen module was given, `loss` takes other arguments, or the module holds
        parameters that are no floats, or variables that are neither parameters nor RNG state.
    """
    _check_makes_nnx(make_module)

    def make(key: jax.Array) -> nnx.Module:
        with nnx.use_eager_sharding(False):  # annotated variables want a mesh that has their axes
            module = make_module(nnx.Rngs(key))
        if not isinstance(module, nnx.Module):
            raise UserError(
                f"{_name(make_module)} returned {_describe(module)}; from_nnx needs a class, or a function "
                "of nnx.Rngs, that makes a flax.nnx.Module"
            )
        _check_variables(module)
        return module

    def init(key: jax.Array) -> Params:
        return nnx.to_pure_dict(nnx.state(make(key), nnx.Param))

    def call_loss(params: Params, batch: Batch, keys_B: jax.Array | None) -> Any:
        # A module made again brings its constants along; the parameters it draws are used by nothing, and the
        # compiler leaves them out.
        module = make(make_key(0))
        nnx.update(module, params)
        counts = list(_iterate_variables(module, nnx.RngCount))
        before = [variable.get_value() for _, variable in counts]
        result = loss(module, batch, keys_B)
        drawn = [
            path
            for (path, variable), value in zip(counts, before, strict=True)
            if variable.get_value() is not value
        ]
        if drawn:
            raise UserError(
                f"{_name(loss)}: the module drew random numbers from its own {' and '.join(drawn)}, the same "
                "in every step; pass it rngs=nnx.Rngs(key) for a key of keys_B, under jax.vmap over the "
                "sequences, and deterministic=True in evaluation, where keys_B is None"
            )
        return result

    _check_takes(loss, ("module", "batch", "keys_B"))
    return _make_model(init, call_loss, _name(loss), rules, flops_per_token)


def from_linen(
    module: linen.Module,
    loss: Loss,
    *,
    rules: Dims,
    init: Callable[[jax.Array], Any] | None = None,
    flops_per_token: Flops | None = None,
) -> Model:
    """A Flax Linen module as a `Model`.

    Partitioning metadata on parameters is left aside: rules say where they lie.

    Args:
      module: an instance. Only its collection `params` may hold anything.
      loss: (apply, batch, keys_B) -> (sum of losses, sum of weights). `apply` is `module.apply` with the
        parameters in it: `apply(batch["tokens"])`, or with dropout `apply(tokens_T, rngs={"dropout": key})`
        of one sequence and its key, under `jax.vmap`.
      rules: path pattern -> dim names; paths begin below `params`.
      init: PRNG key -> the module's variables; None: `module.init(key, tokens)` for int32 tokens [1, 8].
      flops_per_token: tokens a sequence -> FLOPs to train on a token; None: mfu is not reported.

    Raises:
      UserError: a class or another kind of module was given, `loss` takes other arguments, or the module
        has other collections, or parameters that are no floats.
    """
    if isinstance(module, type) or not isinstance(module, linen.Module):
        remedy = "pass an instance of it" if isinstance(module, type) else "see from_nnx and from_functions"
        raise UserError(f"from_linen needs a flax.linen.Module, not {_describe(module)}; {remedy}")
    make_variables = init or (lambda key: module.init(key, jnp.zeros(_EXAMPLE_TOKENS, jnp.int32)))

    def init_params(key: jax.Array) -> Params:
        # Where there is a mesh, a box constrains what is taken out of it, by its own names.
        with jax.sharding.use_abstract_mesh(_NO_MESH):
            variables = jax.tree.map(_unbox, make_variables(key), is_leaf=_is_box)
        if not isinstance(variables, Mapping) or "params" not in variables:
            raise UserError(
                f"from_linen: initialising {type(module).__name__} gave {_describe(variables)} without a "
                "collection 'params'; init(key) returns what module.init returns"
            )
        if others := sorted(set(variables) - {"params"}):
            raise UserError(
                f"from_linen: {type(module).__name__} has the collection(s) {', '.join(others)} beside "
                "params; what changes in a forward pass is no part of a step. Use layers without it "
                "(LayerNorm for BatchNorm), and caches only to generate"
            )
        return variables["params"]

    def call_loss(params: Params, batch: Batch, keys_B: jax.Array | None) -> Any:
        return loss(partial(module.apply, {"params": params}), batch, keys_B)

    _check_takes(loss, ("apply", "batch", "keys_B"))
    return _make_model(init_params, call_loss, _name(loss), rules, flops_per_token)


def from_functions(
    init: Callable[[jax.Array], Params],
    loss: Loss,
    *,
    rules: Dims,
    flops_per_token: Flops | None = None,
) -> Model:
    """A pair of plain functions as a `Model`.

    Args:
      init: PRNG key -> parameters: a tree of float arrays, such as nested dicts.
      loss: (parameters, batch, keys_B) -> (sum of losses, sum of weights); the parameters are a tree as
        `init` makes it.
      rules: path pattern -> dim names.
      flops_per_token: tokens a sequence -> FLOPs to train on a token; None: mfu is not reported.

    Raises:
      UserError: a function takes other arguments, or a parameter is no array of floats.
    """
    _check_takes(init, ("key",))
    _check_takes(loss, ("params", "batch", "keys_B"))
    return _make_model(init, loss, _name(loss), rules, flops_per_token)


def check_losses(model: Model, *, length: int) -> None:
    """Traces the loss on a small batch, as in training and as in evaluation; nothing is compiled.

    Args:
      length: tokens a sequence, as the run will have them.

    Raises:
      UserError: what the loss returns is no pair of scalars.
    """
    # As few sequences as the ambient mesh can lay out, and never one, which broadcasts.
    axis_sizes = get_abstract_mesh().shape
    sequences = 2 * math.prod(axis_sizes.get(axis, 1) for axis in BATCH_AXES)
    shape = (sequences, length)
    names = ("tokens", "labels", "positions", "segments")
    batch = {name: jax.ShapeDtypeStruct(shape, jnp.int32) for name in names}
    batch["weights"] = jax.ShapeDtypeStruct(shape, jnp.float32)
    keys_B = jax.eval_shape(lambda: jax.random.split(make_key(0), sequences))

    def read(*arguments: Any) -> tuple[jax.Array, jax.Array]:
        return _read_pair(model.sum_losses(*arguments), "Model.sum_losses")

    jax.eval_shape(read, model.shapes, batch, keys_B)
    jax.eval_shape(lambda params, batch: read(params, batch, None), model.shapes, batch)


def _make_model(
    init: Callable[[jax.Array], Any], call_loss: Loss, loss_name: str, rules: Dims, flops: Flops | None
) -> Model:
    tree = jax.eval_shape(init, jax.eval_shape(lambda: make_key(0)))
    nesting = _Nesting.read(tree)
    _check_floats(nesting, tree)
    dtypes = jax.tree.map(lambda leaf: leaf.dtype, tree)

    def init_nested(key: jax.Array) -> Params:
        # Numbers of Python would be weakly typed, unlike what the shapes promise.
        return nesting.nest(jax.tree.map(jax.lax.convert_element_type, init(key), dtypes))

    def sum_losses(params: Params, batch: Batch, keys_B: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        return _read_pair(call_loss(nesting.restore(params), batch, keys_B), loss_name)

    return Model(
        shapes=nesting.nest(jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)),
        rules=rules if isinstance(rules, Rules) else Rules(rules),
        init=init_nested,
        sum_losses=sum_losses,
        flops_per_token=flops,
    )


@dataclass(frozen=True)
class _Nesting:
    """How a model's own tree of parameters reads as nested dicts with string keys, and back."""

    structure: Any
    paths: tuple[tuple[str, ...], ...]

    @classmethod
    def read(cls, tree: Any) -> "_Nesting":
        """Raises UserError: there is no parameter, or two have one path."""
        leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
        texts = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves]
        if not leaves or texts == [""]:
            raise UserError(f"the model's parameters are {_describe(tree)}; they are a tree of named arrays")
        paths = tuple(tuple(text.split("/")) for text in texts)
        inner = {path[:end] for path in paths for end in range(1, len(path))}
        twice = {path for path in paths if path in inner or paths.count(path) > 1}
        if twice:
            shown = ", ".join(sorted("/".join(path) for path in twice))
            raise UserError(
                f"several parameters have the path {shown}; a '/' in a name parts it: rename them"
            )
        return cls(structure, paths)

    def nest(self, tree: Any) -> Params:
        nested: dict[str, Any] = {}
        for path, leaf in zip(self.paths, jax.tree.leaves(tree), strict=True):
            node = nested
            for key in path[:-1]:
                node = node.setdefault(key, {})
            node[path[-1]] = leaf
        return nested

    def restore(self, nested: Params) -> Any:
        leaves = []
        for path in self.paths:
            node = nested
            for key in path:
                node = node[key]
            leaves.append(node)
        return jax.tree.unflatten(self.structure, leaves)


def _check_floats(nesting: _Nesting, tree: Any) -> None:
    problems = [
        f"{'/'.join(path)}: {_describe(leaf)}"
        for path, leaf in zip(nesting.paths, jax.tree.leaves(tree), strict=True)
        if not jnp.issubdtype(leaf.dtype, jnp.floating)
    ]
    if problems:
        raise UserError(
            f"{len(problems)} parameter(s) are no floats, so they have no gradient; make them constants of "
            "the model, or floats\n  " + "\n  ".join(problems)
        )


def _check_makes_nnx(make_module: Any) -> None:
    if isinstance(make_module, nnx.Module):
        kind = type(make_module).__name__
        raise UserError(
            f"from_nnx got an instance of {kind}, whose weights lie on one device already; pass the class, "
            f"or a function such as lambda rngs: {kind}(..., rngs=rngs)"
        )
    if isinstance(make_module, linen.Module) or (
        isinstance(make_module, type) and issubclass(make_module, linen.Module)
    ):
        raise UserError(f"from_nnx got {_name(make_module)}, a Linen module; use jaxscale.from_linen")
    _check_takes(make_module, ("rngs",))


def _check_variables(module: nnx.Module) -> None:
    problems = [
        f"{path}: {type(variable).__name__}"
        for path, variable in _iterate_variables(module, nnx.Variable)
        if not isinstance(variable, nnx.Param | nnx.RngState)
    ]
    if problems:
        raise UserError(
            f"{type(module).__name__} holds {len(problems)} variable(s) that are no nnx.Param; what changes "
            "in a forward pass is no part of a step. Use layers without them (LayerNorm for BatchNorm), "
            "caches only to generate, and plain arrays for constants\n  " + "\n  ".join(problems)
        )


def _iterate_variables(module: nnx.Module, kind: type) -> Any:
    """(path, variable) of the module's variables of one kind."""
    for path, variable in nnx.to_flat_state(nnx.state(module, kind)):
        yield "/".join(map(str, path)), variable


def _is_box(leaf: Any) -> bool:
    return isinstance(leaf, meta.AxisMetadata)


def _unbox(leaf: Any) -> Any:
    return leaf.unbox() if isinstance(leaf, meta.AxisMetadata) else leaf


def _check_takes(function: Any, names: tuple[str, ...]) -> None:
    """Whether a function can be called with so many arguments by position."""
    shown = f"({', '.join(names)})"
    if not callable(function):
        raise UserError(f"{_describe(function)} is no function of {shown}")
    try:
        inspect.signature(function).bind(*names)
    except TypeError as error:
        raise UserError(
            f"{_name(function)}{inspect.signature(function)} is called with {shown}: {error}; "
            "change its parameters"
        ) from None


def _read_pair(result: Any, name: str) -> tuple[jax.Array, jax.Array]:
    """The pair in at least fp32."""
    parts = result if isinstance(result, tuple | list) else ()
    if len(parts) != 2 or not all(map(_is_real_scalar, parts)):
        raise UserError(
            f"{name} returned {_describe(result)}; a loss returns two scalars, (sum of losses, sum of "
            "weights), as jaxscale.token_cross_entropy does. Sums, not means: the step divides once, by the "
            "weight of all its microbatches"
        )
    total, weight = (jnp.asarray(part) for part in parts)
    return total.astype(widen(total.dtype)), weight.astype(widen(weight.dtype))


def _is_real_scalar(part: Any) -> bool:
    if not isinstance(part, jax.Array | float | int):
        return False
    array = jnp.asarray(part)
    return array.shape == () and jnp.issubdtype(array.dtype, jnp.number) and not jnp.iscomplexobj(array)


def _describe(value: Any) -> str:
    """A value as a person would name it: `float32[2, 8]`, `(float32[], float32[2])`, `None`, `a Decoder`."""
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{value.dtype}[{', '.join(map(str, value.shape))}]"
    if isinstance(value, tuple | list):
        return f"({', '.join(map(_describe, value))})"
    if isinstance(value, Mapping):
        return f"a dict with {', '.join(map(str, value)) or 'nothing in it'}"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    return repr(value) if isinstance(value, str | int | float | None) else f"a {type(value).__name__}"


def _name(function: Any) -> str:
    return getattr(function, "__qualname__", None) or f"a {type(function).__name__}"
