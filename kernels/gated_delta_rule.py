"""Gated delta rule: the op of Gated DeltaNet."""

from typing import Unpack

import jax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from . import arguments, reference
from .operation import CallOptions, Operation, clamp_decay
from .recurrent import RecurrentOperation
from .tpu import gated_delta_rule as tpu
from .xla import gated_delta_rule as xla

_chunk = Operation(
    "chunk_gated_delta_rule",
    reference.gated_delta_rule,
    {
        "pallas_tpu": tpu.implementation,
        "xla": xla.implementation,
    },
)
_recurrent = RecurrentOperation("recurrent_gated_delta_rule", reference.gated_delta_rule)


def chunk_gated_delta_rule(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T HV V"],
    g: Float[Array, "B T HV"],
    beta: Float[Array, "B T HV"],
    *,
    scale: float | None = None,
    initial_state: Float[Array, "B *N HV K V"] | None = None,
    output_final_state: bool = False,
    segment_ids: Int[Array, "B T"] | None = None,
    cu_seqlens: Int[Array, " N+1"] | None = None,
    max_num_segments: int | None = None,
    qk_l2norm: bool = False,
    precision: jax.lax.Precision | str | None = None,
    implementation: str | None = None,
    num_splits: int | None = None,
    partition: PartitionSpec | None = None,
) -> tuple[Float[Array, "B T HV V"], Float[Array, "B *N HV K V"] | None]:
    """Run the gated delta rule over whole sequences.

    Per batch row and value head, with a state `S` `[K, V]`:

        S <- exp(g_t) S
        S <- S + beta_t k_t (v_t - S^T k_t)^T
        o_t = S^T (scale q_t)

    Args:
        q: queries `[B, T, H, K]`.
        k: keys `[B, T, H, K]`.
        v: values `[B, T, HV, V]`, HV a multiple of H; value head j reads key head `j // (HV // H)`.
        g: natural-log decay per token, at most 0 and down to -inf. A value above 0 acts as 0,
            one below -128 as -128, which leaves nothing in float32; both get gradient 0.
        beta: write strength; (0, 1), or (0, 2) for negative eigenvalues, in practice.
        scale: multiplies q; `K**-0.5` by default.
        initial_state: `[B, HV, K, V]`, with packing the state of each row's first document; or,
            with packing, `[B, N, HV, K, V]`, one for each document.
        output_final_state: whether to return the state after the last token, with packing after
            each document's last.
        segment_ids: packing: the state starts afresh where the id differs from the token before;
            0 is padding, which gives `o = 0` and leaves the state alone.
        cu_seqlens: packing in the other notation, for `B = 1`: document n holds the tokens from
            `cu_seqlens[n]` up to `cu_seqlens[n + 1]`. An empty document keeps its state. Offsets
            that turn out, in a traced call, not to rise from 0 to at most T give NaN throughout.
        max_num_segments: documents a row to return states for, with `segment_ids`. A row that
            turns out, in a traced call, to hold more gets NaN states.
        qk_l2norm: divide q and k by their norms, `x * rsqrt(sum(x**2) + 1e-6)`, in float32.
        precision: of the dots. None takes bfloat16 operands where q, k and v are all bfloat16,
            and float32-accurate dots for anything else. Any other takes float32 operands, whatever
            q, k and v are.
        implementation: "pallas_tpu" (interpreted, slowly, where there is no TPU), "xla" (any
            backend), "reference" (token by token) or None, the best for the platform that the
            program is lowered for.
        num_splits: stretches that each row is cut into, which a core then works on side by side;
            1 leaves rows whole. None cuts long rows of very few heads where that is faster on a
            TPU, if the call is not differentiated. A row then has one state.
        partition: how `[B, T, heads]` are split over the mesh in context. Needed where the mesh
            has Auto axes; with Explicit ones the arrays' types tell it. H and HV are both to
            divide by the size of the heads' axes. Devices along the axes of T exchange one map
            `[K, K + V]` a head, forward and backward; a row then has one state.

    Returns:
        The outputs `[B, T, HV, V]` in v's dtype; and the final state, `[B, HV, K, V]` or with
        packing `[B, N, HV, K, V]`, in float32 (float64 of float64 arguments), or None without
        `output_final_state`.

    Raises:
        ValueError: an argument's shape, dtype or combination is wrong.

    Note:
        No token sees a later one or another document, as long as all inputs but g are finite: what
        is not (a NaN in g included) may reach all tokens of its row from 127 before it on, as
        matrix products multiply it by 0.

    Source: Yang et al., "Gated Delta Networks" (arXiv:2412.06464), and flash-linear-attention's
    pull request 433 for the chunked form with one inverse.

    Example:

    >>> import jax.numpy as jnp
    >>> from gla_layers.kernels import chunk_gated_delta_rule
    >>> q = k = jnp.ones((1, 5, 2, 16))
    >>> v = jnp.ones((1, 5, 4, 32))
    >>> g, beta = jnp.full((1, 5, 4), -0.1), jnp.full((1, 5, 4), 0.5)
    >>> o, state = chunk_gated_delta_rule(
    ...     q, k, v, g, beta, qk_l2norm=True, output_final_state=True)
    >>> o.shape, state.shape
    ((1, 5, 4, 32), (1, 4, 16, 32))
    """
    return _chunk(
        _tokens(q, k, v, g, beta),
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        segment_ids=segment_ids,
        cu_seqlens=cu_seqlens,
        max_num_segments=max_num_segments,
        qk_l2norm=qk_l2norm,
        precision=precision,
        implementation=implementation,
        num_splits=num_splits,
        partition=partition,
    )


def recurrent_gated_delta_rule(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T HV V"],
    g: Float[Array, "B T HV"],
    beta: Float[Array, "B T HV"],
    **options: Unpack[CallOptions],
) -> tuple[Float[Array, "B T HV V"], Float[Array, "B *N HV K V"] | None]:
    """`chunk_gated_delta_rule` one token after another, for a few tokens from a state (decoding).

    Takes the same arguments, makes the same promises and computes in float32. The implementations
    "pallas_tpu" and "xla" are for one token a row, neither packed nor float64; None takes the
    definition for all else. The kernel is for heads of 128 channels or a multiple: others are
    computed in plain JAX where it is asked for.

    Example:

    >>> import jax.numpy as jnp
    >>> from gla_layers.kernels import recurrent_gated_delta_rule
    >>> q = k = v = jnp.ones((1, 1, 2, 16))
    >>> g, beta = jnp.full((1, 1, 2), -0.1), jnp.full((1, 1, 2), 0.5)
    >>> state = jnp.zeros((1, 2, 16, 16))
    >>> o, state = recurrent_gated_delta_rule(
    ...     q, k, v, g, beta, initial_state=state, output_final_state=True)
    >>> o.shape, state.shape
    ((1, 1, 2, 16), (1, 2, 16, 16))
    """
    return _recurrent(_tokens(q, k, v, g, beta), **options)


def _tokens(q, k, v, g, beta):
    arguments.check_tokens(q, k, v, g=(g, False), beta=(beta, False))
    return q, k, v, clamp_decay(g), beta
