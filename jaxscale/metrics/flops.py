"""Model FLOPs and the peak of the device: what MFU is measured against.

Convention: PaLM (Chowdhery 2022, appendix B). A token costs 6·N + 12·L·H·Q·T floating-point operations,
forward and backward: N parameters of matmuls (every kernel and the output head; without the input
embedding, which is a look-up, without norms and biases; of a mixture of experts only what a token uses),
and attention over T positions in L layers of H heads with Q channels, not halved for causal masks.
Recomputation does not count: that would be HFU.
"""

_TERA = 10**12

_TPU = frozenset({"bf16"})
_GPU = frozenset({"bf16", "fp16"})

# Peak dense TFLOP/s of one jax device, by `jax.Device.device_kind`, and the compute formats it holds for.
# fp32 is left out: by default XLA computes fp32 matmuls in bf16 passes on TPU and in TF32 on newer GPUs, so
# there is no one peak to divide by.
_PEAKS: dict[str, tuple[float, frozenset[str]]] = {
    # Google Cloud TPU documentation, "System architecture"; a device of v2, v3 and 7x is one of a chip's
    # two cores.
    "TPU v2": (45 / 2, _TPU),
    "TPU v3": (123 / 2, _TPU),
    "TPU v4": (275, _TPU),
    "TPU v5 lite": (197, _TPU),  # v5e
    "TPU v5e": (197, _TPU),
    "TPU v5": (459, _TPU),  # v5p
    "TPU v5p": (459, _TPU),
    "TPU v6 lite": (918, _TPU),  # v6e, Trillium
    "TPU v6e": (918, _TPU),
    "TPU7x": (2307 / 2, _TPU),  # Ironwood
    # NVIDIA V100 datasheet, 2020: tensor cores take fp16 only; PCIe 112, SXM2 125.
    "Tesla V100-SXM2-16GB": (125, frozenset({"fp16"})),
    "Tesla V100-SXM2-32GB": (125, frozenset({"fp16"})),
    "Tesla V100-PCIE-16GB": (112, frozenset({"fp16"})),
    "Tesla V100-PCIE-32GB": (112, frozenset({"fp16"})),
    # NVIDIA A100 datasheet, 2021.
    "NVIDIA A100-SXM4-40GB": (312, _GPU),
    "NVIDIA A100-SXM4-80GB": (312, _GPU),
    "NVIDIA A100-PCIE-40GB": (312, _GPU),
    "NVIDIA A100 80GB PCIe": (312, _GPU),
    # NVIDIA H100 datasheet, 2023; half of the figures printed there, which are with sparsity.
    "NVIDIA H100 80GB HBM3": (989, _GPU),
    "NVIDIA H100 PCIe": (756, _GPU),
    "NVIDIA H100 NVL": (835, _GPU),
    # NVIDIA H200 datasheet, 2024; SXM; half of the figure printed there, which is with sparsity.
    "NVIDIA H200": (989, _GPU),
    # NVIDIA L4 and L40S datasheets, 2023; half of the figures printed there, which are with sparsity.
    "NVIDIA L4": (121, _GPU),
    "NVIDIA L40S": (362, _GPU),
}

# Peak dense TFLOP/s in fp8, from the same datasheets; devices of the table above that are missing here have
# no fp8 units.
_FP8_PEAKS: dict[str, float] = {
    "TPU7x": 4614 / 2,
    "NVIDIA H100 80GB HBM3": 1979,
    "NVIDIA H100 PCIe": 1513,
    "NVIDIA H100 NVL": 1671,
    "NVIDIA H200": 1979,
    "NVIDIA L4": 242,
    "NVIDIA L40S": 733,
}


def model_flops_per_token(num_matmul_params: int, layers: int, heads: int, head: int, length: int) -> float:
    """Model FLOPs to train on one token: 6·N + 12·L·H·Q·T.

    `num_matmul_params` as this module's docstring counts them, `heads` query heads of `head` channels,
    `length` tokens a sequence. Source: PaLM (Chowdhery 2022), appendix B.
    """
    return 6.0 * num_matmul_params + 12.0 * layers * heads * head * length


def peak_flops_per_second(device_kind: str, compute: str) -> float | None:
    """Peak dense FLOP/s of one jax device in the compute format (`fp8`, `bf16`, `fp16`, `fp32`); None where
    not known.

    `device_kind` as `jax.Device.device_kind` spells it.
    """
    if compute == "fp8":
        return _FP8_PEAKS[device_kind] * _TERA if has_fp8(device_kind) else None
    tera, formats = _PEAKS.get(device_kind, (0.0, frozenset()))
    return tera * _TERA if compute in formats else None


def has_fp8(device_kind: str) -> bool | None:
    """Whether a device multiplies in fp8; None where not known. Otherwise a wider format stands in."""
    if device_kind in _FP8_PEAKS:
        return True
    return False if device_kind in _PEAKS or device_kind == "cpu" else None


def model_flops_utilisation(
    tokens_per_second: float, flops_per_token: float, *, devices: int, device_kind: str, compute: str
) -> float | None:
    """MFU, 0 to 1: model FLOPs of the whole mesh's tokens over the peak of its devices; None where not
    known."""
    peak = peak_flops_per_second(device_kind, compute)
    return None if peak is None else tokens_per_second * flops_per_token / (devices * peak)
