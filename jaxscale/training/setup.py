"""From a configuration to everything a run needs, each check before the first compile."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import optax
from jax.sharding import Mesh

from jaxscale.config import Config, UserError
from jaxscale.mesh import BATCH_AXES, make_mesh, resolve_mesh
from jaxscale.models.build import Model, build_decoder, shape_decoder
from jaxscale.models.decoder import DecoderShape
from jaxscale.sharding.zero import Layouts, plan_layouts
from jaxscale.training.optimizer import make_optimizer
from jaxscale.training.state import TrainState, describe_state, init_state, lay_state
from jaxscale.training.step import describe_batch, make_evaluation, make_step

Compiled = Callable[..., Any]


@dataclass(frozen=True)
class Setup:
    """A configuration laid on a mesh: what is compiled, and where everything lies."""

    config: Config
    mesh: Mesh
    shape: DecoderShape
    model: Model
    layouts: Layouts
    optimizer: optax.GradientTransformation

    @property
    def platform(self) -> str:
        """`tpu`, `gpu` or `cpu`."""
        return self.mesh.devices.flat[0].platform

    @cached_property
    def shardings(self) -> TrainState:
        return lay_state(self.model, self.optimizer, self.layouts)

    @cached_property
    def abstract_state(self) -> TrainState:
        return describe_state(self.model, self.optimizer, self.shardings)

    def compile_init(self) -> Compiled:
        """PRNG key -> `TrainState`, each leaf made where it lies, never first on one device."""
        init = jax.jit(lambda key: init_state(self.model, self.optimizer, key), out_shardings=self.shardings)
        # It runs once: on CPU, LLVM at full effort takes three times as long and gains nothing.
        options: Any = {"xla_backend_optimization_level": 1} if self.platform == "cpu" else None
        with jax.set_mesh(self.mesh):
            return init.lower(make_key(self.config.seed)).compile(compiler_options=options)

    def compile_step(self) -> Compiled:
        """(state, batch) -> (state, metrics), the state donated."""
        step = jax.jit(
            make_step(self.model, self.optimizer, self.layouts, self.config),
            out_shardings=(self.shardings, self.layouts.replicated),
            donate_argnums=0,
        )
        with jax.set_mesh(self.mesh):
            return step.lower(self.abstract_state, describe_batch(self.config, self.layouts)).compile()

    def compile_evaluation(self) -> Compiled:
        """(parameters, batch of one microbatch) -> (sum of losses, sum of weights)."""
        evaluate = jax.jit(make_evaluation(self.model, self.config), out_shardings=self.layouts.replicated)
        batch = describe_batch(self.evaluation_config, self.layouts)
        with jax.set_mesh(self.mesh):
            return evaluate.lower(self.abstract_state.params, batch).compile()

    @cached_property
    def evaluation_config(self) -> Config:
        """Evaluation takes one training microbatch at a time, which is known to fit."""
        batch = self.config.batch
        rows = batch.sequences // batch.microbatches
        return replace(self.config, batch=replace(batch, sequences=rows, microbatches=1))


def make_key(seed: int) -> jax.Array:
    """The run's PRNG key. threefry draws the same numbers on every mesh, which the faster rbg does not."""
    return jax.random.key(seed, impl="threefry2x32")


def find_mesh(config: Config) -> tuple[Config, Mesh]:
    """The mesh over all devices, and the configuration with its sizes filled in.

    Raises:
      UserError: the mesh does not fit the devices, or the batch does not fit the mesh.
    """
    resolved = resolve_mesh(config.mesh, jax.device_count())
    mesh = make_mesh(resolved)
    _check_batch(config, mesh)
    return replace(config, mesh=resolved), mesh


def make_setup(config: Config, mesh: Mesh, vocab: int) -> Setup:
    """Builds the model for a mesh and lays it out; nothing is allocated or compiled.

    Raises:
      UserError: sizes contradict each other or do not divide over the mesh.
    """
    platform = mesh.devices.flat[0].platform
    shape = shape_decoder(config, vocab=vocab, platform=platform)
    model = build_decoder(shape)
    layouts = plan_layouts(model.shapes, model.rules, mesh, config.zero.stage)
    return Setup(config, mesh, shape, model, layouts, make_optimizer(config.optimizer, config.precision))


def _check_batch(config: Config, mesh: Mesh) -> None:
    batch = config.batch
    if config.steps * batch.sequences >= 2**32:
        raise UserError(
            f"steps={config.steps} of batch.sequences={batch.sequences} are "
            f"{config.steps * batch.sequences} sequences, and a run counts up to {2**32 - 1}; "
            "make batch.length longer or the run shorter"
        )
    if batch.sequences % batch.microbatches:
        raise UserError(
            f"batch.sequences={batch.sequences} does not divide by batch.microbatches={batch.microbatches}; "
            f"the nearest multiple is {-(-batch.sequences // batch.microbatches) * batch.microbatches}"
        )
    rows = batch.sequences // batch.microbatches
    axes = [axis for axis in BATCH_AXES if mesh.shape[axis] > 1]
    ways = math.prod(mesh.shape[axis] for axis in axes)
    if rows % ways:
        shown = " × ".join(f"mesh.{axis}={mesh.shape[axis]}" for axis in axes)
        raise UserError(
            f"a microbatch of {rows} sequences (batch.sequences={batch.sequences} / "
            f"batch.microbatches={batch.microbatches}) does not divide over {shown}; make batch.sequences a "
            f"multiple of {ways * batch.microbatches}, or lower batch.microbatches"
        )
