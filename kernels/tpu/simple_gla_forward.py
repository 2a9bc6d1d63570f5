"""SimpleGLA forward: one kernel, forward in time, with the state in vector memory.

Per value head and chunk of C tokens, with the decays of `decay.py` and the chunk's initial state S:

    A  = (q k^T) * pairs                         [C, C]
    o  = scale (A v + (q * start) S)
    S <- total S + k^T (end * v)

Saved for the backward: S before each chunk, in the compute dtype. Recomputing the states would
cost more traffic than it saves.

The two products of o as one, of depth C + K, take a v6e chip 0.157 rather than 0.159 million
cycles, but 0.496 rather than 0.480 in float32, where each is six.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from ..implementation import Options
from .batch_rows import over_batch_rows
from .blocks import Blocks, chunk_rows, clear_padding, document_ends, widen
from .call import pallas_call
from .decay import ChunkDecay, chunk_documents
from .dots import dot
from .heads import HeadWriter, own_state, place_state, read_head
from .keys import read_keys
from .lockstep import interleaved


def forward(
    blocks: Blocks,
    options: Options,
    save: bool,
    prefetched: tuple[Array, ...],
    q: Float[Array, "B T H*K"],
    k: Float[Array, "B T H*K"],
    v: Float[Array, "B T HV*V"],
    g: Float[Array, "B HV/heads heads S"],
    row_document: Int[Array, "B 1 S"] | None,
    states: Float[Array, "B N HV K V"],
) -> tuple[
    Float[Array, "B T HV*V"], Float[Array, "B N HV K V"], Float[Array, "B HV chunks K V"] | None
]:
    """Outputs, new states and, with `save`, the state before each chunk."""
    sizes = (blocks.key_size, blocks.value_size)
    chunk_states = (blocks.batch, blocks.value_heads, blocks.num_chunks, *sizes)
    grid_spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=len(prefetched),
        grid=blocks.grid,
        in_specs=[
            blocks.keys(),
            blocks.keys(),
            blocks.values(),
            blocks.gates(),
            None if row_document is None else blocks.row_document(),
            blocks.states(),
        ],
        out_specs=[
            blocks.values(),
            blocks.states(),
            blocks.per_chunk(*sizes) if save else None,
        ],
        scratch_shapes=[blocks.carried()],
    )
    operands = (*prefetched, q, k, v, g, row_document, states)
    return pallas_call(
        over_batch_rows(blocks, functools.partial(_row, blocks, options)),
        grid_spec=grid_spec,
        out_shape=[
            jax.ShapeDtypeStruct(v.shape, v.dtype),
            jax.ShapeDtypeStruct(states.shape, states.dtype),
            jax.ShapeDtypeStruct(chunk_states, v.dtype) if save else None,
        ],
        input_output_aliases={len(jax.tree.leaves(operands)) - 1: 1},
        compiler_params=blocks.compiler_params,
        name="simple_gla_forward",
    )(*operands)


def _row(
    blocks,
    options,
    row,
    documents,
    padding,
    chunk_ends,
    q,
    k,
    v,
    g,
    row_document,
    initial_state,
    o,
    final_state,
    chunk_states,
    state,
):
    first, last = document_ends(blocks, row, documents)

    @pl.when(first)
    def _():
        for h in range(blocks.heads):
            state[h] = place_state(initial_state[h], h, blocks)

    clear_padding(blocks, row, padding, row_document, q, k, v)
    dtype = q.dtype
    key_lanes, value_lanes = blocks.state_lanes
    output = HeadWriter(o, blocks.value_size)

    @functools.cache
    def decay(chunk):
        documents = chunk_documents(blocks, row, chunk, chunk_ends, row_document)
        return ChunkDecay(g[:, chunk_rows(chunk)], documents, exact=dtype == jnp.float32)

    @functools.cache
    def key_head(chunk, j):
        qj, kj, _ = read_keys(q, k, chunk, j, blocks, qk_l2norm=options.qk_l2norm)
        qj, kj = qj.astype(dtype), kj.astype(dtype)
        keys = kj.T
        return qj, keys, dot(qj, keys, options.precision)

    def value_head(chunk, h):
        qh, keys, scores = key_head(chunk, h // blocks.group)
        yield
        pairs, start, end, total = decay(chunk).head(h)
        vh = read_head(v, chunk, h, blocks.value_size)
        before = state[h]
        if chunk_states is not None:
            chunk_states[h, chunk] = own_state(before, h, blocks).astype(dtype)
        attention = (scores * pairs).astype(dtype)
        reads = (qh * widen(start, key_lanes)).astype(dtype)
        oh = dot(attention, vh, options.precision)
        yield
        oh += dot(reads, before.astype(dtype), options.precision)
        yield
        output.write(chunk, h, options.scale * oh)
        writes = (vh * widen(end, value_lanes)).astype(dtype)
        state[h] = widen(total, value_lanes) * before + dot(keys, writes, options.precision)
        yield

    def head(h):
        for chunk in range(blocks.chunks):
            yield from value_head(chunk, h)

    yield interleaved(map(head, range(blocks.heads)), skew=1)

    @pl.when(last)
    def _():
        for h in range(blocks.heads):
            final_state[h] = own_state(state[h], h, blocks)
