"""Elements of each parameter on a device: kept, in use, of its gradient, and gathered for a layer."""

import math
from dataclasses import dataclass

from jax.sharding import NamedSharding

from jaxscale.mesh import BATCH_AXES
from jaxscale.models.shape import DecoderShape
from jaxscale.sharding.rules import Leaf, iterate_leaves
from jaxscale.sharding.zero import Layouts, dim_axes


@dataclass(frozen=True)
class Weight:
    """A parameter on one device."""

    path: str
    is_table: bool
    """Embedding, positions or head: no layer has it."""
    is_stacked: bool
    keeps_format: bool
    """Whether the step uses it as it is kept."""
    layers: int
    kept: int
    in_use: int
    gradient: int
    gathered: int
    """Of one layer, whole but for what lies over `tensor` or `expert`."""
    kept_local: tuple[int, ...]
    """Shape of the kept part."""
    is_moved: bool
    """Whether weights in use lie otherwise than those that are kept."""

    @property
    def is_cut(self) -> bool:
        """Whether a layer has to gather it."""
        return self.in_use < self.gathered * self.layers

    @property
    def is_of_expert_layer(self) -> bool:
        return self.path.startswith("expert_layers/")

    @property
    def is_expert(self) -> bool:
        """Of experts that tokens choose."""
        return "/experts/" in self.path and "/shared/" not in self.path and "/router/" not in self.path

    @property
    def is_mlp(self) -> bool:
        """A kernel of a dense MLP, or of shared experts."""
        return self.path.endswith("/kernel") and ("/mlp/" in self.path or "/shared/" in self.path)

    @property
    def is_attention(self) -> bool:
        return self.path.endswith("/kernel") and "/attention/" in self.path


def measure_weights(layouts: Layouts) -> tuple[Weight, ...]:
    """Every parameter, in tree order."""
    trees = (layouts.params, layouts.weights, layouts.gradients)
    kept, in_use, gradients = (dict(iterate_leaves(tree)) for tree in trees)
    return tuple(
        _measure(leaf, kept[path], in_use[path], gradients[path]) for path, leaf in layouts.leaves.items()
    )


def find_head_path(shape: DecoderShape) -> str:
    """Path of the table that makes logits."""
    return "embed/table" if shape.tied else "head/table"


def _measure(leaf: Leaf, kept: NamedSharding, in_use: NamedSharding, gradient: NamedSharding) -> Weight:
    is_stacked = leaf.dims[:1] == ("layers",) or leaf.path.startswith(("layers/", "dense_", "expert_"))
    local = _cut(leaf.shape, kept)
    return Weight(
        path=leaf.path,
        is_table=leaf.path.endswith("/table"),
        is_stacked=is_stacked,
        keeps_format=leaf.keeps_format,
        layers=leaf.shape[0] if is_stacked else 1,
        kept=math.prod(local),
        in_use=math.prod(_cut(leaf.shape, in_use)),
        gradient=math.prod(_cut(leaf.shape, gradient)),
        gathered=math.prod(_cut(leaf.shape, in_use, gathered=True)[1 if is_stacked else 0 :]),
        kept_local=local,
        is_moved=local != _cut(leaf.shape, in_use),
    )


def _cut(shape: tuple[int, ...], sharding: NamedSharding, *, gathered: bool = False) -> tuple[int, ...]:
    """Shape of a device's part; `gathered`: whole over the batch axes but for experts, which stay apart."""
    sizes, laid = sharding.mesh.shape, dim_axes(sharding.spec, len(shape))
    away = set(BATCH_AXES) - {"expert"} if gathered else set()
    ways = (math.prod(sizes[axis] for axis in axes if axis not in away) for axes in laid)
    return tuple(-(-size // way) for size, way in zip(shape, ways, strict=True))
