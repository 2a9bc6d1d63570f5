"""Sampling from a language model: prompts are read at once, new tokens come one at a time.

    logits, state = model(prompts, state)        prefill, chunked ops over whole prompts
    logits, state = model(tokens, state)         decode, recurrent ops, once for each new token

The state of a linear-attention layer has the same size after every token, so that each costs the
same; that of softmax attention has room for all tokens from the beginning.
"""

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int, Int32, PRNGKeyArray

from gla_layers import LanguageModel
from gla_layers.language_model import State


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How a token is chosen by its logits."""

    temperature: float = 0.8
    """Divides the logits; 0 takes the likeliest token."""
    top_k: int | None = None
    """Choose among this many of the likeliest tokens; all by default."""
    top_p: float = 1.0
    """Choose among the likeliest tokens that together have this probability."""

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature must be a number from 0 up, got {self.temperature}")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k must be at least 1, got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, got {self.top_p}")

    def choose(self, logits: Float[Array, "B vocab"], key: PRNGKeyArray) -> Int[Array, " B"]:
        """A token for each row."""
        if self.temperature == 0:
            return jnp.argmax(logits, axis=-1)
        vocab_size = logits.shape[-1]
        logits, tokens = jax.lax.top_k(logits, min(self.top_k or vocab_size, vocab_size))
        # The largest logit is 0 before the division, which then overflows to -inf alone.
        logits = (logits - logits[:, :1]) / self.temperature
        probability = jax.nn.softmax(logits)
        likelier = jnp.cumsum(probability, axis=-1) - probability
        rank = jax.random.categorical(key, jnp.where(likelier < self.top_p, logits, -jnp.inf))
        return jnp.take_along_axis(tokens, rank[:, None], axis=-1)[:, 0]


def generate(
    model: LanguageModel,
    prompts: Sequence[Sequence[int]],
    key: PRNGKeyArray,
    *,
    max_new_tokens: int,
    stop_token: int,
    sampling: Sampling,
) -> Int[Array, "B max_new_tokens"]:
    """Continue prompts, each of its own length.

    Args:
        model: the model.
        prompts: token ids, at least one a prompt.
        key: of the random choices.
        max_new_tokens: tokens to add at most.
        stop_token: what ends a row.
        sampling: how tokens are chosen.

    Returns:
        The new tokens; after a row's first `stop_token` there are only more of them.
    """
    logits, state = prefill(model, *pad_left(prompts), max_new_tokens=max_new_tokens)
    return decode(
        model,
        logits,
        state,
        key,
        max_new_tokens=max_new_tokens,
        stop_token=stop_token,
        sampling=sampling,
    )


def pad_left(
    prompts: Sequence[Sequence[int]],
) -> tuple[Int32[np.ndarray, "B P"], Int32[np.ndarray, "B P"]]:
    """Prompts as rows that end together, and their segment ids: 1, and 0 for padding."""
    width = max(map(len, prompts))
    tokens, segment_ids = np.zeros((2, len(prompts), width), np.int32)
    for i, prompt in enumerate(prompts):
        tokens[i, width - len(prompt) :] = prompt
        segment_ids[i, width - len(prompt) :] = 1
    return tokens, segment_ids


@nnx.jit(static_argnames="max_new_tokens")
def prefill(
    model: LanguageModel,
    tokens: Int[Array | np.ndarray, "B P"],
    segment_ids: Int[Array | np.ndarray, "B P"],
    *,
    max_new_tokens: int,
) -> tuple[Float[Array, "B vocab"], State]:
    """The logits of the first new token, and the state after prompts that are padded left."""
    tokens, segment_ids = jnp.asarray(tokens), jnp.asarray(segment_ids)
    batch_size, length = tokens.shape
    state = model.init_state(batch_size, length + max_new_tokens)
    logits, state = model(tokens, state=state, segment_ids=segment_ids)
    return logits[:, -1], state


@nnx.jit(static_argnames=("max_new_tokens", "stop_token", "sampling"))
def decode(
    model: LanguageModel,
    logits: Float[Array, "B vocab"],
    state: State,
    key: PRNGKeyArray,
    *,
    max_new_tokens: int,
    stop_token: int,
    sampling: Sampling,
) -> Int[Array, "B max_new_tokens"]:
    """New tokens, in one program, until every row has stopped; arguments as for `generate`."""
    batch_size = logits.shape[0]

    def goes_on(carry):
        step, *_, stopped = carry
        return (step < max_new_tokens) & ~jnp.all(stopped)

    def advance(carry):
        step, logits, state, tokens, stopped = carry
        token = sampling.choose(logits, jax.random.fold_in(key, step))
        token = jnp.where(stopped, stop_token, token)
        logits, state = model(token[:, None], state=state)
        tokens = tokens.at[:, step].set(token)
        return step + 1, logits[:, -1], state, tokens, token == stop_token

    tokens = jnp.full((batch_size, max_new_tokens), stop_token, jnp.int32)
    stopped = jnp.zeros(batch_size, bool)
    *_, tokens, _ = jax.lax.while_loop(goes_on, advance, (0, logits, state, tokens, stopped))
    return tokens
