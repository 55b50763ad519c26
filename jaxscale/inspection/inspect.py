"""Inspects a setup: what lies where, what that costs a device, and what the compiled step sends."""

import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from jaxscale.inspection.report import (
    ActivationReport,
    ExpertsReport,
    Inspection,
    LeafReport,
    MemoryReport,
    sum_bytes,
)
from jaxscale.inspection.traffic import compare_traffic, tabulate_expected, tabulate_traffic, warn_of_formats
from jaxscale.inspection.weigh import weigh_leaves
from jaxscale.models.build import count_parameters
from jaxscale.numerics.policy import compute_dtype
from jaxscale.sharding.activations import Observation, watch_constraints
from jaxscale.sharding.collectives import Collective, read_collectives
from jaxscale.sharding.host_moves import HostMoves, read_host_moves
from jaxscale.sharding.parts import measure_part
from jaxscale.sharding.rules import Axes
from jaxscale.sharding.zero import STATE_AXES, ZERO_AXIS, dim_axes
from jaxscale.training.offload import expect_host_traffic
from jaxscale.training.optimizer_layout import describe_optimizer
from jaxscale.training.setup import Setup
from jaxscale.training.traffic import expected_traffic

_NOTABLE = 0.02  # of a device's state: what a leaf may cost by being whole before it is a warning

Progress = Callable[[str], AbstractContextManager[object]]


def inspect_setup(
    setup: Setup, *, compile: bool = True, progress: Progress = lambda _: nullcontext()
) -> Inspection:
    """Reports layouts, bytes, and with `compile` the memory and the collectives of the step.

    No parameter is allocated. Without `compile` everything comes from shapes, in well under a second.

    Args:
      progress: shows a line while the step compiles.
    """
    config = setup.config
    optimizer_leaves, _ = describe_optimizer(setup.optimizer, setup.model.shapes, setup.layouts)
    leaves, counter_bytes = weigh_leaves(
        setup.layouts, optimizer_leaves, config.precision, config.offload, setup.model.fp8_kernels
    )
    warnings = warn_of_replication(leaves, wanted_axes(config.zero.stage))
    seen = _look_at_step(setup, progress) if compile else None
    rows = tabulate_traffic(seen.collectives if seen else ())
    expected = tabulate_expected(expected_traffic(setup), rows, compute_dtype(config.precision).itemsize)
    if seen:
        predicted = setup.mesh.axis_names if setup.shape is not None else setup.layouts.reduction_axes
        warnings += compare_traffic(seen.collectives, rows, expected, predicted)
        warnings += warn_of_formats(seen.collectives, config.precision.compute, setup.platform)
    return Inspection(
        mesh=dict(setup.mesh.shape),
        platform=setup.platform,
        zero_stage=config.zero.stage,
        leaves=leaves,
        counter_bytes=counter_bytes + _weigh_counters(setup),
        memory=seen.memory if seen else None,
        activations=seen.activations if seen else None,
        collectives=rows if seen else None,
        expected_collectives=expected,
        host_traffic=None if config.offload.is_off else expect_host_traffic(setup.abstract_state),
        host_moves=seen.host_moves if seen else None,
        experts=_describe_experts(setup),
        warnings=tuple(warnings),
        errors=tuple(find_activation_errors(seen.activations)) if seen else (),
    )


def _describe_experts(setup: Setup) -> ExpertsReport | None:
    if setup.shape is None or setup.shape.experts is None:
        return None
    shape, experts = setup.shape, setup.shape.experts
    ways = math.prod(setup.mesh.shape[axis] for axis in setup.strategy["experts"])
    return ExpertsReport(
        layers=shape.expert_layers,
        experts=experts.router.experts,
        experts_per_device=experts.router.experts // ways,
        top_k=experts.router.top_k,
        shared_experts=experts.shared,
        parameters=count_parameters(shape),
        active_parameters=count_parameters(shape, active=True),
    )


@dataclass(frozen=True)
class _CompiledStep:
    """What is read from the compiled step."""

    collectives: list[Collective]
    memory: MemoryReport
    activations: tuple[ActivationReport, ...]
    host_moves: HostMoves | None


def _look_at_step(setup: Setup, progress: Progress) -> _CompiledStep:
    with progress("compiling the step"), watch_constraints() as observations:
        compiled: Any = setup.compile_step()
    with progress("reading the compiled step"):
        text = compiled.as_text()
        return _CompiledStep(
            collectives=read_collectives(text, setup.mesh),
            memory=read_memory(compiled),
            activations=tuple(describe_activation(each) for each in observations),
            host_moves=read_host_moves(text) if setup.platform == "tpu" else None,
        )


def describe_activation(observed: Observation) -> ActivationReport:
    """Bytes of a constrained activation on a device, as asked and as the compiler laid it."""
    assert isinstance(observed.got, NamedSharding), observed.got
    asked = NamedSharding(observed.got.mesh, observed.asked)
    itemsize = jnp.dtype(observed.dtype).itemsize
    return ActivationReport(
        dims=observed.dims,
        shape=observed.shape,
        dtype=observed.dtype,
        asked=tuple(dim_axes(observed.asked, len(observed.shape))),
        bytes_asked=measure_part(observed.shape, observed.dtype, asked).bytes,
        bytes_got=math.prod(observed.got.shard_shape(observed.shape)) * itemsize,
        is_as_asked=observed.is_as_asked,
    )


def find_activation_errors(activations: Iterable[ActivationReport]) -> list[str]:
    """An error for each activation that the compiler laid otherwise than the model asks."""
    return [
        f"activation {' '.join(each.dims)} {each.shape} {each.dtype} lies otherwise than asked: "
        f"{each.bytes_asked:,} bytes a device were asked, the compiled step has {each.bytes_got:,}"
        for each in activations
        if not each.is_as_asked
    ]


def read_memory(compiled: Any) -> MemoryReport:
    """The compiler's account of one device."""
    analysis = compiled.memory_analysis()
    return MemoryReport(
        arguments=analysis.argument_size_in_bytes,
        outputs=analysis.output_size_in_bytes - analysis.alias_size_in_bytes,
        temporaries=analysis.temp_size_in_bytes,
        host=analysis.host_argument_size_in_bytes
        + analysis.host_output_size_in_bytes
        - analysis.host_alias_size_in_bytes
        + analysis.host_temp_size_in_bytes,
    )


def warn_of_replication(leaves: Iterable[LeafReport], wanted: Axes) -> list[str]:
    """A warning for each leaf whose kept state lies over none of an axis it might lie over, where that costs
    more than 2 % of a device's state.

    Args:
      wanted: axes over which the ZeRO stage and the strategy are meant to lay kept state.
    """
    listed = list(leaves)
    limit = _NOTABLE * sum_bytes(leaf.bytes_per_device for leaf in listed).total
    return [
        _word_replication(leaf, whole)
        for leaf in listed
        if leaf.replication.total > limit
        and (whole := [axis for axis in wanted if axis in leaf.kept_whole_on])
    ]


def _word_replication(leaf: LeafReport, whole: list[str]) -> str:
    dims = ", ".join(f"{dim}={size}" for (dim, _), size in zip(leaf.dims, leaf.shape, strict=True))
    return (
        f"{leaf.path} ({dims}) is whole on {' and '.join(whole)}: every device along it keeps the same, "
        f"which costs {leaf.replication.total:,} bytes a device. Its rule is {leaf.rule!r}; lay one of its "
        f"dims over {whole[0]} in `strategy`, if one divides"
    )


def wanted_axes(stage: int) -> Axes:
    """Axes over which a ZeRO stage and the strategy are meant to lay what a run keeps."""
    return (ZERO_AXIS, *STATE_AXES, "tensor") if stage >= 1 else ("tensor",)


def _weigh_counters(setup: Setup) -> int:
    """Bytes of the run's own counters beside parameters and optimizer state."""
    counters = replace(setup.abstract_state, params=None, moments=None)
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(counters))
