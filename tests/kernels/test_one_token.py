"""One token from a state, on a TPU kernel and in plain JAX, and the state's place in memory."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from benchmarks.tpu_compiler import TARGETS, compile_for
from gla_layers import LanguageModel, LanguageModelConfig

from .cases import OPS, evaluate, random_inputs, reference, relative_error

every_op = pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
every_implementation = pytest.mark.parametrize("implementation", ["pallas_tpu", "xla"])
for_tpu = pytest.mark.skipif(sys.platform != "linux", reason="libtpu exists for Linux alone")

SIZES = {
    "one row": {"key_size": 128, "value_size": 128},
    "grouped heads": {"batch": 3, "heads": 2, "value_heads": 4, "key_size": 128, "value_size": 256},
    "a ragged block of rows": {"batch": 9, "heads": 2, "key_size": 256, "value_size": 128},
    "several blocks of a key head": {
        "batch": 8,
        "value_heads": 4,
        "key_size": 256,
        "value_size": 256,
    },
    "heads that are no whole registers": {"batch": 2, "key_size": 48, "value_size": 100},
}


def one_token(op, **sizes):
    return random_inputs(op, length=1, **sizes)


def check(actual, expected, tolerance):
    assert actual.keys() == expected.keys()
    for name, x in expected.items():
        assert relative_error(actual[name], x, floor=1e-3) < tolerance, name


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@every_implementation
@every_op
def test_equals_the_recurrence(op, implementation, sizes):
    inputs = one_token(op, **sizes)
    actual = evaluate(op, implementation, inputs, recurrent=True, qk_l2norm=True)
    check(actual, reference(op, inputs, qk_l2norm=True), 1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@every_implementation
@every_op
def test_narrow_types(op, implementation, dtype):
    inputs = one_token(op, batch=2, key_size=128, value_size=128)
    actual = evaluate(op, implementation, inputs, dtype=dtype, recurrent=True)
    check(actual, reference(op, inputs, dtype), 5e-3)


@every_implementation
@every_op
def test_a_state_that_is_forgotten_and_gates_above_zero(op, implementation):
    inputs = one_token(op, key_size=128, value_size=128)
    inputs["g"][:, :, 0], inputs["g"][:, :, 1] = -np.inf, 1.0
    actual = evaluate(op, implementation, inputs, recurrent=True)
    check(actual, reference(op, inputs), 1e-5)


@every_implementation
@every_op
def test_more_than_a_token_is_refused(op, implementation):
    inputs = random_inputs(op, length=2)
    tokens = [jnp.asarray(inputs[name]) for name in op.tokens]
    with pytest.raises(ValueError, match=r"implementation must be None or 'reference' .* got"):
        op.recurrent(*tokens, implementation=implementation)
    first = [x[:, :1] for x in tokens]
    with pytest.raises(ValueError, match=r"implementation must be None or 'reference' .* got"):
        op.recurrent(*first, implementation=implementation, segment_ids=jnp.ones((1, 1), int))


# --- as programs for a TPU --------------------------------------------------------------------


@for_tpu
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("batch", [1, 9])
@every_op
def test_compiles_for_every_generation_and_updates_the_state_in_place(op, batch, target):
    inputs = one_token(op, batch=batch, heads=2, value_heads=4, key_size=256, value_size=256)
    dtypes = dict.fromkeys(("q", "k", "v"), jnp.bfloat16)
    state, *tokens = (
        jax.ShapeDtypeStruct(inputs[name].shape, dtypes.get(name, jnp.float32))
        for name in ("initial_state", *op.tokens)
    )

    def step(state, *tokens):
        return op.recurrent(*tokens, initial_state=state, output_final_state=True)

    compiled = compile_for(target, step, state, *tokens, donate_argnums=(0,))
    memory = compiled.memory_analysis()
    assert "one_token" in compiled.as_text()
    assert memory.alias_size_in_bytes == 4 * state.size
    assert memory.temp_size_in_bytes < state.size


@for_tpu
def test_a_model_decodes_in_place():
    options = {"num_heads": 1, "head_dim": 128, "expand_v": 1}
    config = LanguageModelConfig.preset(
        "tiny", num_layers=2, mixer_options={"gated_deltanet": options}
    )
    model = nnx.eval_shape(lambda: LanguageModel(config, rngs=nnx.Rngs(0)))
    graph, parameters = nnx.split(model)
    state = jax.eval_shape(lambda: model.init_state(8))

    def step(parameters, state, tokens):
        logits, state = nnx.merge(graph, parameters)(tokens, state=state)
        return logits[:, -1], state

    tokens = jax.ShapeDtypeStruct((8, 1), jnp.int32)
    compiled = compile_for("v6e", step, parameters, state, tokens, donate_argnums=(1,))
    size = sum(4 * x.size for x in jax.tree.leaves(state))
    assert compiled.memory_analysis().alias_size_in_bytes == size
