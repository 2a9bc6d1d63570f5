"""Checks of what callers pass to a token mixer, and what padding means to all of them."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from .kernels.arguments import check_float, check_integer, is_concrete
from .kernels.packing import Packing, keep


def check_inputs(x: Array, hidden_size: int, segment_ids: Array | None) -> None:
    """Check x `[B, T, hidden_size]` and segment_ids `[B, T]`.

    Raises:
        ValueError: naming the argument, what came and what is expected.
    """
    check_float("x", x)
    if x.ndim != 3 or x.shape[2] != hidden_size:
        raise ValueError(f"x must be [B, T, {hidden_size}], got shape {x.shape}")
    check_segment_ids(segment_ids, x.shape[:2])


def check_features(x: Array, size: int) -> None:
    """Check x `[..., size]`.

    Raises:
        ValueError: naming the argument, what came and what is expected.
    """
    check_float("x", x)
    if x.shape[-1:] != (size,):
        raise ValueError(f"x must be [..., {size}], got shape {x.shape}")


def check_segment_ids(segment_ids: Array | None, shape: tuple[int, ...]) -> None:
    """Check segment_ids, where there are some, for tokens of the shape `[B, T]`.

    Raises:
        ValueError: naming the argument, what came and what is expected.
    """
    if segment_ids is None:
        return
    check_integer("segment_ids", segment_ids)
    if segment_ids.shape != shape:
        raise ValueError(
            f"segment_ids must be [B, T] = {list(shape)}, got shape {segment_ids.shape}"
        )


def check_state(state: Any, expected: Any) -> None:
    """Check that a state has the structure, the shapes and the kinds of type of the expected one.

    Raises:
        ValueError: showing what came and what is expected.
    """
    got, wanted = _kinds(state), _kinds(expected)
    if got != wanted:
        raise ValueError(f"state must be as init_state makes it, {wanted}, got {got}")


def mask_padding(
    x: Float[Array, "B T D"], segment_ids: Int[Array, "B T"] | None, *, one_document: bool
) -> Float[Array, "B T D"]:
    """Make padding 0, whatever it holds.

    With `one_document`, as a state belongs to one sequence a row, a row that holds several
    documents becomes NaN where segment_ids are traced.

    Raises:
        ValueError: one_document, and segment_ids are known to hold several in a row.
    """
    if segment_ids is None:
        return x
    if one_document:
        several = _holds_several(segment_ids)
        x = jnp.where(several[:, None, None], jnp.nan, x)
    return keep(segment_ids != 0, x)


def _holds_several(segment_ids: Int[Array, "B T"]) -> Bool[Array, " B"]:
    document = Packing.from_segment_ids(segment_ids).document
    several = jnp.max(document, axis=1, initial=0) > 0
    if is_concrete(several) and several.any():
        raise ValueError(
            "segment_ids must hold one document a row, beside padding, in a call with a state; "
            f"got more in row {int(several.argmax())}"
        )
    return several


def _kinds(tree: Any) -> Any:
    def kind(x):
        if not hasattr(x, "dtype"):
            return type(x).__name__
        name = "float" if jnp.issubdtype(x.dtype, jnp.floating) else x.dtype
        return f"{name}{x.shape}"

    return jax.tree.map(kind, tree)
