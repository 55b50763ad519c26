"""`verify`: runs every case, compares it with the reference, and says what is wrong."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import jax
import optax
from jax.errors import JaxRuntimeError

from jaxscale.config import (
    Config,
    MeshConfig,
    ModelConfig,
    OffloadConfig,
    PrecisionConfig,
    RematConfig,
    UserError,
)
from jaxscale.data.dataset import find_vocab
from jaxscale.mesh import axis_sizes, count_asked, make_mesh, resolve_mesh
from jaxscale.models.build import find_contradictions
from jaxscale.models.model import Model
from jaxscale.sharding.rules import lay_leaves, raise_problems
from jaxscale.training.setup import Compiled, Setup, find_batch_problems, find_strategy, make_setup
from jaxscale.verify.batches import make_batch
from jaxscale.verify.cases import Case, LeftOut, apply_case, fixes_microbatches, plan_cases
from jaxscale.verify.compare import (
    FP32_LIMITS,
    FP64_LIMITS,
    CaseResult,
    Limits,
    compare,
    find_rounding_leaves,
)
from jaxscale.verify.oracle import DISTURBANCE, STEPS, Reference, Trace, find_rate, make_reference, trace_case
from jaxscale.verify.precision import Fp64, allow_fp64, choose_precision, widen_model
from jaxscale.verify.reduce import reduce_config

DEVICE_COUNT = 8
MOST_PARAMETERS = 10_000_000
MOST_FLOPS = 10**12  # a step, forward and backward: some seconds on a CPU

# The rate of a run's first steps, whatever the configuration's is. Adam divides by the gradient's size, so
# where a gradient is zero but for rounding its update is rounding times the rate.
PEAK_LR = 1e-2
WARMUP_STEPS = 50

MOST_ATTEMPTS = 8  # at batches whose tokens choose their experts clearly
NEAR_TIE = (
    "in every batch that was tried, some token chooses between experts that score almost alike: a mesh that "
    "rounds otherwise may choose the other, which fails its case; --fp64 tells that from a fault"
)

TellResult = Callable[[CaseResult, int, int], None]


@dataclass(frozen=True)
class Verification:
    """What `verify` found."""

    config: Config
    """What ran: reduced if asked, in fp32 or fp64."""
    parameter_count: int
    limits: Limits
    results: tuple[CaseResult, ...]
    left_out: tuple[LeftOut, ...]
    rounding_leaves: tuple[str, ...]
    """Parameters whose true gradient is zero: compared with the norm of the whole gradient."""
    notes: tuple[str, ...]
    """What is otherwise than in the configuration."""
    problems: tuple[str, ...]
    """Faults of the model itself, on one device."""
    seconds: float

    @property
    def ok(self) -> bool:
        return not self.problems and all(result.ok for result in self.results)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "ok": self.ok,
            "cases": [result.to_dict() for result in self.results],
            "left_out": [
                {
                    "mesh": None if each.mesh is None else axis_sizes(each.mesh),
                    "microbatches": each.microbatches,
                    "reason": each.reason,
                }
                for each in self.left_out
            ],
            "limits": vars(self.limits),
            "rounding_leaves": list(self.rounding_leaves),
            "notes": list(self.notes),
            "problems": list(self.problems),
            "parameters": self.parameter_count,
            "seconds": round(self.seconds, 1),
        }


def verify_model(
    config: Config,
    model: Model | None = None,
    *,
    optimizer: optax.GradientTransformation | None = None,
    vocab: int | None = None,
    reduce: bool = False,
    fp64: bool = False,
    whole_product: bool = False,
    device_count: int = DEVICE_COUNT,
    tell: TellResult | None = None,
    tell_plan: Callable[["Oracle", list[Case]], None] | None = None,
) -> Verification:
    """Runs a model on simulated devices in many ways, each of which has to repeat one device's numbers.

    Args:
      model: one that comes from Python; otherwise the configuration says which.
      optimizer: one that comes from Python, for `optimizer.name: python`.
      vocab: tokens in the vocabulary; None: found as a run finds it.
      reduce: a decoder in small, a smaller batch for any model.
      fp64: in fp64 with limits of 1e-10, in place of fp32.
      whole_product: every combination of settings in place of every pair.
      device_count: simulated devices, all of which every mesh takes.
      tell: called after each case with its result, its number and the number of all cases.
      tell_plan: called once before the first case.

    Raises:
      UserError: the configuration fits no mesh, the model is too large, or there are too few devices.
    """
    start = time.monotonic()
    with allow_fp64(fp64=fp64):
        oracle = make_oracle(
            config,
            model,
            optimizer=optimizer,
            vocab=vocab,
            reduce=reduce,
            fp64=fp64,
            device_count=device_count,
        )
        cases, left_out = oracle.plan(whole_product=whole_product)
        if tell_plan is not None:
            tell_plan(oracle, cases)
        results = []
        for result in oracle.run(cases):
            results.append(result)
            if tell is not None:
                tell(result, len(results), len(cases))
    return Verification(
        config=oracle.config,
        parameter_count=oracle.parameter_count,
        limits=oracle.limits,
        results=tuple(results),
        left_out=tuple(left_out),
        rounding_leaves=oracle.rounding,
        notes=oracle.notes,
        problems=oracle.problems,
        seconds=time.monotonic() - start,
    )


@dataclass(frozen=True)
class Oracle:
    """The reference of a configuration, and the means to run cases against it."""

    config: Config
    vocab: int
    model: Model | None
    optimizer: optax.GradientTransformation | None
    """One that comes from Python."""
    devices: tuple[jax.Device, ...]
    reference: Reference
    traces: dict[str, Trace]
    """The reference's, by way of clipping."""
    clip_norms: dict[str, float | None]
    rounding: tuple[str, ...]
    limits: Limits
    notes: tuple[str, ...]
    problems: tuple[str, ...]

    @property
    def parameter_count(self) -> int:
        return sum(leaf.size for leaf in jax.tree.leaves(self.reference.setup.model.shapes))

    def plan(self, *, whole_product: bool = False) -> tuple[list[Case], list[LeftOut]]:
        """The cases, and what is left out.

        Raises:
          UserError: no mesh of these devices fits; every reason is given.
        """
        count = len(self.devices)
        cases, left_out = plan_cases(self.config, count, self._find_obstacle, whole_product=whole_product)
        if count > 1 and not any(case.device_count > 1 for case in cases):
            reasons = dict.fromkeys(each.reason.replace("\n", "\n  ") for each in left_out)
            raise UserError(f"no mesh of {count} devices fits this configuration\n  " + "\n  ".join(reasons))
        return cases, left_out

    def run(self, cases: Iterable[Case]) -> Iterable[CaseResult]:
        """Runs the cases one by one. A case that cannot be compiled or run is a failed one."""
        reach = sum(float(find_rate(self.reference.setup, step)) for step in range(1, STEPS + 1))
        inits: dict[tuple, Compiled] = {}  # stages that lay their state alike share an initialiser
        for case in cases:
            try:
                with jax.default_device(self.devices[0]):
                    setup = self.lay(case)
                    laid = tuple(jax.tree.leaves(setup.shardings))
                    if laid not in inits:
                        inits[laid] = setup.compile_init()
                    trace = trace_case(setup, self.reference.batches, inits[laid])
            except (UserError, JaxRuntimeError) as error:
                yield CaseResult(case, (f"{type(error).__name__}: {error}",))
                continue
            yield compare(case, trace, self.traces[case.clip], self.limits, self.rounding, reach)

    def lay(self, case: Case) -> Setup:
        config = apply_case(self.config, case, self.clip_norms[case.clip])
        return _lay(config, self.devices, self.vocab, self.model, self.optimizer)

    def _find_obstacle(self, mesh: MeshConfig, microbatches: int) -> str | None:
        """Why a mesh or a batch does not fit; rules alone, nothing is built."""
        config = replace(self.config, batch=replace(self.config.batch, microbatches=microbatches))
        try:
            laid = make_mesh(resolve_mesh(mesh, len(self.devices)), self.devices)
        except UserError as error:
            return str(error)
        model = self.reference.setup.model
        _, problems = lay_leaves(model.shapes, model.rules, dict(laid.shape), find_strategy(config))
        problems += find_batch_problems(config, laid)
        return "\n".join(problems) or None


def make_oracle(
    config: Config,
    model: Model | None = None,
    *,
    optimizer: optax.GradientTransformation | None = None,
    vocab: int | None = None,
    reduce: bool = False,
    fp64: bool = False,
    device_count: int = DEVICE_COUNT,
) -> Oracle:
    """Makes the reference; its programs run before this returns. Arguments and errors as `verify_model`."""
    devices = _find_devices(device_count)
    if isinstance(config.model, ModelConfig):
        raise_problems(find_contradictions(config))
    asked = config
    if reduce:
        config = reduce_config(config, device_count)
    config, notes = _prepare(config, fp64=fp64)
    if reduce and isinstance(config.model, ModelConfig):
        vocab = config.model.vocab
    if vocab is None:
        vocab = find_vocab(config)
    alone = replace(
        config,
        mesh=MeshConfig(),
        zero=replace(config.zero, stage=0, keep_gathered=False),
        batch=replace(config.batch, microbatches=1),
        remat=RematConfig(),
        offload=OffloadConfig(),
    )
    setup = _lay(alone, devices, vocab, model, optimizer)
    _refuse_large(setup, asked, reduced=reduce)
    batch = config.batch
    several = batch.microbatches if batch.microbatches > 1 else 4
    parts = batch.microbatches if fixes_microbatches(config) else 1
    with jax.default_device(devices[0]):
        reference = make_reference(setup, [], parts)
        for attempt in range(MOST_ATTEMPTS):
            batches = [
                make_batch(batch, vocab, step, shards=device_count, microbatches=several)
                for step in range(attempt * STEPS, (attempt + 1) * STEPS)
            ]
            reference = replace(reference, batches=batches)
            plain = reference.trace(config.optimizer.clip_norm)
            half = float(plain.grad_norms[0]) / 2 or None
            clipped = reference.trace(half)
            pairs = ((config.optimizer.clip_norm, plain), (half, clipped))
            if not any(reference.is_near_tie(clip, trace.loads) for clip, trace in pairs):
                break
        else:
            notes = (*notes, NEAR_TIE)
        problem = reference.find_mask_problem()
    return Oracle(
        config=config,
        vocab=vocab,
        # A decoder is made anew for each case; the file of one's own model is read once.
        model=setup.model if setup.shape is None else None,
        optimizer=optimizer,
        devices=devices,
        reference=reference,
        traces={"config": plain, "half": clipped},
        clip_norms={"config": config.optimizer.clip_norm, "half": half},
        rounding=find_rounding_leaves(plain),
        limits=FP64_LIMITS if fp64 else FP32_LIMITS,
        notes=notes,
        problems=(problem,) if problem else (),
    )


def _lay(
    config: Config,
    devices: tuple[jax.Device, ...],
    vocab: int,
    model: Model | None,
    optimizer: optax.GradientTransformation | None,
) -> Setup:
    count = count_asked(config.mesh)
    mesh = make_mesh(resolve_mesh(config.mesh, count), devices[:count])
    setup = make_setup(config, mesh, vocab, model, optimizer)
    if isinstance(config.precision, Fp64):
        setup = replace(setup, model=widen_model(setup.model))
    return setup


def _find_devices(count: int) -> tuple[jax.Device, ...]:
    devices = tuple(jax.devices("cpu"))
    if len(devices) < count:
        raise UserError(
            f"verify wants {count} simulated devices and JAX shows {len(devices)}; run `jaxscale verify`, or "
            f"call jaxscale.mesh.simulate_devices(MeshConfig(data={count})) before JAX starts, and leave "
            "xla_force_host_platform_device_count out of XLA_FLAGS"
        )
    return devices[:count]


def _prepare(config: Config, *, fp64: bool) -> tuple[Config, tuple[str, ...]]:
    """The configuration with what would drown faults in rounding set aside, and notes on that."""
    batch, precision = config.batch, choose_precision(fp64=fp64)
    shown = "fp64" if fp64 else "fp32"
    notes = [f"everything is in {shown}"]
    if config.precision != PrecisionConfig():
        notes[0] += f", not in the configuration's precision (compute {config.precision.compute})"
    notes.append(
        f"the learning rate is that of a warm-up: {PEAK_LR:g} after {WARMUP_STEPS} steps, not "
        f"{config.optimizer.peak_lr:g} after {config.optimizer.warmup_tokens:,} tokens"
    )
    notes.append(f"leaves that start as zeros or ones are moved by about {DISTURBANCE}, so that faults show")
    if fixes_microbatches(config):
        notes.append(
            "moe.balance_scope=microbatch makes the number of microbatches part of the mathematics: none but "
            f"batch.microbatches={batch.microbatches} is tried"
        )
    model = config.model
    if isinstance(model, ModelConfig) and model.attention not in ("auto", "xla"):
        notes.append(f"attention is xla: no CPU runs {model.attention}")
        model = replace(model, attention="xla")
    optimizer = replace(
        config.optimizer,
        peak_lr=PEAK_LR,
        warmup_tokens=WARMUP_STEPS * batch.sequences * batch.length,
    )
    prepared = replace(
        config,
        steps=2 * WARMUP_STEPS,
        optimizer=optimizer,
        precision=precision,
        loss_scale=None,
        fp8=None,
        model=model,
    )
    return prepared, tuple(notes)


def _refuse_large(setup: Setup, asked: Config, *, reduced: bool) -> None:
    batch = setup.config.batch
    leaves = jax.tree.leaves(setup.model.shapes)
    count = sum(leaf.size for leaf in leaves)
    held = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(setup.abstract_state))
    held += sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)  # gradients
    tokens = batch.sequences * batch.length
    flops = 6 * count * tokens
    if count <= MOST_PARAMETERS and flops <= MOST_FLOPS:
        return
    if not reduced:
        remedy = "add --reduce, which runs it in small"
    elif isinstance(asked.model, ModelConfig):
        raise AssertionError("a reduced decoder is small")
    else:
        remedy = "make the model smaller by its own arguments (model.arguments.width=64)"
    raise UserError(
        f"{count:,} parameters and {tokens:,} tokens a step: a device that holds all of it needs {held:,} "
        f"bytes for parameters, gradients and optimizer state, and a step takes {flops:.1e} floating-point "
        "operations. verify simulates its devices on this machine's CPU, in dozens of cases, so it takes "
        f"models of up to {MOST_PARAMETERS:,} parameters and {MOST_FLOPS:.0e} operations a step; {remedy}"
    )
