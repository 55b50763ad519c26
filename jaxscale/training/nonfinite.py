"""Numbers gone bad: which gradients, and what is said when a run ends over them."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxscale.config import NonfiniteConfig

_SHOWN_LEAVES = 10


def count_nonfinite(gradients: Any) -> jax.Array:
    """Elements of each leaf that are infinite or no number, int32 [leaves] in tree order."""
    return jnp.stack([jnp.sum(~jnp.isfinite(g), dtype=jnp.int32) for g in jax.tree.leaves(gradients)])


def allowed_skips(config: NonfiniteConfig) -> int:
    """Skipped steps in a row that do not end a run yet."""
    return 0 if config.policy == "stop" else config.limit


def word_give_up(
    step: int,
    skips_in_row: int,
    good_step: int | None,
    bad_leaves: Mapping[str, int],
    loss_scale: float | None,
) -> str:
    """Why a run ended at `step`, what is left of it, and what to look at.

    Args:
      good_step: step of the newest checkpoint.
      bad_leaves: path of a gradient -> elements of it that are not finite, at the last step.
    """
    word = "step" if skips_in_row == 1 else "steps in a row"
    lines = [
        f"{skips_in_row} {word} had a loss or gradient that is not finite, or no counted token; "
        f"stopped at step {step}."
    ]
    if bad_leaves:
        worst = sorted(bad_leaves.items(), key=lambda item: -item[1])
        lines.append("Gradients that are not finite, elements of each:")
        lines += [f"  {count:>12,}  {path}" for path, count in worst[:_SHOWN_LEAVES]]
        if len(worst) > _SHOWN_LEAVES:
            lines.append(f"  and {len(worst) - _SHOWN_LEAVES} more leaves")
    if loss_scale is not None:
        lines.append(f"The loss scale was {loss_scale:g}.")
    kept = f"The last good checkpoint is of step {good_step}" if good_step else "There is no checkpoint"
    lines.append(f"{kept}. Look at the data of these steps, or lower optimizer.peak_lr, and start anew")
    return "\n".join(lines)
