"""From a configuration to everything a run needs, each check before the first compile."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import optax
from jax.sharding import AbstractMesh, Mesh

from jaxscale.config import Config, ModelConfig, PythonModelConfig, UserError
from jaxscale.mesh import BATCH_AXES, make_mesh, resolve_mesh
from jaxscale.models.adapters import check_losses
from jaxscale.models.build import build_decoder, complete_shape, find_contradictions
from jaxscale.models.model import Model
from jaxscale.models.python_file import load_model
from jaxscale.models.remat import find_remat_problems, use_remat
from jaxscale.models.shape import DecoderShape
from jaxscale.numerics.draw import make_key
from jaxscale.sharding.activations import use_strategy
from jaxscale.sharding.rules import PARAMETER_STRATEGY, REPLICATED, Axes, lay_leaves, raise_problems
from jaxscale.sharding.zero import Layouts, lay_stages
from jaxscale.training.layout_check import check_constraints, check_layouts
from jaxscale.training.offload import find_offload_problems
from jaxscale.training.optimizer import adopt_optimizer, make_optimizer
from jaxscale.training.remat_check import check_remat
from jaxscale.training.state import TrainState, describe_state, init_state, lay_state
from jaxscale.training.step import describe_batch, make_evaluation, make_step

Compiled = Callable[..., Any]


@dataclass(frozen=True)
class Setup:
    """A configuration laid on a mesh: what is compiled, and where everything lies."""

    config: Config
    mesh: Mesh | AbstractMesh
    """Abstract where nothing is to be compiled."""
    platform: str
    """`tpu`, `gpu` or `cpu`."""
    shape: DecoderShape | None
    """Of a decoder; None for a model of one's own."""
    vocab: int
    model: Model
    layouts: Layouts
    optimizer: optax.GradientTransformation

    @cached_property
    def shardings(self) -> TrainState:
        return lay_state(self.model, self.optimizer, self.config, self.layouts)

    @cached_property
    def abstract_state(self) -> TrainState:
        return describe_state(self.model, self.optimizer, self.config, self.shardings)

    @property
    def strategy(self) -> Mapping[str, Axes]:
        """Dim name -> mesh axes: the configuration's over the usual ones."""
        return find_strategy(self.config)

    @contextmanager
    def ambient(self) -> Iterator[None]:
        """The mesh, the strategy and the remat that programs are traced under."""
        assert isinstance(self.mesh, Mesh), "an abstract mesh compiles nothing"
        with jax.set_mesh(self.mesh), use_strategy(self.strategy), use_remat(self.config.remat):
            yield

    def compile_init(self) -> Compiled:
        """PRNG key -> `TrainState`, each leaf made where it lies, never first on one device."""
        init = jax.jit(
            lambda key: init_state(self.model, self.optimizer, self.config, key),
            out_shardings=self.shardings,
        )
        # It runs once: on CPU, LLVM at full effort takes three times as long and gains nothing.
        options: Any = {"xla_backend_optimization_level": 1} if self.platform == "cpu" else None
        with self.ambient():
            return init.lower(make_key(self.config.seed)).compile(compiler_options=options)

    def trace_step(self, *, with_gradients: bool = False) -> jax.stages.Traced:
        """The step of `compile_step` before it compiles.

        Raises:
          UserError: a layout that was asked for cannot be had; the model does not do what `remat` asks for.
        """
        outputs: tuple = (self.shardings, self.layouts.replicated)
        step = jax.jit(
            make_step(self.model, self.optimizer, self.layouts, self.config, with_gradients=with_gradients),
            out_shardings=(*outputs, self.layouts.moments) if with_gradients else outputs,
            donate_argnums=0,
        )
        with self.ambient():
            traced = step.trace(self.abstract_state, describe_batch(self.config, self.layouts))
        check_constraints(traced.jaxpr)
        check_remat(traced.jaxpr, self.config.remat)
        return traced

    def compile_step(self, *, with_gradients: bool = False) -> Compiled:
        """(state, batch) -> (state, metrics), the state donated; optionally the gradients (`make_step`).

        Raises:
          UserError: as `trace_step`, or a layout is not what the compiler made.
        """
        return self.compile_traced(self.trace_step(with_gradients=with_gradients))

    def compile_traced(self, traced: jax.stages.Traced) -> Compiled:
        """Compiles what `trace_step` traced, and checks its layouts.

        Raises:
          UserError: a layout is not what the compiler made.
        """
        with self.ambient():
            compiled = traced.lower().compile()
        check_layouts(compiled, self.abstract_state, self.layouts, self.config)
        return compiled

    def compile_evaluation(self) -> Compiled:
        """(parameters, state of routers, batch of one microbatch) -> (sum of losses, sum of weights)."""
        evaluate = jax.jit(
            make_evaluation(self.model, self.layouts, self.config), out_shardings=self.layouts.replicated
        )
        batch = describe_batch(self.evaluation_config, self.layouts)
        with self.ambient():
            return evaluate.lower(self.abstract_state.params, self.abstract_state.routers, batch).compile()

    @cached_property
    def evaluation_config(self) -> Config:
        """Evaluation takes one training microbatch at a time, which is known to fit."""
        batch = self.config.batch
        rows = batch.sequences // batch.microbatches
        return replace(self.config, batch=replace(batch, sequences=rows, microbatches=1))


def find_mesh(config: Config, devices: Sequence[jax.Device] | None = None) -> tuple[Config, Mesh]:
    """The mesh over all devices (or those given), and the configuration with its sizes filled in.

    Raises:
      UserError: the mesh does not fit the devices.
    """
    resolved = resolve_mesh(config.mesh, jax.device_count() if devices is None else len(devices))
    return replace(config, mesh=resolved), make_mesh(resolved, devices)


def find_strategy(config: Config) -> Mapping[str, Axes]:
    """Dim name -> mesh axes: the configuration's over the usual ones."""
    return {**PARAMETER_STRATEGY, **{dim: axes or REPLICATED for dim, axes in config.strategy.items()}}


def make_setup(
    config: Config,
    mesh: Mesh,
    vocab: int,
    model: Model | None = None,
    optimizer: optax.GradientTransformation | None = None,
) -> Setup:
    """Builds the model for a mesh and lays it out; nothing is allocated or compiled.

    Args:
      model: one that comes from Python; otherwise the configuration says which.
      optimizer: one that comes from Python, for `optimizer.name: python`.

    Raises:
      UserError: batch, sizes, rules or strategy do not fit each other or the mesh; every problem is listed.
    """
    problems = find_batch_problems(config, mesh) + find_offload_problems(config, mesh)
    platform = mesh.devices.flat[0].platform
    shape: DecoderShape | None = None
    if model is not None:
        with jax.set_mesh(mesh):
            check_losses(model, length=config.batch.length)
    elif isinstance(config.model, PythonModelConfig):
        with jax.set_mesh(mesh):
            model = load_model(config.model, vocab=vocab, length=config.batch.length)
    elif isinstance(config.model, ModelConfig):
        problems += find_contradictions(config)
        shape = complete_shape(config, vocab=vocab, platform=platform)
        model = build_decoder(shape)
    else:
        raise UserError("model: is required and has no value; give a decoder's shape, or `file` of your own")
    if shape is None:
        problems += find_remat_problems(config.remat, None)
        if config.moe is not None:
            problems.append("moe is for the decoder's layers, and this model is your own; remove the section")
    leaves, rule_problems = lay_leaves(model.shapes, model.rules, dict(mesh.shape), find_strategy(config))
    if config.precision.compute == "fp8" and not model.fp8_kernels:
        problems.append(
            "precision.compute=fp8 is for the decoder's matmuls, and those of a model of your own are not "
            "known here; use precision.compute=bf16"
        )
    raise_problems(problems + rule_problems)
    layouts = lay_stages(
        leaves,
        model.shapes,
        mesh,
        config.zero.stage,
        keep_gathered=config.zero.keep_gathered,
        split_dims=model.split_dims,
    )
    if optimizer is None:
        optimizer = make_optimizer(config.optimizer, config.precision, leaves, layouts)
    else:
        optimizer = adopt_optimizer(config.optimizer, config.precision, optimizer)
    return Setup(config, mesh, platform, shape, vocab, model, layouts, optimizer)


def find_batch_problems(config: Config, mesh: Mesh | AbstractMesh) -> list[str]:
    """What keeps a batch from being cut into microbatches and laid over the mesh."""
    batch, problems = config.batch, []
    if config.steps * batch.sequences >= 2**32:
        problems.append(
            f"steps={config.steps} of batch.sequences={batch.sequences} are "
            f"{config.steps * batch.sequences} sequences, and a run counts up to {2**32 - 1}; "
            "make batch.length longer or the run shorter"
        )
    if batch.sequences % batch.microbatches:
        problems.append(
            f"batch.sequences={batch.sequences} does not divide by batch.microbatches={batch.microbatches}; "
            f"the nearest multiple is {-(-batch.sequences // batch.microbatches) * batch.microbatches}"
        )
        return problems
    rows = batch.sequences // batch.microbatches
    axes = [axis for axis in BATCH_AXES if mesh.shape[axis] > 1]
    ways = math.prod(mesh.shape[axis] for axis in axes)
    if rows % ways:
        shown = " × ".join(f"mesh.{axis}={mesh.shape[axis]}" for axis in axes)
        problems.append(
            f"a microbatch of {rows} sequences (batch.sequences={batch.sequences} / "
            f"batch.microbatches={batch.microbatches}) does not divide over {shown}; make batch.sequences a "
            f"multiple of {ways * batch.microbatches}, or lower batch.microbatches"
        )
    return problems
