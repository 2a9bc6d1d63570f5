"""The language model on a mesh with Explicit axes gives what one device gives."""

import re

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from gla_layers import LanguageModel, LanguageModelConfig, ShardingConfig

from .layers.mixers import difference

CONFIG = LanguageModelConfig(
    vocab_size=32,
    hidden_size=16,
    num_layers=2,
    intermediate_size=16,
    mixers=("simple_gla", "attention"),
    mixer_options={"simple_gla": {"num_heads": 2}, "attention": {"num_heads": 2}},
)


@jax.jit
def losses_and_logits(model, tokens, segment_ids):
    def loss(model):
        return model.loss(tokens, segment_ids=segment_ids)

    return nnx.value_and_grad(loss)(model), model(tokens, segment_ids=segment_ids)


@pytest.mark.slow
@pytest.mark.parametrize(("preset", "remat"), [("fsdp_tensor", True), (None, False)])
def test_language_model_on_explicit_axes(preset, remat):
    sharding = getattr(ShardingConfig, preset)() if preset else ShardingConfig()
    tokens = np.random.default_rng(0).integers(0, 32, (4, 21)).astype(np.int32)
    ids = np.where(np.arange(21) < 9, 1, 2)[None].repeat(4, axis=0)
    plain = LanguageModel(CONFIG, rngs=nnx.Rngs(0))
    expected = jax.tree.leaves(losses_and_logits(plain, tokens, ids))

    axes = ("data", "fsdp", "tensor")
    mesh = jax.make_mesh((2, 2, 2), axes, axis_types=(AxisType.Explicit,) * 3)
    with jax.set_mesh(mesh):
        model = nnx.eval_shape(
            lambda: LanguageModel(CONFIG, sharding=sharding, remat=remat, rngs=nnx.Rngs(0))
        )
        places = nnx.get_named_sharding(nnx.state(model), mesh)
        values = map(jax.device_put, jax.tree.leaves(nnx.state(plain)), jax.tree.leaves(places))
        nnx.update(model, jax.tree.unflatten(jax.tree.structure(nnx.state(model)), values))
        rows = NamedSharding(mesh, P(("data", "fsdp")))
        arguments = model, *(jax.device_put(x, rows) for x in (tokens, ids))
        compiled = losses_and_logits.lower(*arguments).compile()
        actual = jax.device_get(jax.tree.leaves(compiled(*arguments)))
    assert difference(actual, expected) < 1e-5
    # Nothing of all tokens is gathered but what each device's part of the embedding gives.
    exchanged = re.findall(
        r"= f32\[\d+,20,\d+\]\S* (?:all-gather|all-to-all)\(.*", compiled.as_text()
    )
    assert all("take" in operation for operation in exchanged), exchanged
