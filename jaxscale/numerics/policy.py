"""Number formats of a run, and the matmul precision that goes with them."""

from contextlib import AbstractContextManager

import jax
import jax.numpy as jnp

from jaxscale.config import PrecisionConfig

# fp64 is for `jaxscale verify --fp64` alone: no configuration offers it.
DTYPES: dict[str, jnp.dtype] = {
    "fp64": jnp.dtype("float64"),
    "fp32": jnp.dtype("float32"),
    "bf16": jnp.dtype("bfloat16"),
    "fp16": jnp.dtype("float16"),
}
_MATMUL_FORMATS = {"fp8": "bf16"}  # formats of matmuls' operands alone, and what all else is then computed in


def compute_dtype(precision: PrecisionConfig) -> jnp.dtype:
    """Dtype of activations, and of matmuls unless they are in fp8."""
    return DTYPES[_MATMUL_FORMATS.get(precision.compute, precision.compute)]


def matmul_precision(precision: PrecisionConfig) -> AbstractContextManager:
    """Within it, fp32 matmuls are fp32: TPUs and GPUs otherwise multiply fp32 in bf16 or tf32."""
    is_narrow = compute_dtype(precision).itemsize < 4
    return jax.default_matmul_precision("default" if is_narrow else "float32")


def widen(dtype: jnp.dtype) -> jnp.dtype:
    """At least fp32: what statistics, sums and losses are computed in, whatever the compute format."""
    return jnp.promote_types(dtype, jnp.float32)
