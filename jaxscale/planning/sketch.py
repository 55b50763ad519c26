"""A candidate laid out without devices: a `Setup` on an abstract mesh, in well under a millisecond each.

The model is built once for each compute format, its leaves are laid once for each mesh, and the trees of a
ZeRO stage once for each of both, so that thousands of candidates can be weighed.
"""

from dataclasses import dataclass, field
from typing import Any

from jax.sharding import AbstractMesh, AxisType

from jaxscale.config import Config, MeshConfig, ModelConfig, UserError
from jaxscale.mesh import AXES, axis_sizes
from jaxscale.models.build import build_decoder, complete_shape, find_contradictions
from jaxscale.models.model import Model
from jaxscale.models.shape import DecoderShape
from jaxscale.planning.candidates import Candidate, change_compute
from jaxscale.sharding.rules import Leaf, lay_leaves, raise_problems
from jaxscale.sharding.zero import Layouts, lay_stages
from jaxscale.training.offload import find_stream_problems
from jaxscale.training.optimizer import make_optimizer
from jaxscale.training.setup import Setup, find_batch_problems, find_strategy


def make_abstract_mesh(sizes: MeshConfig) -> AbstractMesh:
    """A mesh of no devices."""
    shown = axis_sizes(sizes)
    return AbstractMesh(tuple(shown[axis] for axis in AXES), AXES, axis_types=(AxisType.Auto,) * len(AXES))


@dataclass
class Sketcher:
    """Lays out candidates of one configuration for one platform."""

    config: Config
    vocab: int
    platform: str
    """`tpu`, `gpu` or `cpu`."""
    _models: dict[str, tuple[DecoderShape, Model]] = field(default_factory=dict)
    _leaves: dict[Any, tuple[dict[str, Leaf], tuple[str, ...]]] = field(default_factory=dict)
    _layouts: dict[Any, Layouts] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.config.model, ModelConfig):
            raise UserError(
                "plan: the closed forms are a decoder's, and this model is from a Python file; `jaxscale "
                "inspect` compiles it on a simulated mesh and shows what it needs"
            )
        raise_problems(find_contradictions(self.config))

    def find_problems(self, candidate: Candidate) -> tuple[str, ...]:
        """Why a candidate cannot be had: what does not divide."""
        _, problems = self._lay(candidate)
        config = candidate.apply(self.config)
        batch_problems = find_batch_problems(config, make_abstract_mesh(candidate.mesh))
        return (*problems, *batch_problems, *find_stream_problems(config))

    def sketch(self, candidate: Candidate) -> Setup:
        """The setup of a candidate without problems."""
        shape, model = self._model(candidate.compute)
        config = candidate.apply(self.config)
        leaves, _ = self._lay(candidate)
        key = (candidate.mesh, candidate.zero_stage, candidate.keep_gathered, candidate.compute)
        if key not in self._layouts:
            self._layouts[key] = lay_stages(
                leaves,
                model.shapes,
                make_abstract_mesh(candidate.mesh),
                candidate.zero_stage,
                keep_gathered=candidate.keep_gathered,
                split_dims=model.split_dims,
            )
        layouts = self._layouts[key]
        optimizer = make_optimizer(config.optimizer, config.precision, leaves, layouts)
        return Setup(config, layouts.mesh, self.platform, shape, self.vocab, model, layouts, optimizer)

    def _model(self, compute: str) -> tuple[DecoderShape, Model]:
        if compute not in self._models:
            config = change_compute(self.config, compute)
            shape = complete_shape(config, vocab=self.vocab, platform=self.platform)
            self._models[compute] = shape, build_decoder(shape)
        return self._models[compute]

    def _lay(self, candidate: Candidate) -> tuple[dict[str, Leaf], tuple[str, ...]]:
        key = (candidate.mesh, candidate.compute)
        if key not in self._leaves:
            _, model = self._model(candidate.compute)
            strategy, sizes = find_strategy(self.config), axis_sizes(candidate.mesh)
            leaves, problems = lay_leaves(model.shapes, model.rules, sizes, strategy)
            self._leaves[key] = dict(leaves), tuple(problems)
        return self._leaves[key]
