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

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ..implementation import Options
from .blocks import Blocks, chunk_rows, widen
from .chunk_scan import scan_chunks
from .decay import ChunkDecay
from .dots import dot
from .heads import HeadWriter, own_state, read_head
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
) -> tuple[dict[str, Array], Float[Array, "B N HV K V"]]:
    """o `[B, T, HV*V]`, with `save` the state before each chunk ("states"), and new states."""
    inputs = {
        "q": blocks.keys(q),
        "k": blocks.keys(k),
        "v": blocks.values(v),
        "g": blocks.gates(g),
        "row_document": blocks.row_document(row_document),
    }
    outputs = {"o": blocks.values(v)}
    if save:
        outputs["states"] = blocks.saved(v.dtype, blocks.key_size, blocks.value_size)
    row = functools.partial(_row, options, save)
    return scan_chunks(row, blocks, prefetched, inputs, outputs, states, name="simple_gla_forward")


def _row(options, save, row, refs, state):
    blocks = row.blocks
    row.clear_padding(refs.q, refs.k, refs.v)
    dtype = refs.q.dtype
    key_lanes, value_lanes = blocks.state_lanes
    output = HeadWriter(refs.o, blocks.value_size)

    @functools.cache
    def decay(chunk):
        documents = row.chunk_documents(chunk)
        return ChunkDecay(refs.g[:, chunk_rows(chunk)], documents, exact=dtype == jnp.float32)

    @functools.cache
    def key_head(chunk, j):
        qj, kj, _ = read_keys(refs, chunk, j, blocks, qk_l2norm=options.qk_l2norm)
        qj, kj = qj.astype(dtype), kj.astype(dtype)
        keys = kj.T
        return qj, keys, dot(qj, keys, options.precision)

    def value_head(chunk, h):
        qh, keys, scores = key_head(chunk, h // blocks.group)
        yield
        pairs, start, end, total = decay(chunk).head(h)
        vh = read_head(refs.v, chunk, h, blocks.value_size)
        before = state[h]
        if save:
            refs.states[h, chunk] = own_state(before, h, blocks).astype(dtype)
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
