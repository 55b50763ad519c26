"""Experts compiled for chips that are not here: what travels, by which kernels, and in how much memory."""

from functools import cache
from typing import Any

import pytest

from jaxscale.config import parse_config
from jaxscale.training.setup import Compiled, make_setup
from tests.chips import describe_gpu, describe_tpu

pytestmark = pytest.mark.chips

MIXTRAL: dict[str, Any] = {
    "run_dir": "unused",
    "steps": 1000,
    "mesh": {"fsdp": 4, "expert": 4},
    "batch": {"sequences": 16, "length": 2048},
    "model": {
        "family": "llama",
        "layers": 32,
        "embed": 4096,
        "heads": 32,
        "kv_heads": 8,
        "mlp": 14336,
        "rope_theta": 1e6,
    },
    "moe": {"experts": 8, "top_k": 2, "balance_coef": 0.02},
    "precision": "bf16",
    "remat": "full",
}
GIB = 2**30


@cache
def compile_mixtral(exchange: str) -> Compiled:
    config = parse_config({**MIXTRAL, "moe": {**MIXTRAL["moe"], "exchange": exchange}}, origin="test")
    return make_setup(config, describe_tpu("v5p:2x2x4", **MIXTRAL["mesh"]), 32000).compile_step()


@pytest.mark.parametrize("exchange", ["capacity", "dropless"])
def test_mixtral_fits_16_chips_with_less_than_a_peer_takes(exchange: str) -> None:
    """MaxText 0.2.5, same shape and mesh: arguments 32.6 GiB, temporaries 19.6 GiB."""
    memory = compile_mixtral(exchange).memory_analysis()
    print(
        f"{exchange}: arguments {memory.argument_size_in_bytes / GIB:.2f} GiB, "
        f"temporaries {memory.temp_size_in_bytes / GIB:.2f} GiB"
    )
    assert memory.argument_size_in_bytes / GIB == pytest.approx(32.6, abs=0.05)
    assert memory.temp_size_in_bytes / GIB < 19.6


def test_the_tpu_sends_ragged_rows_to_kernels_of_grouped_matmuls() -> None:
    text = compile_mixtral("dropless").as_text()
    assert text.count(" ragged-all-to-all(") + text.count(" ragged-all-to-all-start(") >= 6
    assert " all-to-all(" not in "".join(line for line in text.splitlines() if "experts.py" in line)
    # Three matmuls, in the forward pass and again in the backward pass, and three of each kind of gradient.
    assert text.count('custom_call_target="tpu_custom_call"') >= 12
    assert "gmm" in text


def test_h100_compiles_the_ragged_exchange_too() -> None:
    tree = {
        **MIXTRAL,
        "mesh": {"fsdp": 2, "expert": 4},
        "batch": {"sequences": 8, "length": 512},
        "model": {**MIXTRAL["model"], "layers": 2, "embed": 1024, "heads": 8, "mlp": 2048},
        "moe": {**MIXTRAL["moe"], "exchange": "dropless"},
    }
    setup = make_setup(parse_config(tree, origin="test"), describe_gpu(8, **tree["mesh"]), 32000)
    assert "ragged-all-to-all" in setup.compile_step().as_text()
