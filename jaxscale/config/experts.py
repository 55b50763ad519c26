"""The mixture of experts: routers, exchanges, and what keeps the load even."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field
from pydantic.dataclasses import dataclass

from jaxscale.config.fields import STRICT, Count, Positive, PositiveRate, Rate, refuse_bool

Router = Literal["softmax", "softmax_kept", "sigmoid"]
Exchange = Literal["capacity", "dropless"]
BalanceScope = Literal["sequence", "microbatch", "step"]


@dataclass(frozen=True, config=STRICT, kw_only=True)
class MoeConfig:
    """Experts in place of a decoder's MLP (docs/experts.md). Their activation is the family's MLP's."""

    experts: Positive
    """Experts a layer, over mesh.expert."""
    top_k: Positive
    """Experts that a token chooses."""
    mlp: Positive | None = None
    """Hidden channels of an expert; null: model.mlp."""
    shared_experts: Count = 0
    """Experts that every token takes beside those it chooses, as one MLP so many times as wide."""
    first_dense: Count = 0
    """Layers at the start that keep their dense MLP."""
    every: Positive = 1
    """Of the layers that follow, the last of every so many has experts, the others are dense."""

    router: Router = "softmax_kept"
    """Weights of the chosen: softmax over all experts (Switch), over the chosen (Mixtral), or sigmoids over
    their sum (DeepSeek-V3)."""
    weight_scale: PositiveRate = 1.0
    """Factor of the weights, no unit."""
    groups: Positive = 1
    """Groups of neighbouring experts; a token chooses among those in `groups_kept` of them (DeepSeek-V3)."""
    groups_kept: Positive = 1
    """Groups that a token may choose from: those whose two best experts score highest together."""
    jitter: Annotated[float, BeforeValidator(refuse_bool), Field(ge=0, lt=1)] = 0.0
    """What routers read is multiplied by random numbers in 1 ± this fraction (Switch: 0.01); not in
    evaluation."""

    exchange: Exchange = "dropless"
    """dropless: every token reaches its experts. capacity: fixed buffers, and what overflows is dropped."""
    capacity_factor: PositiveRate = 1.25
    """Capacity of an expert, in multiples of an even share of a sequence's choices; for capacity alone."""
    eval_capacity_factor: PositiveRate = 2.0
    """As capacity_factor, in multiples of an even share, in evaluation."""
    overflow: Literal["drop", "reroute"] = "drop"
    """What becomes of a choice that an expert has no room for: the residual alone, or the token's next
    choices, as many again as top_k."""
    priority: Literal["position", "probability"] = "position"
    """Which tokens of a sequence find room first: the earlier, or those most sure of their first choice."""

    balance: Literal["none", "loss", "bias", "loss+bias"] = "loss"
    """What keeps the load even: a loss (Switch), a bias of the choice (DeepSeek-V3), both or neither."""
    balance_coef: Rate = 1e-2
    """Factor of the balance loss, no unit; an even load gives exactly this much in each layer."""
    balance_scope: BalanceScope = "sequence"
    """Tokens that loads are fractions of: a sequence's, a microbatch's (microbatches then belong to the
    mathematics), or the step's (with several microbatches, one more forward pass)."""
    z_coef: Rate = 0.0
    """Factor of the z-loss, the mean square of logsumexp of the logits, no unit (ST-MoE: 1e-3)."""
    bias_rate: Rate = 1e-3
    """What an update adds to or takes from an expert's bias, no unit."""
    bias_freeze_tokens: Positive | None = None
    """Tokens of the run after which biases stay; null: never."""

    @property
    def has_loss(self) -> bool:
        return self.balance in ("loss", "loss+bias") and self.balance_coef > 0

    @property
    def has_bias(self) -> bool:
        return self.balance in ("bias", "loss+bias")
