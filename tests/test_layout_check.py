"""Layouts that the compiler would change, or has changed, without a word are refused with their bytes."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

import jaxscale as js
from jaxscale.config import UserError
from jaxscale.mesh import make_mesh
from jaxscale.models.model import Model
from jaxscale.sharding.activations import constrain, watch_constraints
from jaxscale.sharding.hlo import Program, read_arrays
from jaxscale.training import gradients
from jaxscale.training.layout_check import check_constraints, check_layouts
from jaxscale.training.setup import Setup, make_setup
from tests.tiny import make_config, make_tiny_setup

MESH = {"data": 2, "fsdp": 2, "tensor": 2}


def make_own_model(hidden: int) -> Model:
    """A model that lays an activation over `tensor` by itself."""

    def init(key: jax.Array) -> Any:
        return {"table": jnp.ones((64, 32)), "up": jnp.ones((32, hidden))}

    def loss(params: Any, batch: Any, _: Any) -> tuple[jax.Array, jax.Array]:
        x_BTF = params["table"][batch["tokens"]] @ params["up"]
        x_BTF = lax.with_sharding_constraint(x_BTF, PartitionSpec(None, None, "tensor"))
        return (x_BTF.sum(-1) * batch["weights"]).sum(), batch["weights"].sum()

    rules = js.Rules({"table": ("vocab", "embed"), "up": ("embed", "head")})
    return js.from_functions(init, loss, rules=rules)


def make_own_setup(hidden: int) -> Setup:
    config = make_config(mesh={"data": 2, "tensor": 4}, batch={"microbatches": 2})
    return make_setup(config, make_mesh(config.mesh), 64, make_own_model(hidden))


def test_a_constraint_that_jax_would_drop_is_refused_with_its_place_and_bytes() -> None:
    with pytest.raises(UserError) as caught:
        make_own_setup(hidden=34).compile_step()
    message = str(caught.value)
    assert "34" in message
    assert "tensor=4" in message
    assert "test_layout_check.py" in message
    assert f"{16 * 32 * 34 * 4 // 2:,} bytes" in message, "half of the sequences stand on a shard of data"
    make_own_setup(hidden=36).compile_step()


def test_a_constraint_may_leave_a_dim_to_the_compiler_and_is_still_checked_on_the_others() -> None:
    def trace(size: int) -> Any:
        spec = PartitionSpec("data", PartitionSpec.UNCONSTRAINED, ("fsdp", "tensor"))
        constrained = jax.jit(lambda x: lax.with_sharding_constraint(x, spec))
        return constrained.trace(jnp.ones((8, 5, size))).jaxpr

    with jax.set_mesh(make_mesh(make_config(mesh=MESH).mesh)):
        check_constraints(trace(12))
        with pytest.raises(UserError, match="dim 2 of size 10 does not divide by fsdp=2 × tensor=2"):
            check_constraints(trace(10))


@pytest.mark.parametrize("stage", [2, 3])
def test_accumulators_that_lie_otherwise_are_found_with_their_bytes(stage: int, monkeypatch: Any) -> None:
    """Silent replication passes every parity test: here the loop carries whole gradients, or others."""

    def lay_otherwise(tree: Any, layouts: Any, groups: Any) -> Any:
        return jax.tree.map(
            lambda leaf: lax.with_sharding_constraint(
                leaf, PartitionSpec(*[None] * (leaf.ndim - 1), "fsdp" if leaf.shape[-1] % 8 == 0 else None)
            ),
            tree,
        )

    config = make_config(mesh={"fsdp": 8}, zero={"stage": stage}, batch={"microbatches": 4})
    make_tiny_setup(config).compile_step()
    monkeypatch.setattr(gradients, "_pin", lay_otherwise)
    with pytest.raises(UserError, match=r"accumulator of layers/mlp/up/kernel \(2, 32, 64\): \(2, 4, 64\)"):
        make_tiny_setup(config).compile_step()


def test_state_that_lies_otherwise_is_found() -> None:
    setup = make_tiny_setup(make_config(mesh=MESH))
    compiled = setup.compile_step()
    check_layouts(compiled, setup.abstract_state, setup.layouts, setup.config)
    table = setup.abstract_state.params["embed"]["table"]
    wrong = NamedSharding(setup.mesh, PartitionSpec("fsdp"))
    setup.abstract_state.params["embed"]["table"] = jax.ShapeDtypeStruct(
        table.shape, table.dtype, sharding=wrong
    )
    with pytest.raises(UserError, match=r"params/embed/table \(384, 32\): \(192, 32\) a device was asked"):
        check_layouts(compiled, setup.abstract_state, setup.layouts, setup.config)


def test_the_compiler_is_asked_how_it_laid_each_constrained_activation() -> None:
    mesh = make_mesh(make_config(mesh={"data": 2, "tensor": 4}).mesh)
    with jax.set_mesh(mesh), watch_constraints() as seen:
        jax.jit(lambda x: constrain(x * 2, "batch", "length", "mlp")).lower(jnp.ones((8, 4, 16))).compile()
    [observed] = seen
    assert observed.is_as_asked
    assert observed.got.shard_shape(observed.shape) == (4, 4, 4)
    assert observed.dims == ("batch", "length", "mlp")


def make_constrained_model(*dims: str) -> Model:
    def init(key: jax.Array) -> Any:
        return {"table": jnp.ones((64, 32))}

    def loss(params: Any, batch: Any, _: Any) -> tuple[jax.Array, jax.Array]:
        x_BTD = js.constrain(params["table"][batch["tokens"]], *dims)
        return (x_BTD.sum(-1) * batch["weights"]).sum(), batch["weights"].sum()

    return js.from_functions(init, loss, rules=js.Rules({"table": ("vocab", "embed")}))


def test_a_model_of_ones_own_constrains_within_the_groups_of_its_batch() -> None:
    config = make_config(mesh=MESH, batch={"microbatches": 2})
    setup = make_setup(config, make_mesh(config.mesh), 64, make_constrained_model("batch", "length", "embed"))
    with watch_constraints() as seen:
        setup.compile_step()
    assert seen
    for observed in seen:
        assert observed.is_as_asked
        assert observed.dims == ("groups", "batch", "length", "embed")
        assert observed.got.shard_shape(observed.shape) == (1, 4, 32, 32), "data=2 takes groups, fsdp=2 rows"


@pytest.mark.parametrize(
    ("dims", "said"),
    [
        (("batch", "length"), "names 2 dims"),
        (("batch", "length", "embde"), "'embde' is not known"),
        (("batch", "vocab", "length"), "vocab=31 .* does not divide by tensor=2"),
    ],
)
def test_a_constraint_that_cannot_hold_is_an_error(dims: tuple[str, ...], said: str) -> None:
    config = make_config(mesh=MESH, batch={"length": 31})
    with pytest.raises(UserError, match=said):
        make_setup(config, make_mesh(config.mesh), 64, make_constrained_model(*dims)).compile_step()


def test_an_accumulator_that_is_whole_stays_whole_beside_an_activation_over_tensor() -> None:
    """Left open, XLA cuts it like the activation that its gradient comes from."""

    def init(key: jax.Array) -> Any:
        return {"table": jnp.ones((64, 32)), "up": jnp.ones((32, 48)), "scale": jnp.ones((48,))}

    def loss(params: Any, batch: Any, _: Any) -> tuple[jax.Array, jax.Array]:
        x_BTF = constrain(params["table"][batch["tokens"]] @ params["up"], "batch", "length", "mlp")
        return ((x_BTF * params["scale"]).sum(-1) * batch["weights"]).sum(), batch["weights"].sum()

    rules = js.Rules({"table": ("vocab", "embed"), "up": ("embed", "mlp"), "scale": js.REPLICATED})
    config = make_config(mesh={"fsdp": 2, "tensor": 4}, zero={"stage": 2}, batch={"microbatches": 2})
    model = js.from_functions(init, loss, rules=rules)
    program = Program(make_setup(config, make_mesh(config.mesh), 64, model).compile_step().as_text())
    [loop] = [each for each in program.instructions(program.entry) if each.opcode == "while"]
    assert (48,) in {shape for _, shape in read_arrays(loop.type)}
