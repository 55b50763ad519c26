"""Everything in fp32, or on request in fp64: what is verified is rules and arithmetic, not rounding."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
from pydantic.dataclasses import dataclass

from jaxscale.config import PrecisionConfig
from jaxscale.models.model import Model, Params


@dataclass(frozen=True, kw_only=True)
class Fp64(PrecisionConfig):
    """Number formats that no configuration can ask for: they are of no use in training."""

    compute: Literal["fp64"] = "fp64"  # type: ignore[assignment]
    params: Literal["fp64"] = "fp64"  # type: ignore[assignment]
    accumulate: Literal["fp64"] = "fp64"  # type: ignore[assignment]
    moments: Literal["fp64"] = "fp64"  # type: ignore[assignment]


def choose_precision(*, fp64: bool) -> PrecisionConfig:
    return Fp64() if fp64 else PrecisionConfig()


@contextmanager
def allow_fp64(*, fp64: bool) -> Iterator[None]:
    """JAX makes fp32 of every fp64 number unless it is told not to."""
    if not fp64:
        yield
        return
    with jax.enable_x64(True):
        yield


def widen_model(model: Model) -> Model:
    """The model with its initial parameters, drawn in fp32 as ever, kept in fp64."""

    def widen(leaf: Any) -> Any:
        return leaf.astype(jnp.float64) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf

    def describe(leaf: Any) -> jax.ShapeDtypeStruct:
        return jax.eval_shape(widen, leaf)

    def init(key: jax.Array) -> Params:
        return jax.tree.map(widen, model.init(key))

    return replace(model, shapes=jax.tree.map(describe, model.shapes), init=init)
