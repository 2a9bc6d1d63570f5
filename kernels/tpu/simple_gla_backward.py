"""SimpleGLA backward: one fused kernel, backward in time, the state's gradient in vector memory.

Per value head and chunk, with the forward's S (before the chunk), A and decays, and dS the gradient
of the state after the chunk:

    dP = (do v^T) * scale pairs               A = (q k^T) * scale pairs
    dv = [A^T | end * k] [do; dS]
    dk = dP^T q + (end * v) dS^T
    dq = [dP | scale start * do] [k; S^T]
    dS <- total dS + (scale start * q)^T do

Of the decay, with G its sum within the chunk (`decay.py`):

    dG_i = sum(q_i dq_i) - sum(k_i dk_i)
    dG_C += sum(dS * total S) + sum(k * (end * v) dS^T)

A head's dq and dk are summed over the value heads that read it, in float32. Every term of dG that
cancels is the same number on both sides, rounding included.

Two passes, dS and dv one chunk after another and then dq and dk of all chunks at once, would read
q, k, v and do twice, and write and read dS of every chunk. At T = 8192 and 16 heads of 128 a draft
of two passes took 0.52 million cycles on a v6e chip, a draft of one 0.31.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from ..implementation import Options
from ..packing import CHUNK
from .batch_rows import over_batch_rows
from .blocks import (
    Blocks,
    chunk_rows,
    clear_padding,
    document_ends,
    iota,
    widen,
)
from .call import pallas_call
from .decay import ChunkDecay, chunk_documents
from .dots import NT, dot
from .heads import HeadWriter, own_state, place_state, read_head
from .keys import KeyGradientWriter, read_keys
from .lockstep import interleaved


def backward(
    blocks: Blocks,
    options: Options,
    prefetched: tuple[Array, ...],
    q: Float[Array, "B T H*K"],
    k: Float[Array, "B T H*K"],
    v: Float[Array, "B T HV*V"],
    g: Float[Array, "B HV/heads heads S"],
    row_document: Int[Array, "B 1 S"] | None,
    do: Float[Array, "B T HV*V"],
    chunk_states: Float[Array, "B HV chunks K V"],
    dstates: Float[Array, "B N HV K V"],
):
    """Gradients of q, k, v, g and of the initial states.

    Those of q and k are `[B, T, sharing * H * K]`, and float32 if they remain to be summed.
    """
    sizes = (blocks.key_size, blocks.value_size)
    dq = jax.ShapeDtypeStruct(
        (*q.shape[:2], q.shape[2] * blocks.sharing),
        q.dtype if blocks.sharing == 1 else jnp.float32,
    )
    grid_spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=len(prefetched),
        grid=blocks.grid,
        in_specs=[
            blocks.keys(),
            blocks.keys(),
            blocks.values(),
            blocks.gates(),
            None if row_document is None else blocks.row_document(),
            blocks.values(),
            blocks.per_chunk(*sizes),
            blocks.states(),
        ],
        out_specs=[
            blocks.key_gradients(),
            blocks.key_gradients(),
            blocks.values(),
            blocks.gates(),
            blocks.states(),
        ],
        scratch_shapes=[blocks.carried()],
    )
    operands = (*prefetched, q, k, v, g, row_document, do, chunk_states, dstates)
    return pallas_call(
        over_batch_rows(blocks, functools.partial(_row, blocks, options)),
        grid_spec=grid_spec,
        out_shape=[
            dq,
            dq,
            jax.ShapeDtypeStruct(v.shape, v.dtype),
            jax.ShapeDtypeStruct(g.shape, g.dtype),
            jax.ShapeDtypeStruct(dstates.shape, dstates.dtype),
        ],
        input_output_aliases={len(jax.tree.leaves(operands)) - 1: 4},
        compiler_params=blocks.compiler_params,
        name="simple_gla_backward",
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
    do,
    chunk_states,
    dfinal_state,
    dq,
    dk,
    dv,
    dg,
    dinitial_state,
    dstate,
):
    first, last = document_ends(blocks, row, documents)

    @pl.when(last)
    def _():
        for h in range(blocks.heads):
            dstate[h] = place_state(dfinal_state[h], h, blocks)

    clear_padding(blocks, row, padding, row_document, q, k, v, do)
    dtype = q.dtype
    key_lanes, value_lanes = blocks.state_lanes
    precision = options.precision
    key_gradients = KeyGradientWriter(dq, dk, blocks)
    dv_writer = HeadWriter(dv, blocks.value_size)
    cumulated = {}

    @functools.cache
    def decay(chunk):
        documents = chunk_documents(blocks, row, chunk, chunk_ends, row_document)
        return ChunkDecay(g[:, chunk_rows(chunk)], documents, exact=dtype == jnp.float32)

    @functools.cache
    def key_head(chunk, j):
        qj, kj, norms = read_keys(q, k, chunk, j, blocks, qk_l2norm=options.qk_l2norm)
        qj, kj = qj.astype(dtype), kj.astype(dtype)
        return qj, kj, norms, dot(qj, kj, precision, NT)

    def value_head(chunk, h):
        qh, kh, norms, scores = key_head(chunk, h // blocks.group)
        vh, doh = (read_head(x, chunk, h, blocks.value_size) for x in (v, do))
        dscores = dot(doh, vh, precision, NT)
        yield
        pairs, start, end, total = decay(chunk).head(h)
        pairs, start = options.scale * pairs, options.scale * start
        attention, dattention = (scores * pairs).astype(dtype), (dscores * pairs).astype(dtype)
        q_start = (qh * widen(start, key_lanes)).astype(dtype)
        k_end = (kh * widen(end, key_lanes)).astype(dtype)
        v_end = (vh * widen(end, value_lanes)).astype(dtype)
        do_start = (doh * widen(start, value_lanes)).astype(dtype)
        before = place_state(chunk_states[h, chunk], h, blocks)
        dafter = dstate[h]
        dvh = dot(
            jnp.concatenate([attention.T, k_end], axis=1),
            jnp.concatenate([doh, dafter.astype(dtype)], axis=0),
            precision,
        )
        dv_writer.write(chunk, h, dvh)
        yield
        dbefore = widen(total, value_lanes) * dafter
        dstate[h] = dbefore + dot(q_start.T, doh, precision)
        yield
        dk_end = dot(v_end, dafter.astype(dtype), precision, NT)
        yield
        dkh = dk_end + dot(dattention.T, qh, precision)
        yield
        dqh = dot(
            jnp.concatenate([dattention, do_start], axis=1),
            jnp.concatenate([kh, before.T], axis=0),
            precision,
        )
        yield
        by_row = (qh * dqh - kh * dkh).T
        at_end = jnp.sum(kh * dk_end, keepdims=True) + jnp.sum(dbefore * before, keepdims=True)
        yield
        dG = jnp.sum(by_row, axis=0, keepdims=True)
        cumulated[chunk, h] = jnp.where(iota(1)[:1] == CHUNK - 1, dG + at_end, dG)
        key_gradients.add(chunk, h // blocks.group, (qh, kh), norms, dqh, dkh)
        yield

    def head(h):
        for chunk in reversed(range(blocks.chunks)):
            yield from value_head(chunk, h)

    yield interleaved(map(head, range(blocks.heads)), skew=1)
    for chunk in range(blocks.chunks):
        dG = jnp.concatenate([cumulated[chunk, h] for h in range(blocks.heads)], axis=0)
        dg[:, chunk_rows(chunk)] = decay(chunk).gradient(dG)

    @pl.when(first)
    def _():
        for h in range(blocks.heads):
            dinitial_state[h] = own_state(dstate[h], h, blocks)
