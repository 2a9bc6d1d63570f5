"""Every wrong configuration and call is one ValueError that names the argument."""

import jax.numpy as jnp
import pytest
from flax import nnx

from gla_layers import KDA, Attention, GatedDeltaNet, ShortConvolution, SimpleGLA

from .mixers import MIXERS, empty_state, inputs, mixer

CONFIGURATIONS = [
    (GatedDeltaNet, {"hidden_size": 0}, r"hidden_size must be an integer of at least 1, got 0"),
    (GatedDeltaNet, {"num_heads": 0}, r"num_heads must be an integer of at least 1, got 0"),
    (GatedDeltaNet, {"head_dim": 1.5}, r"head_dim must be an integer of at least 1, got 1.5"),
    (GatedDeltaNet, {"num_v_heads": 7}, r"num_v_heads must be a multiple of num_heads = 6, got 7"),
    (GatedDeltaNet, {"head_dim": 10, "expand_v": 1.25}, r"expand_v must make .* = 12.5"),
    (GatedDeltaNet, {"head_dim": 10, "expand_v": 0.01}, r"expand_v must make .* = 0.1"),
    (GatedDeltaNet, {"head_dim": 257}, r"head_dim must make key heads of at most 256, got 257"),
    (GatedDeltaNet, {"head_dim": 107, "expand_v": 5}, r"expand_v must make .* 3 equal parts.* 535"),
    (GatedDeltaNet, {"conv_size": 0}, r"conv_size must be an integer of at least 1, got 0"),
    (GatedDeltaNet, {"gate_activation": "softmax"}, r"gate_activation must be one of"),
    (GatedDeltaNet, {"implementation": "cuda"}, r"implementation must be one of .* got 'cuda'"),
    (GatedDeltaNet, {"sharding": "fsdp"}, r"sharding must be a ShardingConfig, got 'fsdp'"),
    (KDA, {"num_v_heads": 17}, r"num_v_heads must be a multiple of num_heads = 16, got 17"),
    (KDA, {"head_dim": 10, "expand_v": 1.25}, r"expand_v must make .* = 12.5"),
    (KDA, {"lower_bound": 0.0}, r"lower_bound must be None or a .* below 0, got 0.0"),
    (KDA, {"safe_gate": True}, r"safe_gate needs a lower_bound in \[-5, 0\), got None"),
    (KDA, {"safe_gate": True, "lower_bound": -6.0}, r"safe_gate needs .* got -6.0"),
    (SimpleGLA, {"num_kv_heads": 3}, r"num_heads must be a multiple of num_kv_heads = 3, got 4"),
    (SimpleGLA, {"num_heads": 3}, r"expand_k must make .* 3 heads = 341.3"),
    (SimpleGLA, {"expand_v": 0.3}, r"expand_v must make .* 4 heads = 76.8"),
    (SimpleGLA, {"feature_map": "cosine"}, r"feature_map must be one of .* got 'cosine'"),
    (SimpleGLA, {"gate_fn": "none"}, r"gate_fn must be one of .* got 'none'"),
    (SimpleGLA, {"gate_logit_normalizer": 0}, r"gate_logit_normalizer must be a .* above 0, got 0"),
    (Attention, {"hidden_size": 10, "num_heads": 3}, r"hidden_size must be a multiple"),
    (Attention, {"hidden_size": 8, "num_heads": 4, "num_kv_heads": 3}, r"num_heads must be"),
    (Attention, {"hidden_size": 9, "num_heads": 3}, r"rope_theta must be None .* head_dim 3"),
    (ShortConvolution, {"features": 0}, r"features must be an integer of at least 1, got 0"),
    (ShortConvolution, {"features": 4, "kernel_size": 0}, r"kernel_size must be an integer"),
    (ShortConvolution, {"features": 4, "activation": "step"}, r"activation must be one of"),
]


@pytest.mark.parametrize(
    ("layer", "options", "message"),
    CONFIGURATIONS,
    ids=[f"{layer.__name__}-{options}" for layer, options, _ in CONFIGURATIONS],
)
def test_configuration(layer, options, message):
    with pytest.raises(ValueError, match=message):
        layer(**options, rngs=nnx.Rngs(0))


CALLS = {
    "rank": (lambda x: x[0], {}, r"x must be \[B, T, 16\], got shape \(12, 16\)"),
    "size": (lambda x: x[..., :9], {}, r"x must be \[B, T, 16\], got shape \(2, 12, 9\)"),
    "dtype": (lambda x: x.astype(int), {}, r"x must be an array of floating type, got int32"),
    "list": (lambda x: [1.0], {}, r"x must be an array of floating type, got list"),
    "ids-shape": (
        lambda x: x,
        {"segment_ids": jnp.ones((2, 11), jnp.int32)},
        r"segment_ids must be \[B, T\] = \[2, 12\], got shape \(2, 11\)",
    ),
    "ids-dtype": (
        lambda x: x,
        {"segment_ids": jnp.ones((2, 12))},
        r"segment_ids must be an array of integer type, got float32",
    ),
    "state-type": (lambda x: x, {"state": jnp.ones(3)}, r"state must be "),
}


@pytest.mark.parametrize("name", MIXERS)
@pytest.mark.parametrize("call", CALLS)
def test_call(name, call):
    change, options, message = CALLS[call]
    with pytest.raises(ValueError, match=message):
        mixer(name)(change(inputs(2, 12)), **options)


@pytest.mark.parametrize("name", MIXERS)
def test_state_of_another_batch_size(name):
    with pytest.raises(
        ValueError, match=r"state must be as init_state makes it, .*\(2, .* got .*\(3, "
    ):
        mixer(name)(inputs(2, 12), state=empty_state(mixer(name), 3))


@pytest.mark.parametrize("name", MIXERS)
def test_state_of_another_kind(name):
    other = mixer("attention" if name != "attention" else "kda")
    with pytest.raises(ValueError, match=r"state must be .*AttentionState.* got .*AttentionState"):
        mixer(name)(inputs(2, 12), state=empty_state(other, 2))


def test_prompt_longer_than_the_cache():
    layer = mixer("attention")
    with pytest.raises(ValueError, match=r"x must have at most max_length = 8 tokens"):
        layer(inputs(2, 12), state=layer.init_state(2, 8))
