"""KDA forward: one kernel, forward in time, with the state in vector memory.

Per value head and chunk of C tokens, with k (and q, times `scale`) of norm 1 if asked for, the
decays of `channel_decay.py` (since and until without an index are those of the whole chunk, total
is since's last row), and the chunk's initial state S:

    A_q = q k^T, A_k = k k^T with the decay between row i and column j, on and below the diagonal,
          and below it                                          [C, C]
    T   = (I + beta A_k)^-1                                     [C, C]
    v_new = T beta (v - (k since) S)                            [C, V]
    o   = (q since) S + A_q v_new
    S  <- total S + (k until)^T v_new

Saved for the backward, in the compute dtype: S before the chunk, A_q and v_new; T in
float32.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ..implementation import Options
from ..packing import CHUNK
from .blocks import Blocks, chunk_rows, column, widen
from .channel_decay import LEVELS
from .chunk_scan import scan_chunks
from .dots import dot
from .heads import HeadWriter, move_lanes, own_lanes, own_state, read_head, read_value
from .kda_pairs import decay_tokens, scaling, scores
from .keys import read_keys
from .lockstep import interleaved
from .triangular_inverse import triangular_inverse

CHUNK_SKEW = 6
HEAD_SKEW = 0


def forward(
    blocks: Blocks,
    options: Options,
    save: bool,
    prefetched: tuple[Array, ...],
    q: Float[Array, "B T H*K"],
    k: Float[Array, "B T H*K"],
    v: Float[Array, "B T HV*W"],
    g: Float[Array, "B T HV*K"],
    beta: Float[Array, "B HV/heads heads S"],
    row_document: Int[Array, "B 1 S"] | None,
    states: Float[Array, "B N HV K V"],
) -> tuple[dict[str, Array], Float[Array, "B N HV K V"]]:
    """o `[B, T, HV*V]` and new states.

    With `save`, S ("states"), T ("inverse"), A_q ("attention") and v_new ("v_new") per chunk.
    v may have fewer channels, W, than states have columns, V: zeros are written to the others.
    """
    inputs = {
        "q": blocks.keys(q),
        "k": blocks.keys(k),
        "v": blocks.written_values(v),
        "g": blocks.channel_gates(g),
        "beta": blocks.gates(beta),
        "row_document": blocks.row_document(row_document),
    }
    outputs = {"o": blocks.outputs(v)}
    if save:
        outputs["states"] = blocks.saved(v.dtype, blocks.key_size, blocks.value_size)
        outputs["inverse"] = blocks.saved(jnp.float32, CHUNK, CHUNK)
        outputs["attention"] = blocks.saved(v.dtype, CHUNK, CHUNK)
        outputs["v_new"] = blocks.saved(v.dtype, CHUNK, blocks.value_size)
    row = functools.partial(_row, options, save)
    return scan_chunks(row, blocks, prefetched, inputs, outputs, states, name="kda_forward")


def _row(options, save, row, refs, state):
    blocks = row.blocks
    row.clear_padding(refs.q, refs.k, refs.v, refs.g)
    dtype = refs.q.dtype
    precision = options.precision if dtype == jnp.float32 else jax.lax.Precision.HIGH
    product = functools.partial(dot, precision=precision)
    scaled = scaling(dtype)
    key_lanes, value_lanes = blocks.state_lanes
    output = HeadWriter(refs.o, blocks.value_size)

    @functools.cache
    def key_head(chunk, j):
        qj, kj, _ = read_keys(refs, chunk, j, blocks, qk_l2norm=options.qk_l2norm)
        return options.scale * qj.astype(jnp.float32), kj.astype(jnp.float32)

    def value_head(chunk, h):
        j = h // blocks.group
        betas = column(refs.beta[h : h + 1, chunk_rows(chunk)])
        qh, kh = key_head(chunk, j)
        vh = read_value(refs.v, chunk, h, blocks)
        gh = move_lanes(read_head(refs.g, chunk, h, blocks.key_size), h, j, blocks.key_size)
        document = row.chunk_documents(chunk)
        levels = decay_tokens(qh, kh, gh, document, scaled)
        whole = levels[LEVELS]
        attention, m = yield from scores(levels, qh.astype(dtype), product)
        if document.first is not None:
            attention, m = document.summed * attention, document.summed * m
        attention = attention.astype(dtype)
        inverse = yield from triangular_inverse(betas * m, precision)
        before = state[h]
        stored = before.astype(dtype)
        read = product(jnp.concatenate([whole.queries, whole.readers]), stored)
        yield
        error = widen(betas, value_lanes) * (vh - read[CHUNK:])
        v_new = product(inverse, error.astype(dtype)).astype(dtype)
        yield
        written = product(jnp.concatenate([attention, whole.keys.T]), v_new)
        yield
        output.write(chunk, h, read[:CHUNK] + written[:CHUNK])
        total = jnp.broadcast_to(whole.since[CHUNK - 1 :], (value_lanes, key_lanes)).T
        state[h] = total * before + written[CHUNK:]
        if save:
            refs.states[h, chunk] = own_state(stored, h, blocks)
            refs.inverse[h, chunk] = inverse
            refs.attention[h, chunk] = attention
            refs.v_new[h, chunk] = own_lanes(v_new, h, blocks.value_size)

    yield interleaved(
        (
            interleaved([value_head(chunk, h) for h in range(blocks.heads)], HEAD_SKEW)
            for chunk in range(blocks.chunks)
        ),
        CHUNK_SKEW,
    )
