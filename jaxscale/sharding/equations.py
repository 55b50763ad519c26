"""Walks over the operations of a traced program, those inside loops, branches and regions too."""

from collections.abc import Iterator
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.interpreters.partial_eval import dce_jaxpr


def iterate_jaxprs(jaxpr: Jaxpr) -> Iterator[Jaxpr]:
    """The program and every one inside it, outer ones first."""
    yield jaxpr
    for equation in jaxpr.eqns:
        for inner in find_inner(equation):
            yield from iterate_jaxprs(inner)


def iterate_equations(jaxpr: Jaxpr) -> Iterator[Any]:
    """Every operation of a program."""
    for each in iterate_jaxprs(jaxpr):
        yield from each.eqns


def find_inner(equation: Any) -> Iterator[Jaxpr]:
    """The programs that one operation runs: a loop's body, branches, what a region does on each shard."""
    for value in jax.tree.leaves(
        list(equation.params.values()), is_leaf=lambda x: isinstance(x, ClosedJaxpr | Jaxpr)
    ):
        if isinstance(value, ClosedJaxpr):
            yield value.jaxpr
        elif isinstance(value, Jaxpr):
            yield value


def drop_unused(jaxpr: Jaxpr) -> Jaxpr:
    """The program without what none of its results needs, which compilers leave out too."""
    return dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))[0]
