"""`verify` passes what is right, and catches and names what is wrong: faults planted in the real code."""

import json
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxscale.cli.main import main
from jaxscale.config import MeshConfig, UserError
from jaxscale.models import remat
from jaxscale.models.build import shape_decoder
from jaxscale.parallel import vocab as vocab_module
from jaxscale.sharding.rules import iterate_leaves
from jaxscale.training import gradients, setup, state, step
from jaxscale.verify.batches import make_batch
from jaxscale.verify.cases import Case, list_meshes, plan_cases
from jaxscale.verify.compare import CaseResult
from jaxscale.verify.diagnose import find_common
from jaxscale.verify.oracle import make_plain_step
from jaxscale.verify.precision import allow_fp64
from jaxscale.verify.reduce import reduce_config
from jaxscale.verify.verification import make_oracle, verify_model
from tests.tiny import VOCAB, make_config

SMALL = {"layers": 1, "embed": 16, "heads": 4, "kv_heads": 2, "mlp": 32}
CUBE = MeshConfig(data=2, fsdp=2, tensor=2)
SQUARE = MeshConfig(data=2, fsdp=2)
# The case that most faults are planted in: every kind of traffic but that of tensor, and it clips.
PLANTED = Case(SQUARE, 2, False, 4, "none", "half")


@pytest.fixture(scope="module")
def oracle():
    """The reference of a tiny Llama, made once, before any fault is planted."""
    config = make_config(model=SMALL, batch={"length": 16}, mesh={"data": 2, "fsdp": 2, "tensor": 2})
    return make_oracle(config, vocab=VOCAB)


def run_case(oracle, case):
    (result,) = oracle.run([case])
    return result


def check_caught(oracle, case, *words):
    result = run_case(oracle, case)
    assert not result.ok, "the fault went unseen"
    said = "; ".join(result.problems)
    for word in words:
        assert word in said, said
    return result


@pytest.mark.smoke
@pytest.mark.parametrize(
    "case",
    [
        Case(MeshConfig(), 0, False, 4, "full", "half"),
        PLANTED,
        Case(CUBE, 3, False, 4, "matmuls", "half"),
        Case(CUBE, 1, False, 1, "none", "config"),
        Case(MeshConfig(fsdp=8), 3, True, 4, "none", "config"),
    ],
    ids=lambda case: case.name,
)
def test_what_is_right_passes(oracle, case):
    result = run_case(oracle, case)
    assert result.ok, result.problems
    assert 0 <= result.grad_error <= 1e-5
    assert result.worst_leaf in dict(iterate_leaves(oracle.reference.setup.model.shapes))


def plant_lax(monkeypatch, module, **functions):
    """Replaces functions of `lax` as one module sees it."""
    monkeypatch.setattr(module, "lax", SimpleNamespace(**{**vars(lax), **functions}))


def test_a_lost_reduction_over_data_is_caught(oracle, monkeypatch):
    def reduce_numbers_only(sums, axes):
        return sums._replace(loss=lax.psum(sums.loss, axes), weight=lax.psum(sums.weight, axes))

    plant_lax(monkeypatch, gradients, psum=reduce_numbers_only)
    check_caught(oracle, PLANTED, "gradient at step 1", "gradient norm")


def test_a_leaf_that_is_not_reduced_is_caught_and_named(oracle, monkeypatch):
    def forget_one(sums, axes):
        reduced = lax.psum(sums, axes)
        reduced.gradients["final_norm"]["scale"] = sums.gradients["final_norm"]["scale"]
        return reduced

    plant_lax(monkeypatch, gradients, psum=forget_one)
    result = check_caught(oracle, PLANTED, "gradient at step 1: final_norm/scale is off")
    assert result.worst_leaf == "final_norm/scale"


def test_a_gradient_counted_twice_on_one_shard_is_caught_and_named(oracle, monkeypatch):
    def scale_on_one_shard(sums, axes):
        kernel = sums.gradients["layers"]["mlp"]["down"]["kernel"]
        factor = jnp.where(lax.axis_index(axes[0]) == 1, 1.001, 1.0)
        sums.gradients["layers"]["mlp"]["down"]["kernel"] = kernel * factor
        return lax.psum(sums, axes)

    plant_lax(monkeypatch, gradients, psum=scale_on_one_shard)
    result = check_caught(oracle, PLANTED, "layers/mlp/down/kernel")
    assert result.worst_leaf == "layers/mlp/down/kernel"


def test_a_norm_that_counts_replicated_leaves_once_a_shard_is_caught(oracle, monkeypatch):
    """Every gradient is right; leaves that are whole on an axis of 2 enter the norm twice."""
    right = step.find_norm

    def find_norm(tree):
        return right([leaf * (2**0.5 if "norm" in path else 1.0) for path, leaf in iterate_leaves(tree)])

    monkeypatch.setattr(step, "find_norm", find_norm)
    result = check_caught(oracle, PLANTED, "gradient norm is off", "at step 1", "optimizer state")
    assert not any("gradient at step 1" in problem for problem in result.problems)


def test_clipping_leaf_by_leaf_is_caught(oracle, monkeypatch):
    right = step.clip_gradients

    def clip(tree, _, limit):
        return jax.tree.map(lambda leaf: right(leaf, step.find_norm(leaf), limit), tree)

    monkeypatch.setattr(step, "clip_gradients", clip)
    result = check_caught(oracle, PLANTED, "optimizer state")
    assert not any("at step 1" in problem for problem in result.problems), "norm and gradient are right"


def scan_only_the_last(add, start, batch):
    return add(start, jax.tree.map(lambda array: array[-1], batch))


def scan_without_the_first(add, start, batch):
    return lax.scan(add, start, jax.tree.map(lambda array: array[1:], batch))


@pytest.mark.parametrize("scan", [scan_only_the_last, scan_without_the_first])
def test_a_dropped_microbatch_is_caught(oracle, monkeypatch, scan):
    plant_lax(monkeypatch, gradients, scan=scan)
    check_caught(oracle, PLANTED, "loss is off", "gradient norm is off", "weights sum up to")


def test_a_mean_of_means_over_microbatches_is_caught(oracle, monkeypatch):
    right = gradients._scan_microbatches

    def scan(sum_microbatch, *arguments, **options):
        def average(weights, use, microbatch):
            loss, weight, tree, _ = sum_microbatch(weights, use, microbatch)
            share = jnp.maximum(weight, 1.0)
            tree = jax.tree.map(lambda g: g / share, tree)
            return gradients.Sums(loss / share, jnp.float32(1.0), tree, None)

        return right(average, *arguments, **options)

    monkeypatch.setattr(gradients, "_scan_microbatches", scan)
    check_caught(oracle, PLANTED, "loss is off", "gradient at step 1")


def test_a_mean_of_means_over_data_is_caught(oracle, monkeypatch):
    """Each shard divides by its own weight; with one microbatch nothing else is wrong."""

    def average(sums, axes):
        loss, weight, tree, _ = sums
        share = lax.psum(weight, axes) / (2 * jnp.maximum(weight, 1.0))
        tree = jax.tree.map(lambda g: g * share, tree)
        return lax.psum(gradients.Sums(loss * share, weight, tree, None), axes)

    plant_lax(monkeypatch, gradients, psum=average)
    check_caught(oracle, replace(PLANTED, microbatches=1), "loss is off", "gradient at step 1")


def test_a_mask_that_is_not_read_is_caught(oracle, monkeypatch):
    right = step.make_gradient_sums

    def make(*arguments):
        sum_gradients = right(*arguments)
        return lambda weights, use, batch: sum_gradients(
            weights, use, {**batch, "weights": jnp.ones_like(batch["weights"])}
        )

    monkeypatch.setattr(step, "make_gradient_sums", make)
    check_caught(oracle, PLANTED, "loss is off", "weights sum up to")


def test_a_rate_that_is_off_by_a_percent_is_caught(oracle, monkeypatch):
    right = step._find_rate
    monkeypatch.setattr(step, "_find_rate", lambda *arguments: right(*arguments) * 1.01)
    result = check_caught(oracle, PLANTED, "parameter: ")
    assert result.grad_norm_error is not None


def test_an_optimizer_state_that_is_lost_between_steps_is_caught(oracle, monkeypatch):
    right = step._make_update

    def make(optimizer, layouts, config):
        update = right(optimizer, layouts, config)

        def forget(before, *arguments):
            return update(replace(before, moments=optimizer.init(before.params)), *arguments)

        return forget

    monkeypatch.setattr(step, "_make_update", make)
    check_caught(oracle, PLANTED, "parameter: ", "optimizer state: ")


def test_weights_of_low_precision_are_caught(oracle, monkeypatch):
    monkeypatch.setattr(step, "compute_dtype", lambda _: jnp.dtype("bfloat16"))
    check_caught(oracle, PLANTED, "loss is off", "gradient at step 1")


def test_accumulators_of_low_precision_are_caught(oracle, monkeypatch):
    monkeypatch.setattr(step, "DTYPES", {"fp32": jnp.dtype("bfloat16")})
    check_caught(oracle, PLANTED, "gradient at step 1")


def test_weights_that_start_otherwise_are_caught(oracle, monkeypatch):
    right = setup.init_state
    monkeypatch.setattr(
        setup, "init_state", lambda *arguments: right(*arguments[:-1], jax.random.split(arguments[-1])[0])
    )
    check_caught(oracle, PLANTED, "parameter(s) start otherwise than on one device")


def test_optimizer_state_that_is_replicated_in_silence_is_caught(oracle, monkeypatch):
    right = state.lay_optimizer

    def lay(optimizer, shapes, layouts, **options):
        return jax.tree.map(lambda _: layouts.replicated, right(optimizer, shapes, layouts, **options))

    monkeypatch.setattr(state, "lay_optimizer", lay)
    monkeypatch.setattr(setup, "check_layouts", lambda *_: None)  # else the compile is refused already
    check_caught(oracle, PLANTED, "after step 1, optimizer state", "embed/table lies as", "bytes a device")


def test_a_step_that_counts_its_sequences_twice_is_caught(oracle, monkeypatch):
    right = step._sequences
    monkeypatch.setattr(step, "_sequences", lambda config: 2 * right(config))
    check_caught(oracle, PLANTED, "the state counts 192 sequences after 3 steps, not 96")


def test_a_lost_reduction_over_tensor_is_caught(oracle, monkeypatch):
    """The embedding's parts of the vocabulary are never added up."""
    monkeypatch.setattr(
        vocab_module, "_sum_over", lambda x, axes: x if "tensor" in axes else lax.psum(x, axes)
    )
    check_caught(oracle, Case(MeshConfig(data=2, tensor=2), 0, False, 1, "none", "config"), "loss is off")


def test_a_remat_policy_that_changes_numbers_is_caught(oracle, monkeypatch):
    right = jax.checkpoint

    def checkpoint(function, **options):
        return right(lambda x, layer: (function(x, layer)[0] + 1e-3, None), **options)

    monkeypatch.setattr(remat.jax, "checkpoint", checkpoint)
    check_caught(oracle, replace(PLANTED, remat="full"), "loss is off")


def test_a_loss_that_reads_masked_labels_is_a_fault_of_the_model(oracle):
    setup = oracle.reference.setup

    def sum_losses(params, batch, keys_B):
        loss, weight = setup.model.sum_losses(params, batch, keys_B)
        return loss + 1e-3 * batch["labels"].sum(), weight

    careless = replace(setup, model=replace(setup.model, sum_losses=sum_losses))
    reference = replace(oracle.reference, setup=careless)
    reference = replace(reference, step=jax.jit(make_plain_step(careless)))
    assert "labels that batch['weights'] takes out" in reference.find_mask_problem()
    assert oracle.problems == ()


def test_a_case_that_cannot_be_compiled_fails_with_its_message(oracle, monkeypatch):
    def refuse(*_):
        raise UserError("the compiler laid it otherwise")

    monkeypatch.setattr(setup, "check_layouts", refuse)
    result = check_caught(oracle, PLANTED, "UserError: the compiler laid it otherwise")
    assert result.grad_error is None


def test_a_programming_error_is_not_taken_for_a_failed_case(oracle, monkeypatch):
    monkeypatch.setattr(step, "clip_gradients", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run_case(oracle, PLANTED)


def test_gpt2_key_bias_is_no_false_alarm_and_a_wrong_bias_beside_it_is_caught(monkeypatch):
    model = {**SMALL, "family": "gpt2", "kv_heads": 4, "tied": True}
    oracle = make_oracle(make_config(model=model, batch={"length": 16}), vocab=VOCAB)
    assert oracle.rounding == ("layers/attention/key/bias",)
    result = run_case(oracle, PLANTED)
    assert result.ok, result.problems

    def scale_bias(sums, axes):
        reduced = lax.psum(sums, axes)
        query = reduced.gradients["layers"]["attention"]["query"]
        query["bias"] = query["bias"] * 1.001
        return reduced

    plant_lax(monkeypatch, gradients, psum=scale_bias)
    check_caught(oracle, PLANTED, "layers/attention/query/bias is off")


def test_fp64_agrees_to_ten_digits():
    config = make_config(model=SMALL, batch={"length": 16}, mesh={"data": 2, "fsdp": 2})
    with allow_fp64(fp64=True):
        oracle = make_oracle(config, vocab=VOCAB, fp64=True, device_count=4)
        result = run_case(oracle, PLANTED)
    assert result.ok, result.problems
    assert max(result.loss_error, result.grad_norm_error, result.grad_error) < 1e-12, "fp32 is left somewhere"
    assert not jax.config.jax_enable_x64


def never(mesh, microbatches):
    return None


def test_cases_cover_every_pair_and_repeat():
    config = make_config(mesh={"data": 2, "fsdp": 2, "tensor": 2})
    cases, left_out = plan_cases(config, 8, never, whole_product=False)
    assert left_out == []
    assert cases == plan_cases(config, 8, never, whole_product=False)[0]
    meshes = {case.mesh for case in cases} - {MeshConfig()}
    assert len(meshes) == 10
    laid = [case for case in cases if case.mesh in meshes]
    remats = {"none", "attention", "matmuls", "full"}
    assert {(c.mesh, c.zero) for c in laid} == {(m, z) for m in meshes for z in range(4)}
    assert {(c.mesh, c.microbatches) for c in laid} == {(m, n) for m in meshes for n in (1, 4)}
    assert {(c.mesh, c.remat) for c in laid} == {(m, r) for m in meshes for r in remats}
    assert {(c.zero, c.microbatches) for c in laid} == {(z, n) for z in range(4) for n in (1, 4)}
    assert {(c.zero, c.remat) for c in laid} == {(z, r) for z in range(4) for r in remats}
    assert {(c.keep_gathered, c.microbatches) for c in laid} == {
        (k, n) for k in (False, True) for n in (1, 4)
    }
    assert {c.clip for c in laid} == {"config", "half"}
    assert len(cases) < 50
    whole, _ = plan_cases(config, 8, never, whole_product=True)
    assert set(cases) <= set(whole)
    assert len(whole) > 400


def test_meshes_are_those_of_the_axes_that_the_configuration_uses():
    assert list_meshes(MeshConfig(fsdp=-1), 8) == [MeshConfig(fsdp=8)]
    assert len(list_meshes(MeshConfig(expert=2, tensor=4), 8)) == 4
    assert len(list_meshes(MeshConfig(), 8)) == 10
    assert {mesh.pipe for mesh in list_meshes(MeshConfig(), 8)} == {1}


def test_what_does_not_fit_is_left_out_with_its_reason(oracle):
    cases, left_out = oracle.plan()
    assert {case.mesh.tensor for case in cases} == {1, 2}, "2 key/value heads"
    assert {each.mesh.tensor for each in left_out} == {4, 8}
    assert all("kv_heads=2 does not divide by tensor=" in each.reason for each in left_out)


def test_a_batch_that_cannot_be_cut_leaves_out_several_microbatches():
    config = make_config(batch={"sequences": 8})
    oracle = make_oracle(config, vocab=VOCAB)
    cases, left_out = oracle.plan()
    shapes = {(case.mesh_name, case.microbatches) for case in cases}
    assert ("data=8", 1) in shapes
    assert ("data=8", 4) not in shapes
    assert any(each.microbatches == 4 and "batch.sequences=8" in each.reason for each in left_out)


@pytest.mark.parametrize("step_number", range(3))
def test_batches_have_masks_as_unequal_as_can_be(step_number):
    arrays = make_batch(make_config().batch, VOCAB, step_number)
    counts = arrays["weights"].sum(axis=1)
    by_microbatch, by_shard = counts.reshape(4, 8).sum(1), counts.reshape(4, 8).sum(0)
    assert (by_microbatch == 0).sum() == 1, "a whole microbatch without a label"
    assert (by_shard == 0).sum() >= 1, "a whole shard without a label"
    assert counts.max() > 3 * max(counts[counts > 0].min(), 1)
    assert set(np.unique(arrays["segments"])) == {1, 2}
    again = make_batch(make_config().batch, VOCAB, step_number)
    assert all(np.array_equal(arrays[name], again[name]) for name in arrays)


def test_no_batch_is_all_mask():
    for sequences in (1, 2, 3, 8):
        batch = make_config(batch={"sequences": sequences, "length": 2}).batch
        assert all(make_batch(batch, VOCAB, number)["weights"].any() for number in range(20))


def sizes(config):
    model = config.model
    return model.heads, model.kv_heads or model.heads, model.embed, model.mlp, model.positions


@pytest.mark.parametrize(
    "model",
    [
        {"embed": 8192, "heads": 64, "kv_heads": 8, "mlp": 28672, "vocab": 128256},
        {"embed": 768, "heads": 12, "kv_heads": None, "mlp": 3072, "family": "gpt2", "positions": 1100},
        {"embed": 100, "heads": 10, "kv_heads": 5, "mlp": 402},
        {"embed": 33, "heads": 3, "kv_heads": 3, "head": 20, "mlp": 7},
    ],
)
def test_a_reduced_decoder_divides_by_what_the_whole_one_divides_by(model):
    whole = make_config(model=model, batch={"length": 1024})
    small = reduce_config(whole, 8)
    whole_sizes = (*sizes(whole)[:4], whole.model.positions or 1024)
    for ways in (2, 4, 8):
        assert [size % ways == 0 for size in sizes(small)] == [size % ways == 0 for size in whole_sizes]
    assert small.model.layers == 2
    assert small.model.embed <= 80
    assert (small.model.heads > sizes(small)[1]) == (whole.model.heads > sizes(whole)[1]), "grouped or not"
    assert small.batch.sequences % (8 * small.batch.microbatches) == 0
    shape_decoder(small, vocab=small.model.vocab, platform="cpu")  # its sizes do not contradict each other


def test_a_large_model_is_refused_with_its_bytes():
    config = make_config(model={"embed": 4096, "heads": 32, "kv_heads": 8, "mlp": 14336, "vocab": 32000})
    with pytest.raises(UserError, match=r"parameters and 1,024 tokens a step.*bytes.*--reduce"):
        verify_model(config)


def make_results(fails):
    meshes = [MeshConfig(), MeshConfig(data=2), MeshConfig(tensor=2), MeshConfig(data=2, tensor=2)]
    cases = [
        Case(mesh, zero, False, count, "none", "config")
        for mesh in meshes
        for zero in (0, 3)
        for count in (1, 4)
    ]
    return [CaseResult(case, ("wrong",) if fails(case) else ()) for case in cases]


@pytest.mark.parametrize(
    ("fails", "sentence"),
    [
        (lambda case: False, ""),
        (lambda case: case.mesh.tensor > 1, "exactly the cases with mesh.tensor > 1 fail"),
        (lambda case: case.microbatches > 1, "exactly the cases with several microbatches fail"),
        (
            lambda case: case.mesh.data > 1 and case.zero == 3,
            "exactly the cases with mesh.data > 1 and zero.stage >= 1 fail",
        ),
        (lambda case: True, "every case fails, those on one device too"),
    ],
)
def test_the_last_line_says_what_failed_cases_have_in_common(fails, sentence):
    assert find_common(make_results(fails)).startswith(sentence)
    if not sentence:
        assert find_common(make_results(fails)) == ""


CONFIG = """
run_dir: unused
steps: 10
mesh: {data: 2}
batch: {sequences: 8, microbatches: 2, length: 8}
precision: bf16
"""
MODEL = """
import jax, jax.numpy as jnp
from jaxscale.models.losses import token_cross_entropy
from jaxscale.models.model import Model
from jaxscale.sharding.rules import Rules

def make_model(*, vocab, length):
    def init(key):
        return {"table": 0.1 * jax.random.normal(key, (vocab, vocab))}

    def sum_losses(params, batch, keys_B):
        logits = params["table"][batch["tokens"]]
        return token_cross_entropy(logits, batch["labels"], batch["weights"])

    shapes, rules = jax.eval_shape(init, jax.random.key(0)), Rules({"table": ("vocab", "embed")})
    return Model(shapes=shapes, rules=rules, init=init, sum_losses=sum_losses)
"""


@pytest.fixture
def command(tmp_path, monkeypatch):
    """The command in this process, on two of its devices, with a model of one's own: bigrams."""
    (tmp_path / "bigrams.py").write_text(MODEL)
    (tmp_path / "run.yaml").write_text(f"{CONFIG}model: {{file: {tmp_path}/bigrams.py, vocab: 64}}\n")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
    return lambda *words: main(["verify", str(tmp_path / "run.yaml"), "--devices", "2", *words])


def test_the_command_prints_json(command, capsys):
    assert command("--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["ok"] is True
    keys = {"mesh", "zero", "microbatches", "loss_error", "grad_norm_error", "grad_error", "worst_leaf"}
    assert keys | {"parameter_error"} <= set(told["cases"][0])
    assert {case["zero"] for case in told["cases"]} == {0, 1, 2, 3}
    assert told["cases"][-1]["mesh"] == {"pipe": 1, "data": 2, "fsdp": 1, "expert": 1, "tensor": 1}
    assert any("fp32" in note for note in told["notes"])


def test_the_command_shows_a_table_and_exits_with_1_on_a_fault(command, capsys, monkeypatch):
    plant_lax(monkeypatch, gradients, scan=scan_only_the_last)
    assert command() == 1
    said = capsys.readouterr()
    assert "simulates 2 device(s)" in said.err
    assert "FAILED data=2" in said.out
    assert "worst leaf" in said.out
    assert said.out.splitlines()[-1].endswith("exactly the cases with several microbatches fail: look there")
