"""Checkpoints: the state of a run on disk, restored onto any mesh. Knows trees and shardings only."""

from jaxscale.checkpoint.checkpoints import Checkpoints
from jaxscale.checkpoint.leaves import LeafType

__all__ = ["Checkpoints", "LeafType"]
