"""Every wrong configuration and call is one ValueError that names the argument."""

import inspect
import math
import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from gla_layers import (
    KDA,
    Attention,
    GatedDeltaNet,
    GatedRMSNorm,
    LanguageModel,
    LanguageModelConfig,
    LatentAttention,
    RMSNorm,
    ShardingConfig,
    ShortConvolution,
    SimpleGLA,
    SwiGLU,
)

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
    (GatedDeltaNet, {"precision": "exact"}, r"precision must be None or .* got 'exact'"),
    (GatedDeltaNet, {"dtype": "int32"}, r"dtype must be None or one of .* got 'int32'"),
    (GatedDeltaNet, {"param_dtype": None}, r"param_dtype must be one of .* got None"),
    (KDA, {"rngs": None}, r"rngs must be an nnx.Rngs .* such as nnx.Rngs\(0\), got None"),
    (KDA, {"rngs": nnx.Rngs(dropout=0)}, r"rngs must be an nnx.Rngs with a stream for parameters"),
    (SimpleGLA, {"feature_map": ""}, r"feature_map must be one of .* got ''"),
    (SimpleGLA, {"gate_fn": ["silu"]}, r"gate_fn must be one of .* got \['silu'\]"),
    (Attention, {"hidden_size": 9, "num_heads": 3}, r"rotary_dim must be even .* = 3, got 3"),
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
        layer(**{"rngs": nnx.Rngs(0)} | options)


SMALL = {
    GatedDeltaNet: {"hidden_size": 16, "num_heads": 2, "head_dim": 8},
    KDA: {"hidden_size": 16, "num_heads": 2, "head_dim": 8},
    SimpleGLA: {"hidden_size": 16, "num_heads": 2},
    Attention: {"hidden_size": 16, "num_heads": 2},
    LatentAttention: {
        "hidden_size": 16,
        "num_heads": 2,
        "kv_rank": 4,
        "head_dim": 8,
        "shared_head_dim": 2,
    },
    LanguageModel: {"config": LanguageModelConfig.preset("tiny")},
    SwiGLU: {"hidden_size": 16, "intermediate_size": 8},
    ShortConvolution: {"features": 4},
    GatedRMSNorm: {"num_features": 4},
    RMSNorm: {"num_features": 4},
}
"""Arguments of a small layer of each class."""

WRONG_VALUES = {
    bool: ("no", 1, None),
    int: (0, -1, 2.0, "2", True, math.nan),
    float: (0.0, math.nan, math.inf, "2", True),
}
UNUSED = (GatedRMSNorm, "rngs"), (RMSNorm, "rngs")
ARGUMENTS = [
    (layer, argument, parameter.annotation)
    for layer in SMALL
    for argument, parameter in inspect.signature(layer.__init__).parameters.items()
    if argument != "self" and (layer, argument) not in UNUSED
]


@pytest.mark.parametrize(
    ("layer", "argument", "annotation"),
    ARGUMENTS,
    ids=[f"{layer.__name__}-{argument}" for layer, argument, _ in ARGUMENTS],
)
def test_every_argument_is_checked(layer, argument, annotation):
    kinds = {annotation, *typing.get_args(annotation)}
    wrong = [value for kind in kinds & WRONG_VALUES.keys() for value in WRONG_VALUES[kind]]
    for value in (*wrong, object()):
        with pytest.raises(ValueError, match=rf"^{argument} must "):
            layer(**SMALL[layer] | {"rngs": nnx.Rngs(0), argument: value})


@pytest.mark.parametrize("integer", [np.int64, np.uint8])
def test_numbers_of_numpy_are_numbers(integer):
    sizes = {"num_heads": integer(2), "num_v_heads": integer(4), "head_dim": integer(128)}
    options = {"expand_v": np.float32(2), "norm_eps": np.float64(1e-5), "use_gate": np.bool_(1)}
    layer = nnx.eval_shape(lambda: GatedDeltaNet(integer(8), **sizes, **options, rngs=nnx.Rngs(0)))
    assert layer.v_proj.kernel.shape == (8, 4 * 256)
    assert type(layer.hidden_size) is int


SPLIT = [
    (GatedDeltaNet, {"num_heads": 3}, r"num_heads must be a multiple of 2, .*'tensor'.* got 3"),
    (KDA, {"num_heads": 1, "num_v_heads": 2}, r"num_heads must be a multiple of 2, .* got 1"),
    (SimpleGLA, {"num_heads": 1}, r"num_heads must be a multiple of 2, .* got 1"),
    (Attention, {"num_heads": 1, "head_dim": 3, "rope_theta": None}, r"num_heads \* head_dim .* 3"),
    (SwiGLU, {"intermediate_size": 7}, r"intermediate_size must be a multiple of 2, .* got 7"),
    (LanguageModel, {}, r"vocab_size must be a multiple of 2, .*'tensor'.* got 257"),
    (KDA, {"hidden_size": 15}, r"hidden_size must be a multiple of 2, .*'fsdp'.* got 15"),
    (SwiGLU, {"hidden_size": 7}, r"hidden_size must be a multiple of 2, .*'fsdp'.* got 7"),
]


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize(("layer", "change", "message"), SPLIT)
def test_sizes_that_a_mesh_does_not_divide(layer, change, message, kind):
    mesh = jax.make_mesh((2, 2, 2), ("data", "fsdp", "tensor"), axis_types=(kind,) * 3)
    options = SMALL[layer] | {"sharding": ShardingConfig.fsdp_tensor(), "rngs": nnx.Rngs(0)}
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=message):
        layer(**options | change)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(kind,))
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=r"axes of the mesh, \('data',\), got"):
        layer(**options)


CALLS = {
    "rank": (lambda x: x[0], {}, r"x must be \[B, T, 16\], got shape \(12, 16\)"),
    "size": (lambda x: x[..., :9], {}, r"x must be \[B, T, 16\], got shape \(2, 12, 9\)"),
    "dtype": (lambda x: x.astype(int), {}, r"x must be an array of one of \(.*\), got int32"),
    "float8": (
        lambda x: x.astype(jnp.float8_e4m3fn),
        {},
        r"x must be an array of one of \(.*\), got float8_e4m3fn",
    ),
    "list": (lambda x: [1.0], {}, r"x must be an array of one of \(.*\), got list"),
    "ids-shape": (
        lambda x: x,
        {"segment_ids": jnp.ones((2, 11), jnp.int32)},
        r"segment_ids must be \[B, T\] = \[2, 12\], got shape \(2, 11\)",
    ),
    "ids-dtype": (
        lambda x: x,
        {"segment_ids": jnp.ones((2, 12))},
        r"segment_ids must be an integer array, got float32",
    ),
    "ids-list": (
        lambda x: x,
        {"segment_ids": [[1] * 12] * 2},
        r"segment_ids must be an integer array, got list",
    ),
    "state-type": (lambda x: x, {"state": jnp.ones(3)}, r"state must be .* got "),
    "state-number": (lambda x: x, {"state": 1}, r"state must be .* got int"),
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


@pytest.mark.parametrize("name", MIXERS)
def test_state_of_another_dtype(name):
    state = jax.tree.map(lambda x: x.astype("complex64"), empty_state(mixer(name), 2))
    with pytest.raises(ValueError, match=r"state must be as .*float\(2, .* got .*complex64\(2, "):
        mixer(name)(inputs(2, 12), state=state)


@pytest.mark.parametrize("name", MIXERS)
@pytest.mark.parametrize("size", [-1, 2.0, "2", None])
def test_batch_size_of_a_state(name, size):
    with pytest.raises(ValueError, match=r"batch_size must be an integer of at least 0, got"):
        empty_state(mixer(name), size)


def test_cache_of_no_length():
    with pytest.raises(ValueError, match=r"max_length must be an integer of at least 1, got None"):
        mixer("attention").init_state(2)


def test_prompt_longer_than_the_cache():
    layer = mixer("attention")
    with pytest.raises(ValueError, match=r"x must have at most max_length = 8 tokens"):
        layer(inputs(2, 12), state=layer.init_state(2, 8))


@pytest.mark.parametrize(
    ("field", "spec", "message"),
    [
        (
            "in_kernel",
            "fsdp",
            "in_kernel must be None or a PartitionSpec of at most 2 axes, got",
        ),
        ("norm", P(None, "tensor"), "norm must be None or a PartitionSpec of at most 1 axes"),
        ("tokens", P(None, None, None, "x"), "tokens must be .* of at most 3 axes"),
    ],
)
def test_wrong_specs(field, spec, message):
    with pytest.raises(ValueError, match=message):
        ShardingConfig(**{field: spec})


@pytest.mark.parametrize("x", [jnp.ones((2, 5)), jnp.ones(()), np.ones((2, 4), int), [1.0] * 4])
def test_a_feed_forward_network_names_its_input(x):
    with pytest.raises(ValueError, match="x must"):
        SwiGLU(4, 8, rngs=nnx.Rngs(0))(x)
