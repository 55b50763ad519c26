"""Everything that decides a decoder; sizes in elements, see `jaxscale.config.ModelConfig` and `MoeConfig`."""

import math
from dataclasses import dataclass
from typing import Literal

import jax.numpy as jnp

from jaxscale.models.attention import Implementation
from jaxscale.models.router import RouterShape
from jaxscale.parallel.capacity import Priority

VOCAB_MULTIPLE = 128  # the table's rows: a multiple of what a matrix unit takes, and of most tensor axes


@dataclass(frozen=True)
class ExpertShape:
    """A decoder's layers with experts, and how tokens travel to them."""

    router: RouterShape
    mlp: int
    shared: int
    """Shared experts; their MLP is so many times as wide as an expert."""
    first_dense: int
    every: int
    exchange: Literal["capacity", "ragged", "padded"]
    """ragged and padded are both dropless: the second for compilers without a ragged all-to-all."""
    capacity_factor: float
    eval_capacity_factor: float
    reroutes: bool
    priority: Priority
    has_bias: bool
    balance_scope: Literal["sequence", "microbatch", "step"] | None
    """Of the balance loss; None: there is none."""
    balance_coef: float
    z_coef: float


@dataclass(frozen=True)
class DecoderShape:
    """A decoder."""

    family: str
    layers: int
    embed: int
    heads: int
    kv_heads: int
    head: int
    mlp: int
    vocab: int
    positions: int
    tied: bool
    rope_theta: float
    rope_scaling: str
    norm_eps: float
    cross_documents: bool
    attention: Implementation
    dtype: jnp.dtype
    fp8: Literal["none", "delayed", "dynamic"] = "none"
    experts: ExpertShape | None = None

    @property
    def padded_vocab(self) -> int:
        """Rows of the table. The padding depends on no mesh, so a run moves between meshes as it is."""
        return math.ceil(self.vocab / VOCAB_MULTIPLE) * VOCAB_MULTIPLE

    @property
    def expert_layers(self) -> int:
        """Layers with experts."""
        if self.experts is None:
            return 0
        return (self.layers - self.experts.first_dense) // self.experts.every

    @property
    def dense_layers(self) -> int:
        return self.layers - self.expert_layers

    def kernel_std(self, fan_in: int) -> float:
        """GPT-2 published 0.02 for all; elsewhere a projection keeps the variance of what enters it."""
        return 0.02 if self.family == "gpt2" else fan_in**-0.5

    def residual_std(self, fan_in: int) -> float:
        """Projections into the residual stream shrink with depth, so that its variance does not grow
        (GPT-2)."""
        return self.kernel_std(fan_in) / math.sqrt(2 * self.layers)
