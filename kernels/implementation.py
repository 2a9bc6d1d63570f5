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
import jax.numpy as jnp
from jaxtyping import Array, Float


@dataclasses.dataclass(frozen=True)
class Options:
    """What is static in a call.

    Attributes:
        implementation: the one that was asked for.
        num_splits: stretches that each row is cut into on a device; None for what pays.
        time: the mesh axes that rows are split over into stretches of tokens; () for whole rows.
    """

    scale: float
    qk_l2norm: bool
    precision: jax.lax.Precision | None
    implementation: str | None
    num_splits: int | None = 1
    time: tuple[str, ...] = ()


def add_reads(
    options: Options, outputs: Float[Array, "B T HV V+K"], x: Float[Array, "B HV K V"]
) -> Float[Array, "B T HV V"]:
    """o' + R X, from outputs [o' | R] and a state; see `context_parallel.py`."""
    value_size = x.shape[3]
    precision = options.precision
    if precision is None and outputs.dtype == jnp.float32:
        precision = jax.lax.Precision.HIGHEST
    outputs = outputs.astype(jnp.float32)
    reads = outputs[..., value_size:]
    return outputs[..., :value_size] + jnp.einsum("bthk,bhkv->bthv", reads, x, precision=precision)


@dataclasses.dataclass(frozen=True)
class Implementation:
    """One way to compute an op, forward and backward.

    `outputs_only` is `forward` without residuals, for an implementation that would else write
    them whether or not they are used: a kernel's outputs are not dead code. A delta rule's takes
    states of more columns than v has channels: what is written to the others is 0, and o has as
    many channels as the state columns. `add_reads` adds to outputs what they read of a state.
    `split_chains` tells, by the sizes of heads, up to how many rows times value heads it pays to
    cut rows into stretches (see `splits.py`).
    """

    forward: Callable[..., Any]
    backward: Callable[..., Any]
    outputs_only: Callable[..., Any] | None = None
    add_reads: Callable[..., Any] = add_reads
    split_chains: Callable[[int, int], int] = lambda key_size, value_size: 0

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


def on_platform(
    implementation: str | None, bind: Callable[[str], Callable[..., Any]], *arrays: Any
) -> Any:
    """Call the implementation that was asked for, else the one for the target platform.

    The platform is the one that the program is lowered for, which need not be the one that traces
    it: so it is decided in the program.

    Args:
        implementation: a name, or None.
        bind: gives what to call, by name.
        *arrays: what to call it with.
    """
    if implementation is not None:
        return bind(implementation)(*arrays)
    return jax.lax.platform_dependent(*arrays, tpu=bind("pallas_tpu"), default=bind("xla"))
