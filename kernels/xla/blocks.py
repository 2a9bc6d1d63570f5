"""Long rows in blocks of chunks, worked through one after the other.

What is batched over chunks need not be batched over all chunks of a row. A hundred matrix products
of a chunk's size fill a device, and what one step of the computation leaves is still in fast memory
when the next step reads it; nor does temporary memory grow with the row. On a v6e core, which holds
128 MB in its fast memory, KDA's forward pass takes half the cycles of all chunks at once.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ..implementation import Implementation
from ..packing import CHUNK, zero_padding
from .chunks import Documents

HEADS_AND_CHUNKS = 128
"""Chunks in a block, counted for each row and head (a block holds at least one chunk of each)."""

HEADS_AND_CHUNKS_ON_GPU = 1024
"""A GPU runs more products at a time, and keeps less of a block in fast memory: on an H200 forward
and backward of 16 heads take a fifth less time than in blocks of 128 (gated delta rule), or a third
less (KDA, SimpleGLA)."""

SUBLANES = 8
"""Tokens that a TPU keeps together in one tile. Moved as a whole, heads and tokens are exchanged
in one copy of tiles; left to itself, the compiler makes two copies of some tensors."""


@dataclasses.dataclass(frozen=True)
class Blocks:
    """How rows of `length` tokens are cut: into `count` blocks of `chunks` chunks.

    Padding fills the last block.
    """

    length: int
    count: int
    chunks: int

    @classmethod
    def of(cls, v: Float[Array, "B T HV V"], heads_and_chunks: int) -> "Blocks":
        batch, length, heads, _ = v.shape
        total = -(-length // CHUNK)
        count = min(total, -(-total * batch * heads // heads_and_chunks))
        return cls(length, count, -(-total // count))

    def cut(self, x: Array, axis: int, *, mode: str = "constant") -> Array:
        """Cut an axis of chunks; the blocks become the first axis. `mode` is `jnp.pad`'s."""
        widths = [(0, 0)] * x.ndim
        widths[axis] = (0, self.count * self.chunks - x.shape[axis])
        x = jnp.pad(x, widths, mode=mode)
        x = x.reshape(*x.shape[:axis], self.count, self.chunks, *x.shape[axis + 1 :])
        return jnp.moveaxis(x, axis, 0)

    def join(self, x: Array, axis: int) -> Array:
        """Undo `cut`."""
        x = jnp.moveaxis(x, 0, axis)
        x = x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])
        return jax.lax.slice_in_dim(x, 0, -(-self.length // CHUNK), axis=axis)

    def cut_tokens(self, x: Float[Array, "B T H *D"]) -> Float[Array, "count B t H 8 *D"]:
        """Cut rows into blocks, tokens in the order of `SUBLANES`: a flat row is not moved."""
        batch, length, heads, *size = x.shape
        padding = self.count * self.chunks * CHUNK - length
        x = jnp.pad(x, ((0, 0), (0, padding)) + ((0, 0),) * (x.ndim - 2))
        x = x.reshape(batch, self.count, -1, SUBLANES, heads, *size)
        return jnp.moveaxis(x, (1, 4), (0, 3))

    def join_tokens(self, x: Float[Array, "count B t H 8 *D"]) -> Float[Array, "B T H *D"]:
        """Undo `cut_tokens`."""
        x = jnp.moveaxis(x, (0, 3), (1, 4))
        batch, _, _, _, heads, *size = x.shape
        return x.reshape(batch, -1, heads, *size)[:, : self.length]


def tiles_to_chunks(x: Float[Array, "B t H 8 *D"]) -> Float[Array, "B H N C *D"]:
    """One block's tokens, from the order of `Blocks.cut_tokens`, as chunks of each head."""
    x = jnp.moveaxis(x, 2, 1)
    return x.reshape(*x.shape[:2], -1, CHUNK, *x.shape[4:])


def chunks_to_tiles(x: Float[Array, "B H N C *D"]) -> Float[Array, "B t H 8 *D"]:
    """Undo `tiles_to_chunks`."""
    return jnp.moveaxis(x.reshape(*x.shape[:2], -1, SUBLANES, *x.shape[4:]), 1, 2)


def by_blocks(forward: Callable[..., Any], backward: Callable[..., Any]) -> Implementation:
    """An implementation out of what it does with one block.

    Args:
        forward: from (options, states, tokens, documents, chunk_document) of one block to its
            outputs, the new states and the residuals.
        backward: from (options, dstates, tokens, documents, chunk_document, residuals, do) of one
            block to the gradients of its tokens and of the states that entered it.
    """
    return Implementation(
        functools.partial(_for_platform, _forward_by_blocks, forward),
        functools.partial(_for_platform, _backward_by_blocks, backward),
    )


def _for_platform(run, block, options, tokens, *arrays):
    """`run` with blocks of the size for the platform that the program is lowered for."""
    small, large = (
        Blocks.of(tokens[2], size) for size in (HEADS_AND_CHUNKS, HEADS_AND_CHUNKS_ON_GPU)
    )
    if small == large:
        return run(block, small, options, tokens, *arrays)
    return jax.lax.platform_dependent(
        tokens,
        *arrays,
        cuda=functools.partial(run, block, large, options),
        default=functools.partial(run, block, small, options),
    )


def _forward_by_blocks(block, blocks, options, tokens, states, packing, chunk_document):
    """One block after the other; states may have more columns than v has channels."""
    q, k, v, *gates = tokens
    tokens = q, k, jnp.pad(v, [(0, 0)] * 3 + [(0, states.shape[-1] - v.shape[3])]), *gates
    inputs = _cut(blocks, tokens, packing, chunk_document)

    def step(states, inputs):
        o, states, residuals = block(options, states, *_with_documents(inputs))
        return states, (o, residuals)

    states, (o, residuals) = jax.lax.scan(step, states, inputs)
    residuals = {name: blocks.join(x, 2) for name, x in residuals.items()}
    return (zero_padding(blocks.join_tokens(o), packing), states), residuals


def _backward_by_blocks(
    block, blocks, options, tokens, states, packing, chunk_document, residuals, do, dstates
):
    """From the last block to the first.

    The gradients take the tokens' place in memory: a scan's own output would be as large again,
    and a TPU fills it with zeros first.
    """
    tokens, *inputs = _cut(blocks, tokens, packing, chunk_document)
    residuals = {name: blocks.cut(x, 2) for name, x in residuals.items()}
    inputs = (*inputs, residuals, blocks.cut_tokens(zero_padding(do, packing)))

    def step(i, carry):
        dstates, tokens = carry
        n = blocks.count - 1 - i
        of_block = jax.tree.map(lambda x: x[n], (tokens, *inputs))
        dtokens, dstates = block(options, dstates, *_with_documents(of_block))
        return dstates, jax.tree.map(lambda x, dx: x.at[n].set(dx), tokens, dtokens)

    dstates, dtokens = jax.lax.fori_loop(0, blocks.count, step, (dstates, tokens))
    return tuple(zero_padding(blocks.join_tokens(x), packing) for x in dtokens), dstates


def _cut(blocks, tokens, packing, chunk_document):
    documents = None
    if packing is not None:
        documents = jax.tree.map(lambda x: blocks.cut(x, 1, mode="edge"), Documents.of(packing))
    if chunk_document is not None:
        chunk_document = blocks.cut(chunk_document, 1, mode="edge")
    tokens = tuple(blocks.cut_tokens(zero_padding(x, packing)) for x in tokens)
    return tokens, documents, chunk_document


def _with_documents(inputs):
    tokens, documents, *rest = inputs
    return tokens, Documents.of(None) if documents is None else documents, *rest
