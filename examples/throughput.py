"""Model FLOPs: what a step must compute, and what share of the device's peak that is (MFU).

Counted are multiplications and additions that the definition asks for, not those of the chunked
form, and nothing twice that remat makes again:

    parameters       2 a token, forward, for each entry of a matrix, convolutions included; the
                     embedding counts where it is the head too
    SimpleGLA        4 K V a token and head: S += k v^T and S^T q
    delta rules      6 K V: S^T k too
    softmax          (K + V) T: 2 K for a score, 2 V for its value, of T / 2 tokens on average
    backward         twice the forward
"""

import jax
from flax import nnx

from gla_layers import LanguageModel, SimpleGLA
from gla_layers.linear_attention import LinearAttention
from gla_layers.softmax_attention import SoftmaxAttention
from gla_layers.state import TokenMixer

PEAK_FLOPS = {
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5": 459e12,
    "TPU v6 lite": 918e12,
    "TPU7x": 1153e12,
    "NVIDIA A100": 312e12,
    "NVIDIA H100": 989e12,
    "NVIDIA H200": 989e12,
}
"""A device's dense bfloat16 peak, by how its kind begins."""


def peak_tokens_per_second(model: LanguageModel, length: int) -> float | None:
    """What all devices could train on at their peak, or None where that is not known."""
    peak = peak_flops()
    return None if peak is None else peak / training_flops(model, length)


def training_flops(model: LanguageModel, length: int) -> float:
    """Model FLOPs a token, forward and backward, in rows of `length` tokens."""
    matrices = sum(
        parameter.size
        for path, parameter in nnx.to_flat_state(nnx.state(model, nnx.Param))
        if parameter.ndim > 1 and (path[0] != "embed" or model.config.tie_embeddings)
    )
    mixers = sum(_mixer_flops(layer.mixer, length) for layer in model.layers)
    return 3 * (2 * matrices + mixers)


def peak_flops() -> float | None:
    """What all devices can do in a second in bfloat16, or None where it is not known."""
    kind = jax.devices()[0].device_kind
    # "TPU v5 lite" begins as "TPU v5" does.
    name = max((name for name in PEAK_FLOPS if kind.startswith(name)), key=len, default=None)
    return None if name is None else PEAK_FLOPS[name] * jax.device_count()


def _mixer_flops(mixer: TokenMixer, length: int) -> int:
    """Of one token, forward, without the projections."""
    if isinstance(mixer, LinearAttention):
        heads = mixer.heads
        products = 2 if isinstance(mixer, SimpleGLA) else 3
        return products * 2 * heads.output * heads.key_size * heads.value_size
    assert isinstance(mixer, SoftmaxAttention)
    return mixer.num_heads * (mixer.key_size + mixer.value_size) * length
