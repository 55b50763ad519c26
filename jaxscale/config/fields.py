"""Kinds of configuration fields that several sections share."""

import math
from decimal import Decimal, InvalidOperation
from typing import Annotated, Any

from pydantic import BeforeValidator, ConfigDict, Field

STRICT = ConfigDict(extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

_MULTIPLES = {"k": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


def refuse_bool(value: Any) -> Any:
    """YAML's true and false are numbers to Python, and never meant as such."""
    if isinstance(value, bool):
        raise ValueError("a number is needed here, not true or false")
    return value


def parse_count(value: Any) -> Any:
    """Reads `100k`, `2.5M`, `3B` or `1e6` as a whole number."""
    refuse_bool(value)
    if isinstance(value, str) and value[-1:] in _MULTIPLES:
        try:
            value = Decimal(value[:-1]) * _MULTIPLES[value[-1]]  # as a float, 1.001k is no whole number
        except InvalidOperation:
            raise ValueError("a count is a whole number, or a number followed by k, M, B or T") from None
    if isinstance(value, float | Decimal):
        if not math.isfinite(value) or value != int(value):
            raise ValueError("a count is a whole number")
        return int(value)
    return value


Count = Annotated[int, BeforeValidator(parse_count), Field(ge=0)]
Positive = Annotated[int, BeforeValidator(parse_count), Field(gt=0)]
Rate = Annotated[float, BeforeValidator(refuse_bool), Field(ge=0)]
PositiveRate = Annotated[float, BeforeValidator(refuse_bool), Field(gt=0)]
Fraction = Annotated[float, BeforeValidator(refuse_bool), Field(ge=0, le=1)]
Decay = Annotated[float, BeforeValidator(refuse_bool), Field(ge=0, lt=1)]
