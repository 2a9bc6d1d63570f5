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
and read dS of every chunk and dx: at T = 8192 and 16 heads of 128 that is 270 MB with both in
float32, beside the 340 that one pass moves in bfloat16.

Heads start one turn apart: 9 % fewer cycles on a v5e chip, 2 % fewer on a v6e.
"""

import functools
from collections.abc import Generator

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ..implementation import Options
from ..packing import CHUNK
from .blocks import LANES, Blocks, chunk_rows, iota, lane, widen
from .chunk_scan import scan_chunks
from .decay import ChunkDecay, cumulated_gradient
from .dots import NT, TN, dot
from .heads import HeadWriter, place_lanes, place_state, read_head
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
) -> tuple[dict[str, Array], Float[Array, "B N HV K V"]]:
    """dq and dk, see `Blocks.key_gradients`, dv, dg, dbeta, and those of the initial states."""
    inputs = {
        "q": blocks.keys(q),
        "k": blocks.keys(k),
        "g": blocks.gates(g),
        "beta": blocks.gates(beta),
        "row_document": blocks.row_document(row_document),
        "do": blocks.values(do),
        "states": blocks.per_chunk(chunk_states),
        "inverse": blocks.per_chunk(inverses),
        "x": blocks.per_chunk(xs),
    }
    outputs = {
        "dq": blocks.key_gradients(q),
        "dk": blocks.key_gradients(q),
        "dv": blocks.values(do),
        "dg": blocks.gates(g),
        "dbeta": blocks.gates(beta),
    }
    row = functools.partial(_row, options)
    return scan_chunks(
        row, blocks, prefetched, inputs, outputs, dstates, name="gated_delta_rule_backward"
    )


def _row(options, row, refs, dstate):
    blocks = row.blocks
    row.clear_padding(refs.q, refs.k, refs.do)
    row.clear_missing_chunks(refs.states, refs.inverse, refs.x)
    dtype = refs.q.dtype
    precision = options.precision if dtype == jnp.float32 else jax.lax.Precision.HIGH
    value_lanes = blocks.state_lanes[1]
    key_gradients = KeyGradientWriter(refs.dq, refs.dk, blocks)
    dv_writer = HeadWriter(refs.dv, blocks.value_size)
    gate_gradients = {}

    @functools.cache
    def decay(chunk):
        rows = chunk_rows(chunk)
        documents = row.chunk_documents(chunk)
        decay = ChunkDecay(refs.g[:, rows], documents, exact=dtype == jnp.float32)
        return decay, refs.beta[:, rows], decay.ends() * refs.beta[:, rows].T

    @functools.cache
    def key_head(chunk, j):
        qj, kj, norms = read_keys(refs, chunk, j, blocks, qk_l2norm=options.qk_l2norm)
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
        doh = read_head(refs.do, chunk, h, blocks.value_size)
        x = place_lanes(refs.x[h, chunk], h, blocks.value_size)
        before = place_state(refs.states[h, chunk], h, blocks)
        yield
        u = dot(refs.inverse[h, chunk], x, precision, TN)
        yield
        d_after = ends * dot(kh, after, precision)
        yield
        du = d_after + dot(attention.T, doh, precision)
        yield
        dx = dot(refs.inverse[h, chunk], du.astype(dtype), precision)
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
        dqh, dk_read, dk_write = yield from _key_gradients(
            qh, kh, before, dattention, dm, starting, precision
        )
        written = u * d_after
        by_row = _fold(qh * dqh + kh * (dk_read - dk_write)) - _fold(written)
        at_end = jnp.sum(written, keepdims=True) + jnp.sum(carried * before, keepdims=True)
        yield
        dG = cumulated_gradient(by_row.T, at_end)
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
        refs.dg[:, chunk_rows(chunk)] = decay(chunk)[0].gradient(dG)
        refs.dbeta[:, chunk_rows(chunk)] = d_beta


def _key_gradients(
    q: Float[Array, "C K"],
    k: Float[Array, "C K"],
    before: Float[Array, "K V"],
    dattention: Float[Array, "C C"],
    dm: Float[Array, "C C"],
    starting: Float[Array, "2*C V"],
    precision: jax.lax.Precision | None,
) -> Generator[None, None, tuple[Array, Array, Array]]:
    """dq, and of k as it is read and as it is written; `starting` is s start * do, -start * dx."""
    d_read = dot(
        jnp.concatenate([jnp.concatenate([dattention, dm], axis=0), starting], axis=1),
        jnp.concatenate([k, before.T], axis=0),
        precision,
    )
    yield
    dk_write = dot(
        jnp.concatenate([dattention.T, dm.T], axis=1),
        jnp.concatenate([q, k], axis=0),
        precision,
    )
    yield
    return d_read[:CHUNK], d_read[CHUNK:], dk_write


def _fold(x):
    """The sum of the registers that a row takes."""
    return sum(x[:, i : i + LANES] for i in range(0, x.shape[1], LANES))
