"""Token mixers under the transformations of flax, in both of its graph modes."""

import copy

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from .mixers import (
    CLASSES,
    HIDDEN,
    LINEAR,
    MIXERS,
    difference,
    empty_state,
    inputs,
    make,
    mixer,
    run,
)

every_mixer = pytest.mark.parametrize("name", MIXERS)


@pytest.fixture(params=[True, False], ids=["graph", "tree"])
def graph_mode(request):
    with nnx.set_graph_mode(request.param):
        yield request.param


@every_mixer
def test_jit_with_a_state(name, graph_mode):
    layer, x = make(name), inputs(2, 3)

    @nnx.jit
    def step(layer, x, state):
        return layer(x, state=state)

    actual = step(layer, x, empty_state(layer, 2))
    assert difference(actual, run(layer, x, empty_state(layer, 2))) < 5e-6


@every_mixer
def test_scan_over_tokens(name):
    layer, x = mixer(name), inputs(2, 3)

    @jax.jit
    def decode(layer, x):
        def step(state, token):
            y, state = layer(token[:, None], state=state)
            return state, y[:, 0]

        _, y = jax.lax.scan(step, empty_state(layer, 2), jnp.swapaxes(x, 0, 1))
        return jnp.swapaxes(y, 0, 1)

    assert difference(decode(layer, x), run(layer, x)) < 5e-6


@pytest.mark.parametrize(
    ("name", "graph"), [("gdn", True), ("kda", False), ("sgla", True), ("attention", False)]
)
def test_a_scanned_stack_under_remat(name, graph):
    x = inputs(1, 3)
    graphdef, state = nnx.split(mixer(name))
    stack = nnx.merge(graphdef, jax.tree.map(lambda p: jnp.stack([p, 1.1 * p]), state))

    def scanned(stack, x):
        @nnx.remat
        def block(x, layer):
            return x + layer(x)

        scan = nnx.scan(block, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        return jnp.sum(scan(x, stack) ** 2)

    def looped(stack, x):
        graphdef, state = nnx.split(stack)
        for i in range(2):
            layer = nnx.merge(graphdef, jax.tree.map(lambda p, i=i: p[i], state))
            x = x + layer(x)
        return jnp.sum(x**2)

    with nnx.set_graph_mode(graph):
        actual, expected = jax.jit(
            lambda *arguments: [nnx.value_and_grad(f)(*arguments) for f in (scanned, looped)]
        )(stack, x)
    assert difference(actual, expected) < 1e-5


@pytest.mark.parametrize("name", LINEAR)
def test_vmap_makes_a_stack(name, graph_mode):
    @nnx.split_rngs(splits=2)
    @nnx.vmap(transform_metadata={nnx.PARTITION_NAME: None})
    def create(rngs):
        return CLASSES[name](rngs=rngs)

    stack = nnx.eval_shape(lambda: create(nnx.Rngs(0)))
    single = nnx.eval_shape(lambda: CLASSES[name](rngs=nnx.Rngs(0)))
    stacked = jax.tree.map(lambda leaf: leaf.shape[1:], nnx.state(stack))
    assert stacked == jax.tree.map(lambda leaf: leaf.shape, nnx.state(single))


@every_mixer
def test_sequential_split_and_merge(name):
    layer, x = make(name), inputs(1, 3)
    model = nnx.Sequential(layer, nnx.Linear(HIDDEN, 2, rngs=nnx.Rngs(0)))
    graph, state = nnx.split(model)
    call = jax.jit(lambda model, x: model(x))
    assert np.array_equal(call(nnx.merge(graph, state), x), call(model, x))


@every_mixer
def test_tabulate(name):
    table = nnx.tabulate(make(name), inputs(1, 3), console_kwargs={"width": 200})
    assert "q_proj" in table


@every_mixer
def test_to_linen(name):
    partial = CLASSES[name]
    module = nnx.bridge.to_linen(partial.func, *partial.args, **partial.keywords)
    x = jax.ShapeDtypeStruct((1, 3, HIDDEN), jnp.float32)
    y, variables = jax.eval_shape(module.init_with_output, jax.random.key(0), x)
    assert y.shape == (1, 3, HIDDEN)
    assert "q_proj" in variables["params"]


def test_layers_of_one_configuration_share_a_trace():
    first, second = mixer("sgla"), make("sgla")
    assert nnx.split(first)[0] == nnx.split(second)[0]
    assert hash(nnx.split(first)[0]) == hash(nnx.split(second)[0])


@every_mixer
def test_a_deep_copy_is_not_traced_again(name):
    layer = mixer(name)
    assert nnx.graphdef(copy.deepcopy(layer)) == nnx.graphdef(layer)
