"""What collectives a compiled program holds is read right: kind, axes, bytes, loops."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
from jax.sharding import AbstractMesh

from jaxscale.sharding.collectives import Collective, read_collectives, summarise

MICROBATCHES = 4
LAYERS = 5
ROUNDS = 3

# Compiled in a process of its own, since the number of simulated devices is fixed when JAX starts.
_COMPILE = f"""
import json, sys
import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

mesh = jax.make_mesh((2, 2, 2), ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)

def manual(f, in_specs, out_specs, axes):
    options = dict(mesh=mesh, axis_names=axes, check_vma=False)
    return jax.shard_map(f, in_specs=in_specs, out_specs=out_specs, **options)

def microbatches(inside):
    def region(w, x):
        def one(total, x):
            grad = jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w) ** 2))(w)
            return total + (jax.lax.psum(grad, "data") if inside else grad), None
        total, _ = jax.lax.scan(one, jnp.zeros_like(w), x)
        return total if inside else jax.lax.psum(total, "data")
    return manual(region, (P(), P(None, "data")), P(), {{"data"}})

def layers(w, x):
    def layer(x, w):
        return jax.lax.with_sharding_constraint(jnp.tanh(x @ w), P(("data", "fsdp"), None)), None
    return jax.lax.scan(layer, x, w)[0].sum()

def nested(w, x):
    return jax.lax.scan(lambda total, _: (total + layers(w + total, x), None), 0.0, None, length={ROUNDS})[0]

def exchanges(x):
    x = jax.lax.ppermute(x, "fsdp", [(0, 1)])
    x = jax.lax.all_to_all(x, ("data", "tensor"), 0, 0, tiled=True)
    return jax.lax.psum_scatter(x, ("fsdp", "tensor"), tiled=True)

def unbounded(x, n):
    one = lambda state: (state[0] + 1, jax.lax.psum(state[1], "data"))
    return jax.lax.while_loop(lambda state: state[0] < n[0], one, (0, x))[1]

def array(spec, *shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

every = P(("data", "fsdp", "tensor"))
weight, batch = array(P("fsdp", "tensor"), 64, 64), array(P(None, ("data", "fsdp")), {MICROBATCHES}, 16, 64)
stack, rows = array(P(None, "fsdp", "tensor"), {LAYERS}, 64, 64), array(P(("data", "fsdp")), 16, 64)
count = array(P(), 1, dtype=jnp.int32)
programs = {{
    "outside": (microbatches(False), (weight, batch)),
    "inside": (microbatches(True), (weight, batch)),
    "layers": (layers, (stack, rows)),
    "nested": (nested, (stack, rows)),
    "exchanges": (manual(exchanges, every, every, set(mesh.axis_names)), (array(every, 256, 64),)),
    "unbounded": (manual(unbounded, (every, P()), every, set(mesh.axis_names)), (rows, count)),
}}
with jax.set_mesh(mesh):
    json.dump({{k: jax.jit(f).lower(*a).compile().as_text() for k, (f, a) in programs.items()}}, sys.stdout)
"""


@pytest.fixture(scope="module")
def compiled() -> dict[str, list[Collective]]:
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
    }
    done = subprocess.run([sys.executable, "-c", _COMPILE], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return {name: read_collectives(text, MESH) for name, text in json.loads(done.stdout).items()}


MESH = AbstractMesh((2, 2, 2), ("data", "fsdp", "tensor"))
WEIGHT_BYTES = 64 * 64 * 4


def _over(collectives: list[Collective], axis: str) -> list[Collective]:
    return [c for c in collectives if axis in c.axes]


def test_one_gradient_reduction_over_data_stands_outside_the_microbatch_loop(compiled):
    [reduction] = _over(compiled["outside"], "data")
    assert (reduction.kind, reduction.axes, reduction.group_size) == ("all-reduce", ("data",), 2)
    assert (reduction.loop_depth, reduction.trips, reduction.in_branch) == (0, 1, False)
    assert (reduction.dtypes, reduction.elements, reduction.bytes) == (("f32",), 64 * 32, WEIGHT_BYTES // 2)
    assert reduction.op_name is not None
    assert reduction.op_name.endswith("psum")
    assert reduction.source is not None
    assert reduction.source.rpartition(":")[2].isdigit()


def test_a_reduction_moved_into_the_microbatch_loop_is_seen_there(compiled):
    [reduction] = _over(compiled["inside"], "data")
    assert (reduction.loop_depth, reduction.trips) == (1, MICROBATCHES)
    assert reduction.bytes_a_step == MICROBATCHES * WEIGHT_BYTES // 2


def test_a_weight_gathered_over_fsdp_in_a_layer_scan_counts_once_a_layer(compiled):
    [gather] = [c for c in _over(compiled["layers"], "fsdp") if c.kind == "all-gather"]
    assert (gather.axes, gather.loop_depth) == (("fsdp",), 1)
    assert (gather.trips, gather.bytes) == (LAYERS, WEIGHT_BYTES // 2)
    assert gather.bytes_a_step == LAYERS * WEIGHT_BYTES // 2


def test_trips_of_nested_scans_multiply(compiled):
    [gather] = [c for c in _over(compiled["nested"], "fsdp") if c.kind == "all-gather"]
    assert (gather.axes, gather.loop_depth, gather.trips) == (("fsdp",), 2, ROUNDS * LAYERS)


def test_permutes_exchanges_and_groups_over_two_axes_are_told_apart(compiled):
    permute, exchange, scatter = compiled["exchanges"]
    assert (permute.kind, permute.axes, permute.group_size) == ("collective-permute", ("fsdp",), 2)
    assert (exchange.kind, exchange.axes, exchange.group_size) == ("all-to-all", ("data", "tensor"), 4)
    assert exchange.elements == permute.elements == 256 * 64 // 8
    assert (scatter.kind, scatter.axes, scatter.elements) == (
        "reduce-scatter",
        ("fsdp", "tensor"),
        256 * 64 // 32,
    )


def test_a_loop_of_unknown_length_is_never_counted_as_one(compiled):
    [reduction] = compiled["unbounded"]
    assert (reduction.trips, reduction.bytes_a_step, reduction.loop_depth) == (None, None, 1)
    [row] = summarise(compiled["unbounded"])
    assert (row.count, row.calls_a_step, row.bytes_a_step) == (1, None, None)


def test_summary_adds_bytes_with_trips_by_axes_and_kind(compiled):
    rows = {(row.axes, row.kind): row for row in summarise(compiled["inside"] + compiled["outside"])}
    row = rows[("data",), "all-reduce"]
    assert (row.count, row.calls_a_step) == (2, MICROBATCHES + 1)
    assert row.bytes_a_step == (MICROBATCHES + 1) * WEIGHT_BYTES // 2


# --- Forms of the TPU and GPU compilers, shortened from their texts -----------------------------------------


def _module(*body: str, computations: str = "") -> str:
    lines = "\n".join(f"  {line}" for line in body)
    entry = f"ENTRY %main (p: f32[8]) -> f32[8] {{\n{lines}\n}}\n"
    return f"HloModule jit_f, num_partitions=8\n\n{computations}\n{entry}"


def _read(*body: str, computations: str = "") -> list[Collective]:
    return read_collectives(_module(*body, computations=computations), MESH)


@pytest.mark.parametrize(
    ("groups", "axes", "size"),
    [
        ("{{0,4},{1,5},{2,6},{3,7}}", ("data",), 2),
        ("{{0,2},{1,3},{4,6},{5,7}}", ("fsdp",), 2),
        ("{{0,1,2,3},{4,5,6,7}}", ("fsdp", "tensor"), 4),
        ("{}", ("data", "fsdp", "tensor"), 8),
        ("{{0},{1},{2},{3},{4},{5},{6},{7}}", (), 1),
        ("[4,2]<=[8]", ("tensor",), 2),
        ("[1,8]<=[8]", ("data", "fsdp", "tensor"), 8),
        ("[4,2]<=[4,2]T(1,0)", ("fsdp",), 2),
        ("[2,4]<=[4,2]T(1,0)", ("data", "fsdp"), 4),
        ("[4,2]<=[2,2,2]T(2,1,0)", ("data",), 2),
        ("mesh['data'=2,'fsdp'=2,'tensor'=2] {'data'}", ("data",), 2),
        ("mesh['data'=2,'fsdp'=2,'tensor'=2] {'fsdp','tensor'}", ("fsdp", "tensor"), 4),
        ("mesh['axis_0'=4,'axis_1'=2] {'axis_1'}", ("tensor",), 2),
        ("mesh['a'=8] {'a':(1)2}", ("data",), 2),
        ("mesh['a'=8] {'a':(2)2}", ("fsdp",), 2),
        ("mesh['a'=8] {'a':(1)2,'a':(4)2}", ("data", "tensor"), 4),
        ("mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'a'}", ("tensor",), 2),
        ("mesh['a'=2,'b'=4], device_ids=(0,2,4,6,1,3,5,7) {'b'}", ("data", "fsdp"), 4),
        ("@mesh<a=2,b=4> {a}", ("data",), 2),
    ],
)
def test_every_form_of_replica_groups_names_the_axes(groups, axes, size):
    [found] = _read(
        f"ROOT %r = f32[8]{{0}} all-reduce(%p), channel_id=1, replica_groups={groups}, "
        'use_global_device_ids=true, to_apply=%add, metadata={op_name="a/b"}'
    )
    assert (found.axes, found.group_size, found.op_name) == (axes, size, "a/b")


def test_replica_mode_over_all_partitions_spans_the_whole_mesh():
    [found] = _read("ROOT %r = f32[8]{0} all-reduce(%p), channel_id=1, replica_groups={{0}}, to_apply=%add")
    assert found.axes == ("data", "fsdp", "tensor")


def test_an_axis_spanned_in_part_shows_in_the_group_size():
    mesh = SimpleNamespace(axis_names=("pipe", "data"), shape={"pipe": 2, "data": 4})
    text = _module(
        "ROOT %r = f32[8]{0} all-reduce(%p), replica_groups=[4,2]<=[8], use_global_device_ids=true"
    )
    [found] = read_collectives(text, mesh)
    assert (found.axes, found.group_size) == (("data",), 2)


def test_a_permute_over_pipe_names_pipe_alone():
    mesh = SimpleNamespace(axis_names=("pipe", "data"), shape={"pipe": 4, "data": 2})
    text = _module(
        "%p = f32[8]{0} parameter(0)",
        "%s = (f32[8]{0:T(128)}, f32[8]{0:T(128)}, u32[]{:S(2)}, u32[]{:S(2)}) collective-permute-start(%p), "
        "channel_id=1, source_target_pairs={{0,2},{1,3},{2,4},{3,5},{4,6},{5,7}}",
        "ROOT %d = f32[8]{0:T(128)} collective-permute-done(%s)",
    )
    [found] = read_collectives(text, mesh)
    assert (found.kind, found.axes, found.bytes, found.name) == ("collective-permute", ("pipe",), 32, "s")


@pytest.mark.parametrize(
    ("kind", "start_type", "elements", "size_bytes"),
    [
        ("all-gather", "(bf16[4,8]{1,0:T(8,128)(2,1)}, bf16[8,8]{1,0:T(8,128)(2,1)})", 64, 128),
        ("all-gather", "((f32[4]{0}, f32[2]{0}), (f32[8]{0}, /*index=1*/f32[4]{0}))", 12, 48),
        ("all-reduce", "f32[8]{0}", 8, 32),
        ("all-reduce", "(f32[8]{0}, bf16[4]{0})", 12, 40),
        ("all-reduce", "((f32[8]{0}), f32[8]{0})", 8, 32),
        ("all-reduce", "((f32[8]{0}, bf16[4]{0}), (f32[8]{0}, bf16[4]{0}))", 12, 40),
        ("reduce-scatter", "((f32[32,64]{1,0}), f32[8,64]{1,0}, u32[])", 512, 2048),
        ("all-to-all", "((s8[32]{0}), s8[32]{0})", 32, 32),
        ("ragged-all-to-all", "((f8e4m3fn[16], f8e4m3fn[24], s64[2]{0}), f8e4m3fn[24]{0})", 16, 16),
        ("ragged-all-to-all", "((f8e4m3fn[16], f8e4m3fn[8], s64[2]{0}), f8e4m3fn[8]{0})", 8, 8),
    ],
)
def test_an_asynchronous_pair_counts_once_with_the_size_of_its_result(kind, start_type, elements, size_bytes):
    [found] = _read(
        "%a = f8e4m3fn[16] parameter(0)",
        f"%s = {start_type} {kind}-start(%a, /*index=1*/%b), replica_groups={{{{0,1}},{{2,3}}}}, "
        'channel_id=1, use_global_device_ids=true, metadata={op_name="x" source_file="a.py" source_line=7}',
        f"ROOT %d = f32[8]{{0}} {kind}-done(%s)",
    )
    assert (found.kind, found.elements, found.bytes) == (kind, elements, size_bytes)
    assert (found.axes, found.source) == (("tensor",), "a.py:7")


def test_a_wrapped_asynchronous_collective_counts_once():
    [found] = _read(
        "%s = ((f32[8]), f32[8], u32[]) async-start(%p), calls=%wrapped",
        "%u = ((f32[8]), f32[8], u32[]) async-update(%s), calls=%wrapped",
        "ROOT %d = f32[8]{0} async-done(%u), calls=%wrapped",
        computations="%wrapped (q: f32[8]) -> f32[8] {\n"
        "  %q = f32[8]{0} parameter(0)\n"
        "  ROOT %c = f32[8]{0} all-to-all(%q), replica_groups={{0,1},{2,3},{4,5},{6,7}}, dimensions={0}\n}\n",
    )
    assert (found.kind, found.axes) == ("all-to-all", ("tensor",))


def test_a_tpu_collective_spread_over_matmul_fusions_counts_once():
    part = (
        "%{0} (q: f32[4]) -> f32[8] {{\n"
        "  %q = f32[4]{{0}} parameter(0)\n"
        "  %g.{0} = f32[8]{{0}} all-gather(%q), channel_id=4, replica_groups=[4,2]<=[8], dimensions={{0}}\n"
        "  ROOT %r = f32[8]{{0}} custom-call(%g.{0})\n}}\n"
    )
    [found] = _read(
        "%async-collective-start.1 = f32[8]{0} fusion(%p), kind=kCustom, calls=%first",
        "%fusion.2 = f32[8]{0} fusion(%async-collective-start.1), calls=%async_collective_fusion.122",
        "ROOT %async-collective-done.1 = f32[8]{0} fusion(%fusion.2), kind=kCustom, calls=%last",
        computations="".join(part.format(name) for name in ("first", "async_collective_fusion.122", "last")),
    )
    assert (found.name, found.axes, found.bytes) == ("g.first", ("tensor",), 32)


def test_a_tpu_all_reduce_scatter_fusion_is_the_reduce_scatter_it_stands_for():
    [found] = _read(
        "ROOT %f = bf16[4,8]{1,0:T(8,128)(2,1)} fusion(%p), kind=kCustom, calls=%all-reduce-scatter.clone.1, "
        'metadata={op_name="jit(f)/psum"}, backend_config={"emitter":"all-gather(x), calls=%nothing"}',
        computations="%all-reduce-scatter.clone.1 (input: bf16[8,8]) -> bf16[4,8] {\n"
        "  %input = bf16[8,8]{1,0} parameter(0)\n"
        "  %all-reduce.13 = bf16[8,8]{1,0} all-reduce(%input), channel_id=14, "
        "replica_groups={{0,2},{1,3},{4,6},{5,7}}, use_global_device_ids=true, to_apply=%add\n"
        "  ROOT %slice = bf16[4,8]{1,0} dynamic-slice(%all-reduce.13, %i), dynamic_slice_sizes={4,8}\n}\n",
    )
    assert (found.kind, found.axes, found.bytes, found.op_name) == (
        "reduce-scatter",
        ("fsdp",),
        64,
        "jit(f)/psum",
    )


def test_branches_are_entered_and_marked():
    branch = (
        "%{0} (q: f32[8]) -> f32[8] {{\n"
        "  %q = f32[8]{{0}} parameter(0)\n"
        "  ROOT %c{0} = f32[8]{{0}} all-reduce(%q), replica_groups={{{{0,4}}}}\n}}\n"
    )
    found = _read(
        "ROOT %x = f32[8]{0} conditional(%i, %p, %p), branch_computations={%first, %second}",
        computations=branch.format("first") + branch.format("second"),
    )
    assert [(c.name, c.in_branch, c.trips) for c in found] == [("cfirst", True, 1), ("csecond", True, 1)]


def _loop(
    compare: str, start: str = "%zero", step: int = 1, fused: bool = False, attributes: str = ""
) -> str:
    test = (
        "  ROOT %t = pred[] fusion(%i), kind=kLoop, calls=%fused_compare\n"
        if fused
        else f"  %n = s32[]{{:T(128)}} constant(12)\n  ROOT %t = pred[]{{:T(512)}} {compare}\n"
    )
    return _module(
        "%zero = s32[] constant(0)",
        "%three = s32[] constant(3)",
        "%p = f32[8]{0} parameter(0)",
        f"%start = s32[] copy({start})",
        "%state = (s32[]{:T(128)}, f32[8]{0:T(128)}) tuple(%start, %p)",
        "%w = (s32[], f32[8]) while(%state), condition=%condition, body=%body" + attributes,
        "ROOT %r = f32[8]{0} get-tuple-element(%w), index=1",
        computations="%fused_compare (i: s32[]) -> pred[] {\n"
        "  %i.1 = s32[] parameter(0)\n  %n = s32[] constant(12)\n"
        f"  ROOT %t.1 = pred[] {compare.replace('%i,', '%i.1,')}\n}}\n\n"
        "%condition (s: (s32[], f32[8])) -> pred[] {\n"
        "  %s = (s32[], f32[8]{0}) parameter(0)\n"
        f"  %i = s32[] get-tuple-element(%s), index=0\n{test}}}\n\n"
        "%body (s: (s32[], f32[8])) -> (s32[], f32[8]) {\n"
        "  %s.1 = (s32[], f32[8]{0}) parameter(0)\n"
        f"  %step = s32[] constant({step})\n"
        "  %j = s32[] get-tuple-element(%s.1), index=0\n"
        "  %x = f32[8]{0} get-tuple-element(%s.1), index=1\n"
        "  %k = s32[] add(%j, %step)\n"
        "  %c = f32[8]{0} all-reduce(%x), replica_groups={{0,4}}, use_global_device_ids=true\n"
        "  ROOT %next = (s32[], f32[8]{0}) tuple(%k, %c)\n}\n",
    )


@pytest.mark.parametrize(
    ("loop", "trips"),
    [
        (_loop("compare(%i, %n), direction=LT"), 12),
        (_loop("compare(%n, %i), direction=GT"), 12),
        (_loop("compare(%i, %n), direction=LE"), 13),
        (_loop("compare(%i, %n), direction=LT", start="%three"), 9),
        (_loop("compare(%i, %n), direction=LT", step=5), 3),
        (_loop("compare(%i, %n), direction=LT", fused=True), 12),
        (_loop("compare(%i, %n), direction=LT", start="%p"), None),
        (_loop("compare(%i, %n), direction=LT", step=0), None),
        (_loop("compare(%i, %n), direction=GT", step=1), None),
        (_loop("and(%i, %n)", attributes=', backend_config={"known_trip_count":{"n":"7"}}'), 7),
        (_loop("and(%i, %n)", attributes=', backend_config="{\\"known_trip_count\\":{\\"n\\":\\"7\\"}}"'), 7),
    ],
)
def test_trips_come_from_the_loop_counter_where_the_compiler_states_none(loop, trips):
    [found] = read_collectives(loop, MESH)
    assert (found.trips, found.loop_depth) == (trips, 1)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (_module("ROOT %r = f32[8]{0} copy(%p)").replace("=8", "=4", 1), "num_partitions=4"),
        (
            _module("ROOT %r = f32[8]{0} copy(%p)").replace("partitions=8", "partitions=8, replica_count=2"),
            "replica",
        ),
        (
            _module("ROOT %r = f32[8]{0} all-reduce(%p), replica_groups={{0,8}}, use_global_device_ids=true"),
            "8",
        ),
        (_module("ROOT %r = f32[8]{0} all-reduce(%p), replica_groups=spiral(8)"), "unknown form: spiral"),
        (_module("ROOT %r = opaque[8]{0} all-to-all(%p), replica_groups={}"), "opaque"),
        ("HloModule jit_f\n", "no ENTRY"),
    ],
)
def test_a_text_that_does_not_fit_is_refused(text, complaint):
    with pytest.raises(ValueError, match=complaint):
        read_collectives(text, MESH)
