"""What a run reports: one record a step, one an evaluation, now and then one of the load of each expert; each
one line of JSON. The field names are a contract.

A number that is not finite is written as null: JSON has no NaN or infinity, and a string is not a number.
In a step record such a step was skipped and says so in `skipped`. `mfu` is null where no peak is known for
the device.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One optimizer update."""

    kind: str = field(default="step", init=False)
    step: int
    """Updates made so far, this one and skipped ones included: the first is 1."""
    sequences: int
    """Sequences consumed since the start of the run."""
    tokens: int
    """Tokens consumed since the start of the run."""
    loss: float
    """Mean cross-entropy over the step's counted tokens, nats."""
    grad_norm: float
    """Global gradient norm before clipping."""
    lr: float
    """Learning rate of this update."""
    step_seconds: float
    """Wall time of this step."""
    tokens_per_second: float
    """Tokens of this step over its wall time, whole mesh."""
    mfu: float | None
    """Model FLOPs utilisation, 0 to 1, by the convention of `jaxscale.metrics.flops`; None: no peak known."""
    loss_scale: float | None = None
    """Factor of the loss in this step's gradients, fp16 compute; None in every other format."""
    skipped: bool
    """Whether the update was skipped: loss or gradient norm not finite, or no counted token."""
    balance: float | None = None
    """Balance loss without its factor, mean of layers: 1 where the load is even; None, here and below, for a
    model without experts."""
    router_z: float | None = None
    """Square of logsumexp of a router's logits, mean of tokens and layers."""
    router_entropy: float | None = None
    """Entropy of a router's probabilities, nats, mean of tokens and layers."""
    drop_fraction: float | None = None
    """Choices that no expert had room for, of all, 0 to 1."""
    load_max: float | None = None
    """Largest load of an expert in any layer, in multiples of an even share."""
    load_min: float | None = None
    """Smallest load of an expert in any layer, in multiples of an even share."""
    bias_min: float | None = None
    """Smallest bias of the choice after this update; None where the choice goes by none."""
    bias_max: float | None = None
    """Largest bias of the choice after this update; None where the choice goes by none."""

    def to_json(self) -> str:
        """The record as one line of JSON."""
        return _to_line(asdict(self))


OPTIONAL_FIGURES = tuple(each.name for each in fields(StepRecord) if each.default is None)
"""Fields of a step that some runs have."""


@dataclass(frozen=True, kw_only=True)
class EvalRecord:
    """One evaluation on held-out sequences."""

    kind: str = field(default="eval", init=False)
    step: int
    """Updates made before the evaluation."""
    tokens: int
    """Tokens trained on before the evaluation."""
    loss: float
    """Mean cross-entropy over the counted tokens, nats."""
    perplexity: float = field(init=False)
    """exp(loss); not finite where that overflows."""
    counted_tokens: int
    """Validation tokens the loss is a mean over."""

    def __post_init__(self) -> None:
        # exp overflows a double above 709.78
        perplexity = math.exp(self.loss) if not self.loss > 709 else math.inf
        object.__setattr__(self, "perplexity", perplexity)

    def to_json(self) -> str:
        """The record as one line of JSON."""
        return _to_line(asdict(self))


@dataclass(frozen=True, kw_only=True)
class LoadRecord:
    """What each expert had to do in one step."""

    kind: str = field(default="load", init=False)
    step: int
    """Updates made so far, this one included."""
    tokens: int
    """Tokens consumed since the start of the run."""
    load: list[list[float]]
    """Choices that fell on an expert before any was dropped, in multiples of an even share; by layer with
    experts, then by expert."""

    def to_json(self) -> str:
        """The record as one line of JSON, loads to four decimals."""
        load = [[round(share, 4) for share in layer] for layer in self.load]
        return _to_line({**asdict(self), "load": load})


Record = StepRecord | EvalRecord | LoadRecord


def _to_line(values: Mapping[str, Any]) -> str:
    finite = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in values.items()
    }
    return json.dumps(finite, allow_nan=False)
