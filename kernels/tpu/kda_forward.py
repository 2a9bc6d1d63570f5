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
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from ..implementation import Options
from ..packing import CHUNK
from .batch_rows import over_batch_rows
from .blocks import Blocks, chunk_rows, clear_padding, column, document_ends, widen
from .call import pallas_call
from .channel_decay import LEVELS
from .decay import chunk_documents
from .dots import dot
from .heads import HeadWriter, move_lanes, own_lanes, own_state, place_state, read_head, read_value
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
    v: Float[Array, "B T HV*V"],
    g: Float[Array, "B T HV*K"],
    beta: Float[Array, "B HV/heads heads S"],
    row_document: Int[Array, "B 1 S"] | None,
    states: Float[Array, "B N HV K V"],
) -> list[Array | None]:
    """Outputs `[B, T, HV*V]`, new states and, with `save`, S, T, A_q and v_new per chunk."""
    sizes = (blocks.key_size, blocks.value_size)
    pairs = (CHUNK, CHUNK)
    saved = [(sizes, v.dtype), (pairs, jnp.float32), (pairs, v.dtype), ((CHUNK, sizes[1]), v.dtype)]
    chunks = (blocks.batch, blocks.value_heads, blocks.num_chunks)
    grid_spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=len(prefetched),
        grid=blocks.grid,
        in_specs=[
            blocks.keys(),
            blocks.keys(),
            blocks.written_values(),
            blocks.channel_gates(),
            blocks.gates(),
            None if row_document is None else blocks.row_document(),
            blocks.states(),
        ],
        out_specs=[
            blocks.values(),
            blocks.states(),
            *(blocks.per_chunk(*shape) if save else None for shape, _ in saved),
        ],
        scratch_shapes=[blocks.carried()],
    )
    operands = (*prefetched, q, k, v, g, beta, row_document, states)
    return pallas_call(
        over_batch_rows(blocks, functools.partial(_row, blocks, options)),
        grid_spec=grid_spec,
        out_shape=[
            blocks.outputs(v),
            jax.ShapeDtypeStruct(states.shape, states.dtype),
            *(
                jax.ShapeDtypeStruct((*chunks, *shape), dtype) if save else None
                for shape, dtype in saved
            ),
        ],
        input_output_aliases={len(jax.tree.leaves(operands)) - 1: 1},
        compiler_params=blocks.compiler_params,
        name="kda_forward",
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
    beta,
    row_document,
    initial_state,
    o,
    final_state,
    chunk_states,
    inverses,
    attentions,
    new_values,
    state,
):
    first, last = document_ends(blocks, row, documents)

    @pl.when(first)
    def _():
        for h in range(blocks.heads):
            state[h] = place_state(initial_state[h], h, blocks)

    clear_padding(blocks, row, padding, row_document, q, k, v, g)
    dtype = q.dtype
    precision = options.precision if dtype == jnp.float32 else jax.lax.Precision.HIGH
    product = functools.partial(dot, precision=precision)
    scaled = scaling(dtype)
    key_lanes, value_lanes = blocks.state_lanes
    output = HeadWriter(o, blocks.value_size)

    @functools.cache
    def documents_of(chunk):
        return chunk_documents(blocks, row, chunk, chunk_ends, row_document)

    @functools.cache
    def key_head(chunk, j):
        qj, kj, _ = read_keys(q, k, chunk, j, blocks, qk_l2norm=options.qk_l2norm)
        return options.scale * qj.astype(jnp.float32), kj.astype(jnp.float32)

    def value_head(chunk, h):
        j = h // blocks.group
        betas = column(beta[h : h + 1, chunk_rows(chunk)])
        qh, kh = key_head(chunk, j)
        vh = read_value(v, chunk, h, blocks)
        gh = move_lanes(read_head(g, chunk, h, blocks.key_size), h, j, blocks.key_size)
        document = documents_of(chunk)
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
        if chunk_states is not None:
            chunk_states[h, chunk] = own_state(stored, h, blocks)
            inverses[h, chunk] = inverse
            attentions[h, chunk] = attention
            new_values[h, chunk] = own_lanes(v_new, h, blocks.value_size)

    yield interleaved(
        (
            interleaved([value_head(chunk, h) for h in range(blocks.heads)], HEAD_SKEW)
            for chunk in range(blocks.chunks)
        ),
        CHUNK_SKEW,
    )

    @pl.when(last)
    def _():
        for h in range(blocks.heads):
            final_state[h] = own_state(state[h], h, blocks)
