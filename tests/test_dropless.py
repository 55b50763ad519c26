"""The dropless exchange equals every token going through its experts on one device, in two trips a pass."""

import functools
import math
import re
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec, get_abstract_mesh

from jaxscale.config import MeshConfig
from jaxscale.mesh import axis_sizes, make_mesh
from jaxscale.parallel.dropless import run_dropless
from jaxscale.parallel.groups import multiply_groups
from jaxscale.sharding.collectives import read_collectives
from tests.tiny import relative_errors

LAYERS, TOKENS, EMBED, MLP, EXPERTS = 2, 48, 16, 32, 8
BATCH = ("data", "fsdp", "expert")
LIMITS = {"loss": 1e-6, "out": 1e-6, "gradients": 1e-5}


def make_inputs(choices, *, layers=LAYERS):
    """Tokens, what each chooses in a skewed way, weights of the choices, kernels; a quarter is padding."""
    generator = np.random.default_rng(choices)
    scores = generator.normal(size=(TOKENS, EXPERTS)) + np.linspace(2, 0, EXPERTS)
    choice_NK = np.argsort(-scores, axis=1)[:, :choices]
    choice_NK[generator.random(TOKENS) < 0.25] = EXPERTS
    choice_NK[generator.random(choice_NK.shape) < 0.1] = EXPERTS  # a single choice may be missing too
    normal = partial(generator.normal, scale=0.2)
    arrays = {
        "x": generator.normal(size=(TOKENS, EMBED)),
        "weight": generator.uniform(0.2, 1, (TOKENS, choices)),
        "gate": normal(size=(layers, EXPERTS, EMBED, MLP)),
        "up": normal(size=(layers, EXPERTS, EMBED, MLP)),
        "down": normal(size=(layers, EXPERTS, MLP, EMBED)),
    }
    return {name: jnp.asarray(value, jnp.float32) for name, value in arrays.items()}, jnp.asarray(
        choice_NK, jnp.int32
    )


KERNELS = ("gate", "up", "down")


@jax.jit
def compute_plainly(arrays, choice_NK):
    """Loss, result and gradients on one device: every expert sees every token, weighed by its choices."""

    def compute_loss(arrays):
        x_ND = arrays["x"]
        for gate_EDF, up_EDF, down_EFD in zip(*(arrays[name] for name in KERNELS), strict=True):
            y_ND = x_ND
            for expert in range(gate_EDF.shape[0]):
                weight_N = jnp.where(choice_NK == expert, arrays["weight"], 0).sum(axis=1)
                hidden_NF = jax.nn.silu(x_ND @ gate_EDF[expert]) * (x_ND @ up_EDF[expert])
                y_ND += weight_N[:, None] * (hidden_NF @ down_EFD[expert])
            x_ND = y_ND
        return compare_with_target(x_ND), x_ND

    (loss, x_ND), gradients = jax.value_and_grad(compute_loss, has_aux=True)(arrays)
    return {"loss": loss, "out": x_ND, "gradients": gradients}


def compare_with_target(x_ND):
    return jnp.square(x_ND - jnp.cos(jnp.arange(x_ND.shape[1]))).sum()


def apply_swiglu(kernels, rows_RD, sizes_G):
    """Experts that look beyond the rows they were given, where zeros are, and leave NaN there."""
    gate_GDF, up_GDF, down_GFD = kernels
    is_given_R1 = jnp.arange(rows_RD.shape[0])[:, None] < sizes_G.sum()
    hidden_RF = jax.nn.silu(multiply_groups(rows_RD, gate_GDF, sizes_G))
    hidden_RF *= multiply_groups(rows_RD, up_GDF, sizes_G)
    out_RD = multiply_groups(hidden_RF, down_GFD, sizes_G) + jnp.where(is_given_R1, 0, rows_RD).sum()
    return jnp.where(is_given_R1, out_RD, jnp.nan)


@dataclass(frozen=True)
class Run:
    """A stack of expert layers: how it lies on a mesh, is exchanged and recomputed."""

    mesh: MeshConfig
    choices: int = 2
    experts: int = EXPERTS
    layers: int = LAYERS
    exchange: str = "padded"
    is_nested: bool = False  # in an outer region, manual over `expert`, in which the gradients are taken
    is_scanned: bool = True  # with full remat

    def make_mesh(self):
        sizes = axis_sizes(self.mesh)
        return make_mesh(self.mesh, jax.devices()[: math.prod(sizes.values())])

    def lower(self, mesh, arrays, choice_NK):
        """Lowered for a mesh and arrays of these shapes, kernels over `fsdp` and `tensor` too."""
        batch = ("expert", "data", "fsdp") if self.is_nested else BATCH  # the outer region's axis first
        over = {"x": (batch,), "weight": (batch,), "down": (None, "expert", "tensor", "fsdp")}
        over |= dict.fromkeys(("gate", "up"), (None, "expert", "fsdp", "tensor"))

        def describe(value, *spec):
            sharding = NamedSharding(mesh, PartitionSpec(*spec))
            return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharding)

        laid = {name: describe(value, *over[name]) for name, value in arrays.items()}
        with jax.set_mesh(mesh):
            compute = self._compute_nested if self.is_nested else self._compute
            return jax.jit(compute).lower(laid, describe(choice_NK, batch))

    def compute(self, arrays, choice_NK):
        compiled = compile_run(self)
        return compiled(*jax.device_put((arrays, choice_NK), compiled.input_shardings[0]))

    def _compute(self, arrays, choice_NK):
        (loss, x_ND), gradients = jax.value_and_grad(self._compute_loss, has_aux=True)(arrays, choice_NK)
        return {"loss": loss, "out": x_ND, "gradients": gradients}

    def _compute_nested(self, arrays, choice_NK):
        over = {name: PartitionSpec("expert") for name in ("x", "weight")}
        over |= {name: PartitionSpec(None, "expert") for name in KERNELS}

        def compute(arrays, choice_NK):
            found = self._compute(arrays, choice_NK)
            return {**found, "loss": lax.psum(found["loss"], "expert")}

        return jax.shard_map(
            compute,
            in_specs=(over, PartitionSpec("expert")),
            out_specs={"loss": PartitionSpec(), "out": PartitionSpec("expert"), "gradients": over},
            axis_names={"expert"},
            check_vma=False,
        )(arrays, choice_NK)

    def _compute_loss(self, arrays, choice_NK):
        layer = partial(self._run_layer, choice_NK=choice_NK, weight_NK=arrays["weight"])
        kernels = tuple(arrays[name] for name in KERNELS)
        if self.is_scanned:
            x_ND, _ = lax.scan(jax.checkpoint(layer), arrays["x"], kernels)
        else:
            x_ND = arrays["x"]
            for index in range(self.layers):
                x_ND, _ = layer(x_ND, tuple(kernel[index] for kernel in kernels))
        return compare_with_target(x_ND), x_ND

    def _run_layer(self, x_ND, kernels, *, choice_NK, weight_NK):
        """Kernels are whole over fsdp in the region; each tensor shard gives its part of the sum."""
        inner = set(get_abstract_mesh().axis_names) - ({"expert"} if self.is_nested else set())
        batch = tuple(axis for axis in BATCH if axis in inner)
        expert = "expert" if "expert" in inner else None
        parts_PND = jax.shard_map(
            self._run_experts,
            in_specs=(
                PartitionSpec(batch),
                (PartitionSpec(expert, None, "tensor"),) * 2 + (PartitionSpec(expert, "tensor"),),
                PartitionSpec(batch),
                PartitionSpec(batch),
            ),
            out_specs=PartitionSpec("tensor", batch),
            axis_names=inner,
            check_vma=False,
        )(x_ND, kernels, choice_NK, weight_NK)
        return x_ND + parts_PND.sum(axis=0).astype(x_ND.dtype), None

    def _run_experts(self, x_ND, kernels, choice_NK, weight_NK):
        y_NKD = run_dropless(
            x_ND,
            choice_NK,
            self.experts,
            partial(apply_swiglu, kernels),
            "expert" if self.mesh.expert > 1 else None,
            self.exchange,
        )
        return (y_NKD * weight_NK[:, :, None]).sum(axis=1)[None]


@functools.cache
def compile_run(run):
    """Compiled for the shapes of `make_inputs`; tests share it."""
    return run.lower(run.make_mesh(), *make_inputs(run.choices, layers=run.layers)).compile()


def check(run, arrays, choice_NK):
    found, expected = run.compute(arrays, choice_NK), compute_plainly(arrays, choice_NK)
    for part, limit in LIMITS.items():
        errors = relative_errors({part: found[part]}, {part: jax.tree.map(np.asarray, expected[part])})
        assert all(error < limit for error in errors.values()), errors  # NaN is not less
    return found, expected


ONE, SMALL = MeshConfig(expert=1, fsdp=4, tensor=2), MeshConfig(expert=2, fsdp=2, tensor=2)
WIDE, ALL = MeshConfig(expert=4, fsdp=2), MeshConfig(expert=8)
EQUAL = {
    "expert=1 fsdp=4 tensor=2, top 2": Run(ONE),
    "expert=4 tensor=2, top 1": pytest.param(
        Run(MeshConfig(expert=4, tensor=2), choices=1), marks=pytest.mark.full
    ),
    "expert=4 fsdp=2, top 2": Run(WIDE),
    "expert=4 fsdp=2, top 2, no scan": Run(WIDE, is_scanned=False),
    "expert=8, top 2": Run(ALL),
}


@pytest.mark.parametrize("run", EQUAL.values(), ids=EQUAL.keys())
def test_equals_every_token_going_through_its_experts(run):
    check(run, *make_inputs(run.choices))


@pytest.mark.smoke
def test_equals_the_plain_formula_on_every_axis_nested():
    run = Run(SMALL, choices=3, is_nested=True)
    check(run, *make_inputs(run.choices))


def exchange_as_documented(
    operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name
):
    """`lax.ragged_all_to_all` as its documentation has it, which XLA on CPU lacks; NaN if sizes disagree."""
    here, devices = lax.axis_index(axis_name), lax.axis_size(axis_name)
    slices = input_offsets.size // devices
    gather = partial(lax.all_gather, axis_name=axis_name)
    operands, starts, sizes, landings = map(gather, (operand, input_offsets, send_sizes, output_offsets))
    row_R = jnp.arange(operand.shape[0])
    for sender in range(devices):
        for number in range(slices):
            index = here * slices + number
            row, size = starts[sender, index] + row_R, sizes[sender, index]
            place_R = jnp.where(row_R < size, landings[sender, index] + row_R, output.shape[0])
            output = output.at[place_R].set(operands[sender][row], mode="drop")
    agreed = (recv_sizes == lax.all_to_all(send_sizes, axis_name, 0, 0, tiled=True)).all()
    return jnp.where(agreed, output, jnp.nan)


RAGGED = {
    "expert=2 fsdp=2 tensor=2, top 3": Run(SMALL, choices=3, exchange="ragged"),
    "expert=8, top 1": pytest.param(Run(ALL, choices=1, exchange="ragged"), marks=pytest.mark.full),
}


@pytest.mark.parametrize("run", RAGGED.values(), ids=RAGGED.keys())
def test_the_ragged_exchange_is_asked_for_the_same(run, monkeypatch):
    monkeypatch.setattr(lax, "ragged_all_to_all", exchange_as_documented)
    check(run, *make_inputs(run.choices))


@pytest.mark.parametrize(("choices", "exchange"), [(1, "padded"), (2, "ragged")])
def test_all_tokens_to_one_device_lose_nothing_and_other_experts_get_no_gradient(
    choices, exchange, monkeypatch
):
    monkeypatch.setattr(lax, "ragged_all_to_all", exchange_as_documented)
    arrays, _ = make_inputs(choices, layers=1)
    chosen = np.arange(2, 2 + choices)  # on the second device of four
    found, _ = check(
        Run(WIDE, choices=choices, layers=1, exchange=exchange),
        arrays,
        jnp.broadcast_to(jnp.asarray(chosen, jnp.int32), (TOKENS, choices)),
    )
    others = np.setdiff1d(np.arange(EXPERTS), chosen)
    for name in KERNELS:
        gradient_EDF = np.asarray(found["gradients"][name][0])
        assert (gradient_EDF[others] == 0).all(), name
        assert all(np.abs(gradient_EDF[expert]).max() > 0 for expert in chosen), name


@pytest.mark.parametrize("mesh", [ONE, WIDE], ids=["expert=1", "expert=4"])
def test_padding_alone_gives_zeros(mesh):
    run = Run(mesh)
    arrays, choice_NK = make_inputs(2)
    found = run.compute(arrays, jnp.full_like(choice_NK, EXPERTS))
    np.testing.assert_array_equal(found["out"], arrays["x"])
    for name in (*KERNELS, "weight"):
        np.testing.assert_array_equal(found["gradients"][name], 0)


def read_row_collectives(run):
    text = compile_run(run).as_text()
    mine = [each for each in read_collectives(text, run.make_mesh()) if "expert" in each.axes]
    return [each for each in mine if each.dtypes != ("s32",)], [
        each for each in mine if each.dtypes == ("s32",)
    ]


@pytest.mark.parametrize(("is_scanned", "trips_a_layer"), [(False, 4), (True, 6)])
def test_rows_travel_twice_a_pass_over_expert_and_twice_more_under_full_remat(is_scanned, trips_a_layer):
    run = Run(WIDE, is_scanned=is_scanned)
    rows, counts = read_row_collectives(run)
    exchanges = [each for each in rows if each.kind == "all-to-all"]
    assert {each.axes for each in exchanges} == {("expert",)}
    assert sum(each.trips for each in exchanges) == trips_a_layer * LAYERS
    chunk = TOKENS // 8 * 2
    assert {each.elements for each in exchanges} == {4 * chunk * EMBED}
    # The rest is the loss, and gradients of what is whole over `expert`; nothing gathers rows.
    assert {each.kind for each in rows if each not in exchanges} <= {"all-reduce"}
    assert {(each.kind, each.elements) for each in counts} == {("all-gather", 4 * EXPERTS)}


def test_no_pass_scatters_rows():
    run = Run(WIDE)
    text = run.lower(run.make_mesh(), *make_inputs(run.choices)).as_text()
    scattered = re.findall(r'"stablehlo\.scatter"\([^)]*\).*?\}\) : \((tensor<[^>]*>)', text, flags=re.S)
    assert scattered
    assert all(kind.endswith("xi32>") for kind in scattered), scattered
