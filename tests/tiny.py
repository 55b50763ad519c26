"""A tiny run for tests: configuration, batches with unequal masks, a few steps of the real compiled step."""

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from jaxscale.config import Config, parse_config
from jaxscale.mesh import count_asked, make_mesh, resolve_mesh
from jaxscale.numerics.draw import make_key
from jaxscale.sharding.rules import lay_leaves, raise_problems
from jaxscale.sharding.zero import Layouts, lay_stages
from jaxscale.training.setup import Setup, make_setup
from jaxscale.verify.oracle import place_batch

VOCAB = 257

TREE: dict[str, Any] = {
    "run_dir": "unused",
    "steps": 100,
    "batch": {"sequences": 32, "microbatches": 1, "length": 32},
    "model": {
        "family": "llama",
        "layers": 2,
        "embed": 32,
        "heads": 8,
        "kv_heads": 4,
        "mlp": 64,
        "tied": False,
    },
    # The rate of a run's first steps. Adam divides by the gradient's size, so where a gradient is zero but
    # for rounding its update is rounding times the rate.
    "optimizer": {"peak_lr": 1e-3, "warmup_tokens": 50 * 32 * 32},
    "precision": "fp32",
}


def make_config(**sections: Any) -> Config:
    """The tiny configuration with fields of sections replaced: `mesh={"data": 8}`, `steps=5`."""
    tree = dict(TREE)
    for name, value in sections.items():
        base = tree.get(name)
        tree[name] = {**base, **value} if isinstance(base, dict) and isinstance(value, dict) else value
    return parse_config(tree, origin="test")


def make_tiny_setup(config: Config) -> Setup:
    """Lays a configuration on as many simulated devices as its mesh has."""
    count = count_asked(config.mesh)
    mesh = make_mesh(resolve_mesh(config.mesh, count), jax.devices()[:count])
    return make_setup(config, mesh, VOCAB)


def make_batch(setup: Setup, step: int) -> dict[str, jax.Array]:
    """Random tokens of two documents a window; masks from empty to full, whole sequences without a label."""
    batch = setup.config.batch
    rng = np.random.default_rng(step)
    shape = (batch.sequences, batch.length)
    text = rng.integers(0, VOCAB, (batch.sequences, batch.length + 1))
    boundary = rng.integers(1, batch.length, (batch.sequences, 1))
    places = np.arange(batch.length)
    counted = rng.random(shape) < rng.random((batch.sequences, 1)) ** 2
    counted[rng.integers(0, batch.sequences, 3)] = False
    arrays = {
        "tokens": text[:, :-1].astype(np.int32),
        "labels": text[:, 1:].astype(np.int32),
        "positions": np.where(places < boundary, places, places - boundary).astype(np.int32),
        "segments": np.where(places < boundary, 1, 2).astype(np.int32),
        "weights": counted.astype(np.float32),
    }
    return place_batch(setup, arrays)


def plan_layouts(
    shapes: Any, rules: Any, mesh: Mesh | AbstractMesh, stage: int, *, keep_gathered: bool = False
) -> Layouts:
    """Layouts by the usual strategy, as `make_setup` plans them; every problem is one error."""
    leaves, problems = lay_leaves(shapes, rules, dict(mesh.shape))
    raise_problems(problems)
    return lay_stages(leaves, shapes, mesh, stage, keep_gathered=keep_gathered)


@dataclass(frozen=True)
class Trace:
    """What a few steps left behind."""

    losses: np.ndarray
    grad_norms: np.ndarray
    params: Any
    state: Any


def run_steps(config: Config, steps: int) -> Trace:
    """Initialises and trains a few steps, through the programs that `train` compiles."""
    setup = make_tiny_setup(config)
    state = setup.compile_init()(make_key(config.seed))
    step_function = setup.compile_step()
    history = []
    for step in range(steps):
        state, metrics = step_function(state, make_batch(setup, step))
        history.append((float(metrics["loss"]), float(metrics["grad_norm"])))
    losses, norms = np.array(history).T
    return Trace(losses, norms, jax.tree.map(np.asarray, state.params), state)


def relative_errors(tree: Any, reference: Any) -> dict[str, float]:
    """Relative norm of the difference of each leaf, by path."""
    errors = {}
    for path, ours in jax.tree_util.tree_leaves_with_path(tree):
        theirs = reference
        for key in path:
            theirs = theirs[key.key]
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        scale = np.linalg.norm(theirs) or 1.0
        errors[name] = float(np.linalg.norm(np.asarray(ours) - theirs) / scale)
    return errors
