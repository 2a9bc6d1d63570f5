"""Checkpoints: whole, bit for bit, and what happens to damaged ones."""

import gc
import resource

import data
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from checkpoints import Checkpoints, NotSaved, Training, load_model
from flax import nnx

WIDTH = 300

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture(autouse=True)
def collect_garbage():
    """Where one part cannot be loaded orbax never awaits the others, which warns when collected."""
    yield
    gc.collect()


class Stack(nnx.Module):
    """Layers in a list, whose numbers are the keys of the state."""

    def __init__(self, width, rngs):
        self.layers = nnx.List([nnx.Linear(width, width, rngs=rngs) for _ in range(3)])


def make_training(seed=0, width=WIDTH):
    model = Stack(width, nnx.Rngs(seed))
    optimizer = nnx.Optimizer(model, optax.adamw(1e-2, mu_dtype=jnp.bfloat16), wrt=nnx.Param)
    rows = data.training_stream(
        [b"text" * 50],
        sequence_length=7,
        batch_size=2,
        seed=0,
        sharding=jax.sharding.SingleDeviceSharding(jax.devices()[0]),
    )
    return Training(model, optimizer, rows)


def advance(training):
    next(training.data)
    gradients = jax.tree.map(jnp.ones_like, nnx.state(training.model, nnx.Param))
    training.optimizer.update(training.model, gradients)


def leaves(training):
    arrays = jax.tree.leaves_with_path((nnx.state(training.model), nnx.state(training.optimizer)))
    return {jax.tree_util.keystr(path): np.asarray(array) for path, array in arrays}


def assert_same(actual, expected):
    actual_leaves, expected_leaves = leaves(actual), leaves(expected)
    assert actual_leaves.keys() == expected_leaves.keys()
    for name, array in expected_leaves.items():
        assert actual_leaves[name].dtype == array.dtype, name
        assert actual_leaves[name].tobytes() == array.tobytes(), name
    np.testing.assert_array_equal(next(actual.data)["tokens"], next(expected.data)["tokens"])


def save(directory, steps):
    """A run that is saved after each of the steps."""
    training = make_training()
    with Checkpoints(directory) as checkpoints:
        for step in range(1, max(steps) + 1):
            advance(training)
            if step in steps:
                checkpoints.save(step, training)
    return training


def restore(directory, training):
    with Checkpoints(directory) as checkpoints:
        return checkpoints.restore(training)


def damage(directory, step, how):
    """Flip a byte of, or shorten, what holds the model's arrays."""
    path = max(
        (directory / str(step) / "model").rglob("ocdbt.process_0/d/*"),
        key=lambda p: p.stat().st_size,
    )
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content if how == "flipped" else content[: len(content) // 2])


def test_nothing_saved_restores_step_0(tmp_path):
    training = make_training()
    assert restore(tmp_path / "checkpoints", training) == 0
    assert_same(training, make_training())


def test_a_fresh_process_gets_every_bit_back(tmp_path):
    saved = save(tmp_path, {3, 4})
    restored = make_training(seed=1)
    assert restore(tmp_path, restored) == 4
    assert_same(restored, saved)


def test_the_newest_two_stay(tmp_path):
    save(tmp_path, {1, 2, 3})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2", "3"]


def test_the_best_one_stays_too(tmp_path):
    training = make_training()
    for directory, restarts in ((tmp_path / "one", ()), (tmp_path / "two", (2, 3))):
        checkpoints = Checkpoints(directory, keep=1)
        for step, held_out in enumerate((3.0, 1.0, 2.0, None, 4.0), start=1):
            checkpoints.save(step, training, held_out)
            if step in restarts:
                checkpoints.__exit__(None, None, None)
                checkpoints = Checkpoints(directory, keep=1)
        checkpoints.__exit__(None, None, None)
        assert sorted(path.name for path in directory.iterdir()) == ["2", "5"]


@pytest.mark.parametrize(
    ("file", "content", "reason"),
    [
        ("_CHECKPOINT_METADATA", "", "_CHECKPOINT_METADATA is no JSON"),
        ("_CHECKPOINT_METADATA", "not JSON", "_CHECKPOINT_METADATA is no JSON"),
        ("_CHECKPOINT_METADATA", "[]", "_CHECKPOINT_METADATA is no JSON object"),
        ("_CHECKPOINT_METADATA", "{}", "the metadata saved with it hold no checksums and no data"),
        ("metrics/metrics", "not JSON", "metrics/metrics is no JSON"),
        ("metrics/metrics", "[]", "metrics/metrics is no JSON object"),
    ],
)
def test_damaged_metadata_are_told(file, content, reason, tmp_path, capfd):
    directory = tmp_path / "checkpoints"
    training = save(directory, {3})
    with Checkpoints(directory) as checkpoints:
        checkpoints.save(4, training, held_out=1.0)
    (directory / "4" / file).write_text(content)
    assert restore(directory, make_training(seed=1)) == 3
    assert reason in capfd.readouterr().err
    assert len(list(tmp_path.glob("unreadable/4-*/model"))) == 1


def test_damaged_metadata_alone_are_left_alone(tmp_path):
    directory = tmp_path / "checkpoints"
    save(directory, {3})
    (directory / "3" / "_CHECKPOINT_METADATA").write_text("[]")
    with pytest.raises(ValueError, match=r"none of steps \[3\] in .* can; step 3: _CHECK"):
        restore(directory, make_training(seed=1))
    assert (directory / "3" / "model").is_dir()


@pytest.mark.parametrize("how", ["flipped", "shortened"])
def test_a_damaged_checkpoint_is_moved_aside_for_the_one_before(how, tmp_path, capfd):
    directory = tmp_path / "checkpoints"
    save(directory, {3, 4})
    damage(directory, 4, how)
    training = make_training(seed=1)
    with Checkpoints(directory) as checkpoints:
        assert checkpoints.restore(training) == 3
        message = capfd.readouterr().err
        assert "checkpoint of step 4 cannot be read" in message
        assert len(list(tmp_path.glob("unreadable/4-*/model"))) == 1
        advance(training)
        checkpoints.save(4, training)
    whole = make_training()
    for _ in range(4):
        advance(whole)
    assert_same(training, whole)
    again = make_training(seed=2)
    assert restore(directory, again) == 4
    advance(training)
    advance(again)
    assert_same(again, training)


def test_without_a_readable_one_nothing_is_touched(tmp_path):
    save(tmp_path, {3, 4})
    for step in (3, 4):
        damage(tmp_path, step, "flipped")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ValueError, match=r"none of steps \[3, 4\] in .* can; step 4: "):
        restore(tmp_path, make_training())
    assert sorted(tmp_path.rglob("*")) == before


def test_checkpoints_of_another_model_are_refused(tmp_path):
    save(tmp_path, {3})
    with pytest.raises(ValueError, match=r"none of steps \[3\]"):
        restore(tmp_path, make_training(width=8))


def test_a_foreign_directory_is_refused(tmp_path):
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"none of steps \[7\]"):
        restore(tmp_path, make_training())
    assert (tmp_path / "7" / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("steps", [(4,), (4, 5)], ids=["leaving", "the next save"])
def test_a_full_disk_is_told_and_leaves_what_was_there(steps, tmp_path):
    saved = save(tmp_path, {3})

    def save_more():
        with Checkpoints(tmp_path) as checkpoints:
            for step in steps:
                checkpoints.save(step, saved)

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, limits[1]))
    try:
        with pytest.raises(NotSaved, match=r"checkpoint of step 4 .*: File too large"):
            save_more()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    restored = make_training(seed=1)
    assert restore(tmp_path, restored) == 3
    assert_same(restored, saved)


def test_what_a_killed_save_leaves_is_no_hindrance(tmp_path):
    saved = save(tmp_path, {3})
    (tmp_path / "4.orbax-checkpoint-tmp" / "model").mkdir(parents=True)
    restored = make_training(seed=1)
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.restore(restored) == 3
        for training in (saved, restored):
            advance(training)
        checkpoints.save(4, restored)
    again = make_training(seed=2)
    assert restore(tmp_path, again) == 4
    next(saved.data), next(again.data)
    assert_same(again, saved)


def test_the_model_alone_is_read_and_nothing_is_touched(tmp_path):
    saved = save(tmp_path, {3, 4})
    (tmp_path / "5.orbax-checkpoint-tmp" / "model").mkdir(parents=True)
    before = sorted(tmp_path.rglob("*"))
    model = make_training(seed=1).model
    assert load_model(tmp_path, model) == 4
    expected = jax.tree.leaves(nnx.state(saved.model))
    for actual, array in zip(jax.tree.leaves(nnx.state(model)), expected, strict=True):
        np.testing.assert_array_equal(actual, array)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_model_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"a checkpoint is needed, but .*none holds none"):
        load_model(tmp_path / "none", make_training().model)
    save(tmp_path, {3})
    with pytest.raises(ValueError, match="3 cannot: ValueError: "):
        load_model(tmp_path, make_training(width=8).model)
    damage(tmp_path, 3, "flipped")
    with pytest.raises(ValueError, match="3 cannot: ValueError: the numbers of model are not"):
        load_model(tmp_path, make_training().model)


def test_a_damaged_model_is_told_and_the_one_before_is_read(tmp_path, capfd):
    save(tmp_path, {3, 4})
    damage(tmp_path, 4, "flipped")
    assert load_model(tmp_path, make_training(seed=1).model) == 3
    assert "4 cannot be read (ValueError: the numbers" in capfd.readouterr().err
    assert (tmp_path / "4").is_dir()
