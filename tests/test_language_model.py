"""The language model: packing, decoding, loss, presets, and wrong configs and calls."""

import dataclasses
import functools
import json
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from gla_layers import LanguageModel, LanguageModelConfig, float32_mask
from tests.programs import arrays

VOCAB = 61
LINEAR = {
    "gated_deltanet": {"num_heads": 2, "head_dim": 8},
    "kda": {"num_heads": 2, "head_dim": 16},
    "simple_gla": {"num_heads": 2},
}
OPTIONS = LINEAR | {"attention": {"num_heads": 2}}
PATTERNS = [(name,) for name in OPTIONS] + [("kda", "attention")]
IDS = ["-".join(pattern) for pattern in PATTERNS]


def make_config(mixers=("gated_deltanet",), **changes):
    fields: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "num_layers": 2,
        "intermediate_size": 48,
        "mixers": mixers,
        "mixer_options": OPTIONS,
    }
    return LanguageModelConfig(**fields | changes)


@functools.cache
def make_model(
    mixers=("gated_deltanet",), *, dtype=None, param_dtype=jnp.float32, remat=False, **changes
):
    """A model of one layer a mixer. It is shared: no test changes one."""
    config = make_config(mixers, **{"num_layers": len(mixers)} | changes)
    types = {"dtype": dtype, "param_dtype": param_dtype}
    options = {"remat": remat, "implementation": "reference", "rngs": nnx.Rngs(0)}
    return LanguageModel(config, **types, **options)


@nnx.jit
def logits_of(model, tokens, state=None):
    return model(tokens, state=state)


@nnx.jit
def losses_of(model, tokens, segment_ids=None):
    return model.token_losses(tokens, segment_ids=segment_ids)


@nnx.jit
def loss_and_gradients(model, tokens, segment_ids=None):
    return nnx.value_and_grad(lambda m: m.loss(tokens, segment_ids=segment_ids))(model)


def random_tokens(batch, length):
    return jax.random.randint(jax.random.key(length), (batch, length), 0, VOCAB)


def close(actual, expected, tolerance=1e-5):
    return np.linalg.norm(actual - expected) <= tolerance * np.linalg.norm(expected)


@pytest.mark.parametrize("mixers", PATTERNS, ids=IDS)
def test_decoding_equals_one_call(mixers):
    model = make_model(mixers)
    tokens = random_tokens(2, 14)
    state = model.init_state(2, max_length=14)
    parts = []
    for start, end in ((0, 13), (13, 14)):
        logits, state = logits_of(model, tokens[:, start:end], state)
        parts.append(logits)
    assert close(np.concatenate(parts, axis=1), logits_of(model, tokens))


@pytest.mark.parametrize("mixers", PATTERNS, ids=IDS)
def test_packed_documents_lose_what_they_lose_alone(mixers):
    """And no target crosses from one to the next, or into padding."""
    model = make_model(mixers)
    tokens = random_tokens(1, 20)
    segment_ids = jnp.array([[1] * 7 + [2] * 1 + [3] * 9 + [0] * 3])
    losses, is_target = model.token_losses(tokens, segment_ids=segment_ids)
    alone = [losses_of(model, tokens[:, a:b])[0] for a, b in ((0, 7), (8, 17))]
    expected = np.zeros((1, 19))
    expected[:, :6], expected[:, 8:16] = alone
    assert close(losses, expected)
    np.testing.assert_array_equal(is_target, expected != 0)


def test_loss_is_the_cross_entropy_of_the_logits():
    model = make_model()
    tokens = random_tokens(2, 12)
    logits = np.float64(logits_of(model, tokens[:, :-1]))
    log_probabilities = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    expected = -np.take_along_axis(log_probabilities, np.asarray(tokens)[:, 1:, None], -1)
    losses, _ = losses_of(model, tokens)
    np.testing.assert_allclose(losses, expected[..., 0], rtol=1e-5)


def test_loss_is_the_mean_over_targets():
    model = make_model()
    tokens = random_tokens(1, 8)
    segment_ids = jnp.array([[1, 1, 1, 2, 2, 2, 2, 0]])
    loss, _ = loss_and_gradients(model, tokens, segment_ids)
    losses, is_target = losses_of(model, tokens, segment_ids)
    assert is_target.sum() == 5
    np.testing.assert_allclose(loss, losses.sum() / 5, rtol=1e-6)


def test_a_batch_of_padding_has_loss_0_and_finite_gradients():
    model = make_model()
    padding = jnp.zeros((1, 8), jnp.int32)
    loss, gradients = loss_and_gradients(model, padding, padding)
    assert loss == 0
    assert all(not leaf.any() for leaf in jax.tree.leaves(gradients))


def test_padding_may_hold_any_number():
    model, segment_ids = make_model(), jnp.asarray([[1, 1, 1, 0, 0]])
    expected = loss_and_gradients(model, jnp.asarray([[1, 2, 3, 0, 0]]), segment_ids)
    actual = loss_and_gradients(model, jnp.asarray([[1, 2, 3, 999, -300]]), segment_ids)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("unknown", [VOCAB, 10 * VOCAB, -1])
@pytest.mark.parametrize("position", [3, 7], ids=["input and target", "target"])
def test_a_traced_token_outside_of_the_vocabulary_makes_the_loss_nan(unknown, position):
    tokens = random_tokens(1, 8).at[0, position].set(unknown)
    loss, gradients = loss_and_gradients(make_model(), tokens)
    assert np.isnan(loss)
    assert all(np.isnan(leaf).any() for leaf in jax.tree.leaves(gradients))
    assert np.isnan(logits_of(make_model(), tokens)[0, position]).all()


@pytest.mark.parametrize("dtype", ["uint8", "int8", "uint32"])
def test_tokens_of_any_integer_type(dtype):
    tokens = random_tokens(1, 8)
    expected = losses_of(make_model(vocab_size=300), tokens)
    for actual, reference in zip(
        losses_of(make_model(vocab_size=300), tokens.astype(dtype)), expected, strict=True
    ):
        np.testing.assert_array_equal(actual, reference)


def test_tokens_of_numpy():
    model, tokens = make_model(), np.arange(5, dtype=np.int64)[None]
    np.testing.assert_array_equal(logits_of(model, tokens), logits_of(model, jnp.arange(5)[None]))
    assert np.isfinite(model.loss(tokens))


def test_loss_never_holds_all_logits():
    model = make_model()
    tokens = random_tokens(2, 301)
    graph, parameters = nnx.split(model)
    program = jax.make_jaxpr(jax.grad(lambda p: nnx.merge(graph, p).loss(tokens)))(parameters)
    with_vocabulary = [x for x in arrays(program.jaxpr) if VOCAB in x.shape]
    assert max(x.size for x in with_vocabulary) == 2 * 128 * VOCAB


def test_rematerialised_blocks_have_the_same_gradients():
    tokens = random_tokens(1, 10)

    def gradients(remat):
        return loss_and_gradients(make_model(("simple_gla",), remat=remat), tokens)[1]

    kept, made_again = (jax.tree.leaves(gradients(remat)) for remat in (False, True))
    assert all(close(a, b, 1e-6) for a, b in zip(made_again, kept, strict=True))


def test_rematerialised_blocks_decode_in_a_loop():
    tokens = random_tokens(1, 5)
    model = make_model(("simple_gla", "attention"), remat=True)

    @nnx.jit
    def decode(model, tokens):
        def step(state, token):
            logits, state = model(token[None, None], state=state)
            return state, logits[0, 0]

        return jax.lax.scan(step, model.init_state(1, max_length=5), tokens)[1]

    expected = logits_of(make_model(("simple_gla", "attention")), tokens)
    assert close(decode(model, tokens[0]), expected[0])


@pytest.mark.parametrize("graph", [True, False], ids=["graph", "tree"])
def test_jit_in_graph_and_tree_mode(graph):
    tokens = random_tokens(1, 6)
    with nnx.set_graph_mode(graph):
        model = LanguageModel(
            make_config(("attention", "kda")), implementation="reference", rngs=nnx.Rngs(0)
        )
        first, state = logits_of(model, tokens[:, :5], model.init_state(1, 6))
        second, _ = logits_of(model, tokens[:, 5:], state)
        assert close(np.concatenate([first, second], 1), logits_of(model, tokens))


def test_bfloat16_computes_in_bfloat16_from_float32_parameters():
    model = make_model(("gated_deltanet", "attention"), dtype=jnp.bfloat16)
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(model))} == {jnp.dtype("float32")}
    tokens = random_tokens(1, 8)
    narrow = logits_of(model, tokens)
    wide = logits_of(make_model(("gated_deltanet", "attention")), tokens)
    assert narrow.dtype == jnp.float32
    assert close(narrow, wide, 2e-2)
    assert not close(narrow, wide, 1e-4)


@pytest.mark.parametrize("mixer", ["gated_deltanet", "kda", "simple_gla", "attention"])
def test_parameters_in_bfloat16_are_those_that_may_be(mixer):
    model = make_model((mixer,), param_dtype=jnp.bfloat16)
    parameters = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    wide = jax.tree.map(lambda x: x.dtype == jnp.float32, parameters)
    assert wide == float32_mask(parameters)


def test_tied_embeddings_have_no_head():
    untied, tied = (make_model(tie_embeddings=tie) for tie in (False, True))
    count = [sum(x.size for x in jax.tree.leaves(nnx.state(m, nnx.Param))) for m in (untied, tied)]
    assert count[0] - count[1] == 32 * VOCAB
    tokens = random_tokens(1, 4)
    _, gradients = loss_and_gradients(tied, tokens)
    assert np.all(np.any(gradients["embed"]["embedding"][...] != 0, axis=1))


def test_matrices_start_normal_with_deviation_0_02():
    model = make_model(hidden_size=256, intermediate_size=256)
    for matrix in (
        model.embed.embedding,
        model.head.kernel,
        model.layers[0].mixer.q_proj.kernel,
        model.layers[0].mixer.o_proj.kernel,
        model.layers[0].mlp.down_proj.kernel,
    ):
        assert 0.018 < float(matrix[...].std()) < 0.022


@pytest.mark.parametrize(
    ("preset", "mixers", "millions"),
    [
        ("tiny", ("gated_deltanet",), 1),
        ("100m", ("gated_deltanet",), 100),
        ("100m", ("kda", "kda", "kda", "attention"), 100),
        ("340m", ("gated_deltanet",), 340),
        ("1.3b", ("gated_deltanet",), 1300),
        ("1.3b", ("kda", "kda", "kda", "attention"), 1100),
        ("1.3b", ("simple_gla",), 1230),
    ],
)
def test_presets_have_the_sizes_of_their_names(preset, mixers, millions):
    config = LanguageModelConfig.preset(preset, mixers=mixers)
    shapes = jax.tree.leaves(nnx.eval_shape(lambda: LanguageModel(config, rngs=nnx.Rngs(0))))
    assert 0.9 < sum(x.size for x in shapes) / 1e6 / millions < 1.1


def test_mixers_repeat_down_the_layers():
    config = make_config(("kda", "kda", "attention"), num_layers=5)
    assert config.layer_mixers == ("kda", "kda", "attention", "kda", "kda")
    names = [type(layer.mixer).__name__ for layer in make_model(("kda", "attention")).layers]
    assert names == ["KDA", "Attention"]


def test_norms_of_what_is_read_and_of_what_is_added():
    model = make_model(("attention", "kda"), post_norm_mixers=("kda",), zero_centered_norms=True)
    tokens = random_tokens(1, 6)
    x = model.embed(tokens)
    first, second = model.layers
    x = x + first.mixer(first.mixer_norm(x))
    x = x + first.mlp(first.mlp_norm(x))
    x = x + second.mixer_norm(second.mixer(x))
    x = x + second.mlp_norm(second.mlp(x))
    assert close(logits_of(model, tokens), model.head(model.norm(x)))
    assert np.all(first.mixer_norm.scale[...] == 0)


def test_config_is_hashable_and_survives_json_types():
    config = make_config()
    fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    fields |= {"mixers": list(config.mixers), "mixer_options": OPTIONS}
    assert LanguageModelConfig(**fields) == config
    assert hash(LanguageModelConfig(**fields)) == hash(config)


def test_a_hybrid_needs_the_length_of_its_cache():
    with pytest.raises(ValueError, match="max_length must be an integer of at least 1, got None"):
        make_model(("kda", "attention")).init_state(1)


def test_numbers_of_numpy_become_those_of_python():
    options = {"kda": {"conv_size": np.int16(4), "expand_v": np.float32(2)}}
    config = make_config(hidden_size=np.int64(32), norm_eps=np.float32(0.5), mixer_options=options)
    assert json.dumps([config.hidden_size, config.norm_eps]) == "[32, 0.5]"
    assert json.dumps(dict(config.mixer_options["kda"])) == '{"conv_size": 4, "expand_v": 2.0}'


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab_size": 0}, "vocab_size must be an integer of at least 1, got 0"),
        ({"hidden_size": 32.0}, "hidden_size must be an integer of at least 1, got 32.0"),
        ({"num_layers": True}, "num_layers must be an integer of at least 1, got True"),
        ({"intermediate_size": "4"}, "intermediate_size must be an integer"),
        ({"mixers": "kda"}, "mixers must be a tuple of names, got 'kda'"),
        ({"mixers": ()}, "mixers must hold from 1 to num_layers = 2 names, got 0"),
        ({"mixers": ("kda",) * 3}, "mixers must hold from 1 to num_layers = 2 names, got 3"),
        ({"mixers": ("kdaa",)}, "'kdaa' is no mixer; did you mean 'kda'?"),
        ({"mixers": ("mamba",)}, "'mamba' is no mixer; expected one of ['attention', "),
        ({"mixer_options": {"gdn": {}}}, "'gdn' is no mixer"),
        ({"mixer_options": {"kda": {"heads": 2}}}, "'heads' is no option of mixer 'kda'"),
        ({"mixer_options": ["kda"]}, "mixer_options must map names to options"),
        (
            {"mixers": ("latent_attention",)},
            "mixer_options of 'latent_attention' must hold ['head_dim', 'kv_rank', ",
        ),
        ({"mixers": None}, "mixers must be a tuple of names, got None"),
        ({"mixer_options": {"kda": None}}, "mixer_options of 'kda' must map names to values, got"),
        ({"mixer_options": {"kda": {"implementation": "xla"}}}, "must leave 'implementation' to"),
        (
            {"mixer_options": {"attention": {"sharding": None}}},
            "must leave 'sharding' to the model",
        ),
        ({"mixer_options": {"kda": {"hidden_size": 8}}}, "must leave 'hidden_size' to the model"),
        ({"mixer_options": {"kda": {"self": 8}}}, "'self' is no option of mixer 'kda'"),
        ({"norm_eps": math.nan}, "norm_eps must be a finite number above 0, got nan"),
        ({"norm_eps": math.inf}, "norm_eps must be a finite number above 0, got inf"),
        ({"post_norm_mixers": "kda"}, "post_norm_mixers must be a tuple of names, got 'kda'"),
        ({"post_norm_mixers": ("kad",)}, "'kad' is no mixer; did you mean 'kda'?"),
        ({"zero_centered_norms": 1}, "zero_centered_norms must be True or False, got 1"),
        ({"tie_embeddings": 1}, "tie_embeddings must be True or False, got 1"),
        ({"norm_eps": 0.0}, "norm_eps must be a finite number above 0, got 0.0"),
        ({"norm_eps": "small"}, "norm_eps must be a finite number above 0, got 'small'"),
    ],
)
def test_wrong_configs_name_the_field(change, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make_config(**change)


def test_a_mistyped_preset_or_field_is_named():
    with pytest.raises(ValueError, match="'tinny' is no preset; did you mean 'tiny'"):
        LanguageModelConfig.preset("tinny")
    with pytest.raises(ValueError, match="'layers' is no field of LanguageModelConfig"):
        LanguageModelConfig.preset("tiny", layers=3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: m(jnp.zeros((4,), jnp.int32)), "tokens must be"),
        (lambda m: m(jnp.zeros((1, 0), jnp.int32)), "tokens must be"),
        (lambda m: m(jnp.zeros((1, 4))), "tokens must be an integer array"),
        (lambda m: m([[1, 2]]), "tokens must be an integer array, got list"),
        (lambda m: m.loss(jnp.zeros((1, 1), jnp.int32)), "tokens must be"),
        (
            lambda m: m(jnp.zeros((1, 4), jnp.int32), segment_ids=jnp.zeros((1, 3), jnp.int32)),
            "segment_ids must be",
        ),
        (lambda m: m(jnp.zeros((1, 4), jnp.int32), state=m.init_state(1) * 2), "state must hold"),
        (lambda m: m(jnp.zeros((1, 4), jnp.int32), state=m.init_state(2)), "state"),
        (lambda m: m(jnp.zeros((1, 4), jnp.int32), state=1), "state must hold .* got int"),
        (
            lambda m: m(jnp.zeros((1, 4), jnp.int32), segment_ids=[[1] * 4]),
            "segment_ids must be an integer array, got list",
        ),
        (
            lambda m: m(jnp.array([[1, VOCAB]])),
            "tokens must be .* below vocab_size = 61, .* got 61",
        ),
        (lambda m: m.loss(jnp.array([[1, 2, -1]])), "tokens must be at least 0 .* got -1"),
        (lambda m: m.token_losses(jnp.array([[1, 2]]), chunk_size=0), "chunk_size must be"),
        (lambda m: LanguageModel({"vocab_size": 3}, rngs=nnx.Rngs(0)), "config must be"),
        (lambda m: LanguageModel(m.config, remat="everything", rngs=nnx.Rngs(0)), "remat must be"),
        (lambda m: LanguageModel(m.config, rngs=None), "rngs must be an nnx.Rngs"),
        (lambda m: LanguageModel(m.config, precision="exact", rngs=nnx.Rngs(0)), "precision must"),
    ],
)
def test_wrong_calls_name_the_argument(call, message):
    with pytest.raises(ValueError, match=message):
        call(make_model())
