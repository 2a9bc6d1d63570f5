"""Next-token cross-entropy that never holds the logits of a whole batch.

    loss_t = logsumexp_v(h_t . W_v) - h_t . W_{target_t}

With hidden states `h` `[B, T, D]` and a head `W` `[D, vocab]`, the logits are made for one chunk of
positions at a time, `[B, C, vocab]`, in a loop whose body is rematerialised: nothing of a chunk's
logits is saved, the backward pass makes them again. Chunks are cut along T, not along the
flattened batch, so that a batch sharded over devices keeps all of them at work in every chunk.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from .configuration import check_options, sizes
from .kernels.arguments import check_float, check_integer


def chunked_cross_entropy(
    hidden: Float[Array, "B T D"],
    head: Float[Array, "D vocab"],
    targets: Int[Array, "B T"],
    *,
    chunk_size: int = 128,
    precision: jax.lax.Precision | str | None = None,
) -> Float[Array, "B T"]:
    """Cross-entropy of every position in nats, with `[B, chunk_size, vocab]` logits at a time.

    Args:
        hidden: hidden states `[B, T, D]`; the logits take their dtype as operands and accumulate
            in float32.
        head: output projection `[D, vocab]`. Its gradient accumulates over the chunks in its own
            dtype, so keep it in float32.
        targets: token ids `[B, T]` in `[0, vocab)`; any other gives NaN, in the gradients too.
        chunk_size: positions whose logits are held at one time.
        precision: of the dots.

    Returns:
        `[B, T]` float32.

    Raises:
        ValueError: an argument's shape or value is wrong.

    Example:

    >>> import jax.numpy as jnp
    >>> from gla_layers.cross_entropy import chunked_cross_entropy
    >>> hidden, head = jnp.zeros((2, 300, 8)), jnp.zeros((8, 256))
    >>> loss = chunked_cross_entropy(hidden, head, jnp.zeros((2, 300), jnp.int32))
    >>> loss.shape, round(float(loss[0, 0]), 4)  # log(256)
    ((2, 300), 5.5452)
    """
    _check(hidden, head, targets, chunk_size, precision)
    length = targets.shape[1]
    targets = targets.astype(jnp.result_type(targets.dtype, jnp.int32))
    hidden, targets = (_split(x, min(chunk_size, length)) for x in (hidden, targets))

    @jax.checkpoint
    def chunk_losses(chunk):
        return _cross_entropy(*chunk, head, precision)

    losses = jax.lax.map(chunk_losses, (hidden, targets))
    losses = jnp.moveaxis(losses, 0, 1)
    batch, chunks, chunk_size = losses.shape
    return losses.reshape(batch, chunks * chunk_size)[:, :length]


def _cross_entropy(hidden, targets, head, precision):
    logits = jnp.einsum(
        "btd,dv->btv",
        hidden,
        head.astype(hidden.dtype),
        precision=precision,
        preferred_element_type=jnp.float32,
    )
    # A masked sum, where indexing would gather a vocabulary that is sharded over devices.
    is_target = jax.lax.broadcasted_iota(targets.dtype, logits.shape, 2) == targets[..., None]
    target_logit = jnp.sum(jnp.where(is_target, logits, 0), axis=-1)
    known = (targets >= 0) & (targets < head.shape[1])
    return (jax.nn.logsumexp(logits, axis=-1) - target_logit) * jnp.where(known, 1, jnp.nan)


def _split(x, chunk_size):
    """`[B, T, ...]` to `[chunks, B, chunk_size, ...]`, padded with zeros."""
    batch, length, *rest = x.shape
    chunks = -(-length // chunk_size)
    x = jnp.pad(x, ((0, 0), (0, chunks * chunk_size - length)) + ((0, 0),) * len(rest))
    return jnp.moveaxis(x.reshape(batch, chunks, chunk_size, *rest), 1, 0)


def _check(hidden, head, targets, chunk_size, precision):
    check_float("hidden", hidden)
    check_float("head", head)
    check_integer("targets", targets)
    check_options(precision=precision)
    sizes(chunk_size=chunk_size)
    if hidden.ndim != 3 or hidden.shape[1] < 1:
        raise ValueError(f"hidden must be [B, T, D] with T >= 1, got shape {hidden.shape}")
    if head.ndim != 2 or head.shape[0] != hidden.shape[2]:
        raise ValueError(
            f"head must be [D, vocab] with D = {hidden.shape[2]} as hidden has it, "
            f"got shape {head.shape}"
        )
    if targets.shape != hidden.shape[:2]:
        raise ValueError(
            f"targets must be [B, T] = {list(hidden.shape[:2])}, got shape {targets.shape}"
        )
