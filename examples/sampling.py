"""Sampling from a language model, one token at a time from a state of constant size."""

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Int, PRNGKeyArray

from gla_layers import LanguageModel


@functools.partial(nnx.jit, static_argnames="num_tokens")
def sample(
    model: LanguageModel,
    prompt: Int[Array, "B P"],
    key: PRNGKeyArray,
    *,
    num_tokens: int,
    temperature: float = 0.8,
) -> Int[Array, "B num_tokens"]:
    """Continue prompts.

    Args:
        model: the model.
        prompt: token ids `[B, P]`, P >= 1.
        key: of the random choices.
        num_tokens: tokens to add.
        temperature: divides the logits.

    Returns:
        The new tokens `[B, num_tokens]`.
    """
    batch, length = prompt.shape
    logits, state = model(prompt, state=model.init_state(batch, length + num_tokens))

    def step(carry, key):
        logits, state = carry
        token = jax.random.categorical(key, logits / temperature)
        logits, state = model(token[:, None], state=state)
        return (logits[:, -1], state), token

    keys = jax.random.split(key, num_tokens)
    _, tokens = jax.lax.scan(step, (logits[:, -1], state), keys)
    return jnp.moveaxis(tokens, 0, 1)
