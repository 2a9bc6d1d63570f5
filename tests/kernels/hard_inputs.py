"""The inputs that are hard on an op, and how far off it may be on them.

Each makes the arguments that `evaluate` takes; `shape` is that of `random_inputs`.
"""

import functools
from collections.abc import Callable

import numpy as np

from .cases import Op, normalised, random_inputs

Inputs = dict[str, np.ndarray]


def close_keys(op: Op, **shape: int) -> Inputs:
    """Keys at cosine 0.99, beta 0.99, no decay."""
    inputs = random_inputs(op, **shape)
    rng = np.random.default_rng(1)
    noise = normalised(rng.normal(size=inputs["k"].shape))
    common = normalised(rng.normal(size=(1, 1, *inputs["k"].shape[2:])))
    cosine = np.sqrt(0.99)
    inputs["k"] = normalised(cosine * common + np.sqrt(1 - 0.99) * noise)
    inputs["g"] = np.zeros_like(inputs["g"])
    if "beta" in inputs:
        inputs["beta"] = np.full_like(inputs["beta"], 0.99)
    return inputs


def repeated_keys(op: Op, **shape: int) -> Inputs:
    """Seven keys over and over, beta 1.9."""
    inputs = random_inputs(op, **shape)
    inputs["k"] = inputs["k"][:, np.arange(inputs["k"].shape[1]) % 7]
    if "beta" in inputs:
        inputs["beta"] = np.full_like(inputs["beta"], 1.9)
    return inputs


def repeated_keys_without_decay(op: Op, **shape: int) -> Inputs:
    inputs = repeated_keys(op, **shape)
    inputs["g"] = np.zeros_like(inputs["g"])
    return inputs


def constant_decay(decay: float, op: Op, **shape: int) -> Inputs:
    inputs = random_inputs(op, **shape)
    inputs["g"] = np.full_like(inputs["g"], decay)
    return inputs


def mixed_decay(op: Op, **shape: int) -> Inputs:
    """Channels (or tokens, where a decay has none) alternate between 0 and -30."""
    inputs = random_inputs(op, **shape)
    axis = inputs["g"].shape[-1] if op.per_channel else inputs["g"].shape[1]
    pattern = np.where(np.arange(axis) % 2, -30.0, 0.0)
    if not op.per_channel:
        pattern = pattern[:, None]
    inputs["g"] = np.broadcast_to(pattern, inputs["g"].shape).copy()
    return inputs


def erasing_tokens(op: Op, **shape: int) -> Inputs:
    """Single tokens at -1000 among slow ones."""
    inputs = random_inputs(op, **shape)
    inputs["g"][:, 5::37] = -1000.0
    return inputs


COLUMNS: dict[str, tuple[Callable[..., Inputs], dict[str, float]]] = {
    "random": (random_inputs, {"float32": 1e-5, "bfloat16": 5e-3}),
    "close keys": (close_keys, {"float32": 1e-4, "bfloat16": 2e-2}),
    "repeated keys": (repeated_keys, {"float32": 1e-4, "bfloat16": 3e-2}),
    "repeated keys, no decay": (repeated_keys_without_decay, {"float32": 1e-4, "bfloat16": 3e-2}),
    "mixed decay": (mixed_decay, {"float32": 1e-5, "bfloat16": 5e-3}),
    "erasing tokens": (erasing_tokens, {"float32": 1e-5, "bfloat16": 5e-3}),
} | {
    f"decay {decay}": (
        functools.partial(constant_decay, decay),
        {"float32": 1e-5, "bfloat16": 5e-3},
    )
    for decay in (-5.0, -7.0, -12.0, -20.0, -200.0, -1e30, -np.inf)
}
