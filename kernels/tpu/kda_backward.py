"""KDA backward: one fused kernel, backward in time, the state's gradient in vector memory.

Per value head and chunk, with the forward's quantities and dS, the gradient of the state after:

    dv_new = A_q^T do + (k until) dS
    derror = T^T dv_new                              error = beta (v - (k since) S)
    dv     = beta derror
    dbeta  = sum(derror * v_new) / beta
    dS    <- total dS + (q since)^T do - (k since)^T dv

All else waits for nothing from the chunk after: `kda_pairs.py` makes dq, dk and dg of

    dA_q = do v_new^T             dA_k = -dv v_new^T
    d(q since) = do S^T           d(k since) = -dv S^T           d(k until) = v_new dS^T

and of the gradient of total's exponent, sum over v of (total dS) * S, which is every token's. The
products T (beta k since) and T (beta v) of the usual form never exist, nor do their gradients.

What limits it is latency between dots and spills, not a full slot: on a v6e chip a head's chunk
takes 1257 cycles, of which 743 hold vector arithmetic, 733 stores (675 of them spills) and 699
matrix products. One factor array a level in place of since and until saves a twentieth of the
products and takes no less time, 1307 cycles.
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
    Blocks,
    chunk_rows,
    clear_missing_chunks,
    clear_padding,
    column,
    document_ends,
    widen,
)
from .call import pallas_call
from .channel_decay import LEVELS, SUBLANES, pair_masks, token_ranges
from .decay import chunk_documents
from .dots import NT, TN, dot, pieces
from .heads import HeadWriter, move_lanes, own_state, place_lanes, place_state, read_head
from .kda_pairs import decay_tokens, scaling, score_gradients
from .keys import KeyGradientWriter, read_keys
from .lockstep import interleaved
from .tuning import vector_dtype

CHUNK_SKEW = 6
HEAD_SKEW = 3


def backward(
    blocks: Blocks,
    options: Options,
    prefetched: tuple[Array, ...],
    q: Float[Array, "B T H*K"],
    k: Float[Array, "B T H*K"],
    g: Float[Array, "B T HV*K"],
    beta: Float[Array, "B HV/heads heads S"],
    row_document: Int[Array, "B 1 S"] | None,
    do: Float[Array, "B T HV*V"],
    residuals: tuple[Array, Array, Array, Array],
    dstates: Float[Array, "B N HV K V"],
) -> list[Array]:
    """Gradients of q, k, v, g, beta and of the initial states; `residuals`: S, T, A_q, v_new.

    Those of q and k are `[B, T, sharing * H * K]`, and float32 if they remain to be summed.
    """
    dq = jax.ShapeDtypeStruct(
        (*q.shape[:2], q.shape[2] * blocks.sharing),
        q.dtype if blocks.sharing == 1 else jnp.float32,
    )
    constants = pair_masks(vector_dtype(q.dtype)), token_ranges(jnp.bfloat16)
    grid_spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=len(prefetched),
        grid=blocks.grid,
        in_specs=[
            *(pl.BlockSpec(x.shape, lambda *_, n=x.ndim: (0,) * n) for x in constants),
            blocks.keys(),
            blocks.keys(),
            blocks.channel_gates(),
            blocks.gates(),
            None if row_document is None else blocks.row_document(),
            blocks.values(),
            *(blocks.per_chunk(*x.shape[3:]) for x in residuals),
            blocks.states(),
        ],
        out_specs=[
            blocks.key_gradients(),
            blocks.key_gradients(),
            blocks.values(),
            blocks.channel_gates(),
            blocks.gates(),
            blocks.states(),
        ],
        scratch_shapes=[blocks.carried()],
    )
    operands = (*prefetched, *constants, q, k, g, beta, row_document, do, *residuals, dstates)
    return pallas_call(
        over_batch_rows(blocks, functools.partial(_row, blocks, options), shared=5),
        grid_spec=grid_spec,
        out_shape=[
            dq,
            dq,
            jax.ShapeDtypeStruct(do.shape, do.dtype),
            jax.ShapeDtypeStruct(g.shape, g.dtype),
            jax.ShapeDtypeStruct(beta.shape, beta.dtype),
            jax.ShapeDtypeStruct(dstates.shape, dstates.dtype),
        ],
        input_output_aliases={len(jax.tree.leaves(operands)) - 1: 5},
        compiler_params=blocks.compiler_params,
        name="kda_backward",
    )(*operands)


def _row(
    blocks,
    options,
    row,
    documents,
    padding,
    chunk_ends,
    masks,
    ranges,
    q,
    k,
    g,
    beta,
    row_document,
    do,
    chunk_states,
    inverses,
    attentions,
    new_values,
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

    clear_padding(blocks, row, padding, row_document, q, k, g, do)
    clear_missing_chunks(blocks, chunk_states, inverses, attentions, new_values)
    dtype = q.dtype
    precision = options.precision if dtype == jnp.float32 else jax.lax.Precision.HIGH
    product = functools.partial(dot, precision=precision)
    scaled = scaling(dtype)
    key_lanes, value_lanes = blocks.state_lanes
    key_gradients = KeyGradientWriter(dq, dk, blocks)
    dv_writer, dg_writer = HeadWriter(dv, blocks.value_size), HeadWriter(dg, blocks.key_size)

    @functools.cache
    def documents_of(chunk):
        return chunk_documents(blocks, row, chunk, chunk_ends, row_document)

    @functools.cache
    def key_head(chunk, j):
        qj, kj, norms = read_keys(q, k, chunk, j, blocks, qk_l2norm=options.qk_l2norm)
        return (qj.astype(jnp.float32), kj.astype(jnp.float32)), norms

    def value_head(chunk, h):
        rows, j = chunk_rows(chunk), h // blocks.group
        betas = widen(column(beta[h : h + 1, rows]), value_lanes)
        keys, norms = key_head(chunk, j)
        qh, kh = options.scale * keys[0], keys[1]
        gh = move_lanes(read_head(g, chunk, h, blocks.key_size), h, j, blocks.key_size)
        document = documents_of(chunk)
        levels = decay_tokens(qh, kh, gh, document, scaled)
        whole = levels[LEVELS]
        doh = read_head(do, chunk, h, blocks.value_size)
        v_new = place_lanes(new_values[h, chunk], h, blocks.value_size)
        before, dafter = place_state(chunk_states[h, chunk], h, blocks), dstate[h]
        terms = [dafter] if dtype == jnp.float32 else pieces(dafter, 2)
        dv_new = product(
            jnp.concatenate([attentions[h, chunk].T] + [whole.keys] * len(terms), axis=1),
            jnp.concatenate([doh, *terms]),
        )
        yield
        derror = product(inverses[h, chunk].T, dv_new.astype(dtype))
        yield
        dvh = betas * derror
        dv_writer.write(chunk, h, dvh)
        drows = jnp.concatenate([doh, (-dvh).astype(dtype)])
        total = jnp.broadcast_to(whole.since[CHUNK - 1 :], (value_lanes, key_lanes)).T
        dbefore = total * dafter
        reads = jnp.concatenate([whole.queries, whole.readers])
        dstate[h] = dbefore + product(reads, drows, contraction=TN)
        yield
        dreads = whole.since * product(drows, before, contraction=NT).reshape(2, CHUNK, -1)
        yield
        dkeys = product(
            jnp.concatenate([v_new] * len(terms), axis=1),
            jnp.concatenate(terms, axis=1),
            contraction=NT,
        )
        dkeys = whole.until * dkeys
        yield
        dscores = product(drows, v_new, contraction=NT).reshape(2, CHUNK, CHUNK)
        yield
        summands = jnp.concatenate([dbefore * before, derror * v_new]).astype(dtype)
        ones = jnp.ones((SUBLANES, value_lanes), jnp.bfloat16)
        sums = product(ones, summands, contraction=NT)[:1]
        yield
        dbeta[h : h + 1, rows] = sums[:, key_lanes:] / beta[h : h + 1, rows]
        if document.first is not None:
            dscores = document.summed * dscores
        dqh, dkh, exponents = yield from score_gradients(
            levels, qh, kh, dscores, masks, product, scaled
        )
        of_token = exponents[0]
        summed = [*exponents[1:], qh * dreads[0] + kh * dreads[1], kh * dkeys]
        summed = jnp.concatenate([x.astype(dtype) for x in summed])
        dgh = of_token + product(ranges[...], summed) + sums[:, :key_lanes]
        yield
        dgh = jnp.where(gh > 0, 0.0, dgh)
        dg_writer.write(chunk, h, move_lanes(dgh, j, h, blocks.key_size))
        dqh = options.scale * (dqh + dreads[0])
        key_gradients.add(chunk, j, keys, norms, dqh, dkh + dreads[1] + dkeys)

    yield interleaved(
        (
            interleaved([value_head(chunk, h) for h in range(blocks.heads)], HEAD_SKEW)
            for chunk in reversed(range(blocks.chunks))
        ),
        CHUNK_SKEW,
    )

    if row_document is not None:
        clear_padding(blocks, row, padding, row_document, dq, dk, dv, dg)

    @pl.when(first)
    def _():
        for h in range(blocks.heads):
            dinitial_state[h] = own_state(dstate[h], h, blocks)
