"""The optimizer's section: which optimizer, the fields that it reads, and the learning-rate schedule."""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import model_validator
from pydantic.dataclasses import dataclass
from pydantic_core import ArgsKwargs, PydanticCustomError

from jaxscale.config.errors import UserError
from jaxscale.config.fields import STRICT, Count, Decay, Fraction, Positive, PositiveRate, Rate

OptimizerName = Literal["adamw", "adafactor", "lion", "sgd", "muon", "python"]

_ADAM = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8}

# What each optimizer reads, and the value of a field that is left out.
READ_FIELDS: Mapping[str, Mapping[str, Any]] = {
    "adamw": {"weight_decay": 0.1, **_ADAM},
    "adafactor": {
        "weight_decay": 0.1,
        "beta1": 0.0,
        "eps": 1e-30,
        "decay_exponent": 0.8,
        "clip_rms": 1.0,
        "min_factored": 128,
        "scale_by_parameter": True,
    },
    "lion": {"weight_decay": 0.1, "beta1": 0.9, "beta2": 0.99},
    "sgd": {"weight_decay": 0.1, "momentum": 0.9, "nesterov": False},
    "muon": {
        "weight_decay": 0.1,
        **_ADAM,
        "momentum": 0.95,
        "nesterov": True,
        "ns_steps": 5,
        "adamw_lr_ratio": 1.0,
    },
    # It may bring a rate and a schedule of its own, which the run's then leave alone.
    "python": {"peak_lr": 1.0, "schedule": "constant"},
}
_SHARED_FIELDS = frozenset(READ_FIELDS["python"])
_OWN_FIELDS = frozenset(field for fields in READ_FIELDS.values() for field in fields) - _SHARED_FIELDS


@dataclass(frozen=True, config=STRICT, kw_only=True)
class OptimizerConfig:
    """The optimizer and its learning-rate schedule; schedules count tokens.

    From `weight_decay` on, a field that the optimizer reads and that is left out gets the optimizer's own
    value; a field that it does not read is null, and an error if it is given (`READ_FIELDS`).
    """

    name: OptimizerName = "adamw"
    """adamw, adafactor, lion, sgd, muon (matrices; AdamW for the rest), or python: one that comes from
    Python, `jaxscale.Trainer(optimizer=...)`, whose updates are multiplied by the rate."""
    peak_lr: Rate = 3e-4
    """Learning rate after warm-up, per update; python: 1 if left out, and a constant schedule."""
    schedule: Literal["constant", "cosine", "wsd"] = "cosine"
    """After warm-up: constant; cosine to the end; or warm-up, stable, linear decay."""
    warmup_tokens: Count = 0
    """Tokens over which the rate rises linearly from 0 to peak_lr."""
    final_lr_fraction: Fraction = 0.1
    """Rate at the end of cosine or wsd, as a fraction of peak_lr."""
    decay_fraction: Fraction = 0.2
    """Fraction of the run's tokens over which wsd decays."""
    clip_norm: PositiveRate | None = 1.0
    """Largest global gradient norm; null: no clipping."""
    weight_decay: Rate | None = None
    """Decoupled weight decay of matrices (not norms or biases), per unit of learning rate."""
    beta1: Decay | None = None
    """adamw, lion, muon's AdamW: decay of the first moment, per update; adafactor: of the running mean of
    updates, 0 keeps none."""
    beta2: Decay | None = None
    """adamw, muon's AdamW: decay of the second moment, per update; lion: of the momentum."""
    eps: PositiveRate | None = None
    """No unit. adamw, muon's AdamW: added to the root of the second moment; adafactor: to the squared
    gradient."""
    momentum: Decay | None = None
    """sgd, muon: decay of the sum of gradients, per update; sgd with 0 keeps none."""
    nesterov: bool | None = None
    """sgd, muon: look one update ahead."""
    ns_steps: Positive | None = None
    """muon: Newton-Schulz iterations per update."""
    adamw_lr_ratio: Rate | None = None
    """muon: learning rate of AdamW for the rest, as a fraction of that of the matrices (it may be more)."""
    decay_exponent: PositiveRate | None = None
    """adafactor: second moments decay by 1 - t^-decay_exponent at update t, from 1; no unit."""
    clip_rms: PositiveRate | None = None
    """adafactor: largest root mean square of a matrix's update, before its scale; no unit."""
    min_factored: Positive | None = None
    """adafactor: channels from which on a matrix's shorter side makes it keep factored second moments."""
    scale_by_parameter: bool | None = None
    """adafactor: scale an update by the root mean square of its parameter (at least 1e-3)."""

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, given: Any) -> Any:
        """Fills in what the optimizer reads and refuses what it does not."""
        fields = (given.kwargs or {}) if isinstance(given, ArgsKwargs) else given
        if not isinstance(fields, Mapping):  # an OptimizerConfig already, or no section at all
            return given
        name = fields.get("name", "adamw")
        reads = READ_FIELDS.get(name) if isinstance(name, str) else None
        if reads is None:  # the name itself is wrong, which is said by its own field
            return given
        said = {
            field: value for field, value in fields.items() if value is not None or field not in _OWN_FIELDS
        }
        unread = [
            _word_unread(name, field, said[field]) for field in said if field in _OWN_FIELDS - reads.keys()
        ]
        if unread:
            raise PydanticCustomError("unread_field", "{problems}", {"problems": "\n".join(unread)})
        complete = {**reads, **said}
        return ArgsKwargs(given.args, complete) if isinstance(given, ArgsKwargs) else complete

    @property
    def settings(self) -> dict[str, Any]:
        """The fields that only some optimizers have, those that this one reads."""
        return {field: getattr(self, field) for field in READ_FIELDS[self.name]}


def _word_unread(name: str, field: str, value: Any) -> str:
    readers = [reader for reader, fields in READ_FIELDS.items() if field in fields]
    does = "it does" if len(readers) == 1 else "they do"
    remedy = f"set optimizer.name={' or '.join(readers)} ({does})"
    return f"{field}: {value!r}: {name} does not read it; leave it out, or {remedy}"


def check_origin(config: OptimizerConfig, *, is_given: bool) -> None:
    """Whether an optimizer that comes from Python is one that the configuration speaks of.

    Raises:
      UserError: only one of them does.
    """
    if is_given and config.name != "python":
        raise UserError(
            f"optimizer.name is {config.name}, and another optimizer comes from Python: set "
            "optimizer.name=python and give its settings in Python, or leave out Trainer(optimizer=...)"
        )
    if not is_given and config.name == "python":
        raise UserError(
            "optimizer.name is python, and no optimizer comes from Python: give one to "
            "jaxscale.Trainer(..., optimizer=...), or choose one by name such as optimizer.name=adamw"
        )
