"""The weights of a run, for commands that read one."""

from dataclasses import replace
from typing import Any

from jaxscale.checkpoint import Checkpoints
from jaxscale.config import Config, OptimizerConfig, UserError
from jaxscale.training.routers import RouterState
from jaxscale.training.run_dir import RunDir
from jaxscale.training.setup import Setup


def forget_optimizer(config: Config) -> Config:
    """For commands that read weights alone: an optimizer from Python is not at hand, and none is needed."""
    return replace(config, optimizer=OptimizerConfig())


def load_params(run_dir: RunDir, setup: Setup, step: int | None) -> tuple[int, Any, RouterState | None]:
    """The step (the newest if None), its parameters and what its routers keep, laid for the setup's mesh.

    Raises:
      UserError: there is no such checkpoint, or it is of another model.
    """
    checkpoints = Checkpoints(run_dir.checkpoints, keep=1)
    try:
        step = checkpoints.latest_step() if step is None else step
        if step is None:
            raise UserError(f"{run_dir.path} has no complete checkpoint yet; train it first")
        state = setup.abstract_state
        routers = state.routers
        if routers is not None:
            routers = checkpoints.restore_params(step, routers, subtree="routers")
        return step, checkpoints.restore_params(step, state.params), routers
    finally:
        checkpoints.close()
