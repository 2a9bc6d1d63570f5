"""Inputs for the ops, and one function that evaluates an op with all its gradients."""

import dataclasses
import functools
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from gla_layers import kernels
from gla_layers.kernels import gated_delta_rule, gla, kda, simple_gla

Arrays = Mapping[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Op:
    """An op as the tests see it."""

    name: str
    chunk: Callable
    recurrent: Callable
    tokens: tuple[str, ...]
    per_channel: bool
    implementations: tuple[str, ...]


DELTA = ("q", "k", "v", "g", "beta")
GDN = Op(
    "gdn",
    kernels.chunk_gated_delta_rule,
    kernels.recurrent_gated_delta_rule,
    DELTA,
    False,
    tuple(gated_delta_rule._chunk.implementations),
)
KDA = Op(
    "kda",
    kernels.chunk_kda,
    kernels.recurrent_kda,
    DELTA,
    True,
    tuple(kda._chunk.implementations),
)
SIMPLE_GLA = Op(
    "sgla",
    kernels.chunk_simple_gla,
    kernels.recurrent_simple_gla,
    DELTA[:4],
    False,
    tuple(simple_gla._chunk.implementations),
)
GLA = Op(
    "gla",
    kernels.chunk_gla,
    kernels.recurrent_gla,
    DELTA[:4],
    True,
    tuple(gla._chunk.implementations),
)
OPS = (GDN, KDA, SIMPLE_GLA, GLA)
OPS_WITH_KERNELS = tuple(op for op in OPS if "pallas_tpu" in op.implementations)
# GLA's rows are cut by the code that cuts KDA's: what documents and meshes make of it is not tested
# for both.
SPLIT_OPS = (GDN, KDA, SIMPLE_GLA)
OP_IMPLEMENTATIONS = [(op, implementation) for op in OPS for implementation in op.implementations]
OP_IDS = [f"{op.name}-{implementation}" for op, implementation in OP_IMPLEMENTATIONS]


def normalised(x: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6)


def random_inputs(
    op: Op,
    *,
    batch: int = 1,
    length: int = 300,
    heads: int = 1,
    value_heads: int = 2,
    key_size: int = 64,
    value_size: int = 64,
    seed: int = 0,
) -> dict[str, np.ndarray]:
    """Unit-norm q and k, gates as the layers make them, a state, and cotangents."""
    rng = np.random.default_rng(seed)
    gate = (batch, length, value_heads) + ((key_size,) if op.per_channel else ())
    state = (batch, value_heads, key_size, value_size)
    inputs = {
        "q": normalised(rng.normal(size=(batch, length, heads, key_size))),
        "k": normalised(rng.normal(size=(batch, length, heads, key_size))),
        "v": rng.normal(size=(batch, length, value_heads, value_size)),
        "g": -np.exp(rng.normal(size=gate) - 2),
        "beta": 1 / (1 + np.exp(-rng.normal(size=gate[:3]))),
        "initial_state": rng.normal(size=state),
        "do": rng.normal(size=(batch, length, value_heads, value_size)),
        "dfinal_state": rng.normal(size=state),
    }
    if "beta" not in op.tokens:
        del inputs["beta"]
    return inputs


@functools.cache
def _evaluator(op: Op, recurrent: bool, options: tuple):
    keywords = {"output_final_state": True} | dict(options)
    function = op.recurrent if recurrent else op.chunk

    @jax.jit
    def evaluate(differentiable, packing, do, dfinal_state):
        def forward(inputs):
            inputs = dict(inputs)
            tokens = [inputs.pop(name) for name in op.tokens if name in inputs]
            return function(*tokens, **inputs, **packing, **keywords)

        outputs, vjp = jax.vjp(forward, differentiable)
        named = {"o": outputs[0], "final_state": outputs[1]}
        cotangents = {"o": do, "final_state": dfinal_state}
        (gradients,) = vjp(
            tuple(x if x is None else cotangents[name].astype(x.dtype) for name, x in named.items())
        )
        named |= {f"d{name}": gradient for name, gradient in gradients.items()}
        return {name: x for name, x in named.items() if x is not None}

    return evaluate


def evaluate(
    op: Op,
    implementation: str,
    inputs: Arrays,
    *,
    dtype: str = "float32",
    recurrent: bool = False,
    **options,
) -> dict[str, np.ndarray]:
    """Outputs, final state and every gradient of `sum(o do) + sum(final_state dfinal_state)`.

    With output_final_state=False, of `sum(o do)`.

    q, k, v and the cotangent of o are cast to `dtype`; the rest to float32, or with float64 all
    to float64.
    """
    narrow = {"q", "k", "v", "do"}
    wide = "float64" if dtype == "float64" else "float32"

    def run():
        arrays = {
            name: jnp.asarray(x, dtype if name in narrow else wide)
            for name, x in inputs.items()
            if name not in ("segment_ids", "cu_seqlens")
        }
        packing = {
            name: jnp.asarray(inputs[name], jnp.int32)
            for name in ("segment_ids", "cu_seqlens")
            if name in inputs
        }
        do, dfinal_state = arrays.pop("do"), arrays.pop("dfinal_state")
        settings = (*sorted(options.items()), ("implementation", implementation))
        evaluator = _evaluator(op, recurrent, settings)
        outputs = evaluator(arrays, packing, do, dfinal_state)
        return {name: np.asarray(x.astype(wide)) for name, x in outputs.items()}

    if dtype != "float64":
        return run()
    with jax.enable_x64(True):
        return run()


def reference(op: Op, inputs: Arrays, dtype: str = "float32", **options) -> dict[str, np.ndarray]:
    """`evaluate` by the recurrence in float64, on the values that `dtype` can hold."""
    rounded = {
        name: np.asarray(jnp.asarray(x, dtype).astype("float32"), np.float64)
        if name in ("q", "k", "v", "do")
        else (x if name in ("segment_ids", "cu_seqlens") else np.asarray(x, "float32"))
        for name, x in inputs.items()
    }
    return evaluate(op, "reference", rounded, dtype="float64", **options)


def relative_error(actual: np.ndarray, expected: np.ndarray, floor: float = 0.0) -> float:
    """Relative L2 error; `floor` bounds the norm that it is relative to from below."""
    assert actual.shape == expected.shape
    error = np.linalg.norm((actual.astype(np.float64) - expected).ravel())
    return float(error / max(np.linalg.norm(expected.ravel()), floor, 1e-300))


def errors(actual: Arrays, expected: Arrays) -> dict[str, float]:
    """The relative error of every array.

    dg under strong decay is tiny: it is compared with the size of the other gradients. And what is
    below 1e-30 may be 0 in float32 (the gradient of a state that -200 a token erases).
    """
    floors = {"dg": np.linalg.norm(expected["dv"])}
    return {
        name: relative_error(value, expected[name], floors.get(name, 1e-30))
        for name, value in actual.items()
    }


def check(actual: Arrays, expected: Arrays, tolerance: float) -> None:
    """Every array within the relative error."""
    assert all(np.isfinite(value).all() for value in actual.values())
    too_large = {name: e for name, e in errors(actual, expected).items() if e > tolerance}
    assert not too_large, f"over {tolerance}: {too_large}"
