"""Sampling from a state equals sampling by running the whole text anew for each token."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from sampling import sample

from gla_layers import LanguageModel, LanguageModelConfig


def test_samples_are_those_of_the_whole_text():
    config = LanguageModelConfig(
        vocab_size=11,
        hidden_size=16,
        num_layers=2,
        intermediate_size=16,
        mixers=("simple_gla", "attention"),
        mixer_options={name: {"num_heads": 2} for name in ("simple_gla", "attention")},
    )
    model = LanguageModel(
        config,
        kernel_init=nnx.initializers.normal(0.5),
        implementation="reference",
        rngs=nnx.Rngs(0),
    )
    prompt, key = jnp.array([[3, 1, 4], [1, 5, 9]]), jax.random.key(0)
    tokens = sample(model, prompt, key, num_tokens=4, temperature=0.7)
    logits_of = nnx.jit(lambda model, text: model(text))
    text = prompt
    for step_key in jax.random.split(key, 4):
        logits = logits_of(model, text)[:, -1]
        token = jax.random.categorical(step_key, logits / 0.7)
        text = jnp.concatenate([text, token[:, None]], axis=1)
    np.testing.assert_array_equal(tokens, text[:, 3:])
    assert len(np.unique(tokens)) > 2
