"""SimpleGLA forward: one kernel, forward in time, with the state in vector memory.

Per value head and chunk of C tokens, with the decays of `decay.py` and the chunk's initial state S:

    A  = (q k^T) * pairs                         [C, C]
    o  = scale [q * start | A] [S; v]            one product of depth K + C
    S <- total S + k^T (end * v)

Saved for the backward: S before each chunk, in the compute dtype. Recomputing the states would
cost more traffic than it saves.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from .blocks import Blocks, chunk_rows, clear_padding, document_ends, lanes, widen
from .call import pallas_call
from .decay import ChunkDecay, chunk_documents
from .dots import dot
from .lockstep import lockstep
from .norm import normalize


def forward(
    blocks: Blocks,
    scale: float,
    l2norm: bool,
    precision: jax.lax.Precision | None,
    vmem_limit_bytes: int,
    prefetched: tuple[Array, ...],
    q: Float[Array, "B T H*K"],
    k: Float[Array, "B T H*K"],
    v: Float[Array, "B T HV*V"],
    g: Float[Array, "B HV/heads heads S"],
    row_document: Int[Array, "B 1 S"] | None,
    states: Float[Array, "B N HV K V"],
):
    """Outputs `[B, T, HV*V]`, chunk states `[B, HV, chunks, K, V]` and the new `states`."""
    sizes = (blocks.key_size, blocks.value_size)
    chunk_states = (blocks.batch, blocks.value_heads, blocks.num_chunks, *sizes)
    grid_spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=3,
        grid=blocks.grid,
        in_specs=[
            blocks.keys(),
            blocks.keys(),
            blocks.values(),
            blocks.gates(),
            None if row_document is None else blocks.row_document(),
            blocks.states(),
        ],
        out_specs=[blocks.values(), blocks.per_chunk(*sizes), blocks.states()],
        scratch_shapes=[pltpu.VMEM((blocks.heads, *sizes), jnp.float32)],
    )
    return pallas_call(
        functools.partial(_kernel, blocks, scale, l2norm, precision),
        grid_spec=grid_spec,
        out_shape=[
            jax.ShapeDtypeStruct(v.shape, v.dtype),
            jax.ShapeDtypeStruct(chunk_states, v.dtype),
            jax.ShapeDtypeStruct(states.shape, states.dtype),
        ],
        input_output_aliases={7 + (row_document is not None): 2},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"),
            vmem_limit_bytes=vmem_limit_bytes,
        ),
        name="simple_gla_forward",
    )(*prefetched, q, k, v, g, row_document, states)


def _kernel(
    blocks,
    scale,
    l2norm,
    precision,
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
    chunk_states,
    final_state,
    state,
):
    first, last = document_ends(blocks, documents)

    @pl.when(first)
    def _():
        state[...] = initial_state[...]

    clear_padding(blocks, padding, row_document, q, k, v)
    dtype = q.dtype

    @functools.cache
    def decay(chunk):
        documents = chunk_documents(blocks, chunk, chunk_ends, row_document)
        return ChunkDecay(g[:, chunk_rows(chunk)], documents, exact=dtype == jnp.float32)

    @functools.cache
    def key_head(chunk, j):
        index = chunk_rows(chunk), lanes(j, blocks.key_size)
        qj, kj = q[index], k[index]
        if l2norm:
            qj, kj = (normalize(x)[0].astype(dtype) for x in (qj, kj))
        keys = kj.T
        return qj, keys, dot(qj, keys, precision)

    def value_head(chunk, h):
        index = chunk_rows(chunk), lanes(h, blocks.value_size)
        qh, keys, scores = key_head(chunk, h // blocks.group)
        yield
        pairs, start, end, total = decay(chunk).head(h)
        before = state[h]
        chunk_states[h, chunk] = before.astype(dtype)
        reads = (qh * widen(start, blocks.key_size)).astype(dtype)
        attention = (scores * pairs).astype(dtype)
        oh = dot(
            jnp.concatenate([reads, attention], axis=1),
            jnp.concatenate([before.astype(dtype), v[index]], axis=0),
            precision,
        )
        yield
        o[index] = (scale * oh).astype(dtype)
        writes = (v[index] * widen(end, blocks.value_size)).astype(dtype)
        state[h] = widen(total, blocks.value_size) * before + dot(keys, writes, precision)
        yield

    def head(h):
        for chunk in range(blocks.chunks):
            yield from value_head(chunk, h)

    lockstep(map(head, range(blocks.heads)), skew=1)

    @pl.when(last)
    def _():
        final_state[...] = state[...]
