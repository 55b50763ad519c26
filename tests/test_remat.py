"""Remat: no choice changes a number, each keeps what it says, and a wrong name is refused."""

import io
import json
from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from rich.console import Console

import jaxscale as js
from jaxscale.cli.main import main
from jaxscale.config import RematConfig, UserError, dump_config, load_config
from jaxscale.inspection.remat import compare_remat, count_matmul_flops, render_remat
from jaxscale.mesh import make_mesh
from jaxscale.models import layers
from jaxscale.models.model import Model
from jaxscale.models.remat import DECODER_TENSORS, find_name, kept_by_name, list_tensors
from jaxscale.numerics.draw import make_key
from jaxscale.sharding.equations import iterate_jaxprs
from jaxscale.sharding.rules import iterate_leaves
from jaxscale.training.setup import Setup, make_setup
from jaxscale.verify.cases import apply_case, plan_cases
from tests.tiny import make_batch, make_config, make_tiny_setup

SMALL = {"layers": 2, "embed": 16, "heads": 4, "kv_heads": 2, "mlp": 32}
MESHES: dict[str, dict[str, Any]] = {
    "one": {"batch": {"length": 16}},
    "cube": {
        "mesh": {"data": 2, "fsdp": 2, "tensor": 2},
        "batch": {"length": 16, "microbatches": 2},
    },
}
CHOICES: dict[str, Any] = {
    "attention": "attention",
    "matmuls": "matmuls",
    "full": "full",
    "offload": {"policy": "full", "keep": ["mlp_up"], "offload": ["block_input", "attention"]},
    "lists": {"policy": "none", "recompute": ["mlp_hidden", "query"], "offload": ["mlp_gate", "value"]},
}


def make_remat_setup(remat: Any, where: str = "one", **model: Any) -> Setup:
    return make_tiny_setup(make_config(**MESHES[where], model={**SMALL, **model}, remat=remat))


@cache
def run_step(remat: str, where: str) -> tuple[float, Any]:
    """Loss and gradients of the first step."""
    setup = make_remat_setup(CHOICES.get(remat, remat), where)
    state = setup.compile_init()(make_key(0))
    _, metrics, gradients = setup.compile_step(with_gradients=True)(state, make_batch(setup, 0))
    return float(metrics["loss"]), jax.tree.map(np.asarray, gradients)


@pytest.mark.parametrize("where", MESHES)
@pytest.mark.parametrize("choice", CHOICES)
def test_no_choice_changes_a_number(choice: str, where: str) -> None:
    """The same operations in fp32; compilers fuse them otherwise, so the last bit may differ."""
    loss, gradients = run_step(choice, where)
    plain_loss, plain_gradients = run_step("none", where)
    np.testing.assert_allclose(loss, plain_loss, rtol=3e-7)
    for (path, got), (_, plain) in zip(
        iterate_leaves(gradients), iterate_leaves(plain_gradients), strict=True
    ):
        assert np.abs(plain).max() > 0, path
        np.testing.assert_allclose(got, plain, atol=1e-6 * np.abs(plain).max(), err_msg=path)


# What is held and what is computed again, read from the traced step.


def find_computed_again(setup: Setup) -> set[str]:
    """Names of tensors that the backward pass makes once more."""
    names = set()
    for jaxpr in iterate_jaxprs(setup.trace_step().jaxpr.jaxpr):
        for equation in jaxpr.eqns:
            if equation.primitive.name in ("remat2", "checkpoint"):
                for inner in iterate_jaxprs(equation.params["jaxpr"]):
                    names |= {find_name(each.primitive, each.params) for each in inner.eqns} - {None}
    return names


ALL = set(list_tensors(gated=True, dense=True, experts=False))
COMPUTED_AGAIN = {
    "attention": ALL - {"attention"},
    "matmuls": {"block_input", "attention_norm", "attention", "mlp_norm", "mlp_hidden"},
    "full": ALL,
    "offload": ALL - {"mlp_up", "block_input", "attention"},
    "lists": {"mlp_hidden", "query"},
}


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("choice", CHOICES)
def test_the_backward_pass_computes_again_what_the_choice_says(choice: str, family: str) -> None:
    remat, absent = CHOICES[choice], {"mlp_gate"} if family == "gpt2" else set()
    if isinstance(remat, dict):
        remat = {**remat, "offload": [name for name in remat["offload"] if name not in absent]}
    setup = make_remat_setup(remat, family=family, kv_heads=4 if family == "gpt2" else 2)
    assert find_computed_again(setup) == COMPUTED_AGAIN[choice] - absent


def test_the_policies_keep_more_and_more() -> None:
    kept = {
        policy: {name for name in DECODER_TENSORS if kept_by_name(RematConfig(policy=policy), name)}
        for policy in ("full", "attention", "matmuls", "none")
    }
    assert kept["full"] == set()
    assert kept["attention"] == {"attention"}
    experts = {"expert_input", "expert_up", "expert_gate", "expert_out"}
    assert kept["matmuls"] == {"query", "key", "value", "attention_out", "mlp_up", "mlp_gate"} | experts
    assert kept["none"] == set(DECODER_TENSORS)


@pytest.fixture(scope="module")
def reports() -> dict[str, Any]:
    setup = make_remat_setup({"policy": "full", "keep": ["mlp_hidden"]}, layers=4)
    return {report.name: report for report in compare_remat(setup)}


def test_flops_computed_again_are_those_of_the_tensors_that_are_not_kept(reports: dict[str, Any]) -> None:
    tokens, layers, d, f, n, k, h, t = 32 * 16, 4, 16, 32, 4, 2, 4, 16
    projections = 2 * tokens * d * (n + 2 * k) * h + 2 * tokens * n * h * d
    mlp, scores = 2 * 2 * tokens * d * f, 2 * tokens * t * n * h
    expected = {
        "none": 0,
        "attention": projections + mlp + scores,  # XLA's softmax needs the scores, not what comes of them
        "matmuls": 2 * scores,
        "full": projections + mlp + 2 * scores,
        "full, keep mlp_hidden": projections + mlp + 2 * scores,
    }
    assert {name: report.recomputed_flops for name, report in reports.items()} == {
        name: layers * flops for name, flops in expected.items()
    }
    assert len({report.matmul_flops - report.recomputed_flops for report in reports.values()}) == 1


def test_policies_that_keep_less_take_less_memory(reports: dict[str, Any]) -> None:
    temporaries = {name: report.memory.temporaries for name, report in reports.items()}
    assert temporaries["full"] < temporaries["attention"] < temporaries["matmuls"] < temporaries["none"]
    assert temporaries["full"] < temporaries["full, keep mlp_hidden"]
    assert len({report.memory.arguments for report in reports.values()}) == 1


def test_flops_of_a_program_are_those_of_all_devices_and_trips() -> None:
    mesh = make_mesh(make_config(mesh={"data": 2, "tensor": 2}).mesh, jax.devices()[:4])
    spec = jax.sharding.PartitionSpec

    def multiply(a: jax.Array, b: jax.Array) -> jax.Array:
        def visit(carry: jax.Array, _: None) -> tuple[jax.Array, None]:
            return carry @ b, None

        return lax.scan(visit, a, None, length=3)[0]

    region = jax.shard_map(
        lambda x: x @ x.T, in_specs=spec("data"), out_specs=spec("data"), axis_names={"data"}
    )

    def program(a: jax.Array, b: jax.Array) -> jax.Array:
        y = region(multiply(a, b))
        return lax.cond(y[0, 0] > 0, lambda y: y @ jnp.ones((4, 4)), lambda y: y, y)

    with jax.set_mesh(mesh):
        traced = jax.jit(program).trace(jnp.ones((8, 16)), jnp.ones((16, 16)))
    in_scan, in_region, in_branch = 3 * 2 * 8 * 16 * 16, 2 * (2 * 4 * 16 * 4), 2 * 8 * 4 * 4
    assert count_matmul_flops(traced.jaxpr.jaxpr) == in_scan + in_region + in_branch


# The configuration.


def test_the_short_form_is_the_policy_and_a_section_survives_its_file(tmp_path: Any) -> None:
    assert make_config(remat="full").remat == RematConfig(policy="full")
    config = make_config(remat={"policy": "matmuls", "offload": ["mlp_up"]})
    path = tmp_path / "config.yaml"
    path.write_text(dump_config(config), encoding="utf-8")
    assert load_config(path) == config
    path.write_text(dump_config(config).replace("policy: matmuls", "policy: full"), encoding="utf-8")
    assert load_config(path, ["remat.keep=[mlp_up]", "remat.offload=[]"]).remat.keep == ("mlp_up",)


def test_an_override_adds_to_the_short_form(tmp_path: Any) -> None:
    path = tmp_path / "short.yaml"
    path.write_text("run_dir: a\nsteps: 1\nbatch: {sequences: 1, length: 1}\nmodel: null\nremat: full\n")
    assert load_config(path, ["remat.offload=[block_input]"]).remat == RematConfig(
        policy="full", offload=("block_input",)
    )


@pytest.mark.parametrize(
    ("remat", "said"),
    [
        ({"policy": "full", "keep": ["mlp_upp"]}, "no tensor 'mlp_upp'; it has block_input, .* mean mlp_up"),
        ({"offload": ["mlp_down"]}, "no tensor 'mlp_down'"),
        ({"keep": ["query"], "offload": ["query"]}, "query stands in keep and offload"),
        ({"policy": "full", "keep": ["key", "key"]}, "key stands in keep; name it once"),
        ({"policy": "full", "recompute": ["block_input"]}, "block_input is what all else is computed from"),
    ],
)
def test_names_that_cannot_be_chosen_are_listed_before_anything_is_traced(remat: Any, said: str) -> None:
    with pytest.raises(UserError, match=said):
        make_remat_setup(remat)


def test_gpt2_has_no_gate() -> None:
    with pytest.raises(UserError, match="no tensor 'mlp_gate'; it has block_input"):
        make_remat_setup({"policy": "full", "keep": ["mlp_gate"]}, family="gpt2", kv_heads=4)


def test_a_kept_tensor_that_the_backward_pass_does_not_read_is_refused(monkeypatch: Any) -> None:
    """The name stands on a copy: the projection reads the array as it was before."""
    right = layers.name_tensor

    def name_copy(x: jax.Array, name: str) -> jax.Array:
        named = right(x, name)
        return x if name == "mlp_hidden" else named

    make_remat_setup({"policy": "full", "keep": ["mlp_hidden"]}).trace_step()
    monkeypatch.setattr(layers, "name_tensor", name_copy)
    for kind in ("keep", "offload"):
        with pytest.raises(UserError, match="mlp_hidden"):
            make_remat_setup({"policy": "full", kind: ["mlp_hidden"]}).trace_step()


# Models of one's own.


def make_own_setup(remat: Any, *, wraps: bool = True, names_output: bool = False) -> Setup:
    def init(key: jax.Array) -> Any:
        return {"table": jax.random.normal(key, (64, 32)), "up": jax.random.normal(key, (4, 32, 32)) / 6}

    def layer(x_BTD: jax.Array, up_DD: jax.Array) -> tuple[jax.Array, None]:
        h_BTD = js.name_tensor(x_BTD @ up_DD, "hidden")
        y_BTD = js.name_tensor(jnp.exp(h_BTD), "exponential") if names_output else jnp.sin(h_BTD)
        return x_BTD + y_BTD, None

    def loss(params: Any, batch: Any, _: Any) -> tuple[jax.Array, jax.Array]:
        visit = js.remat(layer, in_scan=True) if wraps else layer
        x_BTD, _ = lax.scan(visit, params["table"][batch["tokens"]], params["up"])
        return (x_BTD.sum(-1) * batch["weights"]).sum(), batch["weights"].sum()

    rules = js.Rules({"table": ("vocab", "embed"), "up": ("layers", "embed", "head")})
    model: Model = js.from_functions(init, loss, rules=rules)
    config = make_config(mesh={"data": 2, "fsdp": 2}, batch={"microbatches": 2, "length": 16}, remat=remat)
    return make_setup(config, make_mesh(config.mesh, jax.devices()[:4]), 64, model)


def test_a_model_of_ones_own_gets_the_policy_and_its_own_names() -> None:
    flops = {
        str(remat): count_matmul_flops(make_own_setup(remat).trace_step().jaxpr.jaxpr)
        for remat in (
            "none",
            "matmuls",
            "full",
            {"keep": ["hidden"]},
            {"policy": "full", "offload": ["hidden"]},
        )
    }
    once = 4 * 2 * (32 * 16) * 32 * 32
    none, matmuls, full, kept, offloaded = flops.values()
    assert none == 3 * once == matmuls == kept == offloaded
    assert full == 4 * once


def test_numbers_of_a_model_of_ones_own_stay() -> None:
    losses = []
    for remat in ("none", {"policy": "full", "offload": ["hidden"]}):
        setup = make_own_setup(remat)
        state = setup.compile_init()(make_key(0))
        _, metrics = setup.compile_step()(state, make_batch(setup, 0))
        losses.append((float(metrics["loss"]), float(metrics["grad_norm"])))
    np.testing.assert_allclose(losses[1], losses[0], rtol=3e-7)


@pytest.mark.parametrize(
    ("remat", "how", "said"),
    [
        ("full", {"wraps": False}, "never calls jaxscale.remat"),
        ({"policy": "full", "keep": ["hiden"]}, {}, "no tensor 'hiden'; it has hidden; did you mean hidden"),
        ("attention", {}, "no tensor 'attention'"),
        ({"policy": "full", "keep": ["exponential"]}, {"names_output": True}, "exponential is not held"),
        ({"policy": "full", "offload": ["exponential"]}, {"names_output": True}, "exponential is not held"),
        ({"policy": "matmuls", "recompute": ["hidden"]}, {}, "keeps every matmul of a model of your own"),
    ],
)
def test_a_model_of_ones_own_that_does_not_do_it_is_refused(remat: Any, how: Any, said: str) -> None:
    with pytest.raises(UserError, match=said):
        make_own_setup(remat, **how).trace_step()


def test_verify_takes_every_policy_and_the_configurations_own() -> None:
    config = make_config(mesh={"data": 2}, remat={"policy": "matmuls", "offload": ["mlp_up"]})
    cases, _ = plan_cases(config, 2, lambda *_: None, whole_product=False)
    assert {case.remat for case in cases} == {"none", "attention", "matmuls", "full", "config"}
    chosen = {case.remat: apply_case(config, case, None).remat for case in cases}
    assert chosen["config"] == config.remat
    assert chosen["full"] == RematConfig(policy="full")
    own = replace(config, model=None)
    assert {case.remat for case in plan_cases(own, 2, lambda *_: None, whole_product=True)[0]} == {"config"}


def test_inspect_remat_as_json(capsys: Any, tmp_path: Any) -> None:
    config = make_config(model={**SMALL, "layers": 1, "vocab": 257}, batch={"length": 16})
    path = tmp_path / "config.yaml"
    path.write_text(dump_config(config), encoding="utf-8")
    assert main(["inspect", str(path), "mesh.data=8", "--remat", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["policy"] for row in rows] == ["none", "attention", "matmuls", "full"]
    assert {"arguments", "temporaries", "outputs", "host", "peak"} <= set(rows[0]["memory"])
    assert rows[0]["recomputed_flops"] == 0 < rows[2]["recomputed_flops"] < rows[3]["recomputed_flops"]


def test_the_table_names_every_choice_and_says_what_a_cpu_cannot_show(reports: dict[str, Any]) -> None:
    console = Console(width=140, record=True, file=io.StringIO())
    console.print(render_remat(tuple(reports.values()), "cpu"))
    text = console.export_text()
    assert all(name in text for name in reports)
    assert "a CPU has one memory" in text
