"""Each remat policy beside the others: a device's memory by the real compiler, and what is computed again."""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, get_args

from jax.extend.core import Jaxpr
from rich.console import Group, RenderableType
from rich.text import Text

from jaxscale.config import RematConfig
from jaxscale.config.memory import RematPolicy
from jaxscale.inspection.inspect import read_memory
from jaxscale.inspection.report import MemoryReport
from jaxscale.inspection.tables import choose_unit, make_table
from jaxscale.sharding.equations import drop_unused, find_inner
from jaxscale.training.setup import Setup

Progress = Callable[[str], AbstractContextManager[object]]

# Matmuls of cuDNN's attention, each of 2 B N T S H FLOPs; the kernel itself is no matmul of the program.
_KERNEL_MATMULS = {"dot_product_attention_fwd_wrapper": 2, "dot_product_attention_bwd_wrapper": 5}

# Matmuls of groups of rows, each with a matrix of its own, and their derivative: the kernels' grids and other
# platforms' loops are as long as the groups are, but as much as all rows can be is known.
_GROUPED_MATMULS = ("gmm", "tgmm")


@dataclass(frozen=True, kw_only=True)
class RematReport:
    """One way to treat activations."""

    remat: RematConfig
    memory: MemoryReport
    matmul_flops: int
    """Of a step on all devices."""
    recomputed_flops: int
    """Of those, what the step without remat does not do."""

    @property
    def name(self) -> str:
        """Such as `full, offload block_input`."""
        lists = [f"{kind} {' '.join(names)}" for kind, names in self.remat.lists.items() if names]
        return ", ".join([self.remat.policy, *lists])

    def to_json(self) -> dict[str, Any]:
        return {
            "policy": self.remat.policy,
            **{kind: list(names) for kind, names in self.remat.lists.items()},
            "memory": self.memory.to_json(),
            "matmul_flops": self.matmul_flops,
            "recomputed_flops": self.recomputed_flops,
        }


def compare_remat(setup: Setup, progress: Progress = lambda _: nullcontext()) -> tuple[RematReport, ...]:
    """Compiles the step under every policy, and under the configuration's own where it lists tensors.

    `attention` is left out for a model of one's own: it may name no such tensor.

    Raises:
      UserError: the model does not call `jaxscale.remat`, or has no tensor of a listed name.
    """
    plain = measure_remat(setup, RematConfig(), None, progress)
    policies = [policy for policy in get_args(RematPolicy) if policy != "none"]
    if setup.shape is None:
        policies.remove("attention")
    choices = [RematConfig(policy=policy) for policy in policies]
    if setup.config.remat not in (RematConfig(), *choices):
        choices.append(setup.config.remat)
    return (plain, *(measure_remat(setup, choice, plain.matmul_flops, progress) for choice in choices))


def measure_remat(
    setup: Setup,
    remat: RematConfig,
    plain_flops: int | None,
    progress: Progress = lambda _: nullcontext(),
) -> RematReport:
    """Compiles the step with one choice; `plain_flops`: of the step without remat, None if it is this one."""
    chosen = replace(setup, config=replace(setup.config, remat=remat))
    with progress(f"compiling the step with remat {remat.policy}"):
        traced = chosen.trace_step()
        flops = count_matmul_flops(traced.jaxpr.jaxpr)
        memory = read_memory(chosen.compile_traced(traced))
    return RematReport(
        remat=remat,
        memory=memory,
        matmul_flops=flops,
        recomputed_flops=flops - (flops if plain_flops is None else plain_flops),
    )


def count_matmul_flops(program: Jaxpr) -> int:
    """FLOPs of the matmuls of a traced program on all devices, attention kernels in it.

    A loop counts with its trips, a branch as the dearest; a matmul of groups of rows with all rows of its
    buffer, also those that no group has; a Pallas kernel with all blocks of its grid, also
    those that its mask skips.
    """
    return _count_program(drop_unused(program))


def _count_program(program: Jaxpr) -> int:
    return sum(_count_equation(equation) for equation in program.eqns)


def _count_equation(equation: Any) -> int:
    name, params = equation.primitive.name, equation.params
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        shape = equation.invars[0].aval.shape
        return 2 * equation.outvars[0].aval.size * math.prod(shape[dim] for dim in contracted)
    if name in _KERNEL_MATMULS:
        (batch, length, heads, head), keys = (value.aval.shape for value in equation.invars[:2])
        return _KERNEL_MATMULS[name] * 2 * batch * length * heads * head * keys[1]
    programs = list(find_inner(equation))
    if name == "cond" and (grouped := [each for branch in programs for each in _find_grouped(branch)]):
        return 2 * grouped[0].invars[0].aval.size * grouped[0].outvars[0].aval.shape[-1]
    inner = [_count_program(each) for each in programs]
    if name == "cond":
        return max(inner)
    return sum(inner) * _count_runs(name, params)


def _find_grouped(branch: Jaxpr) -> list[Any]:
    """The kernel of a grouped matmul, where a branch for one platform is nothing else."""
    return [each for each in branch.eqns if each.params.get("name") in _GROUPED_MATMULS and each.invars]


def _count_runs(name: str, params: Any) -> int:
    """How often an operation runs the programs inside it, over all devices."""
    if name == "scan":
        return params["length"]
    if name == "shard_map":
        return math.prod(params["mesh"].shape[axis] for axis in params["newly_manual_axes"])
    if name == "pallas_call":
        return math.prod(params["grid_mapping"].grid)
    return 1


def render_remat(reports: tuple[RematReport, ...], platform: str) -> RenderableType:
    """The table, with what its numbers leave out."""
    unit = choose_unit(max(report.memory.peak for report in reports))
    table = make_table(f"Remat: memory of a device in {unit.name}, matmuls of a step", "remat")
    for column in ("arguments", "temporaries", "outputs", "peak", "host", "TFLOP", "recomputed", "more"):
        table.add_column(column, justify="right", no_wrap=True)
    for report in reports:
        memory = report.memory
        before = report.matmul_flops - report.recomputed_flops
        table.add_row(
            report.name,
            *(unit.word(n) for n in (memory.arguments, memory.temporaries, memory.outputs, memory.peak)),
            unit.word(memory.host),
            f"{report.matmul_flops / 1e12:,.4g}",
            f"{report.recomputed_flops / 1e12:,.4g}",
            f"{report.recomputed_flops / before:+.1%}" if before else "",
        )
    notes = [f"by the compiler for {platform}; FLOPs of matmuls and attention kernels, on all devices"]
    if platform == "cpu":
        notes.append("a CPU has one memory: what is offloaded moves nowhere, and counts as the device's")
    return Group(table, Text("; ".join(notes)))
