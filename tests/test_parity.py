"""The mesh never changes the mathematics: 5 steps in fp32 on 8 devices against one device.

Limits: loss and gradient norm 2e-6 relative, parameters 1e-5 (relative norm a leaf).
"""

from functools import cache
from typing import Any

import numpy as np
import pytest

from tests.tiny import Trace, make_config, relative_errors, run_steps

STEPS = 5
MESHES: dict[str, dict[str, int]] = {
    "data8": {"data": 8},
    "fsdp8": {"fsdp": 8},
    "tensor4_data2": {"tensor": 4, "data": 2},
    "data2_fsdp2_tensor2": {"data": 2, "fsdp": 2, "tensor": 2},
}
GPT2 = {"family": "gpt2", "kv_heads": 8, "tied": True}


@cache
def one_device(family: str) -> Trace:
    return run_steps(make_config(**({"model": GPT2} if family == "gpt2" else {})), STEPS)


def check_parity(family: str, **sections: Any) -> None:
    model = {"model": GPT2} if family == "gpt2" else {}
    trace, reference = run_steps(make_config(**model, **sections), STEPS), one_device(family)
    np.testing.assert_allclose(trace.losses, reference.losses, rtol=2e-6)
    np.testing.assert_allclose(trace.grad_norms, reference.grad_norms, rtol=2e-6)
    errors = relative_errors(trace.params, reference.params)
    if family == "gpt2":
        # A key bias adds one number to all logits of a query, which softmax takes out again: its gradient is
        # zero but for rounding, and Adam makes steps of full size of rounding.
        assert errors.pop("layers/attention/key/bias") < 2
    worst = max(errors, key=errors.__getitem__)
    assert errors[worst] <= 1e-5, f"{worst}: {errors[worst]:.1e}"


@pytest.mark.smoke
@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("mesh", MESHES.values(), ids=MESHES)
def test_any_mesh_and_accumulation_equal_one_device(mesh: dict[str, int], microbatches: int) -> None:
    check_parity("llama", mesh=mesh, batch={"microbatches": microbatches})


def test_gpt2_equals_one_device() -> None:
    check_parity("gpt2", mesh=MESHES["data2_fsdp2_tensor2"], batch={"microbatches": 4})


@pytest.mark.full
@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("mesh", [{"fsdp": 8}, {"data": 2, "fsdp": 2, "tensor": 2}], ids=str)
def test_zero_stages_equal_one_device(mesh: dict[str, int], stage: int, microbatches: int) -> None:
    check_parity("llama", mesh=mesh, zero={"stage": stage}, batch={"microbatches": microbatches})


@pytest.mark.full
@pytest.mark.parametrize("remat", ["full", "matmuls"])
@pytest.mark.parametrize("mesh", [{"data": 2, "expert": 2, "fsdp": 2}, {"expert": 4, "tensor": 2}], ids=str)
def test_expert_axis_and_remat_equal_one_device(mesh: dict[str, int], remat: str) -> None:
    check_parity("gpt2", mesh=mesh, remat=remat, batch={"microbatches": 4})


@pytest.mark.full
def test_gpt2_on_every_mesh_equals_one_device() -> None:
    for mesh in MESHES.values():
        check_parity("gpt2", mesh=mesh)
