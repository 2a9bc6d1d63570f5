"""Names of parameters, and what one model takes over from another."""

import jax
import numpy as np
import pytest
from flax import nnx
from parameters import carry_over, check_frozen, is_any, names

from gla_layers import LanguageModel, LanguageModelConfig


def make_model(mixers, seed=0, hidden_size=8):
    config = LanguageModelConfig(
        vocab_size=11,
        hidden_size=hidden_size,
        num_layers=2,
        intermediate_size=8,
        mixers=mixers,
        mixer_options={name: {"num_heads": 1} for name in ("simple_gla", "attention")},
    )
    return LanguageModel(config, rngs=nnx.Rngs(seed))


def arrays(model):
    values = jax.tree.leaves(nnx.state(model, nnx.Param))
    return dict(zip(names(model), map(np.asarray, values), strict=True))


def test_a_replaced_mixer_stays_fresh_though_names_and_shapes_agree():
    old, new = make_model(("simple_gla",), seed=1), make_model(("simple_gla", "attention"))
    before, initial = arrays(old), arrays(new)
    result = carry_over(old, new, ["layers/1/mixer/*"])
    assert "layers/1/mixer/q_proj/kernel" in result.fresh
    assert "layers/1/mixer/q_proj/kernel" in result.unused
    assert "layers/1/mixer/gk_proj/bias" in result.unused
    assert "layers/1/mixer_norm/scale" in result.loaded
    assert {*result.loaded, *result.fresh} == {*initial}
    assert {*result.loaded, *result.unused} == {*before}
    for name, array in arrays(new).items():
        expected = before if name in result.loaded else initial
        np.testing.assert_array_equal(array, expected[name])


@pytest.mark.parametrize(
    ("new", "message"),
    [
        ({"mixers": ("simple_gla", "attention")}, "layers/1/mixer/gk_proj/bias"),
        ({"mixers": ("simple_gla",), "hidden_size": 16}, "embed/embedding"),
    ],
)
def test_what_differs_unasked_is_an_error(new, message):
    old, new = make_model(("simple_gla",)), make_model(**new, seed=1)
    initial = arrays(new)
    with pytest.raises(ValueError, match=f"but differ in .*{message}"):
        carry_over(old, new, [])
    for name, array in arrays(new).items():
        np.testing.assert_array_equal(array, initial[name])


def test_globs_match_whole_names():
    assert is_any("layers/0/mlp/up_proj/kernel", ["embed/*", "layers/*/mlp/*"])
    assert not is_any("layers/0/mlp_norm/scale", ["mlp*", "layers/*/mlp/*"])


def test_frozen_parameters_must_exist_and_not_be_all():
    model = make_model(("simple_gla",))
    check_frozen(model, ["embed/*", "layers/[01]/mlp/*"])
    with pytest.raises(
        ValueError, match=r"'layers/2/\*' matches none of embed/embedding"
    ) as caught:
        check_frozen(model, ["embed/*", "layers/2/*"])
    # A glob for each kind of parameter, however many layers have it.
    message = str(caught.value)
    assert message.count("layers/*/mlp/up_proj/kernel") == 1
    assert "layers/0/" not in message
    with pytest.raises(ValueError, match="freeze must leave a parameter to train"):
        check_frozen(model, ["*"])
