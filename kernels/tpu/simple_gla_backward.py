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
q, k and do twice, and write and read dS of every chunk. At T = 8192 and 16 heads of 128, all in
bfloat16, that is 168 MB beside the 268 that one pass moves.
"""

import functools

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ..implementation import Options
from .blocks import Blocks, chunk_rows, widen
from .chunk_scan import scan_chunks
from .decay import ChunkDecay, cumulated_gradient
from .dots import NT, dot
from .heads import HeadWriter, place_state, read_head
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
) -> tuple[dict[str, Array], Float[Array, "B N HV K V"]]:
    """dq and dk, see `Blocks.key_gradients`, dv, dg, and the gradients of the initial states."""
    inputs = {
        "q": blocks.keys(q),
        "k": blocks.keys(k),
        "v": blocks.values(v),
        "g": blocks.gates(g),
        "row_document": blocks.row_document(row_document),
        "do": blocks.values(do),
        "states": blocks.per_chunk(chunk_states),
    }
    outputs = {
        "dq": blocks.key_gradients(q),
        "dk": blocks.key_gradients(q),
        "dv": blocks.values(v),
        "dg": blocks.gates(g),
    }
    row = functools.partial(_row, options)
    return scan_chunks(
        row, blocks, prefetched, inputs, outputs, dstates, name="simple_gla_backward"
    )


def _row(options, row, refs, dstate):
    blocks = row.blocks
    row.clear_padding(refs.q, refs.k, refs.v, refs.do)
    dtype = refs.q.dtype
    key_lanes, value_lanes = blocks.state_lanes
    precision = options.precision
    key_gradients = KeyGradientWriter(refs.dq, refs.dk, blocks)
    dv_writer = HeadWriter(refs.dv, blocks.value_size)
    cumulated = {}

    @functools.cache
    def decay(chunk):
        documents = row.chunk_documents(chunk)
        return ChunkDecay(refs.g[:, chunk_rows(chunk)], documents, exact=dtype == jnp.float32)

    @functools.cache
    def key_head(chunk, j):
        qj, kj, norms = read_keys(refs, chunk, j, blocks, qk_l2norm=options.qk_l2norm)
        qj, kj = qj.astype(dtype), kj.astype(dtype)
        return qj, kj, norms, dot(qj, kj, precision, NT)

    def value_head(chunk, h):
        qh, kh, norms, scores = key_head(chunk, h // blocks.group)
        vh, doh = (read_head(x, chunk, h, blocks.value_size) for x in (refs.v, refs.do))
        dscores = dot(doh, vh, precision, NT)
        yield
        pairs, start, end, total = decay(chunk).head(h)
        pairs, start = options.scale * pairs, options.scale * start
        attention, dattention = (scores * pairs).astype(dtype), (dscores * pairs).astype(dtype)
        q_start = (qh * widen(start, key_lanes)).astype(dtype)
        k_end = (kh * widen(end, key_lanes)).astype(dtype)
        v_end = (vh * widen(end, value_lanes)).astype(dtype)
        do_start = (doh * widen(start, value_lanes)).astype(dtype)
        before = place_state(refs.states[h, chunk], h, blocks)
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
        cumulated[chunk, h] = cumulated_gradient(by_row, at_end)
        key_gradients.add(chunk, h // blocks.group, (qh, kh), norms, dqh, dkh)
        yield

    def head(h):
        for chunk in reversed(range(blocks.chunks)):
            yield from value_head(chunk, h)

    yield interleaved(map(head, range(blocks.heads)), skew=1)
    for chunk in range(blocks.chunks):
        dG = jnp.concatenate([cumulated[chunk, h] for h in range(blocks.heads)], axis=0)
        refs.dg[:, chunk_rows(chunk)] = decay(chunk).gradient(dG)
