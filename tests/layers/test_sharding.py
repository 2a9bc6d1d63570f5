"""The layers on a mesh of eight devices: what one device gives, with parameters and heads split."""

import functools
import itertools
import re

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from gla_layers import ShardingConfig

from .mixers import CLASSES, HIDDEN, LINEAR, difference, empty_state, fill, inputs, run

SIZES = {
    "gdn": {"num_heads": 2, "num_v_heads": 4},
    "kda": {"num_heads": 2, "num_v_heads": 4},
    "sgla": {"num_heads": 4, "num_kv_heads": 2},
    "attention": {"num_heads": 4, "num_kv_heads": 2},
}
ROWS_AND_HEADS = {"data": 2, "fsdp": 2, "tensor": 2}
PRESETS = {
    ShardingConfig.fsdp: ROWS_AND_HEADS,
    ShardingConfig.fsdp_tensor: ROWS_AND_HEADS,
    ShardingConfig.sequence: {"data": 1, "fsdp": 2, "sequence": 2, "tensor": 2},
}


def make(name, sharding):
    abstract = nnx.eval_shape(
        lambda: CLASSES[name](**SIZES[name], sharding=sharding, rngs=nnx.Rngs(0))
    )
    rng = np.random.default_rng(1)
    return fill(abstract, lambda path, p: rng.normal(size=p.shape, scale=HIDDEN**-0.5))


def split(layer, mesh):
    """The layer with its parameters where its annotations say."""
    graph, state = nnx.split(layer)
    return nnx.merge(graph, jax.device_put(state, nnx.get_named_sharding(state, mesh)))


def make_mesh(axes, kind):
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(kind,) * len(axes))


@jax.jit
def gradients(layer, x, segment_ids):
    def loss(layer, x):
        y = layer(x, segment_ids=segment_ids)
        return (y**2).sum(), y

    return nnx.grad(loss, argnums=(0, 1), has_aux=True)(layer, x)


@pytest.mark.parametrize(
    ("name", "preset", "kind"),
    [
        *itertools.product(LINEAR, PRESETS, [AxisType.Auto]),
        *itertools.product(SIZES, [ShardingConfig.fsdp_tensor], [AxisType.Explicit]),
        ("sgla", ShardingConfig.fsdp, AxisType.Explicit),
        ("sgla", ShardingConfig.sequence, AxisType.Explicit),
        ("sgla", ShardingConfig, AxisType.Explicit),
    ],
)
def test_split_over_devices_equals_one(name, preset, kind):
    x = inputs(4, 20)
    ids = np.where(np.arange(20) < 9, 1, 2)[None].repeat(4, axis=0)
    mesh = make_mesh(PRESETS.get(preset, ROWS_AND_HEADS), kind)
    with jax.set_mesh(mesh):
        layer = split(make(name, preset()), mesh)
        spec = P(*(preset().tokens or [("data", "fsdp")])[:2])
        arguments = layer, *(jax.device_put(a, NamedSharding(mesh, spec)) for a in (x, ids))
        compiled = gradients.lower(*arguments).compile()
        actual = jax.device_get(jax.tree.leaves(compiled(*arguments)))
    expected = jax.tree.leaves(gradients(make(name, ShardingConfig()), x, ids))
    assert difference(actual, expected) < 1e-5
    # Parameters and flat states are gathered. Tokens, of three axes and more, are not.
    gathered = re.findall(r"= f32\[([\d,]+)\]\S* (?:all-gather|all-to-all)\(", compiled.as_text())
    assert bool(gathered) == (preset is not ShardingConfig)
    assert all(shape.count(",") < 2 for shape in gathered), gathered


def test_few_tokens_from_a_state_with_time_split():
    x = inputs(2, 2)
    mesh = make_mesh(PRESETS[ShardingConfig.sequence], AxisType.Auto)
    with jax.set_mesh(mesh):
        layer = split(make("sgla", ShardingConfig.sequence()), mesh)
        actual = jax.device_get(run(layer, x, empty_state(layer, 2)))
    expected = run(make("sgla", ShardingConfig()), x, empty_state(layer, 2))
    assert difference(actual, expected) < 1e-5


@pytest.mark.parametrize("name", ["sgla", "attention"])
def test_state_stays_where_it_is_on_explicit_axes(name):
    x = inputs(4, 5)
    mesh = make_mesh(ROWS_AND_HEADS, AxisType.Explicit)
    rows = P(("data", "fsdp"))
    with jax.set_mesh(mesh):
        layer = split(make(name, ShardingConfig.fsdp_tensor()), mesh)
        place = functools.partial(jax.device_put, device=NamedSharding(mesh, rows))
        y, state = run(layer, place(x), jax.tree.map(place, empty_state(layer, 4)))
    expected = run(make(name, ShardingConfig()), x, empty_state(layer, 4))
    assert difference((y, state), expected) < 1e-5
    assert {array.sharding.spec[0] for array in jax.tree.leaves((y, state))} == {rows[0]}
