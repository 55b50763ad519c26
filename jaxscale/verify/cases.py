"""Which cases are verified: meshes, ZeRO stages, microbatches, remat policies and clipping.

Every pair of (mesh, stage), (mesh, microbatches), (mesh, remat), (stage, microbatches) and (stage, remat)
stands in some case; so do both ways of clipping and of gathering, on every stage or with every number of
microbatches. The whole product is many times as long and finds little more: a fault that needs three
settings at once is rare (Kuhn 2004).
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal, get_args

from jaxscale.config import Config, MeshConfig, ModelConfig, RematConfig
from jaxscale.config.memory import RematPolicy
from jaxscale.mesh import axis_sizes, count_asked

USUAL_AXES = ("data", "fsdp", "tensor")  # where a configuration uses none; `expert` too if it has experts
SEVERAL_MICROBATCHES = 4  # where a configuration has one
Stage = Literal[0, 1, 2, 3]
Remat = RematPolicy | Literal["config"]
Clip = Literal["config", "half"]
FindObstacle = Callable[[MeshConfig, int], str | None]


@dataclass(frozen=True)
class Case:
    """One way to run the configuration; none of it may change the mathematics."""

    mesh: MeshConfig
    zero: Stage
    keep_gathered: bool
    microbatches: int
    remat: Remat
    """A policy; config: the section as it is, where it lists tensors or the model is no decoder."""
    clip: Clip
    """config: optimizer.clip_norm as it is; half: half of the first gradient norm, so that clipping bites."""

    @property
    def device_count(self) -> int:
        return count_asked(self.mesh)

    @property
    def mesh_name(self) -> str:
        """Such as `data=2 fsdp=4`."""
        return name_mesh(self.mesh)

    @property
    def name(self) -> str:
        """Such as `data=2 fsdp=4, zero 3, 4 microbatches, remat full, clipped`."""
        words = [
            self.mesh_name,
            f"zero {self.zero}" + (" keep_gathered" if self.keep_gathered else ""),
            f"{self.microbatches} microbatch{'es' if self.microbatches > 1 else ''}",
            f"remat {self.remat}",
        ]
        return ", ".join(words + ["clipped"] * (self.clip == "half"))


@dataclass(frozen=True)
class LeftOut:
    """What could not be laid, and why."""

    mesh: MeshConfig | None
    microbatches: int | None
    reason: str


def name_mesh(mesh: MeshConfig) -> str:
    sizes = [f"{axis}={size}" for axis, size in axis_sizes(mesh).items() if size > 1]
    return " ".join(sizes) or "one device"


def plan_cases(
    config: Config, device_count: int, find_obstacle: FindObstacle, *, whole_product: bool
) -> tuple[list[Case], list[LeftOut]]:
    """The cases of a configuration in a fixed order, those on one device first, and what is left out.

    Args:
      find_obstacle: (mesh, microbatches) -> why the model or the batch does not fit, or None.
      whole_product: every combination instead of every pair.
    """
    tried, left_out = _choose_microbatches(config)
    fitting: dict[MeshConfig, tuple[int, ...]] = {}
    for mesh in list_meshes(config.mesh, device_count, has_experts=config.moe is not None):
        obstacles = {count: find_obstacle(mesh, count) for count in tried}
        fitting[mesh] = tuple(count for count, obstacle in obstacles.items() if obstacle is None)
        if not fitting[mesh] and len(set(obstacles.values())) == 1:
            left_out.append(LeftOut(mesh, None, str(obstacles[tried[0]])))
        else:
            left_out += [LeftOut(mesh, count, reason) for count, reason in obstacles.items() if reason]
    remats: tuple[Remat, ...] = get_args(RematPolicy)
    if not isinstance(config.model, ModelConfig):  # knows no tensor of ours, and may know no remat
        remats = ("none",) if config.remat.is_off else ("config",)
    elif config.remat.named:
        remats = (*remats, "config")
    product = [
        Case(mesh, stage, keep_gathered, microbatches, remat, clip)
        for mesh, counts in fitting.items()
        for stage in get_args(Stage)
        for keep_gathered in ((False, True) if stage == 3 and mesh.fsdp > 1 else (False,))
        for microbatches in counts
        for remat in remats
        for clip in ("config", "half")
    ]
    alone = [Case(MeshConfig(), 0, False, count, remats[0 if count == 1 else -1], "half") for count in tried]
    return alone + (product if whole_product else list(_cover_pairs(product))), left_out


def list_meshes(mesh: MeshConfig, device_count: int, *, has_experts: bool = False) -> list[MeshConfig]:
    """Every assignment of all devices to the axes that a mesh uses (larger than 1, or -1)."""
    if device_count == 1:
        return []
    usual = (*USUAL_AXES, "expert") if has_experts else USUAL_AXES
    axes = tuple(axis for axis, size in axis_sizes(mesh).items() if size != 1) or usual
    return [
        MeshConfig(**dict(zip(axes, sizes, strict=True))) for sizes in _factorise(device_count, len(axes))
    ]


def _factorise(number: int, count: int) -> Iterator[tuple[int, ...]]:
    """Every tuple of `count` factors whose product is `number`."""
    if count == 1:
        yield (number,)
        return
    for first in range(number, 0, -1):
        if number % first == 0:
            yield from ((first, *rest) for rest in _factorise(number // first, count - 1))


def _choose_microbatches(config: Config) -> tuple[tuple[int, ...], list[LeftOut]]:
    """One and several microbatches, if the batch can be cut at all."""
    batch = config.batch
    if fixes_microbatches(config):
        return (batch.microbatches,), []
    if batch.microbatches > 1:
        return (1, batch.microbatches), []
    largest = max(n for n in range(1, SEVERAL_MICROBATCHES + 1) if batch.sequences % n == 0)
    if largest > 1:
        return (1, largest), []
    reason = f"batch.sequences={batch.sequences} divides by no number of microbatches from 2 to 4"
    return (1,), [LeftOut(None, SEVERAL_MICROBATCHES, reason)]


def fixes_microbatches(config: Config) -> bool:
    """Whether the number of microbatches is part of the mathematics: a balance loss over each of them."""
    moe = config.moe
    return moe is not None and moe.has_loss and moe.balance_scope == "microbatch"


def _cover_pairs(product: list[Case]) -> Iterator[Case]:
    """The case that has the most pairs not seen yet, again and again until all are seen; of cases as good the
    one whose pairs were seen the least, so that settings take turns."""
    seen: Counter[tuple] = Counter()
    missing = {pair for case in product for pair in _list_pairs(case)}

    def rank(case: Case) -> tuple[int, int]:
        pairs = _list_pairs(case)
        return len(missing & pairs), -sum(seen[pair] for pair in pairs)

    while missing:
        case = max(product, key=rank)
        missing -= _list_pairs(case)
        seen.update(_list_pairs(case))
        yield case


def _list_pairs(case: Case) -> set[tuple]:
    gathered = (case.zero, case.keep_gathered)
    pairs = {
        "mesh, stage": (case.mesh, case.zero),
        "mesh, microbatches": (case.mesh, case.microbatches),
        "mesh, remat": (case.mesh, case.remat),
        "stage, microbatches": (gathered, case.microbatches),
        "stage, remat": (gathered, case.remat),
        "stage, clip": (gathered, case.clip),
        "microbatches, clip": (case.microbatches, case.clip),
    }
    return set(pairs.items())


def apply_case(config: Config, case: Case, clip_norm: float | None) -> Config:
    """The configuration of a case; `clip_norm` is what the case's way of clipping comes to."""
    return replace(
        config,
        mesh=case.mesh,
        zero=replace(config.zero, stage=case.zero, keep_gathered=case.keep_gathered),
        batch=replace(config.batch, microbatches=case.microbatches),
        remat=config.remat if case.remat == "config" else RematConfig(policy=case.remat),
        optimizer=replace(config.optimizer, clip_norm=clip_norm),
    )
