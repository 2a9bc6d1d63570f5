"""Packed rows: every document gets what it would get alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gla_layers.kernels.packing import CHUNK, Alignment, Packing

from .cases import (
    OP_IDS,
    OP_IMPLEMENTATIONS,
    OPS,
    evaluate,
    random_inputs,
    reference,
    relative_error,
)

every_implementation = pytest.mark.parametrize(
    ("op", "implementation"), OP_IMPLEMENTATIONS, ids=OP_IDS
)

# Lengths of documents, and of padding as negative numbers: 300 tokens each, for one program.
LAYOUTS = {
    "boundary inside a chunk": [63, 65, 172],
    "one-token documents": [1, 1, 62, 1, 64, 1, 170],
    "a document over several chunks": [40, 200, 60],
    "padding at both ends and between": [-3, 60, -70, 90, 1, -76],
    "padding alone between chunk ends": [128, -128, 44],
}

PER_TOKEN = ("o", "dq", "dk", "dv", "dg", "dbeta")


def lay_out(layout):
    """Segment ids, and each document's slice."""
    ids, documents, position = [], [], 0
    for length in layout:
        if length > 0:
            documents.append(slice(position, position + length))
        ids += [len(documents) if length > 0 else 0] * abs(length)
        position += abs(length)
    return np.array([ids]), documents


def alone(op, inputs, document, **changes):
    per_token = (*op.tokens, "do")
    return inputs | {name: inputs[name][:, document] for name in per_token} | changes


def check(name, actual, expected, tolerance=1e-5, floor=0.0):
    error = relative_error(actual, expected, floor)
    assert error < tolerance, f"{name}: {error:.2e}"


@pytest.mark.parametrize("strong", [False, True], ids=["usual gates", "after strong decay"])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
@every_implementation
def test_one_state_a_row(op, implementation, layout, strong):
    ids, documents = lay_out(layout)
    inputs = random_inputs(op, length=ids.shape[1])
    inputs["dfinal_state"] *= 0  # what the documents alone get
    if strong:
        inputs["g"][:, documents[0]] = -30.0
    state = inputs["initial_state"]
    garbage = {name: np.where(expand(ids == 0, x), np.nan, x) for name, x in per_token(op, inputs)}
    packed = inputs | garbage | {"segment_ids": ids}
    actual = evaluate(op, implementation, packed, output_final_state=False)
    expected = {name: np.zeros(x.shape) for name, x in actual.items()}
    for i, document in enumerate(documents):
        single = alone(op, inputs, document, initial_state=state if i == 0 else 0 * state)
        for name, x in reference(op, single).items():
            if name in PER_TOKEN:
                expected[name][:, document] = x
            elif i == 0 and name == "dinitial_state":
                expected[name] = x
    for name, x in actual.items():
        floor = np.linalg.norm(expected["dv"]) if name == "dg" else 1e-30
        check(name, x, expected[name], floor=floor)
        if name in PER_TOKEN:
            assert not x[ids == 0].any(), f"{name} is not 0 in padding"


def per_token(op, inputs):
    return [(name, inputs[name]) for name in op.tokens]


def expand(mask, x):
    return mask.reshape(mask.shape + (1,) * (x.ndim - 2))


@pytest.mark.parametrize(
    "lengths",
    [[0, 50, 0, 0, 128, 1, 218, 0], [63, 65, 130, 7, 2, 100, 29, 1]],
    ids=["empty ones", "full ones"],
)
@every_implementation
def test_one_state_a_document(op, implementation, lengths):
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    rng = np.random.default_rng(3)
    inputs = random_inputs(op, length=int(offsets[-1]))
    states = (1, len(lengths), *inputs["initial_state"].shape[1:])
    inputs |= {name: rng.normal(size=states) for name in ("initial_state", "dfinal_state")}
    actual = evaluate(op, implementation, inputs | {"cu_seqlens": offsets})
    for i, length in enumerate(lengths):
        document = slice(offsets[i], offsets[i + 1])
        own = {name: inputs[name][:, i] for name in ("initial_state", "dfinal_state")}
        if length == 0:
            np.testing.assert_array_equal(
                actual["final_state"][:, i], own["initial_state"].astype("float32")
            )
            np.testing.assert_array_equal(
                actual["dinitial_state"][:, i], own["dfinal_state"].astype("float32")
            )
            continue
        expected = reference(op, alone(op, inputs, document, **own))
        for name in ("final_state", "dinitial_state"):
            check(name, actual[name][:, i], expected[name])
        for name in set(expected) & set(PER_TOKEN):
            # A one-token document's o can be the small difference of large terms.
            floor = np.linalg.norm(actual[name]) * np.sqrt(length / offsets[-1])
            check(name, actual[name][:, document], expected[name], floor=floor)


@every_implementation
def test_padded_batch_gives_each_row_its_own_state(op, implementation):
    """Rows padded on the left or the right, one document each: the state skips the padding."""
    inputs = random_inputs(op, batch=3, length=140)
    ids = np.zeros((3, 140), int)
    spans = [slice(140 - 70, 140), slice(0, 130), slice(139, 140)]
    for row, span in enumerate(spans):
        ids[row, span] = 1
    padded = inputs | {"segment_ids": ids, "dfinal_state": inputs["dfinal_state"][:, None]}
    actual = evaluate(op, implementation, padded, max_num_segments=1)
    for row, span in enumerate(spans):
        single = {name: x[row : row + 1] for name, x in inputs.items()}
        expected = reference(op, alone(op, single, span))
        check("o", actual["o"][row : row + 1, span], expected["o"])
        check("final_state", actual["final_state"][row], expected["final_state"])
        check("dinitial_state", actual["dinitial_state"][row : row + 1], expected["dinitial_state"])


@every_implementation
def test_more_documents_than_states(op, implementation):
    ids = jnp.asarray([[1] * 10 + [2] * 10 + [3] * 10])
    inputs = random_inputs(op, length=30)
    tokens = [jnp.asarray(inputs[name], "float32") for name in op.tokens]

    def call(ids):
        return op.chunk(
            *tokens,
            segment_ids=ids,
            max_num_segments=2,
            output_final_state=True,
            implementation=implementation,
        )

    with pytest.raises(ValueError, match="max_num_segments must be at least the 3 documents"):
        call(ids)
    _, states = jax.jit(call)(ids)
    assert np.isnan(states).all(), "a traced call cannot raise: it must not return plausible states"


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_more_documents_than_states_in_decoding(op):
    inputs = random_inputs(op, length=6)
    tokens = [jnp.asarray(inputs[name], "float32") for name in op.tokens]

    @jax.jit
    def call(ids):
        options = {"max_num_segments": 2, "output_final_state": True}
        return op.recurrent(*tokens, segment_ids=ids, **options)

    o, states = call(jnp.asarray([[1, 1, 2, 2, 3, 0]]))
    assert np.isnan(states).all()
    assert np.isnan(o).any(axis=(0, 2, 3)).tolist() == [False] * 4 + [True, False]


@every_implementation
def test_documents_known_while_tracing(op, implementation):
    inputs = random_inputs(op, length=9)
    tokens = [jnp.asarray(inputs[name], "float32") for name in op.tokens]

    def call(*tokens, ids):
        options = {"max_num_segments": 3, "output_final_state": True}
        return op.chunk(*tokens, segment_ids=ids, implementation=implementation, **options)

    ids = np.array([[1, 1, 1, 2, 2, 0, 3, 3, 0]])
    known = jax.jit(lambda *tokens: call(*tokens, ids=ids))(*tokens)
    traced = jax.jit(call)(*tokens, ids=jnp.asarray(ids))
    for actual, expected in zip(known, traced, strict=True):
        np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize(
    "packing",
    [
        {"segment_ids": jnp.zeros((1, 0), int), "max_num_segments": 2},
        {"cu_seqlens": jnp.zeros(3, int)},
    ],
    ids=["segment_ids", "cu_seqlens"],
)
@every_implementation
def test_no_tokens_keep_every_documents_state(op, implementation, packing):
    inputs = random_inputs(op, length=0)
    tokens = [jnp.asarray(inputs[name], "float32") for name in op.tokens]
    states = jnp.ones((1, 2, *inputs["initial_state"].shape[1:]))
    options = {"initial_state": states, "implementation": implementation, **packing}
    o, new_states = op.chunk(*tokens, output_final_state=True, **options)
    assert o.shape == inputs["v"].shape
    np.testing.assert_array_equal(new_states, states)
    assert op.chunk(*tokens, **options)[0].shape == inputs["v"].shape


def test_alignment_starts_documents_at_chunk_starts():
    packing = Packing.from_segment_ids(jnp.asarray([[0, 1, 1, 2, 0, 3, 3, 3]]))
    layout = Alignment.of(packing, 3)
    token = jnp.arange(8.0)[None]
    aligned = layout.align(token)
    starts = np.asarray(aligned)[0, ::CHUNK]
    assert starts.tolist() == [1, 3, 5]
    assert np.asarray(layout.chunk_document).tolist() == [[0, 1, 2]]
    restored = np.asarray(layout.restore(aligned))[0]
    assert restored[[1, 2, 3, 5, 6, 7]].tolist() == [1, 2, 3, 5, 6, 7]


def test_segment_ids_and_cu_seqlens_say_the_same():
    by_ids = Packing.from_segment_ids(jnp.asarray([[5, 5, 5, 2, 2, 7, 0]]))
    by_offsets = Packing.from_cu_seqlens(jnp.asarray([0, 3, 5, 6]), 7)
    np.testing.assert_array_equal(by_ids.document, by_offsets.document)
    np.testing.assert_array_equal(by_ids.valid, by_offsets.valid)
