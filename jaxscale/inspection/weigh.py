"""Bytes of each parameter on a device, from shapes and layouts alone."""

from collections.abc import Container, Iterable, Mapping, Sequence

import jax.numpy as jnp
from jax.sharding import NamedSharding

from jaxscale.config import OffloadConfig, PrecisionConfig
from jaxscale.inspection.report import LeafReport, StateBytes
from jaxscale.numerics.fp8 import E4M3
from jaxscale.numerics.policy import DTYPES, compute_dtype
from jaxscale.sharding.parts import Part, measure_part
from jaxscale.sharding.rules import Axes, Leaf, iterate_leaves
from jaxscale.sharding.zero import Layouts, dim_axes
from jaxscale.training.optimizer_layout import StateLeaf

_NO_OFFLOAD = OffloadConfig()


def weigh_leaves(
    layouts: Layouts,
    optimizer_leaves: Sequence[StateLeaf],
    precision: PrecisionConfig,
    offload: OffloadConfig = _NO_OFFLOAD,
    fp8_kernels: Container[str] = (),
) -> tuple[tuple[LeafReport, ...], int]:
    """(a report for each parameter in tree order, bytes of optimizer state that belongs to no parameter).

    Args:
      fp8_kernels: paths of what is in use in fp8.
    """
    moments: dict[str | None, list[Part]] = {}
    for leaf in optimizer_leaves:
        moments.setdefault(leaf.parameter, []).append(measure_part(leaf.shape, leaf.dtype, leaf.sharding))
    kept, weights, gradients = (
        dict(iterate_leaves(tree)) for tree in (layouts.params, layouts.weights, layouts.gradients)
    )
    reports = tuple(
        _weigh_leaf(
            leaf,
            E4M3 if path in fp8_kernels else leaf.dtype if leaf.keeps_format else compute_dtype(precision),
            kept[path],
            weights[path],
            gradients[path],
            moments.get(path, []),
            precision,
            offload,
        )
        for path, leaf in layouts.leaves.items()
    )
    return reports, sum(part.bytes for part in moments.get(None, []))


def _weigh_leaf(
    leaf: Leaf,
    in_compute: jnp.dtype,
    kept: NamedSharding,
    weight: NamedSharding,
    gradient: NamedSharding,
    moments: list[Part],
    precision: PrecisionConfig,
    offload: OffloadConfig,
) -> LeafReport:
    is_master = in_compute != leaf.dtype or not weight.is_equivalent_to(kept, len(leaf.shape))
    masters = [measure_part(leaf.shape, leaf.dtype, kept)] if is_master or offload.master_weights else []
    parts: dict[str, list[Part]] = {
        "parameters": [measure_part(leaf.shape, in_compute, weight)],
        "gradients": [measure_part(leaf.shape, DTYPES[precision.accumulate], gradient)],
        "optimizer": [],
        "host": [],
    }
    parts["host" if offload.master_weights else "optimizer"] += masters
    parts["host" if offload.optimizer_state else "optimizer"] += moments
    return LeafReport(
        path=leaf.path,
        shape=leaf.shape,
        dtype=leaf.dtype.name,
        dims=tuple(
            (dim, tuple(axis for axis in axes if kept.mesh.shape[axis] > 1))
            for dim, axes in zip(leaf.dims, dim_axes(kept.spec, len(leaf.shape)), strict=True)
        ),
        rule=leaf.rule,
        kept_whole_on=measure_part(leaf.shape, leaf.dtype, kept).whole_on,
        bytes_per_device=StateBytes(
            **{kind: sum(part.bytes for part in some) for kind, some in parts.items()}
        ),
        whole_on={
            kind: _join_axes(some, kept.mesh.shape) for kind, some in parts.items() if some or kind != "host"
        },
        replication=StateBytes(**{kind: _count_copies(some) for kind, some in parts.items()}),
    )


def _join_axes(parts: Iterable[Part], axis_sizes: Mapping[str, int]) -> Axes:
    named = {axis for part in parts for axis in part.whole_on}
    return tuple(axis for axis in axis_sizes if axis in named)


def _count_copies(parts: Iterable[Part]) -> int:
    return sum(part.bytes - part.bytes // part.copies for part in parts)
