"""What a person sees of a verification: a bar while it runs, then a table and what to do."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from jaxscale.config import ModelConfig
from jaxscale.metrics.summary import word_duration
from jaxscale.verify.cases import Case, name_mesh
from jaxscale.verify.compare import FP64_LIMITS, CaseResult
from jaxscale.verify.diagnose import find_common
from jaxscale.verify.verification import Oracle, TellResult, Verification

MOST_REASONS = 3  # failed cases that are explained at length


@contextmanager
def show_progress(stream: TextIO) -> Iterator[TellResult]:
    """A bar with the time left on a terminal, a line a case elsewhere; failures are told at once."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(file=stream, highlight=False)
    progress = Progress(
        TextColumn("case"),
        MofNCompleteColumn(),
        BarColumn(bar_width=None),
        TimeRemainingColumn(),
        TextColumn("left   {task.fields[failed]} failed", markup=False),
        console=console,
        transient=True,
        expand=True,
        disable=not console.is_terminal,
    )
    task = progress.add_task("", total=None, failed=0)
    failed = 0

    def tell(result: CaseResult, number: int, total: int) -> None:
        nonlocal failed
        failed += not result.ok
        progress.update(task, completed=number, total=total, failed=failed)
        if not console.is_terminal:
            outcome = "ok" if result.ok else "FAILED"
            print(f"case {number}/{total}  {result.case.name}: {outcome}", file=stream, flush=True)
        elif not result.ok:
            console.print(f"{result.case.name}: {result.problems[0]}", markup=False)

    with progress:
        yield tell


def word_plan(oracle: Oracle, cases: list[Case]) -> str:
    """What is about to run."""
    meshes = len({case.mesh for case in cases})
    batch = oracle.config.batch
    model = oracle.config.model
    shown = ""
    if isinstance(model, ModelConfig):
        sizes = ("layers", "embed", "heads", "kv_heads", "mlp")
        shown = f", {model.family} " + " ".join(f"{name}={getattr(model, name)}" for name in sizes)
    return (
        f"{len(cases)} cases on {meshes} meshes of up to {len(oracle.devices)} simulated devices: "
        f"{oracle.parameter_count:,} parameters{shown}, vocabulary {oracle.vocab}, "
        f"{batch.sequences} sequences of {batch.length} tokens"
    )


def print_verification(verification: Verification, stream: TextIO) -> None:
    """The table of all cases, what is left out and why, and a last line that says how it went."""
    from rich.console import Console
    from rich.table import Table

    console = Console(file=stream, highlight=False)
    if not console.is_terminal:
        console = Console(file=stream, highlight=False, width=150)  # a log has no width of its own
    table = Table(box=None, pad_edge=False, header_style="dim", title="relative errors", title_justify="left")
    for name in ("mesh", "zero", "microbatches", "remat", "clip"):
        table.add_column(name, no_wrap=True)
    for name in ("loss", "norm", "gradient"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("worst leaf", overflow="fold")
    table.add_column("parameter", justify="right", no_wrap=True)
    table.add_column("ok", no_wrap=True)
    for result in verification.results:
        table.add_row(*_make_row(result), style=None if result.ok else "red")
    console.print(table)
    for line in _list_lines(verification):
        console.print(line, markup=False)


def _make_row(result: CaseResult) -> list[str]:
    case = result.case
    errors = (result.loss_error, result.grad_norm_error, result.grad_error)
    return [
        case.mesh_name,
        f"{case.zero} gathered" if case.keep_gathered else str(case.zero),
        str(case.microbatches),
        case.remat,
        "bites" if case.clip == "half" else "",
        *map(_word_error, errors),
        result.worst_leaf or "",
        _word_error(result.parameter_error),
        "ok" if result.ok else "FAILED",
    ]


def _word_error(error: float | None) -> str:
    return "-" if error is None else f"{error:.1e}"


def _list_lines(verification: Verification) -> Iterator[str]:
    limits = verification.limits
    yield (
        f"limits: loss {limits.loss:.0e}, norm {limits.grad_norm:.0e}, gradient {limits.grad:.0e}, parameter "
        f"{limits.parameter:.0e}, relative; leaves by their norm"
    )
    if verification.rounding_leaves:
        yield (
            "gradient is zero but for rounding, so compared with the whole gradient's norm: "
            + ", ".join(verification.rounding_leaves)
        )
    yield from verification.notes
    for each in verification.left_out:
        where = "" if each.mesh is None else name_mesh(each.mesh)
        count = "" if each.microbatches is None else f"{each.microbatches} microbatches"
        # What is indented lists the leaves, which `inspect` and JSON show.
        reasons = [line for line in each.reason.splitlines() if not line.startswith(" ")]
        yield f"left out {', '.join(filter(None, (where, count)))}: {'; '.join(reasons)}"
    failed = [result for result in verification.results if not result.ok]
    for result in failed[:MOST_REASONS]:
        yield f"FAILED {result.case.name}"
        yield from (f"  {problem}" for problem in result.problems)
    if len(failed) > MOST_REASONS:
        yield f"and {len(failed) - MOST_REASONS} more"
    yield from (f"FAILED {problem}" for problem in verification.problems)
    yield word_outcome(verification)


def word_outcome(verification: Verification) -> str:
    """The last line: how many passed, the worst, and where to look if some failed."""
    results = verification.results
    passed = sum(result.ok for result in results)
    seconds = word_duration(verification.seconds)
    if not verification.ok:
        where = find_common(results) or "look at the model's own loss"
        if verification.limits == FP64_LIMITS and not isinstance(verification.config.model, ModelConfig):
            where += " (a model that casts to fp32 inside cannot agree in fp64)"
        return f"{passed} of {len(results)} cases passed in {seconds}; {where}"
    worst = max(results, key=lambda result: result.grad_error or 0.0)
    return (
        f"all {passed} cases passed in {seconds}; the worst gradient is off by {worst.grad_error:.1e}, "
        f"{worst.worst_leaf} at {worst.case.name}"
    )
