"""What a case did against the reference: relative errors, their limits, and the worst leaf by name."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxscale.mesh import axis_sizes
from jaxscale.training.optimizer_layout import find_owner
from jaxscale.verify.cases import Case
from jaxscale.verify.oracle import COMPARED_STEPS, Leaves, Trace

# A leaf whose gradient is less than this many roundings of the whole gradient is zero but for rounding.
ROUNDINGS = 10


@dataclass(frozen=True)
class Limits:
    """Largest relative errors: of numbers, and of leaves by the norm of the difference."""

    loss: float = 2e-6
    grad_norm: float = 2e-6
    grad: float = 1e-5
    parameter: float = 1e-5
    optimizer: float = 2e-5
    """Twice as much: second moments are squares."""


FP32_LIMITS = Limits()
FP64_LIMITS = Limits(1e-10, 1e-10, 1e-10, 1e-10, 1e-10)


@dataclass(frozen=True)
class CaseResult:
    """Errors of one case; None where it did not run or a number is not finite."""

    case: Case
    problems: tuple[str, ...]
    """Why the case fails; none: it passes."""
    loss_error: float | None = None
    grad_norm_error: float | None = None
    grad_error: float | None = None
    worst_leaf: str | None = None
    """The parameter whose gradient is the worst."""
    parameter_error: float | None = None
    worst_parameter: str | None = None
    optimizer_error: float | None = None
    router_error: float | None = None
    """Of what a run keeps of its routers; None without a bias."""

    @property
    def ok(self) -> bool:
        return not self.problems

    def to_dict(self) -> dict[str, Any]:
        """For JSON; `mesh` has every axis."""
        case = self.case
        return {
            "mesh": axis_sizes(case.mesh),
            "zero": case.zero,
            "keep_gathered": case.keep_gathered,
            "microbatches": case.microbatches,
            "remat": case.remat,
            "clip": case.clip,
            "loss_error": self.loss_error,
            "grad_norm_error": self.grad_norm_error,
            "grad_error": self.grad_error,
            "worst_leaf": self.worst_leaf,
            "parameter_error": self.parameter_error,
            "worst_parameter": self.worst_parameter,
            "optimizer_error": self.optimizer_error,
            "router_error": self.router_error,
            "ok": self.ok,
            "problems": list(self.problems),
        }


@dataclass(frozen=True)
class Errors:
    """Relative errors by path, and the worst of them."""

    by_path: dict[str, float]

    @property
    def worst(self) -> str:
        return max(self.by_path, key=lambda path: _order(self.by_path[path]))

    @property
    def largest(self) -> float:
        return self.by_path[self.worst]


def find_rounding_leaves(reference: Trace) -> tuple[str, ...]:
    """Parameters whose true gradient is zero, so that the one at hand is nothing but rounding.

    GPT-2's key bias adds one number to all logits of a query, which softmax takes out again. Such a gradient
    has no relative error; it is compared with the norm of the whole gradient.
    """
    found = set()
    for gradient in reference.gradients.values():
        dtype = next(iter(gradient.values())).dtype
        limit = ROUNDINGS * np.finfo(dtype).eps * _norm(gradient)
        found |= {path for path, leaf in gradient.items() if np.linalg.norm(leaf) <= limit}
    return tuple(path for path in reference.initial if path in found)


def compare(
    case: Case, trace: Trace, reference: Trace, limits: Limits, rounding: tuple[str, ...], reach: float
) -> CaseResult:
    """Measures a case.

    Args:
      rounding: parameters that `find_rounding_leaves` found.
      reach: sum of the learning rates of all steps: about how far an element can have moved. An optimizer
        that divides by the gradient's size makes full steps of rounding, so that for those parameters no more
        can be asked than that they stayed within reach.
    """
    problems = list(trace.problems)
    moved = [path for path, leaf in trace.initial.items() if not _same(leaf, reference.initial[path])]
    if moved:
        problems.append(f"{len(moved)} parameter(s) start otherwise than on one device, such as {moved[0]}")
    if not np.array_equal(trace.counted_tokens, reference.counted_tokens):
        problems.append(
            f"weights sum up to {trace.counted_tokens.tolist()}, not {reference.counted_tokens.tolist()}"
        )
    losses = _relative(trace.losses, reference.losses)
    norms = _relative(trace.grad_norms, reference.grad_norms)
    gradients = {
        step: _measure_gradients(trace.gradients[step], reference.gradients[step], rounding)
        for step in COMPARED_STEPS
    }
    params = _measure_params(trace.params, reference, rounding, reach, limits.parameter)
    moments = _measure_moments(trace.moments, reference, rounding)

    problems += _word_numbers(losses, limits.loss, "loss")
    problems += _word_numbers(norms, limits.grad_norm, "gradient norm")
    for step, errors in gradients.items():
        problems += _word_leaves(errors, limits.grad, f"gradient at step {step}")
    problems += _word_leaves(params, limits.parameter, "parameter")
    problems += _word_leaves(moments, limits.optimizer, "optimizer state")
    routers = Errors(
        {
            path: _distance(leaf, reference.routers[path]) / (_norm({path: reference.routers[path]}) or 1.0)
            for path, leaf in trace.routers.items()
        }
    )
    if routers.by_path:
        problems += _word_leaves(routers, limits.parameter, "routers")
    problems += _word_loads(trace.loads, reference.loads)
    worst = max(gradients.values(), key=lambda errors: _order(errors.largest))
    return CaseResult(
        case,
        tuple(problems),
        loss_error=_finite(max(losses, key=_order)),
        grad_norm_error=_finite(max(norms, key=_order)),
        grad_error=_finite(worst.largest),
        worst_leaf=worst.worst,
        parameter_error=_finite(params.largest),
        worst_parameter=params.worst,
        optimizer_error=_finite(moments.largest),
        router_error=_finite(routers.largest) if routers.by_path else None,
    )


def _measure_gradients(ours: Leaves, reference: Leaves, rounding: tuple[str, ...]) -> Errors:
    whole = _norm(reference)
    return Errors(
        {
            path: _distance(ours[path], leaf) / ((whole if path in rounding else _norm({path: leaf})) or 1.0)
            for path, leaf in reference.items()
        }
    )


def _measure_params(
    ours: Leaves, reference: Trace, rounding: tuple[str, ...], reach: float, limit: float
) -> Errors:
    errors = {}
    for path, leaf in reference.params.items():
        scale = float(np.linalg.norm(leaf))
        if path in rounding:  # the limit is met where the distance is twice as far as an element can move
            scale = max(scale, 2 * reach * math.sqrt(leaf.size) / limit)
        errors[path] = _distance(ours[path], leaf) / (scale or 1.0)
    return Errors(errors)


def _measure_moments(ours: Leaves, reference: Trace, rounding: tuple[str, ...]) -> Errors:
    """Where a parameter's gradient is rounding, the scale is the norm of all leaves of the kind."""
    kinds: dict[str, str] = {}
    owners: dict[str, str | None] = {}
    for path in reference.moments:
        owner = owners[path] = find_owner(path, reference.params)
        kinds[path] = path.removesuffix(owner or "")
    errors = {}
    for path, leaf in reference.moments.items():
        scale = float(np.linalg.norm(leaf))
        if owners[path] in rounding or not scale:
            scale = _norm({p: each for p, each in reference.moments.items() if kinds[p] == kinds[path]})
        errors[path] = _distance(ours[path], leaf) / (scale or 1.0)
    return Errors(errors or {"none": 0.0})


def _word_numbers(errors: list[float], limit: float, what: str) -> list[str]:
    wrong = [(step, error) for step, error in enumerate(errors, 1) if not error <= limit]
    return [
        f"{what} is off by {_order(error):.1e} at step {step} (limit {limit:.0e})"
        for step, error in wrong[:1]
    ]


def _word_leaves(errors: Errors, limit: float, what: str) -> list[str]:
    wrong = [path for path, error in errors.by_path.items() if not error <= limit]
    if not wrong:
        return []
    others = f", and {len(wrong) - 1} more of {len(errors.by_path)}" if len(wrong) > 1 else ""
    return [f"{what}: {errors.worst} is off by {_order(errors.largest):.1e} (limit {limit:.0e}){others}"]


def _word_loads(ours: np.ndarray | None, reference: np.ndarray | None) -> list[str]:
    """Which step chose other experts; a sum over steps, as a step's own tokens may have changed places."""
    if ours is None or reference is None:
        return []
    moved = np.abs(ours - reference).sum((1, 2)) / 2
    if not moved.any():
        return []
    step = int(np.flatnonzero(moved)[0])
    return [
        f"{moved[step]:g} of {reference[step].sum():g} choices fall on other experts at step {step + 1}; one "
        "may by rounding, where two experts score alike: --fp64 tells that from a fault"
    ]


def _relative(ours: np.ndarray, reference: np.ndarray) -> list[float]:
    return list(np.abs(ours - reference) / np.where(reference == 0, 1.0, np.abs(reference)))


def _distance(ours: np.ndarray, reference: np.ndarray) -> float:
    """Norm of the difference; taken in fp64, where no square of a small number is lost."""
    return float(np.linalg.norm(np.asarray(ours, np.float64).ravel() - reference.ravel()))


def _norm(leaves: Leaves) -> float:
    return float(np.sqrt(sum(np.linalg.norm(np.asarray(leaf, np.float64)) ** 2 for leaf in leaves.values())))


def _same(ours: np.ndarray, reference: np.ndarray) -> bool:
    return ours.dtype == reference.dtype and np.array_equal(ours, reference)


def _order(error: float) -> float:
    """Not a number is worse than any number."""
    return float("inf") if np.isnan(error) else float(error)


def _finite(error: float) -> float | None:
    return float(error) if np.isfinite(error) else None
