"""Rows cut into stretches that one core works on side by side.

The kernels advance independent heads and rows in lockstep, since one chain of chunks leaves most of
a TPU's slots empty. A row of few heads becomes several by a reshape, [B, T] to [B * n, T / n],
which moves no token; what each stretch does to the state is then put together as it is across
devices (`context_parallel.py`).

Counted in million cycles for a row of 131072 tokens with heads of 128 in bfloat16, forward; 8
stretches for one head, 4 for two and four:

    heads                        1               2               4
                           whole    cut    whole    cut    whole    cut
    gated delta rule, v6e   1.11   0.83     1.81   1.49     2.69   2.75
                      v5p   1.49   0.73     2.30   1.27     3.49   2.39
                      v5e   1.47   1.29     2.26   2.40
    KDA, v6e                1.14   0.95     1.69   1.79     2.77   3.46
         v5p                1.43   0.82     2.25   1.43
         v5e                1.43   1.52     2.24   2.95

A v5p chip's two cores share the blocks of stretches, which no count shows, where one head leaves
one of them idle. Forward and backward take, with one head on a v6e, 2.50 and 2.25 by the gated
delta rule, 2.69 and 3.00 by KDA: a call that is differentiated is not cut. What a stretch does to
the state costs SimpleGLA another run, which takes it longer than a whole row. Nor is a row that
would have to be filled up: with 130972 tokens the gated delta rule takes 1.15 whole and 2.13 cut.
"""

import dataclasses
import logging
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from .context_parallel import context_parallel, entering_states
from .implementation import Implementation
from .packing import CHUNK, Packing

SPLITS = 8
"""Stretches of one head that fill the pipeline."""

SHORTEST_SPLIT = 32 * CHUNK
"""Tokens: putting the maps together takes as long as 5000 tokens, whatever the row's length."""

logger = logging.getLogger(__name__)


def splits_that_pay(
    implementation: Implementation, k: Float[Array, "B T H K"], v: Float[Array, "B T HV V"]
) -> int:
    """The number of stretches to cut rows into where no gradient is wanted."""
    batch, length, heads, value_size = v.shape
    if batch * heads > implementation.split_chains(k.shape[3], value_size):
        return 1
    count = SPLITS // (batch * heads)
    if length < count * SHORTEST_SPLIT or length % (count * CHUNK):
        return 1
    logger.debug("rows of %d tokens are cut into %d stretches", length, count)
    return count


@dataclasses.dataclass(frozen=True)
class Splits:
    """The `count` stretches of each row, which lie side by side in the batch."""

    count: int

    def split(self, x: Shaped[Array, "B T *D"], **mode: Any) -> Shaped[Array, "B*n t *D"]:
        """Tokens in stretches of whole chunks; zeros, or what `jnp.pad` is told, fill the last."""
        batch, length, *rest = x.shape
        chunks = -(-length // (self.count * CHUNK))
        missing = self.count * chunks * CHUNK - length
        x = jnp.pad(x, [(0, 0), (0, missing), *((0, 0) for _ in rest)], **mode)
        return x.reshape(batch * self.count, chunks * CHUNK, *rest)

    def join(self, x: Shaped[Array, "B*n t *D"], length: int) -> Shaped[Array, "B T *D"]:
        """The inverse of `split`."""
        return x.reshape(-1, self.count * x.shape[1], *x.shape[2:])[:, :length]

    def packing(self, packing: Packing | None) -> Packing | None:
        """The documents of each stretch, counted from the one that enters it."""
        if packing is None:
            return None
        document = self.split(packing.document, mode="edge")
        ends = document[:, -1].reshape(-1, self.count)
        entering = jnp.pad(ends[:, :-1], ((0, 0), (1, 0))).reshape(-1, 1)
        return Packing(document - entering, self.split(packing.valid))

    def place(self, state: Float[Array, "B *S"], stretch: int) -> Float[Array, "B*n *S"]:
        """A row's state for one of its stretches, and zeros for the others."""
        states = jnp.zeros((state.shape[0], self.count, *state.shape[1:]), state.dtype)
        return states.at[:, stretch].set(state).reshape(-1, *state.shape[1:])

    def pick(self, states: Float[Array, "B*n *S"], stretch: int) -> Float[Array, "B *S"]:
        """The state of one stretch of each row."""
        return states.reshape(-1, self.count, *states.shape[1:])[:, stretch]

    def entering(
        self,
        transition: Float[Array, "B*n N HV D D"],
        added: Float[Array, "B*n N HV K V"],
        *,
        reverse: bool = False,
    ) -> Float[Array, "B*n N HV K V"]:
        """X from M and E of every stretch; see `context_parallel.py`."""

        def stretches_first(x):
            return jnp.swapaxes(x.reshape(-1, self.count, *x.shape[1:]), 0, 1)

        x = entering_states(stretches_first(transition), stretches_first(added), reverse)
        return jnp.swapaxes(x, 0, 1).reshape(added.shape)


def split_rows(
    implementation: Implementation, affine_map: Callable[..., Any], count: int
) -> Implementation:
    """The implementation, with each row cut into `count` stretches."""
    splits = Splits(count)
    stretches = context_parallel(implementation, affine_map, splits)

    def inputs(tokens, states, packing):
        tokens = tuple(splits.split(x) for x in tokens)
        return tokens, splits.place(states, 0), splits.packing(packing), None

    def results(o, states, length):
        return splits.join(o, length), splits.pick(states, -1)

    def outputs(options, tokens, states, packing, _):
        o, states = stretches.outputs(options, *inputs(tokens, states, packing))
        return results(o, states, tokens[0].shape[1])

    def forward(options, tokens, states, packing, _):
        (o, states), residuals = stretches.forward(options, *inputs(tokens, states, packing))
        return results(o, states, tokens[0].shape[1]), residuals

    def backward(options, tokens, states, packing, _, residuals, do, dstates):
        dtokens, dstates = stretches.backward(
            options,
            *inputs(tokens, states, packing),
            residuals,
            splits.split(do),
            splits.place(dstates, -1),
        )
        length = tokens[0].shape[1]
        dtokens = tuple(splits.join(x, length) for x in dtokens)
        return dtokens, splits.pick(dstates, 0)

    return Implementation(forward, backward, outputs)
