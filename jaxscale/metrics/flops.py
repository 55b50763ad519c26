"""Model FLOPs and the peak of the device: what MFU is measured against.

Convention: PaLM (Chowdhery 2022, appendix B). A token costs 6·N + 12·L·H·Q·T floating-point operations,
forward and backward: N parameters of matmuls (every kernel and the output head; without the input
embedding, which is a look-up, without norms and biases; of a mixture of experts only what a token uses),
and attention over T positions in L layers of H heads with Q channels, not halved for causal masks.
Recomputation does not count: that would be HFU.

Peaks come from `jaxscale/metrics/chips.yaml`.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxscale.metrics.chips import Chip


def model_flops_per_token(num_matmul_params: int, layers: int, heads: int, head: int, length: int) -> float:
    """Model FLOPs to train on one token: 6·N + 12·L·H·Q·T.

    `num_matmul_params` as this module's docstring counts them, `heads` query heads of `head` channels,
    `length` tokens a sequence. Source: PaLM (Chowdhery 2022), appendix B.
    """
    return 6.0 * num_matmul_params + 12.0 * layers * heads * head * length


def peak_flops_per_second(device_kind: str, compute: str) -> float | None:
    """Peak dense FLOP/s of one jax device in the compute format (`fp8`, `bf16`, `fp16`, `fp32`); None where
    not known.

    `device_kind` as `jax.Device.device_kind` spells it. There is no one peak of fp32 to divide by: by default
    XLA computes fp32 matmuls in bf16 passes on TPU and in TF32 on newer GPUs.
    """
    chip = _find_chip(device_kind)
    return None if chip is None or compute == "fp32" else chip.find_peak(compute)


def has_fp8(device_kind: str) -> bool | None:
    """Whether a device multiplies in fp8; None where not known. Otherwise a wider format stands in."""
    chip = _find_chip(device_kind)
    return None if chip is None else chip.find_peak("fp8") is not None


def _find_chip(device_kind: str) -> "Chip | None":
    from jaxscale.metrics.chips import find_device_kind  # lazily: it reads a file

    return find_device_kind(device_kind)


def model_flops_utilisation(
    tokens_per_second: float, flops_per_token: float, *, devices: int, device_kind: str, compute: str
) -> float | None:
    """MFU, 0 to 1: model FLOPs of the whole mesh's tokens over the peak of its devices; None where not
    known."""
    peak = peak_flops_per_second(device_kind, compute)
    return None if peak is None else tokens_per_second * flops_per_token / (devices * peak)
