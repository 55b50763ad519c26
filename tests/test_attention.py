"""Every attention kernel this machine can run equals a plain softmax, and documents never see each other."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from jaxscale.config.errors import UserError
from jaxscale.models.attention import attend, resolve_implementation

AXES = ("pipe", "data", "fsdp", "expert", "tensor")
BATCH, LENGTH, HEADS, KV_HEADS, HEAD = 4, 128, 4, 2, 16

KERNELS = [
    pytest.param({"implementation": "xla"}, id="xla"),
    pytest.param({"implementation": "splash", "interpret": True}, id="splash"),
]


def make_inputs(batch=BATCH, length=LENGTH, heads=HEADS, kv_heads=KV_HEADS, head=HEAD, dtype=jnp.float32):
    """Queries, keys, values and a random direction in which the output's gradient is taken."""
    generator = np.random.default_rng(0)
    shapes = [(batch, length, count, head) for count in (heads, kv_heads, kv_heads, heads)]
    return [jnp.asarray(generator.normal(size=shape), dtype) for shape in shapes]


def make_segments(batch=BATCH, length=LENGTH):
    """Two documents whose boundary moves with the row, then padding; the last row is padding only."""
    positions = np.arange(length)
    boundary = length // 4 + 7 * np.arange(batch)[:, None]
    segments_BT = np.where(positions < boundary, 1, np.where(positions < length - 40, 2, 0))
    segments_BT[-1] = 0
    return jnp.asarray(segments_BT, jnp.int32)


def attend_plainly(q_BTNH, k_BSKH, v_BSKH, segments_BT, causal):
    """Softmax attention as one reads it in a paper, in fp32, key/value heads repeated."""
    groups = q_BTNH.shape[2] // k_BSKH.shape[2]
    k_BSNH, v_BSNH = (jnp.repeat(x.astype(jnp.float32), groups, axis=2) for x in (k_BSKH, v_BSKH))
    logits_BNTS = jnp.einsum("BTNH,BSNH->BNTS", q_BTNH.astype(jnp.float32), k_BSNH) / np.sqrt(q_BTNH.shape[3])
    length = q_BTNH.shape[1]
    visible_BNTS = jnp.ones((1, 1, length, length), dtype=bool)
    if causal:
        visible_BNTS &= (np.arange(length)[:, None] >= np.arange(length)[None, :])[None, None]
    if segments_BT is not None:
        visible_BNTS &= (segments_BT[:, :, None] == segments_BT[:, None, :])[:, None]
    probabilities_BNTS = jax.nn.softmax(jnp.where(visible_BNTS, logits_BNTS, -jnp.inf), axis=-1)
    return jnp.einsum("BNTS,BSNH->BTNH", probabilities_BNTS, v_BSNH)


@functools.partial(jax.jit, static_argnames="function")
def compute_output_and_gradients(function, q_BTNH, k_BSKH, v_BSKH, direction_BTNH):
    out_BTNH, pull_back = jax.vjp(function, q_BTNH, k_BSKH, v_BSKH)
    return [out_BTNH, *pull_back(direction_BTNH)]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("causal", "packed"), [(True, True), (True, False), (False, True)])
def test_values_and_gradients_equal_a_plain_softmax(kernel, causal, packed):
    inputs = make_inputs()
    segments_BT = make_segments() if packed else None
    found = compute_output_and_gradients(
        functools.partial(attend, segments_BT=segments_BT, causal=causal, **kernel), *inputs
    )
    expected = compute_output_and_gradients(
        functools.partial(attend_plainly, segments_BT=segments_BT, causal=causal), *inputs
    )
    for name, one, other in zip(("out", "dq", "dk", "dv"), found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=5e-6, err_msg=name)


def test_splash_equals_a_plain_softmax_across_tiles():
    """640 positions are five tiles of 128: some are skipped, some have rows that see nothing in them."""
    inputs = make_inputs(batch=1, length=640, heads=2, kv_heads=1)
    segments_BT = jnp.asarray(np.repeat([[1, 2, 0]], [200, 400, 40], axis=1), jnp.int32)
    splash = functools.partial(attend, implementation="splash", interpret=True, segments_BT=segments_BT)
    found = compute_output_and_gradients(splash, *inputs)
    expected = compute_output_and_gradients(
        functools.partial(attend_plainly, segments_BT=segments_BT, causal=True), *inputs
    )
    for name, one, other in zip(("out", "dq", "dk", "dv"), found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=5e-6, err_msg=name)


@pytest.mark.parametrize("kernel", KERNELS)
def test_softmax_statistics_are_fp32_when_the_inputs_are_bf16(kernel):
    """With equal logits and values of 1 each output is 1, unless the sum is kept in bf16: it stops at 256."""
    length = 512
    q_BTNH, k_BSKH, v_BSKH, _ = make_inputs(batch=1, length=length, dtype=jnp.bfloat16)
    run = jax.jit(functools.partial(attend, segments_BT=None, **kernel))
    out_BTNH = run(jnp.zeros_like(q_BTNH), k_BSKH, jnp.ones_like(v_BSKH))
    assert out_BTNH.dtype == jnp.bfloat16
    np.testing.assert_allclose(out_BTNH.astype(jnp.float32), 1.0, rtol=0, atol=2**-8)
    found = run(q_BTNH, k_BSKH, v_BSKH)
    expected = attend_plainly(q_BTNH, k_BSKH, v_BSKH, None, causal=True)
    np.testing.assert_allclose(found.astype(jnp.float32), expected, rtol=0, atol=0.02)


@pytest.mark.parametrize("kernel", KERNELS)
def test_changing_a_document_leaves_the_others_bit_equal(kernel):
    q_BTNH, k_BSKH, v_BSKH, direction_BTNH = make_inputs()
    segments_BT = make_segments()
    function = functools.partial(attend, segments_BT=segments_BT, **kernel)
    before = compute_output_and_gradients(function, q_BTNH, k_BSKH, v_BSKH, direction_BTNH)
    changed = [x.at[:, 3].add(7.0) for x in (q_BTNH, k_BSKH, v_BSKH)]
    after = compute_output_and_gradients(function, *changed, direction_BTNH)
    first_BT = np.asarray(segments_BT == segments_BT[:, 3:4])
    for one, other in zip(before, after, strict=True):
        assert np.array_equal(np.asarray(one)[~first_BT], np.asarray(other)[~first_BT])
        assert not np.array_equal(np.asarray(one)[first_BT], np.asarray(other)[first_BT])


@pytest.mark.parametrize("kernel", KERNELS)
def test_packed_documents_equal_the_documents_alone(kernel):
    length = 256
    q_BTNH, k_BSKH, v_BSKH, _ = make_inputs(batch=1, length=length)
    segments_BT = jnp.asarray(np.repeat([[1, 2]], length // 2, axis=1), jnp.int32)
    run = jax.jit(functools.partial(attend, **kernel))
    packed_BTNH = run(q_BTNH, k_BSKH, v_BSKH, segments_BT=segments_BT)
    for half in (slice(0, length // 2), slice(length // 2, length)):
        alone_BTNH = run(q_BTNH[:, half], k_BSKH[:, half], v_BSKH[:, half], segments_BT=None)
        np.testing.assert_allclose(packed_BTNH[:, half], alone_BTNH, rtol=0, atol=2e-6)


def run_on_mesh(sizes, kernel, inputs, segments_BT):
    """Output and gradients in the step's own surroundings: a region over `data` if it is larger than 1."""
    mesh = jax.make_mesh([sizes.get(axis, 1) for axis in AXES], AXES, axis_types=(AxisType.Auto,) * len(AXES))

    def compute(segments_BT, *inputs):
        return compute_output_and_gradients(
            functools.partial(attend, segments_BT=segments_BT, **kernel), *inputs
        )

    if mesh.shape["data"] > 1:
        rows = PartitionSpec("data")
        compute = jax.shard_map(
            compute, in_specs=(rows,) * 5, out_specs=[rows] * 4, axis_names={"data"}, check_vma=False
        )
    with jax.set_mesh(mesh):
        activation = jax.NamedSharding(mesh, PartitionSpec(("data", "fsdp", "expert"), None, "tensor"))
        placed = [jax.device_put(x, activation) for x in inputs]
        return jax.jit(compute)(segments_BT, *placed)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    ("sizes", "packed"),
    [({"data": 2, "fsdp": 2, "tensor": 2}, True), ({"fsdp": 2, "expert": 2, "tensor": 2}, False)],
    ids=["region over data", "no outer region"],
)
def test_sharded_equals_one_device(kernel, sizes, packed):
    inputs = make_inputs()
    segments_BT = make_segments() if packed else None
    expected = compute_output_and_gradients(
        functools.partial(attend, segments_BT=segments_BT, **kernel), *inputs
    )
    found = run_on_mesh(sizes, kernel, inputs, segments_BT)
    for name, one, other in zip(("out", "dq", "dk", "dv"), found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=2e-6, err_msg=name)


@pytest.mark.parametrize(
    ("platform", "dtype", "length", "head", "expected"),
    [
        ("tpu", jnp.bfloat16, 2048, 128, "splash"),
        ("tpu", jnp.float32, 384, 80, "splash"),
        ("tpu", jnp.bfloat16, 2000, 128, "xla"),
        ("gpu", jnp.bfloat16, 2000, 128, "cudnn"),
        ("gpu", jnp.float32, 2048, 128, "xla"),
        ("gpu", jnp.bfloat16, 2048, 256, "xla"),
        ("gpu", jnp.bfloat16, 2048, 36, "xla"),
        ("gpu", jnp.bfloat16, 2047, 128, "xla"),
        ("cpu", jnp.bfloat16, 2048, 128, "xla"),
    ],
)
def test_auto_takes_the_chips_own_kernel_where_it_fits(platform, dtype, length, head, expected):
    shape = {"platform": platform, "dtype": dtype, "length": length, "head": head}
    assert resolve_implementation("auto", **shape) == expected
    assert resolve_implementation(expected, **shape) == expected


@pytest.mark.parametrize(
    ("name", "platform", "dtype", "length", "head", "message"),
    [
        (
            "splash",
            "cpu",
            jnp.bfloat16,
            256,
            128,
            "'splash' runs on tpu devices and the mesh has cpu",
        ),
        ("splash", "tpu", jnp.bfloat16, 300, 128, "multiple of 128, not 300: use 384"),
        ("cudnn", "tpu", jnp.bfloat16, 256, 128, "'cudnn' runs on gpu devices and the mesh has tpu"),
        ("cudnn", "gpu", jnp.float32, 256, 128, "fp16, not float32: set precision.compute to bf16"),
        ("cudnn", "gpu", jnp.bfloat16, 256, 100, "multiples of 8, not 100: change model.head"),
        ("cudnn", "gpu", jnp.bfloat16, 255, 128, "even batch.length, not 255: use 256"),
    ],
)
def test_a_kernel_asked_for_by_name_is_that_kernel_or_an_error(name, platform, dtype, length, head, message):
    with pytest.raises(UserError, match=message) as error:
        resolve_implementation(name, platform=platform, dtype=dtype, length=length, head=head)
    assert "or set model.attention to 'auto' or 'xla'" in str(error.value)


def test_interpreted_splash_is_allowed_anywhere():
    shape = {"platform": "cpu", "dtype": jnp.float32, "length": 256, "head": 16}
    assert resolve_implementation("splash", interpret=True, **shape) == "splash"


def test_heads_that_do_not_group_are_refused():
    q_BTNH, k_BSKH, v_BSKH, _ = make_inputs(heads=4, kv_heads=3)
    with pytest.raises(UserError, match=r"model\.heads is 4 and model\.kv_heads 3"):
        attend(q_BTNH, k_BSKH, v_BSKH, segments_BT=None, implementation="xla")


def test_a_length_splash_has_no_tile_for_is_refused():
    q_BTNH, k_BSKH, v_BSKH, _ = make_inputs(length=200)
    with pytest.raises(UserError, match="multiple of 128, not 200: use 256"):
        attend(q_BTNH, k_BSKH, v_BSKH, segments_BT=None, implementation="splash", interpret=True)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"tensor": 4, "fsdp": 2}, r"whole key/value heads, and 2 of them do not divide over mesh\.tensor=4"),
        ({"expert": 4, "fsdp": 2}, r"and 4 of them do not divide over mesh\.fsdp=2 x mesh\.expert=4"),
    ],
)
def test_a_region_that_would_split_a_sequence_or_a_head_is_refused(sizes, message):
    mesh = jax.make_mesh([sizes.get(axis, 1) for axis in AXES], AXES, axis_types=(AxisType.Auto,) * len(AXES))
    q_BTNH, k_BSKH, v_BSKH, _ = make_inputs()
    kernel = functools.partial(attend, segments_BT=None, implementation="splash", interpret=True)
    with jax.set_mesh(mesh), pytest.raises(UserError, match=message):
        jax.eval_shape(kernel, q_BTNH, k_BSKH, v_BSKH)
