"""SimpleGLA on Pallas TPU kernels: what surrounds them.

The kernels take flat tokens [B, T, heads * size] in one dtype: bfloat16 if q, k and v all are,
else float32. Head sizes other than 64, 128 and 256 are padded with zeros here, at a pass over
the tensor. Gates of padding are zeroed here: they are small.
"""

import jax.numpy as jnp

from ..implementation import Implementation
from ..numerics import storage_dtype
from ..packing import zero_padding
from . import simple_gla_backward, simple_gla_forward
from .blocks import Blocks, flat_tokens, pad_states
from .tuning import tuning


def forward(options, tokens, states, packing, chunk_document):
    """See `../implementation.py`. Residual: S before each chunk, `[B, HV, chunks, K, V]`."""
    return _forward(options, tokens, states, packing, chunk_document, save=True)


def outputs(options, tokens, states, packing, chunk_document):
    """`forward` without the residual, a fifth of its traffic."""
    return _forward(options, tokens, states, packing, chunk_document, save=False)[0]


def _forward(options, tokens, states, packing, chunk_document, *, save):
    q, k, v, _ = tokens
    dtype = storage_dtype(q, k, v)
    one_chunk = chunk_document is not None
    blocks = Blocks.of(q, v, tuning("simple_gla_forward"), one_chunk=one_chunk)
    written, states = simple_gla_forward.forward(
        blocks,
        options,
        save,
        *_inputs(blocks, dtype, tokens, packing, chunk_document),
        pad_states(states, blocks),
    )
    o = blocks.split_value_heads(written.pop("o"))[..., : v.shape[3]].astype(v.dtype)
    saved = {name: x[..., : q.shape[3], : v.shape[3]] for name, x in written.items()}
    return (o, states[..., : q.shape[3], : v.shape[3]]), saved


def backward(options, tokens, states, packing, chunk_document, residuals, do, dstates):
    """See `../implementation.py`."""
    q, k, v, _ = tokens
    dtype = storage_dtype(q, k, v)
    one_chunk = chunk_document is not None
    tuned = tuning("simple_gla_backward")
    blocks = Blocks.of(q, v, tuned, one_chunk=one_chunk, reverse=True)
    gradients, dstates = simple_gla_backward.backward(
        blocks,
        options,
        *_inputs(blocks, dtype, tokens, packing, chunk_document),
        flat_tokens(do, blocks.value_size, dtype),
        pad_states(residuals["states"], blocks),
        pad_states(dstates, blocks),
    )
    dq, dk = (blocks.sum_key_gradients(gradients[x])[..., : q.shape[3]] for x in ("dq", "dk"))
    dv = blocks.split_value_heads(gradients["dv"])[..., : v.shape[3]]
    dg = zero_padding(blocks.time_first(gradients["dg"]), packing)
    return (dq, dk, dv, dg), dstates[..., : q.shape[3], : v.shape[3]]


def _inputs(blocks, dtype, tokens, packing, chunk_document):
    q, k, v, g = tokens
    g = zero_padding(g.astype(jnp.float32), packing)
    return (
        blocks.prefetched(chunk_document, packing),
        flat_tokens(q, blocks.key_size, dtype),
        flat_tokens(k, blocks.key_size, dtype),
        flat_tokens(v, blocks.value_size, dtype),
        blocks.time_on_lanes(g),
        None if packing is None else blocks.row_documents(packing),
    )


implementation = Implementation(forward, backward, outputs)
