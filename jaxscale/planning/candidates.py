"""What a plan chooses among: meshes, ZeRO stages, remat, microbatches, compute formats and offload.

Nothing here changes the mathematics but the compute format, which is the configuration's alone unless
others are asked for by name. What would only be another name for the same layout is left out: below stage 2
`fsdp` is one more replica, so `data` stands for both; from stage 2 on there is an `fsdp` to lay things over.
"""

import math
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal, get_args

from jaxscale.config import Config, MeshConfig, OffloadConfig, PrecisionConfig, RematConfig
from jaxscale.config.memory import RematPolicy

OFFLOADS = (
    OffloadConfig(),
    OffloadConfig(optimizer_state=True),
    OffloadConfig(optimizer_state=True, master_weights=True),
)
STAGES: tuple[Literal[0, 1, 2, 3], ...] = (0, 1, 2, 3)
FIXABLE = ("mesh", "zero", "remat", "batch.microbatches", "offload")
"""Fields, or sections, that a plan may be told to leave as the configuration has them."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One way to lay a run out."""

    mesh: MeshConfig
    zero_stage: Literal[0, 1, 2, 3]
    keep_gathered: bool = False
    remat: RematConfig
    microbatches: int
    compute: str
    """Compute format."""
    offload: OffloadConfig

    def apply(self, config: Config) -> Config:
        """The configuration with this candidate's choices."""
        zero = replace(config.zero, stage=self.zero_stage, keep_gathered=self.keep_gathered)
        changed = replace(
            config,
            mesh=self.mesh,
            zero=zero,
            remat=self.remat,
            batch=replace(config.batch, microbatches=self.microbatches),
            offload=self.offload,
        )
        return change_compute(changed, self.compute)

    @property
    def batch_ways(self) -> int:
        """Parts that a microbatch is cut into."""
        return self.mesh.data * self.mesh.fsdp * self.mesh.expert

    def show_mesh(self) -> str:
        """Such as `fsdp=16 tensor=4`; `1 device` where every axis is 1."""
        sizes = {axis: getattr(self.mesh, axis) for axis in ("pipe", "data", "fsdp", "expert", "tensor")}
        return " ".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1) or "1 device"

    def show_offload(self) -> str:
        """What lies on the host, in a word."""
        if self.offload.is_off:
            return "none"
        return "state and weights" if self.offload.master_weights else "state"


def change_compute(config: Config, compute: str) -> Config:
    """The configuration in another compute format, with that format's sections at their defaults."""
    if compute == config.precision.compute:
        return config
    precision: PrecisionConfig = replace(config.precision, compute=compute)  # type: ignore[arg-type]
    return replace(config, precision=precision, loss_scale=None, fp8=None)


def describe_own(config: Config) -> Candidate:
    """The candidate that a configuration with a resolved mesh is itself."""
    return Candidate(
        mesh=config.mesh,
        zero_stage=config.zero.stage,
        keep_gathered=config.zero.keep_gathered,
        remat=config.remat,
        microbatches=config.batch.microbatches,
        compute=config.precision.compute,
        offload=config.offload,
    )


def enumerate_candidates(
    config: Config, devices: int, *, fixed: Container[str] = (), computes: Sequence[str] = ()
) -> Iterator[Candidate]:
    """Every candidate for so many devices that its batch divides over; whether its leaves do is not asked.

    Args:
      fixed: fields of `FIXABLE`, or of `mesh` such as `mesh.tensor`, that stay as the configuration has them.
      computes: compute formats; none: the configuration's.
    """
    remats = list_remats(config, fixed)
    offloads = (config.offload,) if "offload" in fixed else OFFLOADS
    for mesh, (stage, keep) in product(
        enumerate_meshes(config, devices, fixed=fixed), list_stages(config, fixed)
    ):
        if is_another_name(mesh, stage, fixed):
            continue
        ways = mesh.data * mesh.fsdp * mesh.expert
        for microbatches in list_microbatches(config, ways, fixed):
            for remat, compute, offload in product(remats, computes or (config.precision.compute,), offloads):
                yield Candidate(
                    mesh=mesh,
                    zero_stage=stage,
                    keep_gathered=keep,
                    remat=remat,
                    microbatches=microbatches,
                    compute=compute,
                    offload=offload,
                )


def list_stages(config: Config, fixed: Container[str]) -> list[tuple[Literal[0, 1, 2, 3], bool]]:
    """(ZeRO stage, whether gathered weights are kept through the step) to try."""
    own = (config.zero.stage, config.zero.keep_gathered)
    return [own] if "zero" in fixed else [(stage, False) for stage in STAGES]


def list_remats(config: Config, fixed: Container[str]) -> list[RematConfig]:
    """Each policy by name, and the configuration's own choice where it names tensors."""
    if "remat" in fixed:
        return [config.remat]
    policies = [RematConfig(policy=policy) for policy in get_args(RematPolicy)]
    return policies if config.remat in policies else [*policies, config.remat]


def is_another_name(mesh: MeshConfig, stage: int, fixed: Container[str] = ()) -> bool:
    """Whether another candidate is the same layout, under the name that is preferred."""
    if "mesh" in fixed or "mesh.fsdp" in fixed or "mesh.data" in fixed:
        return False
    replicas = mesh.data * mesh.fsdp * mesh.expert
    if stage >= 2:
        return mesh.fsdp == 1 and replicas > 1
    return mesh.fsdp > 1 or (stage == 1 and replicas == 1)


def enumerate_meshes(config: Config, devices: int, *, fixed: Container[str] = ()) -> Iterator[MeshConfig]:
    """Every mesh of so many devices; `expert` has more than one in a model with experts alone."""
    if "mesh" in fixed:
        yield config.mesh
        return
    axes = ("data", "fsdp", "expert", "tensor")
    asked = {axis: getattr(config.mesh, axis) for axis in axes}
    held = {axis for axis in axes if f"mesh.{axis}" in fixed and asked[axis] != -1}
    choices = {axis: [asked[axis]] if axis in held else list_divisors(devices) for axis in axes}
    if config.moe is None and "expert" not in held:
        choices["expert"] = [1]
    for tensor, expert, fsdp in product(choices["tensor"], choices["expert"], choices["fsdp"]):
        rest = devices // (tensor * expert * fsdp)
        if tensor * expert * fsdp * rest == devices and rest in choices["data"]:
            yield MeshConfig(data=rest, fsdp=fsdp, expert=expert, tensor=tensor)


def list_microbatches(config: Config, ways: int, fixed: Container[str] = ()) -> list[int]:
    """Numbers of microbatches that leave every device whole sequences, none where the batch does not divide.

    A balance loss of the scope `microbatch` makes their number part of the mathematics: it stays.
    """
    own = config.batch.microbatches
    moe = config.moe
    is_mathematics = moe is not None and moe.has_loss and moe.balance_scope == "microbatch"
    if is_mathematics or "batch.microbatches" in fixed:
        return [own] if config.batch.sequences % (own * ways) == 0 else []
    rows, left = divmod(config.batch.sequences, ways)
    return [] if left else list_divisors(rows)


def list_divisors(number: int) -> list[int]:
    low = [each for each in range(1, math.isqrt(number) + 1) if number % each == 0]
    return sorted({*low, *(number // each for each in low)})
