"""Prefill and decoding equal the whole text run anew for each token, and choices are as asked."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from sampling import Sampling, decode, generate, pad_left, prefill

from gla_layers import LanguageModel, LanguageModelConfig

MIXERS = {
    "gated_deltanet": {"num_heads": 2, "head_dim": 8},
    "kda": {"num_heads": 2, "head_dim": 8},
    "simple_gla": {"num_heads": 2},
    "attention": {"num_heads": 2},
}
LINEAR = ["gated_deltanet", "kda", "simple_gla"]
HYBRIDS = [(name, "attention") for name in LINEAR]
PROMPTS = [[3], [1, 4, 1, 5, 9, 2, 6], [5, 3, 5]]
GREEDY = Sampling(temperature=0)
NO_TOKEN = -1


def make_model(mixers):
    """A model whose likeliest token is far from the next one."""
    config = LanguageModelConfig(
        vocab_size=11,
        hidden_size=16,
        num_layers=len(mixers),
        intermediate_size=16,
        mixers=mixers,
        mixer_options=MIXERS,
    )
    return LanguageModel(config, kernel_init=nnx.initializers.normal(0.5), rngs=nnx.Rngs(0))


@nnx.jit
def last_logits(model, tokens, segment_ids):
    return model(tokens, segment_ids=segment_ids)[:, -1]


def of_whole_text(model, text):
    """The logits after a text that is run as one row of a fixed length."""
    tokens, segment_ids = pad_left([text, [0] * 16])
    return last_logits(model, tokens, segment_ids)[0]


@pytest.mark.slow
@pytest.mark.parametrize("mixers", HYBRIDS)
def test_logits_are_those_of_the_whole_text(mixers):
    model = make_model(mixers)
    logits, state = prefill(model, *pad_left(PROMPTS), max_new_tokens=4)
    step = nnx.jit(lambda model, tokens, state: model(tokens, state=state))
    texts = [list(prompt) for prompt in PROMPTS]
    for token in range(5):
        expected = [of_whole_text(model, text) for text in texts]
        # float32 sums in another order; the logits are of size 1.
        np.testing.assert_allclose(logits, expected, atol=2e-5)
        new = [(token + 3 * row) % 11 for row in range(3)]
        logits, state = step(model, jnp.array(new)[:, None], state)
        logits = logits[:, -1]
        for text, added in zip(texts, new, strict=True):
            text.append(added)


@pytest.mark.slow
@pytest.mark.parametrize("mixers", HYBRIDS)
def test_prompts_of_a_batch_are_continued_as_each_alone(mixers):
    model = make_model(mixers)
    options = {"max_new_tokens": 8, "stop_token": NO_TOKEN, "sampling": GREEDY}
    together = generate(model, PROMPTS, jax.random.key(0), **options)
    for prompt, row in zip(PROMPTS[:2], together, strict=False):
        alone = generate(model, [prompt], jax.random.key(0), **options)
        np.testing.assert_array_equal(row, alone[0])
    assert len(np.unique(together)) > 2


def test_samples_are_drawn_by_the_logits_of_the_whole_text():
    model = make_model(("simple_gla", "attention"))
    key, sampling = jax.random.key(0), Sampling(temperature=0.7, top_k=5, top_p=0.9)
    options = {"max_new_tokens": 4, "stop_token": NO_TOKEN, "sampling": sampling}
    rows = generate(model, PROMPTS, key, **options)
    texts = [list(prompt) for prompt in PROMPTS]
    for step in range(4):
        logits = jnp.stack([of_whole_text(model, text) for text in texts])
        chosen = sampling.choose(logits, jax.random.fold_in(key, step))
        for text, token in zip(texts, chosen.tolist(), strict=True):
            text.append(token)
    assert [text[-4:] for text in texts] == rows.tolist()


def test_a_row_that_stopped_stays_stopped_while_others_go_on():
    model = make_model(("simple_gla",))
    options = {"max_new_tokens": 12, "sampling": GREEDY}
    free = generate(model, PROMPTS, jax.random.key(0), stop_token=NO_TOKEN, **options).tolist()
    stop_token = next(token for token in free[0] if token not in free[1][:3])
    rows = generate(model, PROMPTS, jax.random.key(0), stop_token=stop_token, **options).tolist()
    for row, expected in zip(rows, free, strict=True):
        length = expected.index(stop_token) if stop_token in expected else 12
        assert row == expected[:length] + [stop_token] * (12 - length)
    assert rows[0] != rows[1]


@pytest.mark.parametrize("mixer", LINEAR)
def test_a_token_costs_the_same_at_any_length(mixer):
    model = make_model((mixer,))

    def state_and_step_flops(prompt_length, max_new_tokens):
        tokens = jax.ShapeDtypeStruct((2, prompt_length), jnp.int32)
        logits, state = nnx.eval_shape(
            lambda model, tokens: prefill(model, tokens, tokens, max_new_tokens=max_new_tokens),
            model,
            tokens,
        )
        options = {"max_new_tokens": max_new_tokens, "stop_token": 0, "sampling": GREEDY}
        program = decode.lower(model, logits, state, jax.random.key(0), **options).compile()
        return state, program.cost_analysis()["flops"]

    assert state_and_step_flops(3, 10) == state_and_step_flops(500, 4000)


def drawn(probabilities, **options):
    """How often each token is chosen."""
    logits = jnp.tile(jnp.log(jnp.array(probabilities)), (4000, 1))
    tokens = Sampling(**options).choose(logits, jax.random.key(0))
    return np.bincount(tokens, minlength=len(probabilities)) / 4000


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"temperature": 1.0}, [0.05, 0.5, 0.15, 0.3]),
        ({"temperature": 0.5}, np.array([0.05, 0.5, 0.15, 0.3]) ** 2 / 0.365),
        ({"temperature": 1e-30}, [0, 1, 0, 0]),
        ({"temperature": 0}, [0, 1, 0, 0]),
        ({"temperature": 1.0, "top_k": 1}, [0, 1, 0, 0]),
        ({"temperature": 1.0, "top_k": 2}, [0, 0.625, 0, 0.375]),
        ({"temperature": 1.0, "top_k": 9}, [0.05, 0.5, 0.15, 0.3]),
        ({"temperature": 1.0, "top_p": 1e-9}, [0, 1, 0, 0]),
        ({"temperature": 1.0, "top_p": 0.79}, [0, 0.625, 0, 0.375]),
        ({"temperature": 1.0, "top_p": 0.81}, np.array([0, 0.5, 0.15, 0.3]) / 0.95),
        # Of the two that top_k leaves, the first has 0.625.
        ({"temperature": 1.0, "top_k": 2, "top_p": 0.6}, [0, 1, 0, 0]),
    ],
)
def test_choices_have_the_probabilities_asked_for(options, expected):
    actual = drawn([0.05, 0.5, 0.15, 0.3], **options)
    np.testing.assert_array_equal(actual > 0, np.array(expected) > 0)
    # Four standard deviations of 4000 draws.
    np.testing.assert_allclose(actual, expected, atol=4 * 0.5 / 4000**0.5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -0.1}, "temperature must be a number from 0 up, got -0.1"),
        ({"temperature": float("nan")}, "temperature must be a number from 0 up, got nan"),
        ({"top_k": 0}, "top_k must be at least 1, got 0"),
        ({"top_p": 0.0}, "top_p must be above 0 and at most 1, got 0.0"),
        ({"top_p": 1.1}, "top_p must be above 0 and at most 1, got 1.1"),
    ],
)
def test_wrong_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**options)
