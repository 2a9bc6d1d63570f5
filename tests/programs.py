"""Looking into the programs that JAX traces."""

from collections.abc import Iterator

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn


def equations(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    """Every equation of a program and of the programs within it, those of kernels included."""
    for equation in jaxpr.eqns:
        yield equation
        inner = jax.tree.leaves(equation.params, is_leaf=lambda x: isinstance(x, Jaxpr))
        for program in inner:
            if isinstance(program, ClosedJaxpr):
                program = program.jaxpr
            if isinstance(program, Jaxpr):
                yield from equations(program)


def arrays(jaxpr: Jaxpr) -> Iterator[jax.core.ShapedArray]:
    """The abstract value of every array in a program and in the programs within it."""
    for equation in equations(jaxpr):
        yield from (variable.aval for variable in equation.outvars)
