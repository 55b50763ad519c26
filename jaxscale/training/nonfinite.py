"""Steps that are skipped: what in them was not finite, and when a run gives up."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxscale.config import NonfiniteConfig
from jaxscale.sharding.rules import iterate_leaves

SHOWN_LEAVES = 10


def count_nonfinite(tree: Any) -> jax.Array:
    """Elements of each leaf that are infinite or NaN, fp32 [leaves]: exact up to 2^24 and never zero beyond.

    It stands in the branch of a skipped step, so that a good one does not pay for it.
    """

    leaves = jax.tree.leaves(tree)
    return jnp.stack([(~jnp.isfinite(leaf)).sum(dtype=jnp.float32) for leaf in leaves])


def name_nonfinite(shapes: Any, counts: Any) -> dict[str, int]:
    """Path -> elements that are not finite, of the leaves that have any, most first."""
    named = {path: int(n) for (path, _), n in zip(iterate_leaves(shapes), counts, strict=True) if n}
    return dict(sorted(named.items(), key=lambda each: -each[1]))


def is_too_many(skips_in_row: int, config: NonfiniteConfig) -> bool:
    """Whether so many skipped steps in a row end the run."""
    return skips_in_row > (0 if config.policy == "stop" else config.limit)


@dataclass(frozen=True)
class GiveUp:
    """Why a run ends: one skipped step too many."""

    step: int
    """The last skipped step."""
    skips_in_row: int
    bad_leaves: Mapping[str, int]
    """Of that step, as `name_nonfinite` gives them."""

    def word(self, config: NonfiniteConfig, good_step: int | None) -> str:
        """What is said; `good_step` is that of the newest checkpoint."""
        step, count = self.step, self.skips_in_row
        what = f"step {step} was" if count == 1 else f"{count} steps in a row up to {step} were"
        rule = "nonfinite.policy is stop" if config.policy == "stop" else f"nonfinite.limit is {config.limit}"
        good = f"The last good checkpoint is of step {good_step}" if good_step else "There is no checkpoint"
        return (
            f"{what} skipped and {rule}, so the run ends.\n{self._word_leaves()}\n"
            f"{good}; look at the data there, or lower optimizer.peak_lr, and start anew"
        )

    def _word_leaves(self) -> str:
        if not self.bad_leaves:
            return (
                f"Every gradient of step {self.step} was finite: loss or norm were not, or no token counted"
            )
        lines = [f"Gradients that were not finite in step {self.step}:"]
        shown = list(self.bad_leaves.items())[:SHOWN_LEAVES]
        lines += [f"  {path}: {count:,} elements" for path, count in shown]
        if len(self.bad_leaves) > SHOWN_LEAVES:
            lines.append(f"  and {len(self.bad_leaves) - SHOWN_LEAVES} more leaves")
        return "\n".join(lines)
