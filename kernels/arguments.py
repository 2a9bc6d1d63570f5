"""Checks of what callers pass to the ops: the argument, what came, and what is expected."""

import math
import numbers
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array

MAX_HEAD_SIZE = 256
FLOATS = ("bfloat16", "float16", "float32", "float64")
IMPLEMENTATIONS = (None, "pallas_tpu", "xla", "reference")
PRECISIONS = "None or a jax.lax.Precision, or its name such as 'highest'"


def check_tokens(q: Array, k: Array, v: Array, **per_token: tuple[Array, bool]) -> None:
    """Check q, k, v and the named arrays that have one entry per token and value head.

    Args:
        q: `[B, T, H, K]`.
        k: `[B, T, H, K]`.
        v: `[B, T, HV, V]`.
        **per_token: by argument name, the array and whether it has a key axis: `[B, T, HV, K]`
            if so, else `[B, T, HV]`.

    Raises:
        ValueError: naming the argument, what came and what is expected.
    """
    for name, x in {"q": q, "k": k, "v": v}.items():
        check_float(name, x)
        if x.ndim != 4:
            raise ValueError(f"{name} must be [B, T, heads, size], got shape {x.shape}")
        if not 1 <= x.shape[3] <= MAX_HEAD_SIZE:
            raise ValueError(
                f"{name} must have a head size of 1 to {MAX_HEAD_SIZE}, got shape {x.shape}"
            )
        if x.shape[2] < 1:
            raise ValueError(f"{name} must have at least one head, got shape {x.shape}")
    if k.shape != q.shape:
        raise ValueError(f"k must have q's shape {q.shape}, got {k.shape}")
    batch, length, key_heads, key_size = k.shape
    if v.shape[:2] != (batch, length):
        raise ValueError(f"v must begin with q's [B, T] = {[batch, length]}, got shape {v.shape}")
    value_heads = v.shape[2]
    if value_heads % key_heads:
        raise ValueError(
            f"v must have a multiple of q's {key_heads} heads, got {value_heads} heads"
        )
    for name, (x, per_channel) in per_token.items():
        check_float(name, x)
        expected = (batch, length, value_heads) + ((key_size,) if per_channel else ())
        if x.shape != expected:
            letters = "[B, T, HV, K]" if per_channel else "[B, T, HV]"
            raise ValueError(f"{name} must be {letters} = {list(expected)}, got shape {x.shape}")


def check_head_decay(g: Array | None, g_gamma: Array | None, value_heads: int) -> None:
    """Check SimpleGLA's constant decay per head, `[HV]`, which excludes a decay per token."""
    if g_gamma is None:
        return
    if g is not None:
        raise ValueError("g and g_gamma are both given; pass the decay per token or per head")
    check_float("g_gamma", g_gamma)
    if g_gamma.shape != (value_heads,):
        raise ValueError(f"g_gamma must be [HV] = [{value_heads}], got shape {g_gamma.shape}")


def check_options(
    scale: float | None,
    precision: jax.lax.Precision | str | None,
    implementation: str | None,
    qk_l2norm: bool,
    output_final_state: bool,
) -> None:
    """Check the options that every op takes.

    Raises:
        ValueError: naming the argument, what came and what is expected.
    """
    if scale is not None and not is_finite_number(scale):
        raise ValueError(f"scale must be None or a finite number, got {scale!r}")
    check_implementation(implementation)
    check_flags(qk_l2norm=qk_l2norm, output_final_state=output_final_state)
    if not is_precision(precision):
        raise ValueError(f"precision must be {PRECISIONS}, got {precision!r}")


def check_implementation(implementation: str | None) -> None:
    """Check the name of an implementation.

    Raises:
        ValueError: showing what came and what is expected.
    """
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation must be one of {IMPLEMENTATIONS}, got {implementation!r}")


def check_packing(
    batch: int,
    length: int,
    segment_ids: Array | None,
    cu_seqlens: Array | None,
    max_num_segments: int | None,
) -> None:
    """Check `segment_ids` `[B, T]`, or `cu_seqlens` `[N + 1]` for one row.

    What a traced array holds cannot be checked; where values are known, they are.

    Raises:
        ValueError: naming the argument, what came and what is expected.
    """
    if segment_ids is not None and cu_seqlens is not None:
        raise ValueError("segment_ids and cu_seqlens are both given; pass one of them")
    if max_num_segments is not None:
        if segment_ids is None:
            raise ValueError("max_num_segments is given without segment_ids, which it belongs to")
        if not is_integer(max_num_segments) or max_num_segments < 1:
            raise ValueError(
                f"max_num_segments must be an integer of at least 1, got {max_num_segments!r}"
            )
    if segment_ids is not None:
        check_integer("segment_ids", segment_ids)
        if segment_ids.shape != (batch, length):
            raise ValueError(
                f"segment_ids must be [B, T] = {[batch, length]}, got shape {segment_ids.shape}"
            )
    if cu_seqlens is not None:
        check_integer("cu_seqlens", cu_seqlens)
        if batch != 1:
            raise ValueError(f"cu_seqlens needs a batch of 1, got q with a batch of {batch}")
        if cu_seqlens.ndim != 1 or cu_seqlens.shape[0] < 2:
            raise ValueError(
                f"cu_seqlens must be [N + 1] with N >= 1, got shape {cu_seqlens.shape}"
            )
        if is_concrete(cu_seqlens):
            offsets = np.asarray(cu_seqlens)
            falls = np.any(offsets[1:] < offsets[:-1])
            if offsets[0] != 0 or falls or offsets[-1] > length:
                raise ValueError(
                    f"cu_seqlens must rise from 0 to at most T = {length}, got {offsets.tolist()}"
                )


def check_num_splits(num_splits: int | None) -> None:
    """Check the number of stretches that a row is cut into.

    Raises:
        ValueError: naming the argument, what came and what is expected.
    """
    if num_splits is not None and (not is_integer(num_splits) or num_splits < 1):
        raise ValueError(f"num_splits must be None or an integer of at least 1, got {num_splits!r}")


def check_partition(partition: PartitionSpec | None) -> None:
    """Check the `PartitionSpec` of `[B, T, heads]`.

    Raises:
        ValueError: naming the argument, what came and what is expected.
    """
    if partition is None:
        return
    if not isinstance(partition, PartitionSpec) or len(partition) > 3:
        raise ValueError(
            f"partition must be None or a PartitionSpec of [B, T, heads], got {partition!r}"
        )


def check_initial_state(
    initial_state: Array | None, state_shape: tuple[int, ...], num_documents: int | None
) -> None:
    """Check `[B, HV, K, V]` or, for N documents a row, `[B, N, HV, K, V]`.

    Raises:
        ValueError: naming the argument, what came and what is expected.
    """
    if initial_state is None:
        return
    check_float("initial_state", initial_state)
    batch, *rest = state_shape
    accepted = [tuple(state_shape)]
    if num_documents is not None:
        accepted.append((batch, num_documents, *rest))
    if initial_state.shape not in accepted:
        shapes = " or ".join(str(list(shape)) for shape in accepted)
        raise ValueError(f"initial_state must be {shapes}, got shape {initial_state.shape}")


def check_flags(**flags: bool) -> None:
    """Check that the named arguments are True or False.

    Raises:
        ValueError: naming the argument and what came.
    """
    for name, flag in flags.items():
        if not isinstance(flag, (bool, np.bool_)):
            raise ValueError(f"{name} must be True or False, got {flag!r}")


def is_integer(x: Any) -> bool:
    """Whether x is an integer of Python or numpy; True and False are none."""
    return isinstance(x, numbers.Integral) and not isinstance(x, bool)


def is_finite_number(x: Any) -> bool:
    """Whether x is a finite real number of Python or numpy; True and False are none."""
    return isinstance(x, numbers.Real) and not isinstance(x, bool) and math.isfinite(x)


def is_precision(x: Any) -> bool:
    """Whether x is a precision that every matrix product of the library takes."""
    if isinstance(x, str):
        try:
            x = jax.lax.Precision(x)
        except ValueError:
            return False
    return x is None or isinstance(x, jax.lax.Precision)


def is_float_dtype(x: Any) -> bool:
    """Whether x is, or names, a dtype that the ops take."""
    try:
        return x is not None and jnp.dtype(x).name in FLOATS
    except TypeError:
        return False


def check_activation(activation: Any) -> None:
    """Raise a ValueError if it is no function."""
    if not callable(activation):
        raise ValueError(f"activation must be a function, got {activation!r}")


def float_dtype(name: str, dtype: Any) -> jnp.dtype:
    """The dtype that the named argument is, or names.

    Raises:
        ValueError: it is none that the ops take.
    """
    if not is_float_dtype(dtype):
        raise ValueError(f"{name} must be one of {FLOATS}, got {dtype!r}")
    return jnp.dtype(dtype)


def is_concrete(x: Array) -> bool:
    """Whether x's values are known now, rather than traced."""
    return not isinstance(x, jax.core.Tracer)


def check_float(name: str, x: Array) -> None:
    """Check that the named argument is an array of a type that the ops take.

    Raises:
        ValueError: naming the argument, what came and what is expected.
    """
    if not is_float_dtype(getattr(x, "dtype", None)):
        got = getattr(x, "dtype", type(x).__name__)
        raise ValueError(f"{name} must be an array of one of {FLOATS}, got {got}")


def check_integer(name: str, x: Array) -> None:
    """Check that the named argument is an array of integers.

    Raises:
        ValueError: naming the argument, what came and what was expected.
    """
    if not hasattr(x, "dtype") or not jnp.issubdtype(x.dtype, jnp.integer):
        got = getattr(x, "dtype", type(x).__name__)
        raise ValueError(f"{name} must be an integer array, got {got}")
