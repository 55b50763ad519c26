"""Partition rules fail closed; ZeRO stages are placements."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from jaxscale.config import MeshConfig, UserError, parse_config
from jaxscale.mesh import make_mesh
from jaxscale.models.build import Model, build_decoder, shape_decoder
from jaxscale.sharding.rules import REPLICATED, iterate_leaves, make_specs, match_rules
from jaxscale.sharding.zero import Layouts, plan_layouts, spec_axes

pytestmark = pytest.mark.smoke

SIZES = {"pipe": 1, "data": 1, "fsdp": 2, "expert": 1, "tensor": 4}


def _array(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


SHAPES = {
    "embed": {"table": _array(256, 16)},
    "layers": {"up": {"kernel": _array(2, 16, 64)}},
    "norm": _array(16),
}
RULES = {
    "embed/table": ("vocab", "embed"),
    "layers/up/kernel": ("layers", "embed", "mlp"),
    "norm": ("norm",),
}


def _model(**sizes: Any) -> Model:
    shape = {"family": "llama", "layers": 2, "embed": 64, "heads": 8, "mlp": 128} | sizes
    tree = {"run_dir": "unused", "steps": 1, "batch": {"sequences": 8, "length": 8}, "model": shape}
    return build_decoder(shape_decoder(parse_config(tree, origin="test"), vocab=257, platform="cpu"))


def _refusal(shapes: Any, rules: Any, sizes: Any = SIZES, **strategy: Any) -> str:
    with pytest.raises(UserError) as caught:
        make_specs(shapes, rules, sizes, **strategy)
    return str(caught.value)


# Rules and leaves


def test_each_leaf_is_laid_by_its_rule():
    assert make_specs(SHAPES, RULES, SIZES) == {
        "embed/table": P("tensor", "fsdp"),
        "layers/up/kernel": P("pipe", "fsdp", "tensor"),
        "norm": P(None),
    }


def test_a_star_stands_for_one_segment_and_not_for_several():
    shapes = {"a": {"kernel": _array(16, 4), "deep": {"kernel": _array(16, 4)}}}
    rules = {"*/kernel": ("embed", "mlp"), "a/*/kernel": ("mlp", "embed")}
    assert match_rules(shapes, rules) == {"a/kernel": ("embed", "mlp"), "a/deep/kernel": ("mlp", "embed")}


def test_a_leaf_without_a_rule_is_refused_with_path_and_shape():
    rules = {path: dims for path, dims in RULES.items() if path != "norm"}
    assert "norm (16,): matched by no rule; exactly one rule is needed" in _refusal(SHAPES, rules)


def test_a_rule_without_a_leaf_is_refused_by_its_pattern():
    message = _refusal(SHAPES, RULES | {"lm_hed/table": ("vocab", "embed")})
    assert "rule 'lm_hed/table' matches no parameter" in message


def test_a_leaf_with_two_rules_is_refused_with_both():
    message = _refusal(SHAPES, RULES | {"layers/*/kernel": ("layers", "embed", "mlp")})
    assert "layers/up/kernel (2, 16, 64): matched by 'layers/up/kernel' and 'layers/*/kernel'" in message


def test_a_rule_of_another_rank_is_refused_with_path_shape_and_rule():
    message = _refusal(SHAPES, RULES | {"norm": ("embed", "mlp")})
    assert "norm (16,): rule 'norm' names 2 dims ('embed', 'mlp') for an array of rank 1" in message


def test_an_axis_twice_in_a_leaf_is_refused_with_both_dims():
    message = _refusal(SHAPES, RULES | {"embed/table": ("vocab", "mlp")})
    assert "embed/table (256, 16): dims 'vocab' and 'mlp' both lie over axis 'tensor'" in message


def test_an_unknown_dim_is_refused_with_the_dims_there_are():
    message = _refusal(SHAPES, RULES | {"norm": ("nrom",)})
    assert "norm (16,): dim 'nrom' is not in the strategy; its dims are vocab, " in message


def test_a_strategy_with_an_unknown_axis_is_refused_with_the_axes_there_are():
    strategy = {"vocab": ("model",), "embed": ("fsdp",), "layers": (), "mlp": ("tensor",), "norm": REPLICATED}
    message = _refusal(SHAPES, RULES, strategy=strategy)
    assert "dim 'vocab' lies over 'model'; the mesh axes are pipe, data, fsdp, expert, tensor" in message


# Sizes


def test_a_dim_that_does_not_divide_is_refused_with_both_numbers_and_the_nearest_sizes():
    message = _refusal({"table": _array(250, 16)}, {"table": ("vocab", "embed")})
    assert "table (250, 16): vocab=250 does not divide by tensor=4; 248 and 252 do" in message


def test_a_dim_over_two_axes_divides_by_their_product():
    shapes, rules = {"table": _array(12, 16)}, {"table": ("vocab", "embed")}
    strategy = {"vocab": ("fsdp", "tensor"), "embed": REPLICATED}
    assert "vocab=12 does not divide by fsdp=2 × tensor=4" in _refusal(shapes, rules, strategy=strategy)
    specs = make_specs({"table": _array(16, 16)}, rules, SIZES, strategy)
    assert specs == {"table": P(("fsdp", "tensor"), None)}


def test_two_kv_heads_over_four_devices_are_refused():
    model = _model(kv_heads=2)
    message = _refusal(model.shapes, model.rules)
    assert "layers/attention/key/kernel (2, 64, 2, 8): kv_heads=2 does not divide by tensor=4" in message
    assert "layers/attention/value/kernel" in message


def test_all_problems_come_in_one_message():
    """Six heads, two key/value heads and 250 MLP channels over four devices, embed 63 over two."""
    model = _model(heads=6, kv_heads=2, head=8, embed=63, mlp=250)
    message = _refusal(model.shapes, model.rules)
    for problem in ("heads=6", "kv_heads=2", "mlp=250"):
        assert f" {problem} does not divide by tensor=4" in message
    assert " embed=63 does not divide by fsdp=2" in message
    assert message.startswith(f"the partition rules have {message.count(chr(10))} problem(s)\n")


def test_problems_of_matching_come_in_one_message_too():
    rules = RULES | {"norm": ("embed", "mlp"), "lm_hed": ("vocab",)}
    del rules["embed/table"]
    message = _refusal(SHAPES, rules)
    assert "3 problem(s)" in message
    assert all(part in message for part in ("embed/table", "rank 1", "'lm_hed'"))


@pytest.mark.parametrize(
    ("family", "tied"), [("llama", True), ("llama", False), ("gpt2", True), ("gpt2", False)]
)
def test_the_decoder_rules_cover_every_parameter_exactly(family, tied):
    model = _model(family=family, tied=tied)
    specs = make_specs(model.shapes, model.rules, SIZES)
    assert set(specs) == {path for path, _ in iterate_leaves(model.shapes)}


def test_the_odd_vocabulary_of_gpt2_is_padded_until_it_divides():
    tree = {"run_dir": "unused", "steps": 1, "batch": {"sequences": 8, "length": 8}}
    tree["model"] = {"family": "gpt2", "layers": 1, "embed": 16, "heads": 4, "mlp": 64, "tied": True}
    shape = shape_decoder(parse_config(tree, origin="test"), vocab=50_257, platform="cpu")
    model = build_decoder(shape)
    assert model.shapes["embed"]["table"].shape == (50_304, 16)
    assert make_specs(model.shapes, model.rules, SIZES)["embed/table"] == P("tensor", "fsdp")


# ZeRO stages


def _plan(stage: int, **sizes: int) -> Layouts:
    return plan_layouts(SHAPES, RULES, make_mesh(MeshConfig(**sizes)), stage)


def _table_specs(layouts: Layouts) -> tuple[P, P, P]:
    trees = (layouts.params, layouts.gradients, layouts.moments)
    return tuple(tree["embed"]["table"].spec for tree in trees)


WHOLE, LAID = P("tensor", None), P("tensor", "fsdp")


@pytest.mark.parametrize(
    ("stage", "specs"),
    [
        (0, (WHOLE, WHOLE, WHOLE)),
        (1, (WHOLE, WHOLE, LAID)),
        (2, (WHOLE, LAID, LAID)),
        (3, (LAID, LAID, LAID)),
    ],
)
def test_a_stage_lays_parameters_gradients_and_moments_over_fsdp(stage, specs):
    assert _table_specs(_plan(stage, data=2, fsdp=2, tensor=2)) == specs


def test_the_other_axes_shard_a_leaf_in_every_stage():
    for stage in range(4):
        layouts = _plan(stage, fsdp=4, tensor=2)
        for tree in (layouts.params, layouts.gradients, layouts.moments):
            assert spec_axes(tree["layers"]["up"]["kernel"].spec)[-1] == "tensor"
            assert spec_axes(tree["norm"].spec) == ()


@pytest.mark.parametrize(
    ("stage", "sizes", "axes"),
    [
        (0, {"data": 2, "fsdp": 2, "tensor": 2}, ("data", "fsdp")),
        (1, {"data": 2, "fsdp": 2, "tensor": 2}, ("data", "fsdp")),
        (2, {"data": 2, "fsdp": 2, "tensor": 2}, ("data",)),
        (3, {"data": 2, "fsdp": 2, "expert": 2}, ("data", "expert")),
        (3, {"fsdp": 8}, ()),
        (0, {"tensor": 8}, ()),
    ],
)
def test_gradients_are_reduced_once_over_the_batch_axes_that_they_are_not_laid_over(stage, sizes, axes):
    assert _plan(stage, **sizes).reduction_axes == axes


@pytest.mark.parametrize(
    ("stage", "shards"), [(0, (1, 1, 1)), (1, (1, 1, 8)), (2, (1, 8, 8)), (3, (8, 8, 8))]
)
def test_a_stage_gives_each_device_its_share_of_bytes(stage, shards):
    layouts = plan_layouts(
        {"table": _array(64, 64)}, {"table": ("mlp", "embed")}, make_mesh(MeshConfig(fsdp=8)), stage
    )
    for tree, count in zip((layouts.params, layouts.gradients, layouts.moments), shards, strict=True):
        array = jax.device_put(jnp.zeros((64, 64)), tree["table"])
        assert {shard.data.nbytes for shard in array.addressable_shards} == {64 * 64 * 4 // count}


def test_rules_that_do_not_fit_are_refused_in_every_stage():
    for stage in range(4):
        with pytest.raises(UserError, match="embed=15 does not divide by fsdp=8"):
            plan_layouts(
                {"table": _array(64, 15)}, {"table": ("mlp", "embed")}, make_mesh(MeshConfig(fsdp=8)), stage
            )
