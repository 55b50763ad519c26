"""The whole step compiles for chips that are not here: the attention kernel in, one reduction over data."""

import jax
import pytest

from jaxscale.config import Config, parse_config
from jaxscale.sharding.collectives import Collective, read_collectives
from jaxscale.training.setup import Setup, make_setup
from tests.chips import describe_gpu, describe_tpu
from tests.test_step import count_gradient_elements

pytestmark = pytest.mark.chips

MESH = {"data": 2, "fsdp": 2, "tensor": 2}


def make_chip_config(**model: object) -> Config:
    return parse_config(
        {
            "run_dir": "unused",
            "steps": 1000,
            "mesh": MESH,
            "batch": {"sequences": 16, "microbatches": 4, "length": 512},
            "model": {
                "family": "llama",
                "layers": 3,
                "embed": 512,
                "heads": 8,
                "kv_heads": 4,
                "head": 128,
                "mlp": 1408,
                "vocab": 8000,
                **model,
            },
            "precision": "bf16",
            "remat": "full",
        },
        origin="test",
    )


def compile_for(mesh: jax.sharding.Mesh, **model: object) -> tuple[Setup, str, list[Collective]]:
    config = make_chip_config(**model)
    assert config.model.vocab is not None
    setup = make_setup(config, mesh, config.model.vocab)
    text = setup.compile_step().as_text()
    return setup, text, read_collectives(text, mesh)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_step_compiles_for_tpu_v5p(family: str) -> None:
    model = {"family": family, "kv_heads": 8, "tied": True} if family == "gpt2" else {}
    setup, text, collectives = compile_for(describe_tpu("v5p:2x2x2", **MESH), **model)
    assert setup.shape.attention == "splash"
    assert "tpu_custom_call" in text, "the attention kernel is not in the program"
    check_reduced_once(setup, collectives)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_step_compiles_for_eight_h100(family: str) -> None:
    model = {"family": family, "kv_heads": 8, "tied": True} if family == "gpt2" else {}
    setup, text, collectives = compile_for(describe_gpu(8, **MESH), **model)
    assert setup.shape.attention == "cudnn"
    assert "__cudnn$fmha" in text, "the attention kernel is not in the program"
    check_reduced_once(setup, collectives)


def check_reduced_once(setup: Setup, collectives: list[Collective]) -> None:
    """Over `data`, outside the microbatch loop, once a step: gradients in fp32, new weights in bf16."""
    over_data = [each for each in collectives if "data" in each.axes and each.elements > 100]
    assert over_data
    assert {each.loop_depth for each in over_data} == {0}
    reductions = [each for each in over_data if each.kind in ("all-reduce", "reduce-scatter")]
    gathers = [each for each in over_data if each not in reductions]
    assert {each.kind for each in gathers} == {"all-gather"}
    assert {dtype for each in reductions for dtype in each.dtypes} == {"f32"}
    assert {dtype for each in gathers for dtype in each.dtypes} == {"bf16"}
    for each in over_data:
        print(each.kind, each.axes, each.elements, each.dtypes, each.name)
    reduced = sum(
        each.elements * (each.group_size if each.kind == "reduce-scatter" else 1) for each in reductions
    )
    assert reduced >= count_gradient_elements(setup)
