"""Training on a mesh: how it is described, and runs that go on on another one."""

import jax
import numpy as np
import pytest
from checkpoints import Checkpoints
from data import Text
from flax import nnx
from loop import train_step
from mesh import AXES, make_mesh
from train_config import Config
from training_run import begin, make_model

from gla_layers import LanguageModelConfig

DEVICES = jax.devices()
MODEL = LanguageModelConfig(
    vocab_size=257,
    hidden_size=16,
    num_layers=1,
    intermediate_size=16,
    mixers=("simple_gla",),
    mixer_options={"simple_gla": {"num_heads": 2}},
)
TEXT = Text(training=(bytes(range(256)) * 8,), held_out=(b"",), sha256="")


@pytest.mark.parametrize(
    ("description", "sizes"),
    [
        ("data=2,fsdp=2,tensor=2,sequence=1", (2, 2, 1, 2)),
        ("tensor=2,sequence=2,data=2", (2, 1, 2, 2)),
        ("fsdp=8", (1, 8, 1, 1)),
        ("fsdp=-1", (1, 8, 1, 1)),
        ("data=-1,sequence=4", (2, 1, 4, 1)),
        (None, (1, 1, 1, 1)),
    ],
)
def test_description_of_a_mesh(description, sizes):
    assert make_mesh(description).shape == dict(zip(AXES, sizes, strict=True))


WRONG = (
    "fsdp fsdp= fsdp=x rows=8 fsdp=4 fsdp=16 fsdp=2,fsdp=4 fsdp=0 data=-1,fsdp=-1 data=3,fsdp=-1 "
    "data=-2,fsdp=-4 data=16,fsdp=-1 data=0,fsdp=-1 data=2;fsdp=4"
)


@pytest.mark.parametrize("description", ["", *WRONG.split()])
def test_wrong_description_of_a_mesh(description):
    with pytest.raises(ValueError, match=r"mesh must be sizes of .* product is 8") as caught:
        make_mesh(description)
    assert str(caught.value).endswith(f"got {description}")


def start(description, num_devices, monkeypatch):
    """A run before its first step, and its mesh, on the first of the devices."""
    monkeypatch.setattr(jax, "devices", lambda: DEVICES[:num_devices])
    config = Config(batch_size=8, sequence_length=16, steps=9)
    mesh = make_mesh(description)
    with jax.set_mesh(mesh):
        return begin(make_model(config, MODEL), config, TEXT, (), mesh), mesh


def step(training, mesh):
    with jax.set_mesh(mesh):
        return float(train_step(training.model, training.optimizer, **next(training.data))["loss"])


def arrays(training):
    return jax.tree.leaves(nnx.state((training.model, training.optimizer)))


def share(training):
    """The most of all parameters and moments that a device holds."""
    held = dict.fromkeys(DEVICES, 0)
    for x in arrays(training):
        for shard in x.addressable_shards:
            held[shard.device] += shard.data.nbytes
    return max(held.values()) / sum(x.nbytes for x in arrays(training))


@pytest.mark.slow
def test_run_goes_on_on_another_mesh(tmp_path, monkeypatch):
    training, mesh = start("data=2,fsdp=2,tensor=2", 8, monkeypatch)
    # A half of what has a vocabulary's size, which is most here, and a quarter of other matrices.
    assert share(training) < 0.5
    losses = [step(training, mesh) for _ in range(3)]
    assert share(training) < 0.5
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(3, training)
    saved = [np.asarray(x) for x in arrays(training)]
    losses += [step(training, mesh) for _ in range(2)]

    for num_devices, description in (
        (1, None),
        (2, "tensor=2"),
        (4, "fsdp=2,sequence=2"),
    ):
        training, mesh = start(description, num_devices, monkeypatch)
        with Checkpoints(tmp_path) as checkpoints:
            assert checkpoints.restore(training) == 3
        assert {x.sharding.num_devices for x in arrays(training)} == {num_devices}
        for x, expected in zip(arrays(training), saved, strict=True):
            assert np.asarray(x).tobytes() == expected.tobytes()
        assert np.allclose([step(training, mesh) for _ in range(2)], losses[3:], atol=1e-5)
