"""What a token mixer promises about documents, padding and states."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.programs import equations

from .mixers import (
    HIDDEN,
    MIXERS,
    difference,
    empty_state,
    inputs,
    make,
    mixer,
    run,
)

# Another order of summation moves float32 by a few units in the last place.
ROUNDING = 5e-6

every_mixer = pytest.mark.parametrize("name", MIXERS)
# What a linear layer does in code that all of them share.
either_kind = pytest.mark.parametrize("name", ["kda", "attention"])


@every_mixer
@pytest.mark.parametrize("split", [1, 9])
def test_split_equals_whole(name, split):
    layer, x = mixer(name), inputs(2, 12)
    whole, end = run(layer, x, empty_state(layer, 2))
    first, state = run(layer, x[:, :split], empty_state(layer, 2))
    second, state = run(layer, x[:, split:], state)
    assert difference(jnp.concatenate([first, second], axis=1), whole) < ROUNDING
    assert difference(state, end) < ROUNDING


@every_mixer
def test_stateless_equals_empty_state(name):
    layer, x = mixer(name), inputs(2, 12)
    with_state, _ = run(layer, x, empty_state(layer, 2))
    assert difference(run(layer, x), with_state) < ROUNDING


@every_mixer
def test_packed_equals_separate(name):
    # Convolution and state are reset together, at boundaries inside a chunk.
    layer, x = mixer(name), inputs(3, 5)
    separate = run(layer, x)
    ids = jnp.asarray([[7] * 5 + [3] * 5 + [7] * 5])
    packed = run(layer, x.reshape(1, 15, HIDDEN), segment_ids=ids)
    assert difference(packed.reshape(3, 5, HIDDEN), separate) < ROUNDING


@every_mixer
def test_documents_do_not_see_each_other(name):
    layer, x = mixer(name), inputs(1, 8)
    ids = jnp.asarray([[1, 1, 1, 2, 2, 2, 2, 0]])

    @jax.jit
    def gradient(layer, x):
        return jax.grad(lambda x: jnp.sum(layer(x, segment_ids=ids)[:, 3:7] ** 2))(x)

    dx = np.asarray(gradient(layer, x))
    assert np.all(dx[:, :3] == 0)
    assert np.all(dx[:, 7:] == 0)
    assert np.all(dx[:, 3:7] != 0)


@every_mixer
def test_padding_on_either_side(name):
    layer, x = mixer(name), inputs(2, 12)
    ids = np.zeros((3, 17), np.int32)
    padded = np.full((3, 17, HIDDEN), np.nan, np.float32)
    ids[0, 5:], padded[0, 5:] = 1, x[0]
    ids[1, :12], padded[1, :12] = 1, x[1]
    expected, state = run(layer, x, empty_state(layer, 2))
    y, padded_state = run(layer, jnp.asarray(padded), empty_state(layer, 3), jnp.asarray(ids))
    assert difference(y[0, 5:], expected[0]) < ROUNDING
    assert difference(y[1, :12], expected[1]) < ROUNDING
    assert np.all(np.asarray(y)[ids == 0] == 0)
    rows = jax.tree.map(lambda part: part[:2], padded_state)
    assert difference(rows, state) < ROUNDING
    # A row of padding keeps its state.
    untouched = jax.tree.map(lambda part: part[2:], padded_state)
    assert difference(untouched, empty_state(layer, 1)) == 0


@either_kind
def test_gradients_ignore_padding(name):
    layer, x = mixer(name), inputs(1, 12)
    ids = jnp.asarray([[0] * 3 + [1] * 12 + [0] * 2])
    padded = jnp.full((1, 17, HIDDEN), jnp.nan).at[:, 3:15].set(x)

    @jax.jit
    def gradients(layer, x, ids=None):
        return nnx.grad(lambda layer, x: jnp.sum(layer(x, segment_ids=ids)), argnums=(0, 1))(
            layer, x
        )

    dlayer, dx = gradients(layer, x)
    padded_dlayer, padded_dx = gradients(layer, padded, ids)
    assert difference(padded_dlayer, dlayer) < 1e-5
    assert difference(padded_dx[:, 3:15], dx) < 1e-5
    assert np.all(np.asarray(padded_dx)[np.asarray(ids) == 0] == 0)


@every_mixer
@pytest.mark.parametrize("packed", [False, True])
def test_no_tokens_leave_the_state_alone(name, packed):
    layer = mixer(name)
    _, state = run(layer, inputs(2, 5), empty_state(layer, 2))
    x, ids = inputs(2, 5)[:, :0], jnp.ones((2, 0), jnp.int32) if packed else None
    y, after = run(layer, x, state, ids)
    assert run(layer, x, None, ids).shape == y.shape == (2, 0, HIDDEN)
    jax.tree.map(np.testing.assert_array_equal, after, state)


@every_mixer
@pytest.mark.parametrize("packed", [False, True])
def test_no_rows(name, packed):
    layer = mixer(name)
    ids = jnp.ones((0, 5), jnp.int32) if packed else None
    y, _ = run(layer, inputs(0, 5), empty_state(layer, 0), ids)
    assert run(layer, inputs(0, 5), None, ids).shape == y.shape == (0, 5, HIDDEN)


def test_no_document_sees_what_projections_make_of_padding():
    layer = make("gdn")
    biased = layer._linear(HIDDEN, 8, None, nnx.Rngs(0), use_bias=True)
    biased.bias[...] += 1
    layer.q_proj = layer.k_proj = biased
    x = inputs(1, 12)
    padded = jnp.pad(x, ((0, 0), (3, 2), (0, 0)))
    ids = jnp.asarray([[0] * 3 + [1] * 12 + [0] * 2])
    assert difference(run(layer, padded, segment_ids=ids)[:, 3:15], run(layer, x)) < ROUNDING
    y, state = run(layer, padded, empty_state(layer, 1), ids)
    expected = run(layer, x, empty_state(layer, 1))
    assert difference((y[:, 3:15], state), expected) < ROUNDING


@every_mixer
def test_decoding_goes_on_from_a_padded_prefill(name):
    layer, x = mixer(name), inputs(2, 12)
    whole = run(layer, x)
    prompt = jnp.zeros((2, 9, HIDDEN)).at[0, 2:].set(x[0, :7]).at[1].set(x[1, :9])
    ids = jnp.asarray([[0, 0] + [1] * 7, [1] * 9])
    _, state = run(layer, prompt, empty_state(layer, 2), ids)
    for step in range(3):
        token = jnp.stack([x[0, 7 + step], x[1, 9 + step]])[:, None]
        y, state = run(layer, token, state)
        assert difference(y[0, 0], whole[0, 7 + step]) < ROUNDING
        assert difference(y[1, 0], whole[1, 9 + step]) < ROUNDING


@pytest.mark.parametrize("implementation", ["xla", "reference", None])
def test_decoding_is_by_the_layers_implementation(implementation):
    layer = make("gdn", head_dim=128, implementation=implementation)
    arguments = layer, inputs(1, 1), empty_state(layer, 1)
    program = jax.make_jaxpr(run)(*arguments).jaxpr
    kernels = {x.params["name"] for x in equations(program) if x.primitive.name == "pallas_call"}
    assert ("one_token" in kernels) == (implementation is None)


@either_kind
def test_a_second_padded_prompt_continues_the_first(name):
    # The history of the first prompt comes right before the second's first token, not before
    # the padding in front of it.
    layer, x = mixer(name), inputs(1, 12)
    whole, end = run(layer, x, empty_state(layer, 1))
    _, state = run(layer, x[:, :2], empty_state(layer, 1))
    padded = jnp.zeros((1, 14, HIDDEN)).at[:, 3:13].set(x[:, 2:])
    ids = jnp.asarray([[0] * 3 + [1] * 10 + [0]])
    y, state = run(layer, padded, state, ids)
    assert difference(y[:, 3:13], whole[:, 2:]) < ROUNDING
    assert difference(state, end) < ROUNDING


@either_kind
def test_a_finished_row_keeps_its_state_while_others_decode(name):
    layer, x = mixer(name), inputs(2, 12)
    _, state = run(layer, x[:, :11], empty_state(layer, 2))
    _, after = run(layer, x[:, 11:], state, jnp.asarray([[0], [1]]))
    first = jax.tree.map(lambda part: part[:1], (after, state))
    assert difference(*first) == 0
    _, both = run(layer, x[:, 11:], state)
    second = jax.tree.map(lambda part: part[1:], (after, both))
    assert difference(*second) < ROUNDING


@every_mixer
def test_a_reused_slot_holds_nothing_of_its_former_sequence(name):
    layer, x = mixer(name), inputs(2, 12)
    fresh, _ = run(layer, x, empty_state(layer, 2))
    run(layer, 3 * x, empty_state(layer, 2))
    again, _ = run(layer, x, empty_state(layer, 2))
    assert np.array_equal(again, fresh)


@every_mixer
def test_a_prefix_does_not_depend_on_what_follows(name):
    layer, x = mixer(name), inputs(2, 12)
    changed = x.at[:, 7:].multiply(-3)
    assert np.array_equal(run(layer, x)[:, :7], run(layer, changed)[:, :7])


@either_kind
def test_several_documents_with_a_state_are_refused(name):
    layer, x = mixer(name), inputs(2, 12)
    ids = jnp.asarray([[1] * 12, [1] * 6 + [2] * 6])
    with pytest.raises(ValueError, match=r"segment_ids must hold one document a row.* row 1"):
        layer(x, state=empty_state(layer, 2), segment_ids=ids)
    y, _ = run(layer, x, empty_state(layer, 2), ids)
    assert np.all(np.isfinite(y[0]))
    assert np.all(np.isnan(y[1]))


@pytest.mark.parametrize(
    ("name", "use_short_conv"), [("gdn", True), ("kda", False), ("sgla", True)]
)
def test_gradient_through_the_state(name, use_short_conv):
    layer, x = make(name, use_short_conv=use_short_conv), inputs(1, 12)

    @jax.jit
    def gradients(layer, x):
        def whole(x):
            y, state = layer(x, state=empty_state(layer, 1))
            return jnp.sum(y[:, 10:] ** 2) + jnp.sum(state.recurrent**2)

        def halves(x):
            _, state = layer(x[:, :10], state=empty_state(layer, 1))
            y, state = layer(x[:, 10:], state=state)
            return jnp.sum(y**2) + jnp.sum(state.recurrent**2)

        return jax.grad(whole)(x), jax.grad(halves)(x)

    whole, halves = gradients(layer, x)
    assert difference(halves, whole) < 1e-5
