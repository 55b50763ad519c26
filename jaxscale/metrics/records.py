"""What a run reports: one record a step, one an evaluation, each one line of JSON. The field names are a
contract.

A number that is not finite is written as null: JSON has no NaN or infinity, and a string is not a number.
In a step record such a step was skipped and says so in `skipped`. `mfu` is null where no peak is known for
the device.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
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

    def to_json(self) -> str:
        """The record as one line of JSON."""
        return _to_line(asdict(self))


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


def _to_line(values: Mapping[str, Any]) -> str:
    finite = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in values.items()
    }
    return json.dumps(finite, allow_nan=False)
