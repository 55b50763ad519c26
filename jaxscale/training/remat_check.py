"""What `remat` asked for against the traced step, before anything compiles.

A name on an array that the backward pass does not read, or a model that never calls `jaxscale.remat`, would
otherwise change nothing without a word.
"""

from collections.abc import Iterator
from typing import Any

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
        results = {id(variable) for variable in jaxpr.outvars}
        moved = {id(source): variable for source, variable in _iterate_moves(jaxpr)}
        for equation in jaxpr.eqns:
            name = find_name(equation.primitive, equation.params)
            if name is None:
                continue
            for variable in equation.outvars:
                if id(variable) in results:
                    yield name, False
                if id(variable) in moved and id(moved[id(variable)]) in results:
                    yield name, True


def _iterate_moves(jaxpr: Any) -> Iterator[tuple[Any, Any]]:
    """(array, its copy) of each move into host memory."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "device_put":
            for source, copy in zip(equation.invars, equation.outvars, strict=True):
                if "host" in str(copy.aval.memory_space).lower():
                    yield source, copy
