"""Gated delta rule forward: one kernel, forward in time, with the state in vector memory.

Per value head and chunk of C tokens, with the decays of `decay.py` and the chunk's initial state S:

    M  = strict(k k^T) * pairs * beta_j          [C, C]; what is written is beta u
    T  = (I + M)^-1                              see `triangular_inverse.py`
    u  = T x                                     [C, V]
    x  = v - start * k S
    A  = (q k^T) * pairs * beta_j
    o  = scale (start * q S + A u)
    S <- total S + k^T (end * beta * u)

Saved for the backward: S before each chunk and x in the compute dtype, and T^T in float32. Out of
them the backward makes the same u, to the bit; with u itself in bfloat16 dg is off by 5.5e-3 on
random inputs, not 1.8e-3, and in float32 it takes twice the memory of x.

All heads of a block run in step: started one turn apart they take 1.4 times the cycles on a v6e
chip.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ..implementation import Options
from ..packing import CHUNK
from .blocks import Blocks, chunk_rows, lane, widen
from .chunk_scan import scan_chunks
from .decay import ChunkDecay
from .dots import NT, dot
from .heads import HeadWriter, own_lanes, own_state, read_value
from .keys import read_keys
from .lockstep import interleaved
from .triangular_inverse import triangular_inverse


def forward(
    blocks: Blocks,
    options: Options,
    save: bool,
    prefetched: tuple[Array, ...],
    q: Float[Array, "B T H*K"],
    k: Float[Array, "B T H*K"],
    v: Float[Array, "B T HV*W"],
    g: Float[Array, "B HV/heads heads S"],
    beta: Float[Array, "B HV/heads heads S"],
    row_document: Int[Array, "B 1 S"] | None,
    states: Float[Array, "B N HV K V"],
) -> tuple[dict[str, Array], Float[Array, "B N HV K V"]]:
    """o `[B, T, HV*V]`, with `save` S ("states"), T^T ("inverse") and x ("x"), and new states.

    v may have fewer channels, W, than states have columns, V: zeros are written to the others.
    """
    inputs = {
        "q": blocks.keys(q),
        "k": blocks.keys(k),
        "v": blocks.written_values(v),
        "g": blocks.gates(g),
        "beta": blocks.gates(beta),
        "row_document": blocks.row_document(row_document),
    }
    outputs = {"o": blocks.outputs(v)}
    if save:
        outputs["states"] = blocks.saved(v.dtype, blocks.key_size, blocks.value_size)
        outputs["inverse"] = blocks.saved(jnp.float32, CHUNK, CHUNK)
        outputs["x"] = blocks.saved(v.dtype, CHUNK, blocks.value_size)
    row = functools.partial(_row, options, save)
    return scan_chunks(
        row, blocks, prefetched, inputs, outputs, states, name="gated_delta_rule_forward"
    )


def _row(options, save, row, refs, state):
    blocks = row.blocks
    row.clear_padding(refs.q, refs.k, refs.v)
    dtype = refs.q.dtype
    precision = options.precision if dtype == jnp.float32 else jax.lax.Precision.HIGH
    value_lanes = blocks.state_lanes[1]
    output = HeadWriter(refs.o, blocks.value_size)

    @functools.cache
    def decay(chunk):
        rows = chunk_rows(chunk)
        documents = row.chunk_documents(chunk)
        decay = ChunkDecay(refs.g[:, rows], documents, exact=dtype == jnp.float32)
        return decay, refs.beta[:, rows], decay.ends() * refs.beta[:, rows].T

    @functools.cache
    def key_head(chunk, j):
        qj, kj, _ = read_keys(refs, chunk, j, blocks, qk_l2norm=options.qk_l2norm)
        qj, kj = qj.astype(dtype), kj.astype(dtype)
        both = jnp.concatenate([kj, qj], axis=0)
        return both, kj.T, dot(both, kj, precision, NT)

    def value_head(chunk, h):
        both, keys, scores = key_head(chunk, h // blocks.group)
        yield
        chunk_decay, betas, write_columns = decay(chunk)
        pairs, start, _, total = chunk_decay.head(h)
        yield
        pairs *= betas[h : h + 1]
        attention = (scores[CHUNK:] * pairs).astype(dtype)
        m = scores[:CHUNK] * pairs
        yield
        inverse = yield from triangular_inverse(m, precision)
        before = state[h]
        reads = dot(both, before.astype(dtype), precision)
        yield
        start = widen(start, value_lanes)
        x = (read_value(refs.v, chunk, h, blocks) - start * reads[:CHUNK]).astype(dtype)
        u = dot(inverse, x, precision)
        yield
        writes = widen(lane(write_columns, h), value_lanes) * u
        if save:
            refs.states[h, chunk] = own_state(before, h, blocks).astype(dtype)
            refs.inverse[h, chunk] = inverse.T
            refs.x[h, chunk] = own_lanes(x, h, blocks.value_size)
        written = dot(attention, u.astype(dtype), precision)
        added = dot(keys, writes.astype(dtype), precision)
        yield
        output.write(chunk, h, options.scale * (start * reads[CHUNK:] + written))
        state[h] = widen(total, value_lanes) * before + added
        yield

    def head(h):
        for chunk in range(blocks.chunks):
            yield from value_head(chunk, h)

    yield interleaved(map(head, range(blocks.heads)))
