"""AdamW as language models are trained: warmup and cosine, clipping, decay of matrices alone.

A batch whose gradient is no number is skipped: parameters and moments stay as they are.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import optax
from parameters import is_any, name_of

from gla_layers import weight_decay_mask


def make_optimizer(
    *,
    learning_rate: float,
    warmup_steps: int,
    steps: int,
    weight_decay: float = 0.1,
    clip_norm: float = 1.0,
    accumulate: int = 1,
) -> optax.GradientTransformation:
    """The optimizer of a run of `steps` updates.

    Args:
        learning_rate: at its peak, after the warmup; a tenth of it remains at the end.
        warmup_steps: updates until the peak.
        steps: updates in all.
        weight_decay: of the matrices; gates, biases and norm scales are left alone.
        clip_norm: the most that a gradient's norm may be.
        accumulate: batches whose gradients are averaged for one update.
    """
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, learning_rate, warmup_steps, steps, end_value=0.1 * learning_rate
    )
    optimizer = optax.chain(
        optax.clip_by_global_norm(clip_norm),
        optax.adamw(
            schedule,
            b2=0.95,
            weight_decay=weight_decay,
            mask=weight_decay_mask,
            mu_dtype=jnp.float32,
        ),
    )
    if accumulate == 1:
        in_their_type = optax.stateless(optax.tree.cast_like)
        never = jnp.iinfo(jnp.int32).max
        return optax.apply_if_finite(optax.chain(optimizer, in_their_type), never)
    batches = optax.MultiSteps(optimizer, accumulate, should_skip_update_fn=optax.skip_not_finite)
    return batches.gradient_transformation()


def freeze(
    optimizer: optax.GradientTransformation, patterns: Sequence[str]
) -> optax.GradientTransformation:
    """An optimizer that leaves parameters as they are whose name matches one of the globs.

    Their gradients do not count for the norm that is clipped, and they have no moments.
    """

    def labels(parameters):
        return jax.tree.map_with_path(
            lambda path, _: "frozen" if is_any(name_of(path), patterns) else "trained", parameters
        )

    return optax.partition({"trained": optimizer, "frozen": optax.set_to_zero()}, labels)
