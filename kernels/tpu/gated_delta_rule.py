"""The gated delta rule on Pallas TPU kernels: what surrounds them.

As for `simple_gla.py`. A beta of exactly 0 acts as 2^-60, which vanishes in float32: the backward
divides by it.
"""

import functools

import jax.numpy as jnp

from ..implementation import Implementation
from ..numerics import divisible, storage_dtype
from ..packing import zero_padding
from . import gated_delta_rule_backward, gated_delta_rule_forward
from .blocks import Blocks, flat_tokens, pad_heads, pad_states
from .reads import add_reads
from .tuning import split_chains, tuning


def forward(options, tokens, states, packing, chunk_document):
    """See `../implementation.py`. Residuals: S before each chunk, T^T in float32, and x."""
    return _forward(options, tokens, states, packing, chunk_document, save=True)


def outputs(options, tokens, states, packing, chunk_document):
    """`forward` without the residuals; states may have more columns than v has channels."""
    return _forward(options, tokens, states, packing, chunk_document, save=False)[0]


def _forward(options, tokens, states, packing, chunk_document, *, save):
    q, _, v, *_ = tokens
    one_chunk = chunk_document is not None
    key_size, value_size = states.shape[-2:]
    tuned = tuning("gated_delta_rule_forward")
    blocks = Blocks.of(q, v, tuned, one_chunk=one_chunk, columns=value_size)
    written, states = gated_delta_rule_forward.forward(
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
        "x": written["x"][..., :value_size],
    }


def backward(options, tokens, states, packing, chunk_document, residuals, do, dstates):
    """See `../implementation.py`."""
    q, k, v, *_ = tokens
    dtype = storage_dtype(q, k, v)
    one_chunk = chunk_document is not None
    tuned = tuning("gated_delta_rule_backward")
    blocks = Blocks.of(q, v, tuned, one_chunk=one_chunk, reverse=True)
    prefetched, q_tokens, k_tokens, _, *gates = _inputs(blocks, tokens, packing, chunk_document)
    gradients, dstates = gated_delta_rule_backward.backward(
        blocks,
        options,
        prefetched,
        q_tokens,
        k_tokens,
        *gates,
        flat_tokens(do, blocks.value_size, dtype),
        pad_states(residuals["states"], blocks),
        residuals["inverse"],
        pad_heads(residuals["x"], blocks.value_size),
        pad_states(dstates, blocks),
    )
    dq, dk = (blocks.sum_key_gradients(gradients[x])[..., : q.shape[3]] for x in ("dq", "dk"))
    dv = blocks.split_value_heads(gradients["dv"])[..., : v.shape[3]]
    gates = (blocks.time_first(gradients[x]) for x in ("dg", "dbeta"))
    dg, dbeta = (zero_padding(x, packing) for x in gates)
    return (dq, dk, dv, dg, dbeta), dstates[..., : q.shape[3], : v.shape[3]]


def _inputs(blocks, tokens, packing, chunk_document):
    q, k, v, g, beta = tokens
    dtype = storage_dtype(q, k, v)
    g, beta = (zero_padding(x, packing) for x in (g.astype(jnp.float32), beta))
    return (
        blocks.prefetched(chunk_document, packing),
        flat_tokens(q, blocks.key_size, dtype),
        flat_tokens(k, blocks.key_size, dtype),
        flat_tokens(v, blocks.written_size, dtype),
        blocks.time_on_lanes(g),
        blocks.time_on_lanes(divisible(beta)),
        None if packing is None else blocks.row_documents(packing),
    )


implementation = Implementation(
    forward,
    backward,
    outputs,
    add_reads,
    functools.partial(split_chains, "gated_delta_rule_forward"),
)
