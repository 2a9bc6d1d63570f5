"""Model FLOPs, against sums by hand."""

from types import SimpleNamespace

import jax
import pytest
import throughput
from flax import nnx

from gla_layers import LanguageModel, LanguageModelConfig

LENGTH = 50
SIZES = {
    "vocab_size": 300,
    "hidden_size": 64,
    "num_layers": 1,
    "intermediate_size": 96,
    "mixer_options": {
        "gated_deltanet": {"num_heads": 2, "head_dim": 16, "expand_v": 1},
        "kda": {"num_heads": 2, "head_dim": 16},
        "simple_gla": {"num_heads": 2},
        "attention": {"num_heads": 2},
    },
}
MLP, HEAD = 3 * 64 * 96, 64 * 300
# Projections q, k, v, o and gates; convolutions of four tokens; the mixing.
MIXERS = {
    "gated_deltanet": 5 * 64 * 32 + 2 * 64 * 2 + 3 * 4 * 32 + 3 * 2 * 16 * 16,
    "attention": 4 * 64 * 64 + 2 * 32 * LENGTH,
}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("mixer", MIXERS)
def test_multiplications_of_the_definition(mixer, tied):
    config = LanguageModelConfig(**SIZES, mixers=(mixer,), tie_embeddings=tied)
    model = nnx.eval_shape(lambda: LanguageModel(config, rngs=nnx.Rngs(0)))
    expected = 6 * (MLP + HEAD + MIXERS[mixer])
    assert throughput.training_flops(model, LENGTH) == expected


def test_a_delta_rule_reads_the_state_once_more():
    def mixing(mixer):
        config = LanguageModelConfig(**SIZES, mixers=(mixer,))
        layer = nnx.eval_shape(lambda: LanguageModel(config, rngs=nnx.Rngs(0))).layers[0].mixer
        heads = layer.heads
        sizes = heads.output * heads.key_size * heads.value_size
        return throughput._mixer_flops(layer, LENGTH) / sizes

    assert [mixing(name) for name in ("gated_deltanet", "kda", "simple_gla")] == [6, 6, 4]


@pytest.mark.parametrize(
    ("kind", "peak"),
    [
        ("TPU v5 lite", 197e12),
        ("TPU v5p", 459e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("cpu", None),
    ],
)
def test_peak_of_all_devices(kind, peak, monkeypatch):
    monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace(device_kind=kind)] * 4)
    monkeypatch.setattr(jax, "device_count", lambda: 4)
    assert throughput.peak_flops() == (peak and 4 * peak)
