"""Looking into the programs that JAX traces."""

from collections.abc import Iterator

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr


def arrays(jaxpr: Jaxpr) -> Iterator[jax.core.ShapedArray]:
    """The abstract value of every array in a program and in the programs within it."""
    for equation in jaxpr.eqns:
        yield from (variable.aval for variable in equation.outvars)
        inner = jax.tree.leaves(equation.params, is_leaf=lambda x: isinstance(x, Jaxpr))
        for program in inner:
            if isinstance(program, ClosedJaxpr):
                program = program.jaxpr
            if isinstance(program, Jaxpr):
                yield from arrays(program)
