"""What is kept on the device, computed again, or moved to the host's memory."""

from typing import Any, Literal

from pydantic.dataclasses import dataclass

from jaxscale.config.fields import STRICT

RematPolicy = Literal["none", "attention", "matmuls", "full"]


def expand_remat(value: Any) -> Any:
    """`remat: full` is short for {policy: full}."""
    return {"policy": value} if isinstance(value, str) else value


@dataclass(frozen=True, config=STRICT, kw_only=True)
class RematConfig:
    """What the backward pass finds in memory and what it computes again. `remat: full` is short for
    {policy: full}; the lists choose single tensors over the policy, by name (docs/memory.md)."""

    policy: RematPolicy = "none"
    """What is kept: everything; attention's output; the results of matmuls; nothing but each block's input.
    With a list, `none` keeps every tensor that has a name, and what has none is computed again."""
    keep: tuple[str, ...] = ()
    """Tensors kept whatever the policy says."""
    recompute: tuple[str, ...] = ()
    """Tensors computed again whatever the policy says."""
    offload: tuple[str, ...] = ()
    """Tensors kept in the host's memory and fetched by the backward pass."""

    @property
    def lists(self) -> dict[str, tuple[str, ...]]:
        """The names by what happens to them."""
        return {"keep": self.keep, "recompute": self.recompute, "offload": self.offload}

    @property
    def named(self) -> tuple[str, ...]:
        """Every name in a list, in their order."""
        return self.keep + self.recompute + self.offload

    @property
    def is_off(self) -> bool:
        """Whether everything is kept, as without any remat."""
        return self.policy == "none" and not self.named


@dataclass(frozen=True, config=STRICT, kw_only=True)
class OffloadConfig:
    """What a run keeps in the host's pinned memory; updates stream it a layer at a time (ZeRO-Offload)."""

    optimizer_state: bool = False
    """Moments of the optimizer."""
    master_weights: bool = False
    """Parameters as the optimizer keeps them; the weights in use stay on the device."""

    @property
    def is_off(self) -> bool:
        return not (self.optimizer_state or self.master_weights)
