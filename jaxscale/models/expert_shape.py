"""From a configuration to the shape of a decoder's experts."""

from typing import Literal

from jaxscale.config import Config, ModelConfig, MoeConfig
from jaxscale.models.router import RouterShape
from jaxscale.models.shape import ExpertShape
from jaxscale.sharding.rules import PARAMETER_STRATEGY


def shape_experts(config: Config, *, platform: str) -> ExpertShape:
    """Fills in what the section `moe` leaves open.

    Args:
      platform: `tpu`, `gpu` or `cpu`: XLA's CPU compiler has no ragged all-to-all.
    """
    moe, model = config.moe, config.model
    assert moe is not None
    assert isinstance(model, ModelConfig)
    dropless: Literal["padded", "ragged"] = "padded" if platform == "cpu" else "ragged"
    scope = moe.balance_scope
    if scope == "step" and config.batch.microbatches == 1:  # the one microbatch is the step
        scope = "microbatch"
    return ExpertShape(
        router=RouterShape(
            experts=moe.experts,
            top_k=moe.top_k,
            kind=moe.router,
            weight_scale=moe.weight_scale,
            groups=moe.groups,
            groups_kept=moe.groups_kept,
            jitter=moe.jitter,
        ),
        mlp=moe.mlp or model.mlp,
        shared=moe.shared_experts,
        first_dense=moe.first_dense,
        every=moe.every,
        exchange="capacity" if moe.exchange == "capacity" else dropless,
        capacity_factor=moe.capacity_factor,
        eval_capacity_factor=moe.eval_capacity_factor,
        reroutes=moe.overflow == "reroute",
        priority=moe.priority,
        has_bias=moe.has_bias,
        balance_scope=scope if moe.has_loss else None,
        balance_coef=moe.balance_coef if moe.has_loss else 0.0,
        z_coef=moe.z_coef,
    )


def find_expert_problems(config: Config) -> list[str]:
    """Every pair of sizes of the section `moe` that cannot both hold."""
    moe, model = config.moe, config.model
    if moe is None:
        return []
    assert isinstance(model, ModelConfig)
    problems = []
    if moe.top_k > moe.experts:
        problems.append(
            f"moe.top_k={moe.top_k} is more than moe.experts={moe.experts}; a token chooses each expert once"
        )
    if moe.top_k == 1 and moe.router != "softmax":
        problems.append(
            f"moe.router={moe.router} with moe.top_k=1: the one weight is always 1, so that no loss but the "
            "balance reaches the router; use moe.router=softmax"
        )
    layers = model.layers - moe.first_dense
    if layers <= 0:
        problems.append(
            f"moe.first_dense={moe.first_dense} leaves none of model.layers={model.layers} for experts; "
            "lower it"
        )
    elif layers % moe.every:
        problems.append(
            f"{layers} layers (model.layers={model.layers} - moe.first_dense={moe.first_dense}) do not "
            f"divide by moe.every={moe.every}; change one of them"
        )
    problems += _find_group_problems(moe) + _find_idle_fields(moe)
    laid = config.strategy.get("experts", PARAMETER_STRATEGY["experts"])
    if not set(laid) <= {"expert"}:
        problems.append(
            f"strategy.experts={list(laid)}: tokens travel to experts over `expert` alone; leave it out"
        )
    return problems


def _find_group_problems(moe: MoeConfig) -> list[str]:
    if moe.experts % moe.groups:
        return [f"moe.experts={moe.experts} do not divide by moe.groups={moe.groups}; change one of them"]
    if moe.groups_kept > moe.groups:
        return [f"moe.groups_kept={moe.groups_kept} is more than moe.groups={moe.groups}; lower it"]
    within = moe.experts // moe.groups * moe.groups_kept
    spare = 2 if moe.exchange == "capacity" and moe.overflow == "reroute" else 1
    needed = min(moe.top_k * spare, moe.experts)
    if within < needed:
        return [
            f"moe.groups_kept={moe.groups_kept} of {moe.groups} groups leave {within} experts to choose "
            f"from, and {needed} are needed (moe.top_k={moe.top_k}"
            + (", and as many again for moe.overflow=reroute" if spare == 2 else "")
            + "); keep more groups"
        ]
    return []


def _find_idle_fields(moe: MoeConfig) -> list[str]:
    """Fields that were given and that nothing would read."""
    problems = []
    if moe.exchange == "dropless":
        given = {"overflow": moe.overflow != "drop", "priority": moe.priority != "position"}
        problems += [
            f"moe.{name}={getattr(moe, name)} is for tokens that find no room, and moe.exchange=dropless "
            "has room for all; leave it out, or set moe.exchange=capacity"
            for name, is_given in given.items()
            if is_given
        ]
    if moe.bias_freeze_tokens is not None and not moe.has_bias:
        problems.append(
            f"moe.bias_freeze_tokens={moe.bias_freeze_tokens} is for a bias, and moe.balance={moe.balance} "
            "has none; leave it out, or set moe.balance=bias"
        )
    return problems
