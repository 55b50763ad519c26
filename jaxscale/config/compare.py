"""Which changes of configuration a run survives."""

from jaxscale.config.errors import UserError
from jaxscale.config.load import flatten_config
from jaxscale.config.schema import Config

# Fields (or whole sections) that change where and when things happen, never a number of the run beyond
# rounding. Everything else belongs to the mathematics: a new field is refused until somebody argues here.
FREE_TO_CHANGE = (
    "run_dir",
    "stop_after_steps",
    "mesh",
    "zero",
    "batch.microbatches",
    "remat",
    "offload",
    "checkpoint",
    "eval",
    "nonfinite",
    "model.attention",
    "data.cache_dir",
    "moe.eval_capacity_factor",
)


def check_same_mathematics(saved: Config, asked: Config) -> None:
    """Refuses to continue a run with a configuration that would have given another run.

    Raises:
      UserError: lists every field that differs and belongs to the mathematics, with both values.
    """
    before, now = flatten_config(saved), flatten_config(asked)
    changed = [
        f"{path}: the run has {before.get(path)!r}, asked is {now.get(path)!r}"
        for path in now | before
        if before.get(path) != now.get(path) and not _is_free(path, saved, asked)
    ]
    if changed:
        lines = "\n  ".join(changed)
        raise UserError(
            f"{asked.run_dir}: this folder holds a run whose mathematics differ in {len(changed)} field(s)\n"
            f"  {lines}\n  give the fields their old values to continue it, or another run_dir to start anew"
        )


def _is_free(path: str, saved: Config, asked: Config) -> bool:
    if path == "steps":
        return _ignores_end(saved) and _ignores_end(asked)
    if path == "batch.microbatches" and _balances_microbatches(saved):
        return False
    return any(path == free or path.startswith(free + ".") for free in FREE_TO_CHANGE)


def _balances_microbatches(config: Config) -> bool:
    """Whether a loss is not linear in a microbatch, so that their number is part of the mathematics."""
    moe = config.moe
    return moe is not None and moe.has_loss and moe.balance_scope == "microbatch"


def _ignores_end(config: Config) -> bool:
    """A longer run is the same run only where the learning rate does not look at its end.

    A warm-up longer than the run is shortened to it, so that such a rate does look at the end.
    """
    tokens = config.steps * config.batch.sequences * config.batch.length
    return config.optimizer.schedule == "constant" and config.optimizer.warmup_tokens <= tokens
