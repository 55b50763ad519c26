"""A model as training sees it: shapes, rules, an initialiser and a loss, all of plain nested dicts."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import jax

from jaxscale.sharding.rules import Rules

Params = Any
Batch = Mapping[str, jax.Array]


class RouterInputs(NamedTuple):
    """What routers are handed beside their parameters, [layers with experts, E], fp32."""

    bias: jax.Array | None = None
    """Added to the scores that a choice goes by; None: nothing is."""
    load: jax.Array | None = None
    """Choices that fall on each expert in the whole step, for a balance loss of that scope."""


NO_INPUTS = RouterInputs()


class ExpertSums(NamedTuple):
    """What layers with experts add up to over tokens that are no padding; fp32, layers first."""

    load: jax.Array
    """Choices that fell on each expert, before any was dropped [layers, E]."""
    dropped: jax.Array
    """Choices that found no room [layers]."""
    balance: jax.Array
    """Balance losses, without their coefficient [layers]; 1 a token where the load is even."""
    z: jax.Array
    """z-losses, without their coefficient [layers]."""
    entropy: jax.Array
    """Entropies of the routers' probabilities, nats [layers]."""


@dataclass(frozen=True, kw_only=True)
class Routers:
    """What training needs to know of a model with experts."""

    layers: int
    """Layers with experts."""
    experts: int
    top_k: int
    has_bias: bool
    """Whether the choice goes by a bias that follows the load."""
    balance_coef: float
    z_coef: float
    needs_load: bool
    """Whether the balance loss takes the load of the whole step as given: it is then counted first."""
    count_load: Callable[..., jax.Array]
    """Takes what `sum_losses` takes; choices that fall on each expert [layers, E], and nothing else of it."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """What training needs of a model. It never sees the optimizer, the data or the mesh.

    Casting to the compute format is not the model's business: the step casts every leaf, except those that
    its rule replicates or that have a `norm` dim.
    """

    shapes: Params
    """Parameters as nested dicts of `ShapeDtypeStruct`."""
    rules: Rules
    """Path pattern -> dim names."""
    init: Callable[[jax.Array], Params]
    """PRNG key -> parameters; the same numbers on every mesh."""
    sum_losses: Callable[..., tuple]
    """Parameters, one microbatch and its keys -> (sum of losses, sum of weights), scalars.

    The batch holds tokens, labels, positions, segments (int32) and weights (fp32), each [B, T]. `keys_B` is
    one PRNG key a sequence, a function of the seed and the sequence's number in the run, so that what is
    drawn from it depends on no mesh and no microbatch; None in evaluation, where nothing is drawn. A model
    with `fp8_kernels` takes `Fp8Weights` of them as `fp8=`; without it, it computes in the parameters' dtype.
    A model with `routers` takes `RouterInputs` as `routers=`, and returns `ExpertSums` beside the pair.
    """
    fp8_kernels: Mapping[str, int] = field(default_factory=dict)
    """Path of each kernel whose matmul can be in fp8 -> its layers, which are its first dim."""
    routers: Routers | None = None
    """Of a model with experts whose losses are part of what is minimised; None: a dense one."""
    split_dims: frozenset[str] = frozenset()
    """Dims of parameters that the model takes apart by itself: in a `region` it is handed each device's part
    of them, and no gradient of that part is reduced over the axes it lies over."""
    flops_per_token: Callable[[int], float] | None = None
    """Tokens a sequence -> FLOPs to train on a token (`jaxscale.metrics.flops`); None: unknown."""
    reduction: Literal["region", "groups"] = "groups"
    """How gradients wait for the end of the step. `region`: inside a `shard_map` that is manual over the
    reduction axes, for models whose gathers stand in inner regions of their own. `groups`: under a `vmap`
    over the shards of the batch, for any model: XLA dies on a gather that it has to partition inside a
    manual region (an embedding lookup)."""
