"""Which parameters an optimizer must not decay, and which must stay in float32."""

from typing import Any

import jax

FLOAT32 = frozenset({"A_log", "dt_bias", "scale"})
UNDECAYED = FLOAT32 | {"bias"}


def weight_decay_mask(parameters: Any) -> Any:
    """True where weight decay belongs: not on `A_log`, `dt_bias`, norm scales and biases.

    Args:
        parameters: a model, or its state, or a tree of its arrays.

    Returns:
        The same tree with booleans, as `optax.adamw(..., mask=weight_decay_mask)` takes it.

    Example:

    >>> from flax import nnx
    >>> from gla_layers import SimpleGLA, weight_decay_mask
    >>> layer = SimpleGLA(32, num_heads=2, rngs=nnx.Rngs(0))
    >>> mask = weight_decay_mask(nnx.to_pure_dict(nnx.state(layer, nnx.Param)))
    >>> mask["q_proj"], mask["gk_proj"]["bias"], mask["o_norm"]
    ({'kernel': True}, False, {'scale': False})
    """
    return _mask(parameters, lambda name: name not in UNDECAYED)


def float32_mask(parameters: Any) -> Any:
    """True where a parameter must stay float32 when the rest is cast to a narrower type.

    Args:
        parameters: a model, or its state, or a tree of its arrays.

    Returns:
        The same tree with booleans.

    Example:

    >>> from flax import nnx
    >>> from gla_layers import GatedDeltaNet, float32_mask
    >>> layer = GatedDeltaNet(32, num_heads=2, head_dim=8, rngs=nnx.Rngs(0))
    >>> mask = float32_mask(nnx.to_pure_dict(nnx.state(layer, nnx.Param)))
    >>> mask["q_proj"], mask["A_log"], mask["o_norm"]
    ({'kernel': False}, True, {'scale': True})
    """
    return _mask(parameters, lambda name: name in FLOAT32)


def _mask(parameters, predicate):
    def leaf(path, _):
        names = [str(getattr(key, "key", getattr(key, "name", ""))) for key in path]
        name = next((name for name in reversed(names) if name not in ("value", "raw_value")), "")
        return predicate(name)

    return jax.tree_util.tree_map_with_path(leaf, parameters)
