"""The chunked cross-entropy against its definition in float64, and what it holds in memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gla_layers.cross_entropy import chunked_cross_entropy
from tests.programs import arrays

BATCH, WIDTH, VOCAB = 3, 16, 97


def inputs(length, scale=1.0):
    rng = np.random.default_rng(length)
    hidden = scale * rng.normal(size=(BATCH, length, WIDTH)).astype(np.float32)
    head = rng.normal(size=(WIDTH, VOCAB)).astype(np.float32)
    return hidden, head, rng.integers(0, VOCAB, (BATCH, length), np.int32)


def definition(hidden, head, targets):
    """Losses, and the gradients of their sum, in float64."""
    hidden, head = np.float64(hidden), np.float64(head)
    logits = hidden @ head
    logits -= logits.max(-1, keepdims=True)
    probabilities = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    one_hot = np.eye(VOCAB)[targets]
    losses = -np.log((probabilities * one_hot).sum(-1))
    error = probabilities - one_hot
    return losses, error @ head.T, np.einsum("btd,btv->dv", hidden, error)


def assert_close(actual, expected, tolerance):
    assert np.linalg.norm(actual - expected) <= tolerance * np.linalg.norm(expected)


@pytest.mark.parametrize("length", [1, 7, 8, 9, 40])
@pytest.mark.parametrize("scale", [1.0, 10.0])
def test_losses_and_gradients_are_those_of_the_definition(length, scale):
    hidden, head, targets = inputs(length, scale)

    def total(hidden, head):
        losses = chunked_cross_entropy(hidden, head, targets, chunk_size=8, precision="highest")
        return losses.sum(), losses

    (_, losses), (dhidden, dhead) = jax.value_and_grad(total, (0, 1), has_aux=True)(hidden, head)
    assert losses.dtype == jnp.float32
    expected = definition(hidden, head, targets)
    for actual, reference in zip((losses, dhidden, dhead), expected, strict=True):
        assert_close(actual, reference, 1e-5)


def test_no_rows_have_no_losses():
    _, head, _ = inputs(9)
    hidden, targets = np.zeros((0, 9, WIDTH), np.float32), np.zeros((0, 9), np.int32)
    assert chunked_cross_entropy(hidden, head, targets, chunk_size=8).shape == (0, 9)


@pytest.mark.parametrize("target", [-100, -1, VOCAB, 2**31 - 1])
def test_a_target_outside_of_the_vocabulary_has_the_loss_nan(target):
    hidden, head, targets = inputs(9)
    targets[1, 3] = target

    def total(hidden):
        losses = chunked_cross_entropy(hidden, head, targets, chunk_size=8)
        return losses.sum(), losses

    (_, losses), dhidden = jax.value_and_grad(total, has_aux=True)(hidden)
    expected = np.zeros(targets.shape, bool)
    expected[1, 3] = True
    np.testing.assert_array_equal(np.isnan(losses), expected)
    np.testing.assert_array_equal(np.isnan(dhidden).all(axis=2), expected)


def test_bfloat16_accumulates_in_float32():
    hidden, head, targets = inputs(40)
    hidden = hidden.astype(jnp.bfloat16)
    rounded = head.astype(jnp.bfloat16).astype(np.float32)

    losses, vjp = jax.vjp(
        lambda head: chunked_cross_entropy(hidden, head, targets, chunk_size=8), head
    )
    (dhead,) = vjp(jnp.ones_like(losses))
    expected, _, expected_dhead = definition(hidden, rounded, targets)
    assert losses.dtype == dhead.dtype == jnp.float32
    assert_close(losses, expected, 1e-6)
    # The error of the logits, which multiplies the hidden states, is rounded to bfloat16.
    assert_close(dhead, expected_dhead, 4e-3)


def test_never_holds_all_logits():
    """No array of the program, forward or backward, has more than a chunk's logits."""
    hidden, head, targets = inputs(64)

    def total(hidden, head):
        return chunked_cross_entropy(hidden, head, targets, chunk_size=8).sum()

    program = jax.make_jaxpr(jax.grad(total, (0, 1)))(hidden, head)
    with_vocabulary = [x for x in arrays(program.jaxpr) if VOCAB in x.shape]
    assert max(x.size for x in with_vocabulary) == BATCH * 8 * VOCAB


HIDDEN, HEAD, TARGETS = inputs(4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": HIDDEN[0]}, "hidden must be"),
        ({"hidden": HIDDEN[:, :0], "targets": TARGETS[:, :0]}, "hidden must be"),
        ({"head": HEAD.T}, "head must be"),
        ({"targets": TARGETS[:, 1:]}, "targets must be"),
        ({"targets": np.float32(TARGETS)}, "targets must be"),
        ({"hidden": HIDDEN.tolist()}, "hidden must be an array of one of .*, got list"),
        ({"head": np.int32(HEAD)}, "head must be an array of one of .*, got int32"),
        ({"targets": TARGETS.tolist()}, "targets must be an integer array, got list"),
        ({"precision": "exact"}, "precision must be None or a jax.lax.Precision, .* got 'exact'"),
        ({"chunk_size": True}, "chunk_size must be"),
        ({"chunk_size": 0}, "chunk_size must be"),
        ({"chunk_size": 2.5}, "chunk_size must be"),
    ],
)
def test_wrong_calls_name_the_argument(change, message):
    call = {"hidden": HIDDEN, "head": HEAD, "targets": TARGETS, "chunk_size": 8} | change
    hidden, head, targets = (call.pop(name) for name in ("hidden", "head", "targets"))
    with pytest.raises(ValueError, match=message):
        chunked_cross_entropy(hidden, head, targets, **call)
