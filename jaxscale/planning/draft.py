"""Configurations laid on meshes whose devices are not here, fast enough for thousands of candidates.

What a mesh does not change (the model's shapes, its rules, the optimizer's state) is described once; a layout
is made once for each mesh and ZeRO stage. Nothing is traced or allocated.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType

from jaxscale.config import Config, ModelConfig, UserError
from jaxscale.models.build import build_decoder, shape_decoder
from jaxscale.models.model import Model
from jaxscale.models.shape import DecoderShape
from jaxscale.planning.weights import Weight, measure_weights
from jaxscale.sharding.parts import measure_part
from jaxscale.sharding.rules import Axes, lay_leaves, raise_problems
from jaxscale.sharding.zero import Layouts, lay_stages
from jaxscale.training.fp8_scaling import init_history
from jaxscale.training.loss_scale import start_loss_scale
from jaxscale.training.optimizer import make_optimizer
from jaxscale.training.optimizer_layout import StateLeaf, describe_optimizer
from jaxscale.training.routers import start_routers
from jaxscale.training.setup import Setup, find_strategy

_STEP_COUNTERS = 5 * 4  # updates, skips, skips in a row, sequences, trained sequences: uint32


@dataclass(frozen=True)
class Laid:
    """A model and its optimizer's state on a mesh, in one ZeRO stage."""

    layouts: Layouts
    optimizer_leaves: Sequence[StateLeaf]
    counter_bytes: int
    """Of the state that belongs to no parameter and no optimizer; whole on every device."""

    @cached_property
    def weights(self) -> tuple[Weight, ...]:
        return measure_weights(self.layouts)

    @cached_property
    def kept_bytes(self) -> int:
        """Of the parameters as the run keeps them, on one device."""
        laid = zip(self.layouts.leaves.values(), jax.tree.leaves(self.layouts.params), strict=True)
        return sum(measure_part(leaf.shape, leaf.dtype, sharding).bytes for leaf, sharding in laid)

    @cached_property
    def moment_bytes(self) -> int:
        """Of the optimizer's state that belongs to parameters, on one device."""
        return self._weigh_optimizer(of_parameters=True)

    @cached_property
    def whole_bytes(self) -> int:
        """Of counters, the optimizer's too."""
        return self.counter_bytes + self._weigh_optimizer(of_parameters=False)

    def _weigh_optimizer(self, *, of_parameters: bool) -> int:
        return sum(
            measure_part(leaf.shape, leaf.dtype, leaf.sharding).bytes
            for leaf in self.optimizer_leaves
            if (leaf.parameter is not None) == of_parameters
        )


@dataclass(frozen=True)
class Draft:
    """What closed forms read of a candidate."""

    config: Config
    """With the sizes of its mesh filled in."""
    shape: DecoderShape
    laid: Laid
    platform: str
    """`tpu`, `gpu` or `cpu`."""
    strategy: Mapping[str, Axes]

    @property
    def layouts(self) -> Layouts:
        return self.laid.layouts

    @property
    def axis_sizes(self) -> Mapping[str, int]:
        return self.laid.layouts.mesh.shape


class Drafter:
    """Lays one model on any mesh.

    Args:
      config: of the model, the optimizer and the formats; mesh, ZeRO stage, batch, remat and offload may
        differ in what is drafted.
      vocab: tokens in the vocabulary.

    Raises:
      UserError: the sizes of the model contradict each other, or it is no decoder.
    """

    def __init__(self, config: Config, *, vocab: int, platform: str) -> None:
        if not isinstance(config.model, ModelConfig):
            raise UserError(
                "closed forms know decoders only, and this model is your own: it has to be compiled"
            )
        self._platform, self._vocab = platform, vocab
        self._shape = shape_decoder(config, vocab=vocab, platform=platform)
        self._model = build_decoder(self._shape)
        self._laid: dict[Any, Laid] = {}
        self._shapes: dict[Any, DecoderShape] = {}

    def draft(self, config: Config, axis_sizes: Mapping[str, int]) -> Draft:
        """A candidate: the same model, on a mesh of these sizes.

        Raises:
          UserError: the model does not divide over the mesh; every problem is listed.
        """
        strategy = find_strategy(config)
        key = (
            tuple(axis_sizes.items()),
            config.zero.stage,
            config.zero.keep_gathered,
            repr((config.precision, config.optimizer, config.fp8, config.loss_scale, config.strategy)),
        )
        if key not in self._laid:
            self._laid[key] = self._lay(config, axis_sizes, strategy)
        return Draft(config, self._find_shape(config), self._laid[key], self._platform, strategy)

    def _find_shape(self, config: Config) -> DecoderShape:
        key = (config.batch.length, config.batch.microbatches > 1, config.precision.compute)
        if key not in self._shapes:
            self._shapes[key] = shape_decoder(config, vocab=self._vocab, platform=self._platform)
        return self._shapes[key]

    def _lay(self, config: Config, axis_sizes: Mapping[str, int], strategy: Mapping[str, Axes]) -> Laid:
        mesh = AbstractMesh(
            tuple(axis_sizes.values()),
            tuple(axis_sizes),
            axis_types=(AxisType.Auto,) * len(axis_sizes),
        )
        model = self._model
        leaves, problems = lay_leaves(model.shapes, model.rules, dict(axis_sizes), strategy)
        raise_problems(problems)
        layouts = lay_stages(
            leaves,
            model.shapes,
            mesh,
            config.zero.stage,
            keep_gathered=config.zero.keep_gathered,
            split_dims=model.split_dims,
        )
        optimizer = make_optimizer(config.optimizer, config.precision, leaves, layouts)
        optimizer_leaves, _ = describe_optimizer(optimizer, model.shapes, layouts)
        return Laid(layouts, optimizer_leaves, count_counter_bytes(model, config))


def draft_setup(setup: Setup) -> Draft:
    """A setup as closed forms read it.

    Raises:
      UserError: its model is no decoder.
    """
    if setup.shape is None:
        raise UserError("closed forms know decoders only, and this model is your own: it has to be compiled")
    optimizer_leaves, _ = describe_optimizer(setup.optimizer, setup.model.shapes, setup.layouts)
    laid = Laid(setup.layouts, optimizer_leaves, count_counter_bytes(setup.model, setup.config))
    return Draft(setup.config, setup.shape, laid, setup.platform, setup.strategy)


def count_counter_bytes(model: Model, config: Config) -> int:
    """Bytes of the state beside parameters and optimizer state."""
    extras = jax.eval_shape(
        lambda: (
            start_loss_scale(config.loss_scale),
            init_history(model, config.fp8),
            start_routers(model.routers),
        )
    )
    return _STEP_COUNTERS + sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(extras))
