"""KDA on Pallas TPU kernels: what surrounds them.

As for `simple_gla.py`; but g, as large as all else together, goes in as it is and is clamped where
it is read. A beta of exactly 0 acts as 2^-60, which vanishes in float32: the backward pass divides
by it.
"""

import functools

import jax.numpy as jnp

from ..implementation import Implementation
from ..numerics import divisible, storage_dtype
from ..packing import zero_padding
from . import kda_backward, kda_forward
from .blocks import Blocks, flat_tokens, pad_heads, pad_states
from .reads import add_reads
from .tuning import split_chains, tuning


def forward(options, tokens, states, packing, chunk_document):
    """See `../implementation.py`. Residuals: S before each chunk, T in float32, A_q and v_new."""
    return _forward(options, tokens, states, packing, chunk_document, save=True)


def outputs(options, tokens, states, packing, chunk_document):
    """`forward` without the residuals; states may have more columns than v has channels."""
    return _forward(options, tokens, states, packing, chunk_document, save=False)[0]


def _forward(options, tokens, states, packing, chunk_document, *, save):
    q, _, v, *_ = tokens
    one_chunk = chunk_document is not None
    key_size, value_size = states.shape[-2:]
    tuned = tuning("kda_forward")
    blocks = Blocks.of(q, v, tuned, one_chunk=one_chunk, columns=value_size)
    written, states = kda_forward.forward(
        blocks,
        options,
        save,
        *_inputs(blocks, tokens, packing, chunk_document),
        pad_states(states, blocks),
    )
    o = blocks.split_value_heads(written["o"])[..., :value_size].astype(v.dtype)
    states = states[..., :key_size, :value_size]
    if not save:
        return (o, states), {}
    return (o, states), {
        "states": written["states"][..., :key_size, :value_size],
        "inverse": written["inverse"],
        "attention": written["attention"],
        "v_new": written["v_new"][..., :value_size],
    }


def backward(options, tokens, states, packing, chunk_document, residuals, do, dstates):
    """See `../implementation.py`."""
    q, _, v, *_ = tokens
    one_chunk = chunk_document is not None
    blocks = Blocks.of(q, v, tuning("kda_backward"), one_chunk=one_chunk, reverse=True)
    prefetched, q_, k_, _, *gates = _inputs(blocks, tokens, packing, chunk_document)
    gradients, dstates = kda_backward.backward(
        blocks,
        options,
        prefetched,
        q_,
        k_,
        *gates,
        flat_tokens(do, blocks.value_size, q_.dtype),
        pad_states(residuals["states"], blocks),
        residuals["inverse"],
        residuals["attention"],
        pad_heads(residuals["v_new"], blocks.value_size),
        pad_states(dstates, blocks),
    )
    key_size, value_size = q.shape[3], v.shape[3]
    dq, dk = (blocks.sum_key_gradients(gradients[x])[..., :key_size] for x in ("dq", "dk"))
    dv = blocks.split_value_heads(gradients["dv"])[..., :value_size]
    dg = blocks.split_value_heads(gradients["dg"])[..., :key_size]
    dbeta = zero_padding(blocks.time_first(gradients["dbeta"]), packing)
    return (dq, dk, dv, dg, dbeta), dstates[..., :key_size, :value_size]


def _inputs(blocks, tokens, packing, chunk_document):
    q, k, v, g, beta = tokens
    dtype = storage_dtype(q, k, v)
    beta = zero_padding(beta, packing)
    return (
        blocks.prefetched(chunk_document, packing),
        flat_tokens(q, blocks.key_size, dtype),
        flat_tokens(k, blocks.key_size, dtype),
        flat_tokens(v, blocks.written_size, dtype),
        flat_tokens(g, blocks.key_size, jnp.float32),
        blocks.time_on_lanes(divisible(beta)),
        None if packing is None else blocks.row_documents(packing),
    )


implementation = Implementation(
    forward,
    backward,
    outputs,
    add_reads,
    functools.partial(split_chains, "kda_forward"),
)
