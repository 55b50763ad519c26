"""What `remat` asked for against the traced step, before anything compiles.

A name on an array that the backward pass does not read, or a model that never calls `jaxscale.remat`, would
otherwise change nothing without a word.
"""

from collections.abc import Iterator
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr

from jaxscale.config import RematConfig, UserError
from jaxscale.models.remat import find_name, word_unknown
from jaxscale.sharding.equations import iterate_equations, iterate_jaxprs

_REMAT_PRIMITIVES = {"remat2", "checkpoint"}


def check_remat(program: ClosedJaxpr, config: RematConfig) -> None:
    """Checks that the traced step computes again what it should, and holds what it should, by name.

    Raises:
      UserError: the model never calls `jaxscale.remat`; a name is no tensor's; or a tensor to be kept or
        offloaded is not what the backward pass reads.
    """
    if config.is_off:
        return
    primitives = {equation.primitive.name for equation in iterate_equations(program.jaxpr)}
    if not primitives & _REMAT_PRIMITIVES:
        raise UserError(
            f"remat.policy={config.policy}: this model never calls jaxscale.remat, so nothing would be "
            "computed again; wrap the function of a layer, `jaxscale.remat(layer)`, or set remat: none"
        )
    names = _list_names(program)
    wanted = config.named + (("attention",) if config.policy == "attention" else ())
    problems = [word_unknown(name, names) for name in dict.fromkeys(wanted) if name not in names]
    held = set(_find_held(program))
    problems += [
        f"remat: {name} is not held between the passes: the backward pass reads none of it, or a copy from "
        "before it was named; name the array that later operations read, or take it out of the list"
        for name in config.keep + config.offload
        if name in names and (name, name in config.offload) not in held
    ]
    if problems:
        raise UserError("\n  ".join(problems))


def _list_names(program: ClosedJaxpr) -> list[str]:
    names = (find_name(each.primitive, each.params) for each in iterate_equations(program.jaxpr))
    return list(dict.fromkeys(name for name in names if name is not None))


def _find_held(program: ClosedJaxpr) -> Iterator[tuple[str, bool]]:
    """(name, whether in host memory) of each named tensor that leaves the program that made it."""
    for jaxpr in iterate_jaxprs(program.jaxpr):
        copies, results = _find_copies(jaxpr), {id(variable) for variable in jaxpr.outvars}
        for equation in jaxpr.eqns:
            name = find_name(equation.primitive, equation.params)
            for variable in equation.outvars if name is not None else ():
                for copy in _follow(variable, copies):
                    if id(copy) in results:
                        yield str(name), _is_on_host(copy)


def _find_copies(jaxpr: Any) -> dict[int, list[Any]]:
    """The copies made of each array; `jax.checkpoint` rounds what it keeps, to the format that it has."""
    copies: dict[int, list[Any]] = {}
    for equation in jaxpr.eqns:
        if equation.primitive.name in ("device_put", "reduce_precision"):
            for source, copy in zip(equation.invars, equation.outvars, strict=True):
                copies.setdefault(id(source), []).append(copy)
    return copies


def _follow(variable: Any, copies: dict[int, list[Any]]) -> Iterator[Any]:
    yield variable
    for copy in copies.get(id(variable), ()):
        yield from _follow(copy, copies)


def _is_on_host(variable: Any) -> bool:
    return variable.aval.memory_space == jax.memory.Space.Host
