"""Partition rules fail closed: every way to be wrong is refused, all at once; ZeRO stages are placements."""

import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxscale.config import MeshConfig, UserError, parse_config
from jaxscale.mesh import make_mesh
from jaxscale.models.build import build_decoder, shape_decoder
from jaxscale.models.model import Model
from jaxscale.sharding.rules import (
    PARAMETER_STRATEGY,
    REPLICATED,
    Leaf,
    Rules,
    iterate_leaves,
    lay_leaves,
    raise_problems,
)
from jaxscale.sharding.zero import Layouts, spec_axes
from tests.tiny import plan_layouts

pytestmark = pytest.mark.smoke

SIZES = {"pipe": 1, "data": 1, "fsdp": 2, "expert": 1, "tensor": 4}
ALL_SIZES = "pipe=1 data=1 fsdp=2 expert=1 tensor=4"


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


def _find_problems(shapes: Any, rules: Any, sizes: Any = SIZES, **strategy: Any) -> list[str]:
    """Every problem, with the axes of some dims changed by `dim=axes`."""
    return lay_leaves(shapes, rules, sizes, {**PARAMETER_STRATEGY, **strategy})[1]


def _lay(shapes: Any, rules: Any, **strategy: Any) -> dict[str, P]:
    leaves, problems = lay_leaves(shapes, Rules(rules), SIZES, {**PARAMETER_STRATEGY, **strategy})
    assert problems == []
    return {path: leaf.spec for path, leaf in leaves.items()}


# What rules mean


def test_each_leaf_is_laid_by_its_rule():
    assert _lay(SHAPES, RULES) == {
        "embed/table": P("tensor", "fsdp"),
        "layers/up/kernel": P("pipe", "fsdp", "tensor"),
        "norm": P(None),
    }


@pytest.mark.parametrize(
    "changed",
    [{"layers/*/kernel": ("layers", "embed", "mlp")}, {"layers/up/kernel": ("mlp", "embed", "layers")}],
)
def test_a_leaf_with_a_problem_is_not_laid(changed):
    leaves, problems = lay_leaves(SHAPES, Rules(RULES | changed), SIZES)
    assert len(problems) == 1
    assert list(leaves) == ["embed/table", "norm"]


def test_a_leaf_tells_its_shape_its_rule_and_its_dims():
    rules = {
        "embed/*": RULES["embed/table"],
        "layers/*/kernel": RULES["layers/up/kernel"],
        "norm": REPLICATED,
    }
    leaves, problems = lay_leaves(SHAPES, Rules(rules), SIZES)
    assert problems == []
    assert list(leaves) == [path for path, _ in iterate_leaves(SHAPES)]
    assert leaves["embed/table"] == Leaf(
        "embed/table",
        (256, 16),
        np.dtype(np.float32),
        "embed/*",
        ("vocab", "embed"),
        P("tensor", "fsdp"),
    )
    assert leaves["norm"].dims == ("replicated",)


def test_a_star_stands_for_one_segment_and_not_for_several():
    shapes = {"a": {"kernel": _array(16, 4), "deep": {"kernel": _array(16, 4)}}}
    rules = {"*/kernel": ("embed", "mlp"), "a/*/kernel": ("mlp", "embed")}
    assert _lay(shapes, rules) == {"a/kernel": P("fsdp", "tensor"), "a/deep/kernel": P("tensor", "fsdp")}


def test_a_star_stands_for_part_of_a_segment_and_other_characters_for_themselves():
    shapes = {"layers_0": _array(16), "layers_1": _array(16), "block.2": _array(16), "block(2)": _array(16)}
    rules = {"layers_*": ("embed",), "block.2": ("norm",), "block(2)": ("mlp",)}
    assert _lay(shapes, rules) == {
        "layers_0": P("fsdp"),
        "layers_1": P("fsdp"),
        "block.2": P(None),
        "block(2)": P("tensor"),
    }


def test_replication_by_name_fits_every_rank_and_an_empty_tuple_only_a_scalar():
    shapes = {"a": _array(2, 3, 5), "b": _array(7), "c": _array()}
    leaves, problems = lay_leaves(shapes, Rules(dict.fromkeys("abc", REPLICATED)), SIZES)
    assert problems == []
    assert [leaf.spec for leaf in leaves.values()] == [P(None, None, None), P(None), P()]
    assert _lay({"c": _array()}, {"c": ()}) == {"c": P()}
    (problem,) = _find_problems({"b": _array(7)}, Rules({"b": ()}))
    assert "rule 'b': () names 0 dim(s) for an array of rank 1" in problem
    assert "REPLICATED" in problem
    assert repr(REPLICATED) == "REPLICATED"


def test_several_axes_of_a_dim_are_laid_in_their_order():
    shapes, rules = {"table": _array(16, 16)}, {"table": ("vocab", "embed")}
    assert _lay(shapes, rules, vocab=("fsdp", "tensor"), embed=REPLICATED) == {
        "table": P(("fsdp", "tensor"), None)
    }
    assert _lay(shapes, rules, vocab=("tensor", "fsdp"), embed=()) == {"table": P(("tensor", "fsdp"), None)}


def test_a_layout_does_not_depend_on_the_sizes_of_the_axes():
    leaves, problems = lay_leaves(SHAPES, Rules(RULES), dict.fromkeys(SIZES, 1))
    assert problems == []
    assert {path: leaf.spec for path, leaf in leaves.items()} == _lay(SHAPES, RULES)


# Every way to be wrong: what is changed, and what the one problem (or the one among others) has to say

KERNEL = "layers/up/kernel (2, 16, 64) float32"
KERNEL_RULE = f"{KERNEL}, rule 'layers/up/kernel': ('layers', 'embed', 'mlp')"

# name: (rules added, strategy changed, what the problem says). A rule of None is taken out.
VIOLATIONS: dict[str, tuple[dict[Any, Any], dict[str, Any], tuple[str, ...]]] = {
    # One rule for a parameter
    "no rule": (
        {"norm": None},
        {},
        (
            "norm (16,) float32 has no rule",
            "'norm': ('embed',)",
            "64 bytes on each of 8 devices (fsdp=2 tensor=4)",
        ),
    ),
    "no rule but a mistyped one": (
        {"embed/table": None, "embed/tabel": ("vocab", "embed")},
        {},
        (
            "embed/table (256, 16) float32 has no rule; did you mean 'embed/tabel': ('vocab', 'embed') for",
            "16,384 bytes on each of 8 devices",
        ),
    ),
    "two rules": (
        {"layers/*/kernel": ("layers", "embed", "mlp")},
        {},
        (
            "2 rules match one parameter, where exactly one may",
            "one may: 'layers/up/kernel': ('layers', 'embed', 'mlp') and 'layers/*/kernel': ('layers', ",
            f"\n    {KERNEL}",
        ),
    ),
    # One parameter for a rule
    "a rule of nothing": (
        {"lm_hed": ("vocab", "embed")},
        {},
        ("rule 'lm_hed': ('vocab', 'embed') matches no parameter; remove it",),
    ),
    "a rule of nothing near a bare parameter": (
        {"embed/table": None, "embed/tabel": ("vocab", "embed")},
        {},
        ("rule 'embed/tabel': ('vocab', 'embed') matches no parameter; did you mean 'embed/table'?",),
    ),
    "a rule of nothing near a ruled parameter": (
        {"layers/upp/kernel": ("layers", "embed", "mlp")},
        {},
        ("matches no parameter; the nearest parameter 'layers/up/kernel' has the rule 'layers/up/kernel'",),
    ),
    "too many segments": (
        {"params/layers/up/kernel": REPLICATED},
        {},
        (
            "rule 'params/layers/up/kernel': REPLICATED can never match: it has 4 segments, and no parameter "
            "has more than 3",
        ),
    ),
    "an empty segment": (
        {"layers//kernel": ("mlp",)},
        {},
        ("rule 'layers//kernel': ('mlp',): can never match", "write 'layers/kernel'"),
    ),
    "a slash before": ({"/embed/table": ("vocab", "embed")}, {}, ("can never match", "write 'embed/table'")),
    "a slash behind": ({"embed/": ("vocab",)}, {}, ("can never match", "write 'embed'")),
    "an empty pattern": ({"": ("vocab",)}, {}, ("rule '': ('vocab',): can never match", "'embed/table'")),
    "a pattern that is no text": ({7: ("vocab",)}, {}, ("rule 7: ('vocab',): the pattern is 7, not text",)),
    "two stars": (
        {"layers/**": ("mlp",)},
        {},
        ("rule 'layers/**': ('mlp',): '**' does not stand for several segments; write '*' for each segment",),
    ),
    "any characters": (
        {"layers/.*/bias": ("mlp",)},
        {},
        (
            "rule 'layers/.*/bias': ('mlp',) can never match: this is no regular expression (.*)",
            "write 'layers/*/bias'",
        ),
    ),
    "an end of text": ({"kernel$": ("mlp",)}, {}, ("can never match: this is no regular expression ($)",)),
    "an alternative": (
        {"layers/(up|down)/bias": ("mlp",)},
        {},
        ("no regular expression (( | )), and the only wildcard is '*'", "write one rule for each path"),
    ),
    # Dims
    "a rank too low": (
        {"layers/up/kernel": ("embed", "mlp")},
        {},
        (
            "rule 'layers/up/kernel': ('embed', 'mlp') names 2 dim(s) for an array of rank 3; name 3",
            "each of 8 devices (fsdp=2 tensor=4)",
            f"\n    {KERNEL}, rule",
        ),
    ),
    "a rank too high": (
        {"norm": ("embed", "mlp")},
        {},
        (
            "names 2 dim(s) for an array of rank 1; name 1, by the sizes perhaps ('embed',)",
            "norm (16,) float32",
        ),
    ),
    "a dim of no name": (
        {"embed/table": ("vocab", None)},
        {},
        (
            "rule 'embed/table': ('vocab', None): entry 1 of the dims is None, not a name",
            "strategy.NAME=replicated",
            "\n    embed/table (256, 16) float32",
        ),
    ),
    "a dim that is a number": (
        {"embed/table": (0, "embed")},
        {},
        ("entry 0 of the dims is 0, not a name", "\n    embed/table (256, 16) float32"),
    ),
    "a dim that is a list": (
        {"embed/table": (["fsdp"], "embed")},
        {},
        ("entry 0 of the dims is ['fsdp'], not",),
    ),
    "a dim of no letters": ({"embed/table": ("", "embed")}, {}, ("entry 0 of the dims is '', not a name",)),
    "dims that are text": (
        {"norm": ("norm")},
        {},
        ("rule 'norm': 'norm': the dims are the text", "write ('norm',)"),
    ),
    "dims that are axes": ({"norm": P("fsdp")}, {}, ("not a tuple of names", "axes belong in the strategy")),
    "dims that are nothing": ({"norm": 0}, {}, ("the dims are 0, not a tuple of names", "REPLICATED")),
    "an unknown dim": (
        {"norm": ("nrom",)},
        {},
        (
            "dim 'nrom' is not in the strategy; did you mean 'norm'?",
            "strategy.nrom=replicated",
            ALL_SIZES,
            "\n    norm (16,) float32, rule 'norm': ('nrom',)",
        ),
    ),
    "an unknown dim like no other": ({"norm": ("zzz",)}, {}, ("its dims are vocab, positions, embed",)),
    # The strategy
    "an unknown axis": (
        {},
        {"mlp": ("tensr",)},
        (
            f"strategy.mlp: the mesh has no axis 'tensr'; did you mean 'tensor'? Its axes are {ALL_SIZES}",
            f"\n    {KERNEL_RULE}",
        ),
    ),
    "an unknown axis of a dim that no parameter has": (
        {},
        {"experts": ("model",)},
        (f"strategy.experts: the mesh has no axis 'model'. Its axes are {ALL_SIZES}; replicated",),
    ),
    "an axis that is no name": ({}, {"mlp": (None,)}, ("strategy.mlp: the mesh has no axis None",)),
    "an axis that is a list": (
        {},
        {"mlp": (["tensor"],)},
        ("strategy.mlp: the mesh has no axis ['tensor']",),
    ),
    "axes that are text": ({}, {"mlp": "tensor"}, ("strategy.mlp: 'tensor' is text", "write ('tensor',)")),
    "axes that are nothing": ({}, {"mlp": None}, ("strategy.mlp: None is not a tuple of axes", "REPLICATED")),
    "an axis twice in a dim": (
        {},
        {"mlp": ("tensor", "tensor")},
        ("strategy.mlp: names the axis tensor=4 twice", f"\n    {KERNEL_RULE}"),
    ),
    "a strategy for no dim": (
        {},
        {"mpl": ("tensor",)},
        ("strategy.mpl: no rule has a dim 'mpl', so ('tensor',) lays nothing; did you mean 'mlp'?",),
    ),
    "two dims on an axis": (
        {"embed/table": ("vocab", "mlp")},
        {},
        (
            "dims 'vocab' and 'mlp' of one array both lie over axis tensor=4; say strategy.mlp=replicated, "
            "or lay it over a free axis (fsdp=2)",
            "\n    embed/table (256, 16) float32, rule",
        ),
    ),
    "two dims on an axis of size 1": (
        {"embed/table": ("layers", "stages")},
        {"stages": ("pipe",)},
        ("dims 'layers' and 'stages' of one array both lie over axis pipe=1",),
    ),
    "a dim twice": (
        {"embed/table": ("embed", "embed")},
        {},
        ("dim 'embed' stands twice in one rule, and both lie over axis fsdp=2", "another name"),
    ),
    # Sizes
    "a size": (
        {"layers/up/kernel": ("layers", "embed", "odd")},
        {"odd": ("three",)},
        (
            "odd=64 does not divide by three=3; 63 and 66 do, or three may be 1, 2, 4, 8, 16 or 32",
            "\n    layers/up",
        ),
    ),
    "a size smaller than its axis": (
        {"layers/up/kernel": ("stages", "embed", "mlp")},
        {"stages": ("tensor",), "mlp": REPLICATED},
        ("stages=2 does not divide by tensor=4; 4 does, or tensor may be 1 or 2", "\n    layers/up/kernel"),
    ),
    "a size over two axes": (
        {"layers/up/kernel": ("layers", "embed", "mlp"), "norm": ("embed",)},
        {"embed": ("three", "tensor"), "mlp": REPLICATED, "vocab": REPLICATED},
        (
            "embed=16 does not divide by three=3 × tensor=4; 12 and 24 do, or three × tensor may be 1, 2, 4",
            "\n    embed/table",
            "\n    layers/up/kernel",
            "\n    norm (16,) float32, rule 'norm': ('embed',)",
        ),
    ),
}


def _violate(name: str) -> list[str]:
    added, strategy, _ = VIOLATIONS[name]
    rules = {pattern: dims for pattern, dims in (RULES | added).items() if (pattern, dims) != (pattern, None)}
    sizes = SIZES | ({"three": 3} if "three" in str(strategy) else {})
    return _find_problems(SHAPES, Rules(rules), sizes, **strategy)


@pytest.mark.parametrize("name", VIOLATIONS)
def test_a_violation_is_refused_with_what_it_is_about_and_the_nearest_legal_choice(name):
    problems, said = _violate(name), VIOLATIONS[name][2]
    assert [problem for problem in problems if all(part in problem for part in said)], "\n".join(problems)
    with pytest.raises(UserError):
        raise_problems(problems)


@pytest.mark.parametrize(
    "name", [name for name in VIOLATIONS if "no rule" not in name and "bare" not in name]
)
def test_a_violation_is_one_problem(name):
    """No second problem is made up from the first; a missing and a mistyped rule are two by nature."""
    assert len(_violate(name)) == 1, "\n".join(_violate(name))


# Everything at once


def test_all_kinds_of_problems_come_in_one_message():
    shapes = {
        **SHAPES,
        "head": {"table": _array(256, 16)},
        "odd": {"kernel": _array(30, 17)},
        "pair": _array(16, 16),
        "flat": _array(16),
    }
    rules = {
        "embed/table": ("vocab", None),
        "hed/table": ("vocab", "embed"),
        "layers/up/kernel": ("layers", "embed", "mlp"),
        "layers/*/kernel": ("layers", "embed", "mlp"),
        "norm": ("embed", "mlp"),
        "odd/kernel": ("mlp", "embed"),
        "pair": ("vocab", "mlp"),
        "flat": ("nrom",),
        "/norm": ("norm",),
        "odd/.*": ("mlp",),
        "a/b/c/d": ("mlp",),
    }
    strategy = {"experts": ("expret",), "positions": ("tensor", "tensor"), "mpl": ("fsdp",)}
    problems = _find_problems(shapes, Rules(rules), **strategy)
    with pytest.raises(UserError) as caught:
        raise_problems(["batch.sequences=3 does not fit", *problems])
    message = str(caught.value)
    each = (
        "batch.sequences=3",
        "entry 1 of the dims is None",
        "rule '/norm'",
        "no axis 'expret'",
        "strategy.positions: names the axis tensor=4 twice",
        "strategy.mpl",
        "rule 'hed/table': ('vocab', 'embed') matches no parameter",
        "no regular expression (.*)",
        "it has 4 segments",
        "head/table (256, 16) float32 has no rule",
        "2 rules match one parameter",
        "for an array of rank 1",
        "mlp=30 does not divide by tensor=4",
        "embed=17 does not divide by fsdp=2",
        "dims 'vocab' and 'mlp'",
        "dim 'nrom'",
    )
    lines = message.splitlines()
    assert lines[0] == f"the model, its rules and the mesh have {len(each)} problem(s)"
    heads = [line for line in lines[1:] if line.startswith("  ") and not line.startswith("   ")]
    assert len(heads) == len(each), "one line a problem, and its parameters deeper below it"
    for part in each:
        assert sum(part in line for line in heads) == 1, part


def test_what_is_wrong_with_a_rule_is_not_lost_when_its_table_is_extended():
    base = Rules({"embed/table": P("tensor", "fsdp"), "norm": "norm"})
    extended = Rules({**base, "layers/up/kernel": ("layers", "embed", "mlp")})
    assert len(_find_problems(SHAPES, extended)) == 2


def test_dims_are_guessed_by_their_sizes_and_a_name_in_the_rule_goes_first():
    shapes = dict.fromkeys("abc", _array(16))
    rules = {"a": ("embed",), "b": ("norm",), "c": ("norm", "mlp")}
    (problem,) = _find_problems(shapes, Rules(rules))
    assert "name 1, by the sizes perhaps ('norm',)" in problem


def test_a_table_is_checked_like_its_rules():
    broken = RULES | {"norm": ("norm", None), "x": ("mlp",)}
    assert _find_problems(SHAPES, broken) == _find_problems(SHAPES, Rules(broken)) != []
    with pytest.raises(UserError, match="rules are a table"):
        Rules([("norm", ("norm",))])


def test_two_parameters_of_one_path_are_refused():
    (problem,) = _find_problems({"a/b": _array(16), "a": {"b": _array(16)}}, Rules({"a/b": ("embed",)}))
    assert problem.startswith("two parameters have the path 'a/b'")


def test_no_problem_raises_nothing():
    raise_problems([])


def test_leaves_that_share_a_problem_are_listed_under_it_with_shape_and_rule():
    names = [f"block_{number}/{name}" for number in range(4) for name in ("key", "value")]
    shapes = {f"block_{number}": {name: _array(16, 2, 8) for name in ("key", "value")} for number in range(4)}
    rule = ("embed", "kv_heads", "head")
    (problem,) = _find_problems(shapes, Rules({"block_*/key": rule, "block_*/value": rule}))
    head, *places = problem.splitlines()
    assert head == "kv_heads=2 does not divide by tensor=4; 4 does, or tensor may be 1 or 2"
    assert places == [
        f"    {name} (16, 2, 8) float32, rule 'block_*/{name.partition('/')[2]}': {rule}" for name in names
    ]


def test_a_thousand_mistyped_rules_are_answered_in_seconds():
    """Comparing every name with every other letter by letter took over half a minute."""
    paths = [f"layers_{number}/{name}" for number in range(100) for name in ("key", "query", "up", "down")]
    shapes: dict[str, Any] = {}
    for path in paths:
        layer, _, name = path.partition("/")
        shapes.setdefault(layer, {})[name] = {"kernel": _array(16, 16)}
    rules = Rules({f"{path}/kernal": ("embed", "mlp") for path in paths})
    start = time.process_time()
    problems = _find_problems(shapes, rules)
    assert len(problems) == 2 * len(paths)
    assert "did you mean 'layers_7/up/kernel'" in "".join(problems)
    assert time.process_time() - start < 8


# The decoder


def test_two_kv_heads_over_four_devices_are_refused():
    model = _model(kv_heads=2)
    (problem,) = _find_problems(model.shapes, model.rules)
    assert problem.startswith("kv_heads=2 does not divide by tensor=4; 4 does, or tensor may be 1 or 2")
    for name in ("key", "value"):
        assert (
            f"layers/attention/{name}/kernel (2, 64, 2, 8) float32, rule 'layers/attention/{name}/kernel'"
            in (problem)
        )


def test_everything_of_a_decoder_that_does_not_divide_comes_at_once():
    """Six heads, two key/value heads and 250 MLP channels over four devices, embed 63 over two."""
    model = _model(heads=6, kv_heads=2, head=8, embed=63, mlp=250)
    heads = {problem.partition(";")[0] for problem in _find_problems(model.shapes, model.rules)}
    over_tensor = {f"{size} does not divide by tensor=4" for size in ("heads=6", "kv_heads=2", "mlp=250")}
    assert heads == {*over_tensor, "embed=63 does not divide by fsdp=2"}


@pytest.mark.parametrize(
    ("family", "tied"), [("llama", True), ("llama", False), ("gpt2", True), ("gpt2", False)]
)
def test_the_decoder_rules_cover_every_parameter_exactly(family, tied):
    model = _model(family=family, tied=tied)
    leaves, problems = lay_leaves(model.shapes, model.rules, SIZES)
    assert problems == []
    assert list(leaves) == [path for path, _ in iterate_leaves(model.shapes)]


def test_the_odd_vocabulary_of_gpt2_is_padded_until_it_divides():
    tree = {"run_dir": "unused", "steps": 1, "batch": {"sequences": 8, "length": 8}}
    tree["model"] = {"family": "gpt2", "layers": 1, "embed": 16, "heads": 4, "mlp": 64, "tied": True}
    shape = shape_decoder(parse_config(tree, origin="test"), vocab=50_257, platform="cpu")
    model = build_decoder(shape)
    assert model.shapes["embed"]["table"].shape == (50_304, 16)
    leaves, problems = lay_leaves(model.shapes, model.rules, SIZES)
    assert problems == []
    assert leaves["embed/table"].spec == P("tensor", "fsdp")


# ZeRO stages


def _plan(stage: int, *, keep_gathered: bool = False, **sizes: int) -> Layouts:
    mesh = make_mesh(MeshConfig(**sizes))
    return plan_layouts(SHAPES, Rules(RULES), mesh, stage, keep_gathered=keep_gathered)


WHOLE, LAID = P("tensor", None), P("tensor", "fsdp")
# What the gradient lies over comes first, the rest in the order of the mesh.
SPREAD, SPREAD_1 = P("tensor", ("fsdp", "data", "expert")), P("tensor", ("data", "fsdp", "expert"))


@pytest.mark.parametrize(
    ("stage", "keep_gathered", "kept", "gradient", "weight"),
    [
        (0, False, WHOLE, WHOLE, WHOLE),
        (1, False, SPREAD_1, WHOLE, WHOLE),
        (2, False, SPREAD, LAID, WHOLE),
        (3, False, SPREAD, LAID, LAID),
        (3, True, SPREAD, LAID, WHOLE),
    ],
)
def test_a_stage_lays_what_is_kept_over_the_zero_axes_and_gradients_and_weights_over_fsdp(
    stage, keep_gathered, kept, gradient, weight
):
    layouts = _plan(stage, keep_gathered=keep_gathered, data=2, fsdp=2, tensor=2)
    trees = (layouts.params, layouts.moments, layouts.gradients, layouts.weights)
    assert [tree["embed"]["table"].spec for tree in trees] == [kept, kept, gradient, weight]


def test_the_other_axes_shard_a_leaf_in_every_stage():
    for stage in range(4):
        layouts = _plan(stage, fsdp=4, tensor=2)
        for tree in (layouts.params, layouts.gradients, layouts.weights):
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
    ("stage", "shards"), [(0, (1, 1, 1)), (1, (8, 1, 1)), (2, (8, 8, 1)), (3, (8, 8, 8))]
)
def test_a_stage_gives_each_device_its_share_of_bytes(stage, shards):
    layouts = plan_layouts(
        {"table": _array(64, 64)}, Rules({"table": ("mlp", "embed")}), make_mesh(MeshConfig(fsdp=8)), stage
    )
    for tree, count in zip((layouts.params, layouts.gradients, layouts.weights), shards, strict=True):
        array = jax.device_put(jnp.zeros((64, 64)), tree["table"])
        assert {shard.data.nbytes for shard in array.addressable_shards} == {64 * 64 * 4 // count}


def test_rules_that_do_not_fit_are_refused_in_every_stage():
    for stage in range(4):
        with pytest.raises(UserError, match="embed=15 does not divide by fsdp=8"):
            plan_layouts(
                {"table": _array(64, 15)},
                Rules({"table": ("mlp", "embed")}),
                make_mesh(MeshConfig(fsdp=8)),
                stage,
            )
