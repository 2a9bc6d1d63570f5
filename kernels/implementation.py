"""One way to compute an op.

An implementation sees four arguments beside the static `Options`:

    tokens          tuple of [B, T, ...] arrays, as the caller gave them: q, k, v and the gates
    states          [B, N, HV, K, V] float32
    packing         None, or the documents within a row: a state is carried along the row (N = 1),
                    enters document 0 only, and every later document starts from zero
    chunk_document  None, or [B, chunks]: the state (of N) that each chunk reads and updates

of which at most one of the last two is given. `forward` returns `(o, states), residuals`,
residuals being a dictionary of arrays that is the same, in shapes and types, for every
implementation that can be chosen by the platform; `backward` takes those four, the residuals and
the two cotangents, and returns the gradients of tokens and states.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jaxtyping import Array


@dataclasses.dataclass(frozen=True)
class Options:
    """What is static in a call.

    Attributes:
        implementation: the one that was asked for.
        time: the mesh axes that rows are split over into stretches of tokens; () for whole rows.
    """

    scale: float
    qk_l2norm: bool
    precision: jax.lax.Precision | None
    implementation: str | None
    time: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Implementation:
    """One way to compute an op, forward and backward.

    `outputs_only` is `forward` without residuals, for an implementation that would else write
    them whether or not they are used: a kernel's outputs are not dead code.
    """

    forward: Callable[..., Any]
    backward: Callable[..., Any]
    outputs_only: Callable[..., Any] | None = None

    def outputs(self, *arguments: Any) -> Any:
        """The outputs of a call that will not be differentiated."""
        if self.outputs_only is not None:
            return self.outputs_only(*arguments)
        return self.forward(*arguments)[0]

    def gradients(self, options: Options, tokens: tuple[Array, ...], *arguments: Any) -> Any:
        """`backward`, with the gradients of tokens in their types."""
        dtokens, dstates = self.backward(options, tokens, *arguments)
        dtokens = tuple(dx.astype(x.dtype) for dx, x in zip(dtokens, tokens, strict=True))
        return dtokens, dstates
