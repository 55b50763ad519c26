"""A model as training sees it: shapes, rules, an initialiser and a loss, all of plain nested dicts."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import jax

from jaxscale.sharding.rules import Rules

Params = Any
Batch = Mapping[str, jax.Array]


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
    sum_losses: Callable[..., tuple[jax.Array, jax.Array]]
    """Parameters, one microbatch and its keys -> (sum of losses, sum of weights), scalars.

    The batch holds tokens, labels, positions, segments (int32) and weights (fp32), each [B, T]. `keys_B` is
    one PRNG key a sequence, a function of the seed and the sequence's number in the run, so that what is
    drawn from it depends on no mesh and no microbatch; None in evaluation, where nothing is drawn. A model
    with `fp8_kernels` takes `Fp8Weights` of them as `fp8=`; without it, it computes in the parameters' dtype.
    """
    fp8_kernels: Mapping[str, int] = field(default_factory=dict)
    """Path of each kernel whose matmul can be in fp8 -> its layers, which are its first dim."""
    flops_per_token: Callable[[int], float] | None = None
    """Tokens a sequence -> FLOPs to train on a token (`jaxscale.metrics.flops`); None: unknown."""
    reduction: Literal["region", "groups"] = "groups"
    """How gradients wait for the end of the step. `region`: inside a `shard_map` that is manual over the
    reduction axes, for models whose gathers stand in inner regions of their own. `groups`: under a `vmap`
    over the shards of the batch, for any model: XLA dies on a gather that it has to partition inside a
    manual region (an embedding lookup)."""
