"""Number formats of a run, and the matmul precision that goes with them."""

from contextlib import AbstractContextManager

import jax
import jax.numpy as jnp

from jaxscale.config import PrecisionConfig

DTYPES = {"fp32": jnp.dtype("float32"), "bf16": jnp.dtype("bfloat16")}


def compute_dtype(precision: PrecisionConfig) -> jnp.dtype:
    """Dtype of matmuls and activations."""
    return DTYPES[precision.compute]


def matmul_precision(precision: PrecisionConfig) -> AbstractContextManager:
    """Within it, fp32 matmuls are fp32: TPUs and GPUs otherwise multiply fp32 in bf16 or tf32."""
    return jax.default_matmul_precision("float32" if precision.compute == "fp32" else "default")
