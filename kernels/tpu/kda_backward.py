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
products and no time.
"""

import functools
from collections.abc import Generator

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ..implementation import Options
from ..packing import CHUNK
from .blocks import Blocks, chunk_rows, column, widen
from .channel_decay import LEVELS, SUBLANES, pair_masks, token_ranges
from .chunk_scan import scan_chunks
from .dots import NT, TN, dot, pieces
from .heads import HeadWriter, move_lanes, place_lanes, place_state, read_head
from .kda_pairs import Decayed, Product, decay_tokens, scaling, score_gradients
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
    chunk_states: Float[Array, "B HV chunks K V"],
    inverses: Float[Array, "B HV chunks C C"],
    attentions: Float[Array, "B HV chunks C C"],
    new_values: Float[Array, "B HV chunks C V"],
    dstates: Float[Array, "B N HV K V"],
) -> tuple[dict[str, Array], Float[Array, "B N HV K V"]]:
    """dq and dk, see `Blocks.key_gradients`, dv, dg, dbeta, and those of the initial states."""
    inputs = {
        "q": blocks.keys(q),
        "k": blocks.keys(k),
        "g": blocks.channel_gates(g),
        "beta": blocks.gates(beta),
        "row_document": blocks.row_document(row_document),
        "do": blocks.values(do),
        "states": blocks.per_chunk(chunk_states),
        "inverse": blocks.per_chunk(inverses),
        "attention": blocks.per_chunk(attentions),
        "v_new": blocks.per_chunk(new_values),
    }
    outputs = {
        "dq": blocks.key_gradients(q),
        "dk": blocks.key_gradients(q),
        "dv": blocks.values(do),
        "dg": blocks.channel_gates(g),
        "dbeta": blocks.gates(beta),
    }
    return scan_chunks(
        functools.partial(_row, options),
        blocks,
        prefetched,
        inputs,
        outputs,
        dstates,
        constants={
            "masks": pair_masks(vector_dtype(q.dtype)),
            "ranges": token_ranges(jnp.bfloat16),
        },
        name="kda_backward",
    )


def _row(options, row, refs, dstate):
    blocks = row.blocks
    row.clear_padding(refs.q, refs.k, refs.g, refs.do)
    row.clear_missing_chunks(refs.states, refs.inverse, refs.attention, refs.v_new)
    dtype = refs.q.dtype
    precision = options.precision if dtype == jnp.float32 else jax.lax.Precision.HIGH
    product = functools.partial(dot, precision=precision)
    scaled = scaling(dtype)
    key_lanes, value_lanes = blocks.state_lanes
    key_gradients = KeyGradientWriter(refs.dq, refs.dk, blocks)
    dv_writer = HeadWriter(refs.dv, blocks.value_size)
    dg_writer = HeadWriter(refs.dg, blocks.key_size)

    @functools.cache
    def key_head(chunk, j):
        qj, kj, norms = read_keys(refs, chunk, j, blocks, qk_l2norm=options.qk_l2norm)
        return (qj.astype(jnp.float32), kj.astype(jnp.float32)), norms

    def value_head(chunk, h):
        rows, j = chunk_rows(chunk), h // blocks.group
        betas = widen(column(refs.beta[h : h + 1, rows]), value_lanes)
        keys, norms = key_head(chunk, j)
        qh, kh = options.scale * keys[0], keys[1]
        gh = move_lanes(read_head(refs.g, chunk, h, blocks.key_size), h, j, blocks.key_size)
        document = row.chunk_documents(chunk)
        levels = decay_tokens(qh, kh, gh, document, scaled)
        whole = levels[LEVELS]
        doh = read_head(refs.do, chunk, h, blocks.value_size)
        v_new = place_lanes(refs.v_new[h, chunk], h, blocks.value_size)
        before, dafter = place_state(refs.states[h, chunk], h, blocks), dstate[h]
        terms = [dafter] if dtype == jnp.float32 else pieces(dafter, 2)
        dv_new = product(
            jnp.concatenate([refs.attention[h, chunk].T] + [whole.keys] * len(terms), axis=1),
            jnp.concatenate([doh, *terms]),
        )
        yield
        derror = product(refs.inverse[h, chunk].T, dv_new.astype(dtype))
        yield
        dvh = betas * derror
        dv_writer.write(chunk, h, dvh)
        drows = jnp.concatenate([doh, (-dvh).astype(dtype)])
        total = jnp.broadcast_to(whole.since[CHUNK - 1 :], (value_lanes, key_lanes)).T
        dbefore = total * dafter
        reads = jnp.concatenate([whole.queries, whole.readers])
        dstate[h] = dbefore + product(reads, drows, contraction=TN)
        yield
        dreads, dkeys, dscores = yield from _chunk_gradients(
            whole, drows, v_new, before, terms, product
        )
        summands = jnp.concatenate([dbefore * before, derror * v_new]).astype(dtype)
        ones = jnp.ones((SUBLANES, value_lanes), jnp.bfloat16)
        sums = product(ones, summands, contraction=NT)[:1]
        yield
        refs.dbeta[h : h + 1, rows] = sums[:, key_lanes:] / refs.beta[h : h + 1, rows]
        if document.first is not None:
            dscores = document.summed * dscores
        dqh, dkh, exponents = yield from score_gradients(
            levels, qh, kh, dscores, refs.masks, product, scaled
        )
        exponents += [qh * dreads[0] + kh * dreads[1], kh * dkeys]
        dgh = _of_ranges(exponents, refs.ranges, dtype, product) + sums[:, :key_lanes]
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

    if refs.row_document is not None:
        row.clear_padding(refs.dq, refs.dk, refs.dv, refs.dg)


def _chunk_gradients(
    whole: Decayed,
    drows: Float[Array, "2*C V"],
    v_new: Float[Array, "C V"],
    before: Float[Array, "K V"],
    terms: list[Float[Array, "K V"]],
    product: Product,
) -> Generator[None, None, tuple[Array, Array, Array]]:
    """By way of the state, of (q, k as it is read) and of k as it is written; and (dA_q, dA_k).

    `drows` are do and -dv; `terms` add up to dS.
    """
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
    return dreads, dkeys, dscores


def _of_ranges(exponents, ranges, dtype, product):
    """The gradient of g from those of all exponents, in the order of `token_ranges`."""
    of_token, *summed = exponents
    summed = jnp.concatenate([x.astype(dtype) for x in summed])
    return of_token + product(ranges[...], summed)
