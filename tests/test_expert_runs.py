"""Runs with experts: interrupted or not, skipped steps, padding."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxscale.checkpoint import Checkpoints
from jaxscale.numerics.draw import make_key
from jaxscale.training.loop import Outcome, train
from jaxscale.verify.oracle import place_batch
from tests.test_experts import Step, make_arrays, make_bias, make_moe_config, run_step
from tests.test_training import corpus, make_run, read_metrics  # noqa: F401  (a fixture)
from tests.tiny import make_tiny_setup

MOE = {
    "experts": 4,
    "top_k": 2,
    "mlp": 16,
    "router": "sigmoid",
    "balance": "loss+bias",
    "jitter": 0.1,
    "exchange": "capacity",
    "z_coef": 1e-3,
    "balance_scope": "step",
}
SECTIONS: dict[str, Any] = {"mesh": {"expert": 2, "data": 2, "tensor": 2}, "moe": MOE}


def test_metrics_and_biases_are_bit_equal_whether_or_not_the_run_was_interrupted(
    tmp_path: Path,
    corpus: Path,  # noqa: F811
) -> None:
    whole = train(make_run(tmp_path / "whole", corpus, **SECTIONS))
    assert whole.outcome is Outcome.DONE
    for stop in (2, 3, None):
        parts = train(make_run(tmp_path / "parts", corpus, stop_after_steps=stop, **SECTIONS))
    assert read_metrics(parts.run_dir) == read_metrics(whole.run_dir)
    biases = []
    for run_dir in (whole.run_dir, parts.run_dir):
        setup = make_tiny_setup(make_run(run_dir.path, corpus, **SECTIONS))
        restored = Checkpoints(run_dir.checkpoints, keep=1).restore(whole.step, setup.abstract_state)
        biases.append(np.asarray(restored.routers.bias))
    np.testing.assert_array_equal(*biases)
    assert len(np.unique(biases[0])) > 2, "biases have moved"


def test_a_skipped_step_leaves_the_bias_bit_for_bit() -> None:
    config = make_moe_config({**MOE, "experts": 8}, mesh={"expert": 2, "data": 2}, model={"layers": 1})
    arrays, bias = make_arrays(config), make_bias(config)
    skipped = run_step(config, {**arrays, "weights": np.zeros_like(arrays["weights"])}, bias)
    assert skipped.metrics["skipped"]
    assert np.asarray(skipped.state.routers.bias).tobytes() == bias.tobytes()
    applied = run_step(config, arrays, bias)
    assert not applied.metrics["skipped"]
    assert np.asarray(applied.state.routers.bias).tobytes() != bias.tobytes()


def test_biases_stay_once_the_run_has_seen_so_many_tokens() -> None:
    config = make_moe_config(
        {**MOE, "experts": 8, "bias_freeze_tokens": 2 * 32 * 32}, mesh={"expert": 2}, model={"layers": 1}
    )
    setup = make_tiny_setup(config)
    state, step = setup.compile_init()(make_key(0)), setup.compile_step()
    biases = []
    for number in range(4):
        state, _ = step(state, place_batch(setup, make_arrays(config, number)))
        biases.append(np.asarray(state.routers.bias))
    assert (biases[0] != biases[1]).any()
    np.testing.assert_array_equal(biases[1], biases[2])
    np.testing.assert_array_equal(biases[1], biases[3])


@pytest.mark.parametrize("exchange", ["capacity", "dropless"])
def test_padding_takes_no_room_and_counts_nowhere(exchange: str) -> None:
    """The same text in windows of 16 and of 48 tokens, with so little room that tokens are dropped."""
    moe = {"exchange": exchange, "capacity_factor": 0.75, "balance_coef": 1.0}

    def run(length: int) -> Step:
        config = make_moe_config(moe, mesh={"expert": 2, "fsdp": 2}, batch={"length": length})
        short = make_arrays(make_moe_config(moe, batch={"length": 16}))
        arrays = {name: np.pad(array, ((0, 0), (0, length - 16))) for name, array in short.items()}
        return run_step(config, arrays)

    tight, padded = run(16), run(48)
    assert (tight.metrics["drop_fraction"] > 0.05) == (exchange == "capacity")
    for name in ("loss", "balance", "router_z", "router_entropy", "drop_fraction", "load"):
        np.testing.assert_allclose(padded.metrics[name], tight.metrics[name], rtol=2e-6, err_msg=name)
    for path, leaf in tight.gradients.items():
        error = np.linalg.norm(padded.gradients[path] - leaf) / (np.linalg.norm(leaf) or 1)
        assert error <= 1e-5, path


@pytest.mark.parametrize("remat", ["none", "full"])
def test_loads_sum_up_to_the_choices_of_all_tokens(remat: str) -> None:
    """Once each, recomputed or not, in however many microbatches."""
    config = make_moe_config(
        {"exchange": "capacity"}, mesh={"expert": 2, "data": 2}, batch={"microbatches": 4}, remat=remat
    )
    step = run_step(config, make_arrays(config))
    np.testing.assert_allclose(step.metrics["load"].sum(-1), 8, rtol=1e-6)
    alone = run_step(make_moe_config({"exchange": "capacity"}), make_arrays(config))
    jax.tree.map(np.testing.assert_array_equal, step.metrics["load"], alone.metrics["load"])


@pytest.mark.parametrize(
    ("exchange", "scaling"),
    [("capacity", "delayed"), pytest.param("dropless", "dynamic", marks=pytest.mark.full)],
)
def test_experts_in_fp8_repeat_themselves_on_a_mesh(exchange: str, scaling: str) -> None:
    """Within what fp8 is held to; the largest magnitudes too, of all experts, shards and microbatches."""
    sections = {"precision": "fp8", "fp8": {"scaling": scaling, "history": 2}}
    moe = {"exchange": exchange, "router": "softmax"}
    config = make_moe_config(
        moe, mesh={"expert": 2, "fsdp": 2, "tensor": 2}, batch={"microbatches": 4}, remat="full", **sections
    )
    alone = run_step(make_moe_config(moe, **sections), make_arrays(config))
    step = run_step(config, make_arrays(config))
    exact = run_step(make_moe_config(moe), make_arrays(config))
    np.testing.assert_allclose(step.metrics["loss"], alone.metrics["loss"], rtol=2e-3)
    np.testing.assert_allclose(step.metrics["grad_norm"], alone.metrics["grad_norm"], rtol=2e-2)
    np.testing.assert_allclose(step.metrics["loss"], exact.metrics["loss"], rtol=1e-2)
    for name in ("up", "gate", "down"):
        path = f"expert_layers/experts/{name}/kernel"
        assert (step.gradients[path] != exact.gradients[path]).any()
        if scaling == "delayed":
            # A part's largest would be less, a sum over shards several times as much. Gradients went through
            # E5M2, which rounds by up to an eighth each time.
            ours, theirs = (np.asarray(each.state.fp8[path])[..., 0] for each in (step, alone))
            np.testing.assert_allclose(ours[:, 0], theirs[:, 0], rtol=0.05, err_msg=path)
            np.testing.assert_allclose(ours[:, 1], theirs[:, 1], rtol=0.25, err_msg=path)
