"""Buffers of a step and when they are alive; what is alive at once is what a device needs."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal

Kind = Literal[
    "parameters",
    "gradients",
    "optimizer",
    "activations",
    "working",
    "gathered",
    "logits",
    "exchange",
    "batch",
]
KINDS: tuple[Kind, ...] = (
    *("parameters", "gradients", "optimizer"),
    *("activations", "working", "gathered", "logits", "exchange", "batch"),
)


class Moment(IntEnum):
    """Moments of a step at which memory peaks, in their order."""

    FORWARD = 0
    """In the forward pass of the last layer."""
    HEAD = 1
    """Logits and their gradient."""
    ATTENTION = 2
    """In the backward pass of a layer, its attention made again."""
    DENSE = 3
    """In the backward pass of a layer with an MLP."""
    EXPERTS = 4
    """In the backward pass of a layer with experts."""
    UPDATE = 5
    """Gradients summed over devices, state not yet updated."""


ALWAYS = (Moment.FORWARD, Moment.UPDATE)
BACKWARD = (Moment.ATTENTION, Moment.EXPERTS)
THROUGH_LAYERS = (Moment.FORWARD, Moment.EXPERTS)


@dataclass(frozen=True)
class Buffer:
    """A buffer beside the arguments, or several of a kind."""

    kind: Kind
    what: str
    bytes: int
    alive: tuple[Moment, Moment]
    """First and last moment."""


def sum_alive(buffers: Iterable[Buffer], moment: Moment) -> dict[Kind, int]:
    """Bytes by kind at a moment."""
    total: dict[Kind, int] = {}
    for each in buffers:
        if each.alive[0] <= moment <= each.alive[1]:
            total[each.kind] = total.get(each.kind, 0) + each.bytes
    return total


def find_peak(buffers: list[Buffer], moments: Iterable[Moment]) -> tuple[Moment, Mapping[Kind, int]]:
    """The moment at which most is alive, and what is."""
    alive = {moment: sum_alive(buffers, moment) for moment in moments}
    peak = max(alive, key=lambda moment: sum(alive[moment].values()))
    return peak, alive[peak]
