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

All heads of a block run in step: started one turn apart they take 0.75 rather than 0.52 million
cycles on a v6e chip.
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
from .blocks import Blocks, chunk_rows, clear_padding, document_ends, lane, widen
from .call import pallas_call
from .decay import ChunkDecay, chunk_documents
from .dots import NT, dot
from .heads import HeadWriter, own_lanes, own_state, place_state, read_value
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
    v: Float[Array, "B T HV*V"],
    g: Float[Array, "B HV/heads heads S"],
    beta: Float[Array, "B HV/heads heads S"],
    row_document: Int[Array, "B 1 S"] | None,
    states: Float[Array, "B N HV K V"],
) -> tuple[
    Float[Array, "B T HV*V"],
    Float[Array, "B N HV K V"],
    Float[Array, "B HV chunks K V"] | None,
    Float[Array, "B HV chunks C C"] | None,
    Float[Array, "B HV chunks C V"] | None,
]:
    """Outputs, new states and, with `save`, what the backward reads: S, T^T and x."""
    sizes = (blocks.key_size, blocks.value_size)
    saved = [(sizes, v.dtype), ((CHUNK, CHUNK), jnp.float32), ((CHUNK, sizes[1]), v.dtype)]
    chunks = (blocks.batch, blocks.value_heads, blocks.num_chunks)
    grid_spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=len(prefetched),
        grid=blocks.grid,
        in_specs=[
            blocks.keys(),
            blocks.keys(),
            blocks.written_values(),
            blocks.gates(),
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
        name="gated_delta_rule_forward",
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
    xs,
    state,
):
    first, last = document_ends(blocks, row, documents)

    @pl.when(first)
    def _():
        for h in range(blocks.heads):
            state[h] = place_state(initial_state[h], h, blocks)

    clear_padding(blocks, row, padding, row_document, q, k, v)
    dtype = q.dtype
    precision = options.precision if dtype == jnp.float32 else jax.lax.Precision.HIGH
    value_lanes = blocks.state_lanes[1]
    output = HeadWriter(o, blocks.value_size)

    @functools.cache
    def decay(chunk):
        rows = chunk_rows(chunk)
        documents = chunk_documents(blocks, row, chunk, chunk_ends, row_document)
        decay = ChunkDecay(g[:, rows], documents, exact=dtype == jnp.float32)
        return decay, beta[:, rows], decay.ends() * beta[:, rows].T

    @functools.cache
    def key_head(chunk, j):
        qj, kj, _ = read_keys(q, k, chunk, j, blocks, qk_l2norm=options.qk_l2norm)
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
        x = (read_value(v, chunk, h, blocks) - start * reads[:CHUNK]).astype(dtype)
        u = dot(inverse, x, precision)
        yield
        writes = widen(lane(write_columns, h), value_lanes) * u
        if xs is not None:
            chunk_states[h, chunk] = own_state(before, h, blocks).astype(dtype)
            inverses[h, chunk] = inverse.T
            xs[h, chunk] = own_lanes(x, h, blocks.value_size)
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

    @pl.when(last)
    def _():
        for h in range(blocks.heads):
            final_state[h] = own_state(state[h], h, blocks)
