"""Gated delta rule backward: one fused kernel, backward in time, dS in vector memory.

Per value head and chunk, with the forward's S (before the chunk), T^T, x, A and decays, dS the
gradient of the state after the chunk, and s the scale:

    u = T x
    d_after = end * beta * (k dS)
    du = s A^T do + d_after
    dx = T^T du                                      dv = dx
    dA = s (do u^T) * pairs * beta_j
    dM = -strict(dx u^T) * pairs * beta_j            no gradient passes through the inverse
    dq     = dA k + (s start * do) S^T
    dk     = dk_read + dk_write + dk_after
      read   = dM k - (start * dx) S^T
      write  = dA^T q + dM^T k
      after  = (end * beta * u) dS^T
    dS <- total dS + q^T (s start * do) - k^T (start * dx)
    dbeta  = diagonal(dx u^T) / beta

Of the decay, with G its sum within the chunk (`decay.py`):

    dG_i  = sum(q_i dq_i) + sum(k_i dk_read_i) - sum(k_i dk_write_i) - sum(u_i d_after_i)
    dG_C += sum(dS * total S) + sum(u * d_after)

A head's dq and dk are summed over the value heads that read it, in float32. Every term of dG that
cancels is the same number on both sides, rounding included; the others hold dS in two bfloat16
terms, as with one dg is off by 8e-3.

Two passes, dS and dv one chunk after another and then dq and dk of all chunks at once, would write
and read dS of every chunk and dx: at T = 8192 and 16 heads of 128 that is 270 MB more with both in
float32, 0.29 million cycles of a v6e chip's bandwidth. A draft of two passes took 0.57 where a
draft of one took 0.48 to 0.55.

Heads start one turn apart: 0.84 rather than 0.92 million cycles on a v5e chip, 0.62 rather than
0.63 on a v6e.
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
    LANES,
    Blocks,
    chunk_rows,
    clear_missing_chunks,
    clear_padding,
    document_ends,
    iota,
    lane,
    widen,
)
from .call import pallas_call
from .decay import ChunkDecay, chunk_documents
from .dots import NT, TN, dot
from .heads import HeadWriter, own_state, place_lanes, place_state, read_head
from .keys import KeyGradientWriter, read_keys
from .lockstep import interleaved


def backward(
    blocks: Blocks,
    options: Options,
    prefetched: tuple[Array, ...],
    q: Float[Array, "B T H*K"],
    k: Float[Array, "B T H*K"],
    g: Float[Array, "B HV/heads heads S"],
    beta: Float[Array, "B HV/heads heads S"],
    row_document: Int[Array, "B 1 S"] | None,
    do: Float[Array, "B T HV*V"],
    chunk_states: Float[Array, "B HV chunks K V"],
    inverses: Float[Array, "B HV chunks C C"],
    xs: Float[Array, "B HV chunks C V"],
    dstates: Float[Array, "B N HV K V"],
):
    """Gradients of q, k, v, g, beta and of the initial states.

    Those of q and k are `[B, T, sharing * H * K]`, and float32 if they remain to be summed.
    """
    sizes = (blocks.key_size, blocks.value_size)
    dq = jax.ShapeDtypeStruct(
        (*q.shape[:2], q.shape[2] * blocks.sharing),
        q.dtype if blocks.sharing == 1 else jnp.float32,
    )
    gate = jax.ShapeDtypeStruct(g.shape, g.dtype)
    grid_spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=len(prefetched),
        grid=blocks.grid,
        in_specs=[
            blocks.keys(),
            blocks.keys(),
            blocks.gates(),
            blocks.gates(),
            None if row_document is None else blocks.row_document(),
            blocks.values(),
            blocks.per_chunk(*sizes),
            blocks.per_chunk(CHUNK, CHUNK),
            blocks.per_chunk(CHUNK, blocks.value_size),
            blocks.states(),
        ],
        out_specs=[
            blocks.key_gradients(),
            blocks.key_gradients(),
            blocks.values(),
            blocks.gates(),
            blocks.gates(),
            blocks.states(),
        ],
        scratch_shapes=[blocks.carried()],
    )
    operands = (
        *prefetched, q, k, g, beta, row_document, do, chunk_states, inverses, xs, dstates,
    )  # fmt: skip
    return pallas_call(
        over_batch_rows(blocks, functools.partial(_row, blocks, options)),
        grid_spec=grid_spec,
        out_shape=[
            dq,
            dq,
            jax.ShapeDtypeStruct(do.shape, do.dtype),
            gate,
            gate,
            jax.ShapeDtypeStruct(dstates.shape, dstates.dtype),
        ],
        input_output_aliases={len(jax.tree.leaves(operands)) - 1: 5},
        compiler_params=blocks.compiler_params,
        name="gated_delta_rule_backward",
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
    g,
    beta,
    row_document,
    do,
    chunk_states,
    inverses,
    xs,
    dfinal_state,
    dq,
    dk,
    dv,
    dg,
    dbeta,
    dinitial_state,
    dstate,
):
    first, last = document_ends(blocks, row, documents)

    @pl.when(last)
    def _():
        for h in range(blocks.heads):
            dstate[h] = place_state(dfinal_state[h], h, blocks)

    clear_padding(blocks, row, padding, row_document, q, k, do)
    clear_missing_chunks(blocks, chunk_states, inverses, xs)
    dtype = q.dtype
    precision = options.precision if dtype == jnp.float32 else jax.lax.Precision.HIGH
    value_lanes = blocks.state_lanes[1]
    key_gradients = KeyGradientWriter(dq, dk, blocks)
    dv_writer = HeadWriter(dv, blocks.value_size)
    gate_gradients = {}

    @functools.cache
    def decay(chunk):
        rows = chunk_rows(chunk)
        documents = chunk_documents(blocks, row, chunk, chunk_ends, row_document)
        decay = ChunkDecay(g[:, rows], documents, exact=dtype == jnp.float32)
        return decay, beta[:, rows], decay.ends() * beta[:, rows].T

    @functools.cache
    def key_head(chunk, j):
        qj, kj, norms = read_keys(q, k, chunk, j, blocks, qk_l2norm=options.qk_l2norm)
        qj, kj = qj.astype(dtype), kj.astype(dtype)
        transposed = jnp.concatenate([qj.T, kj.T], axis=1)
        return qj, kj, norms, transposed, dot(qj, kj, precision, NT)

    def value_head(chunk, h):
        qh, kh, norms, transposed, scores = key_head(chunk, h // blocks.group)
        yield
        chunk_decay, betas, write_columns = decay(chunk)
        pairs, start, _, total = chunk_decay.head(h)
        yield
        pairs *= betas[h : h + 1]
        start, total = widen(start, value_lanes), widen(total, value_lanes)
        ends = widen(lane(write_columns, h), value_lanes)
        attention = (options.scale * scores * pairs).astype(dtype)
        after = dstate[h]
        doh = read_head(do, chunk, h, blocks.value_size)
        x = place_lanes(xs[h, chunk], h, blocks.value_size)
        before = place_state(chunk_states[h, chunk], h, blocks)
        yield
        u = dot(inverses[h, chunk], x, precision, TN)
        yield
        d_after = ends * dot(kh, after, precision)
        yield
        du = d_after + dot(attention.T, doh, precision)
        yield
        dx = dot(inverses[h, chunk], du.astype(dtype), precision)
        yield
        dv_writer.write(chunk, h, dx)
        both = jnp.concatenate([doh, dx.astype(dtype)], axis=0)
        starting = jnp.concatenate([options.scale * start * doh, -start * dx], axis=0)
        starting = starting.astype(dtype)
        carried = total * after
        dstate[h] = carried + dot(transposed, starting, precision)
        yield
        dscores = dot(both, u.astype(dtype), precision, NT)
        yield
        dk_after = dot((ends * u).astype(dtype), after.astype(dtype), precision, NT)
        yield
        dattention = (options.scale * dscores[:CHUNK] * pairs).astype(dtype)
        dm = jnp.where(iota(0) > iota(1), -dscores[CHUNK:] * pairs, 0.0).astype(dtype)
        yield
        d_read = dot(
            jnp.concatenate([jnp.concatenate([dattention, dm], axis=0), starting], axis=1),
            jnp.concatenate([kh, before.T], axis=0),
            precision,
        )
        yield
        dk_write = dot(
            jnp.concatenate([dattention.T, dm.T], axis=1),
            jnp.concatenate([qh, kh], axis=0),
            precision,
        )
        yield
        dqh, dk_read = d_read[:CHUNK], d_read[CHUNK:]
        written = u * d_after
        by_row = _fold(qh * dqh + kh * (dk_read - dk_write)) - _fold(written)
        at_end = jnp.sum(written, keepdims=True) + jnp.sum(carried * before, keepdims=True)
        yield
        dG = jnp.sum(by_row.T, axis=0, keepdims=True)
        dG = jnp.where(iota(1)[:1] == CHUNK - 1, dG + at_end, dG)
        diagonal = jnp.where(iota(0) == iota(1), dscores[CHUNK:], 0.0)
        gate_gradients[chunk, h] = dG, jnp.sum(diagonal, axis=0, keepdims=True) / betas[h : h + 1]
        dkh = dk_read + dk_write + dk_after
        key_gradients.add(chunk, h // blocks.group, (qh, kh), norms, dqh, dkh)
        yield

    def head(h):
        for chunk in reversed(range(blocks.chunks)):
            yield from value_head(chunk, h)

    yield interleaved(map(head, range(blocks.heads)), skew=1)
    for chunk in range(blocks.chunks):
        dG, d_beta = (
            jnp.concatenate(rows, axis=0)
            for rows in zip(*(gate_gradients[chunk, h] for h in range(blocks.heads)), strict=True)
        )
        dg[:, chunk_rows(chunk)] = decay(chunk)[0].gradient(dG)
        dbeta[:, chunk_rows(chunk)] = d_beta

    @pl.when(first)
    def _():
        for h in range(blocks.heads):
            dinitial_state[h] = own_state(dstate[h], h, blocks)


def _fold(x):
    """The sum of the registers that a row takes."""
    return sum(x[:, i : i + LANES] for i in range(0, x.shape[1], LANES))
