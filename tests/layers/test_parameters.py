"""Which parameters are decayed, which stay float32, and how they lie on a mesh."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh

from gla_layers import ShardingConfig, float32_mask, weight_decay_mask

from .mixers import CLASSES, LINEAR, MIXERS, make

UNDECAYED = {"A_log", "dt_bias", "scale", "bias"}
EVERY_PARAMETER = {
    **{name: {"conv_bias": True} for name in LINEAR},
    "attention": {"use_gate": True, "qkv_bias": True, "qk_norm": "per_head"},
    "latent": {},
}
"""The options with which a layer has every parameter that it may have."""


@pytest.mark.parametrize("name", LINEAR)
def test_masks(name):
    parameters = nnx.to_pure_dict(nnx.state(make(name, conv_bias=True), nnx.Param))

    def excluded(mask):
        leaves, _ = jax.tree.flatten_with_path(mask)
        return {path[-1].key for path, included in leaves if not included}

    names = {path[-1].key for path, _ in jax.tree.flatten_with_path(parameters)[0]}
    assert excluded(weight_decay_mask(parameters)) == UNDECAYED & names
    assert excluded(float32_mask(parameters)) == names - (UNDECAYED - {"bias"})


def test_mask_in_an_optimizer():
    layer = make("gdn")
    optimizer = nnx.Optimizer(
        layer, optax.adamw(1.0, weight_decay=0.5, mask=weight_decay_mask), wrt=nnx.Param
    )
    before = jax.tree.map(jnp.copy, nnx.state(layer))
    optimizer.update(layer, jax.tree.map(jnp.zeros_like, before))
    for path, p in nnx.to_flat_state(nnx.state(layer)):
        old = dict(nnx.to_flat_state(before))[path][...]
        assert np.array_equal(p[...], old if path[-1] in UNDECAYED else old / 2), path


@pytest.mark.parametrize("name", MIXERS)
def test_nothing_is_annotated_by_default(name):
    for path, p in nnx.to_flat_state(nnx.state(make(name))):
        assert "out_sharding" not in p.get_metadata(), path


@pytest.mark.parametrize("preset", [ShardingConfig.fsdp, ShardingConfig.fsdp_tensor])
@pytest.mark.parametrize("name", MIXERS)
def test_presets_annotate_every_parameter(name, preset):
    mesh = Mesh(np.asarray(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tensor"))
    with jax.set_mesh(mesh):
        layer = nnx.eval_shape(
            lambda: CLASSES[name](sharding=preset(), **EVERY_PARAMETER[name], rngs=nnx.Rngs(0))
        )
    for path, p in nnx.to_flat_state(nnx.state(layer)):
        assert len(p.get_metadata()["out_sharding"]) == p.ndim, path


def test_a_config_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        ShardingConfig().norm = None
