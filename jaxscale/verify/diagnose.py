"""What failed cases have in common, which is where to look."""

from collections.abc import Callable, Sequence

from jaxscale.verify.cases import Case
from jaxscale.verify.compare import CaseResult

Trait = Callable[[Case], bool]

TRAITS: dict[str, Trait] = {
    "mesh.data > 1": lambda case: case.mesh.data > 1,
    "mesh.fsdp > 1": lambda case: case.mesh.fsdp > 1,
    "mesh.expert > 1": lambda case: case.mesh.expert > 1,
    "mesh.tensor > 1": lambda case: case.mesh.tensor > 1,
    "several microbatches": lambda case: case.microbatches > 1,
    "one microbatch": lambda case: case.microbatches == 1,
    "zero.stage >= 1": lambda case: case.zero >= 1,
    "zero.stage >= 2": lambda case: case.zero >= 2,
    "zero.stage = 0": lambda case: case.zero == 0,
    "zero.stage = 1": lambda case: case.zero == 1,
    "zero.stage = 2": lambda case: case.zero == 2,
    "zero.stage = 3": lambda case: case.zero == 3,
    "zero.keep_gathered": lambda case: case.keep_gathered,
    "remat": lambda case: case.remat != "none",
    "remat attention": lambda case: case.remat == "attention",
    "remat full": lambda case: case.remat == "full",
    "remat matmuls": lambda case: case.remat == "matmuls",
    "remat as configured": lambda case: case.remat == "config",
    "clipping that bites": lambda case: case.clip == "half",
    "more than one device": lambda case: case.device_count > 1,
}


def find_common(results: Sequence[CaseResult]) -> str:
    """One sentence on what the failed cases share and the others lack; no failed case, no sentence."""
    failed = [result.case for result in results if not result.ok]
    passed = [result.case for result in results if result.ok]
    if not failed:
        return ""
    if not passed:
        return "every case fails, those on one device too: look at what all share, the model and the step"
    shared = [name for name, trait in TRAITS.items() if all(map(trait, failed))]
    exact = [name for name in shared if not any(map(TRAITS[name], passed))]
    if exact:
        return f"exactly the cases with {exact[0]} fail: look there"
    pairs = [
        (one, other)
        for index, one in enumerate(shared)
        for other in shared[index + 1 :]
        if not any(TRAITS[one](case) and TRAITS[other](case) for case in passed)
    ]
    if pairs:
        return f"exactly the cases with {pairs[0][0]} and {pairs[0][1]} fail: look at how the two meet"
    if shared:
        return f"all that fail have {' and '.join(shared)}, but so have some that pass"
    return "the failed cases share no setting that the others lack"
