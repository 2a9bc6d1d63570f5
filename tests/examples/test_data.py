"""Documents, the held-out tail, packing, and a place in the stream that can be saved."""

import json

import data
import jax
import numpy as np
import pytest


def random_documents(sizes):
    rng = np.random.default_rng(0)
    return [rng.integers(1, 256, size, np.uint8).tobytes() for size in sizes]


ONE_DEVICE = jax.sharding.SingleDeviceSharding(jax.devices()[0])
DOCUMENTS = random_documents([5, 40, 17, 16, 15, 31, 64, 100, 3, 1, 8, 200])


def stream(documents=DOCUMENTS, batch_size=2):
    return data.training_stream(
        documents, sequence_length=15, batch_size=batch_size, seed=3, sharding=ONE_DEVICE
    )


def test_manual_is_text_without_repetition():
    text = data.load_text([], 32768)
    assert sum(map(len, text.held_out)) == 32768
    assert sum(map(len, text.training)) > 10 * 32768
    paragraphs = b"\n\n".join(text.held_out).split(b"\n\n")
    repeated = [p for p in paragraphs if len(p) > 80 and any(p in d for d in text.training)]
    assert not repeated


@pytest.mark.parametrize("size", [1, 3, 200, 203, 250])
def test_tail_and_training_text_are_the_text(size, tmp_path):
    paths = [tmp_path / f"{i:02}.txt" for i in range(len(DOCUMENTS))]
    for path, document in zip(paths, DOCUMENTS, strict=True):
        path.write_bytes(document)
    text = data.load_text([str(tmp_path / "*.txt")], size)
    assert b"".join(text.training) + b"".join(text.held_out) == b"".join(DOCUMENTS)
    assert sum(map(len, text.held_out)) == size
    assert all(text.training)
    assert all(text.held_out)


def test_files_globs_and_jsonl(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "one.txt").write_text("first")
    (tmp_path / "a" / "two.md").write_text("zweites, größer")
    (tmp_path / "three.jsonl").write_text('{"text": "third"}\n\n{"id": 4, "text": "fourth"}\n')
    patterns = [str(tmp_path / "**" / "*.*"), str(tmp_path / "three.jsonl")]
    text = data.load_text(patterns, 1)
    assert b"|".join(text.training) + text.held_out[0] == (
        "first|zweites, größer|third|fourth".encode()
    )
    assert text.sha256 != data.load_text(patterns[1:], 1).sha256


@pytest.mark.parametrize("length", [1, 16, 41, 1000])
def test_rows_hold_every_token_of_every_document_once(length):
    """And a segment is a piece of one document, in a row of its own where it fills one."""
    tokens, segment_ids = data.pack(DOCUMENTS, length)
    pieces = [
        bytes(t % 256 for t in row[ids == i])
        for row, ids in zip(tokens, segment_ids, strict=True)
        for i in np.unique(ids)
        if i
    ]
    marked = [b"\0" + document + b"\0" for document in DOCUMENTS]
    assert sum(map(len, pieces)) == sum(map(len, marked)) == np.sum(segment_ids > 0)
    assert all(any(piece in document for document in marked) for piece in pieces)
    assert sum(len(p) == length for p in pieces) >= sum(len(d) // length for d in marked)
    assert (segment_ids == 0).sum() < length


def test_every_epoch_holds_the_rows_in_another_order():
    rows, _ = data.pack(DOCUMENTS, 16)
    batches = stream(batch_size=len(rows))
    first, second = next(batches)["tokens"], next(batches)["tokens"]
    assert sorted(map(bytes, first)) == sorted(map(bytes, second)) == sorted(map(bytes, rows))
    assert not np.array_equal(first, second)


def test_batches_of_one_row():
    assert len(next(stream(batch_size=1))["tokens"]) == 1


@pytest.mark.parametrize("documents", [DOCUMENTS, random_documents([1600]), random_documents([7])])
def test_a_place_saved_as_json_is_found_again(documents):
    whole = stream(documents)
    places, batches = [], []
    for _ in range(30):
        places.append(json.dumps(whole.get_state()))
        batches.append(next(whole))
    for start in range(25):
        resumed = stream(documents)
        resumed.set_state(json.loads(places[start]))
        for expected in batches[start : start + 5]:
            actual = next(resumed)
            assert all(np.array_equal(actual[name], expected[name]) for name in expected)


def test_evaluation_predicts_every_byte_once():
    tokens, segment_ids = data.evaluation_rows(DOCUMENTS, 15)
    assert tokens.shape == segment_ids.shape == (len(tokens), 16)
    is_target = (segment_ids[:, 1:] == segment_ids[:, :-1]) & (segment_ids[:, 1:] != 0)
    assert bytes(tokens[:, 1:][is_target].tolist()) == b"".join(DOCUMENTS)


def test_decode_leaves_out_marks_and_replaces_what_is_no_text():
    assert data.decode([256, *"größe".encode(), 0xFF]) == "größe\ufffd"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "text must not be empty, but .*corpus.jsonl holds nothing"),
        (" \n", "text must not be empty"),
        ('{"text": "a"}\nno json\n', "line 2 is 'no json'"),
        ('{"txt": "a"}\n', "line 1 is"),
        ('{"text": 3}\n', 'a string "text" on every line'),
        ('{"text": "\\ud800"}\n', 'a string "text" on every line'),
        ("[1]\n", 'a string "text" on every line'),
        ('{"text": "a"}\n', "held_out_bytes must be from 1 to half of the text's 1 bytes, got 1"),
    ],
)
def test_wrong_files_are_named(content, message, tmp_path):
    path = tmp_path / "corpus.jsonl"
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        data.load_text([str(path)], 1)


def test_missing_and_unreadable_files_are_named(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"text must name files, but '.*no.txt' matches none"):
        data.load_text([str(tmp_path / "no.txt")], 1)
    with pytest.raises(ValueError, match="matches none; it is a folder"):
        data.load_text([str(tmp_path)], 1)
    (tmp_path / "a.txt").write_text("text")

    def refuse(path):
        raise PermissionError(13, "Permission denied")

    # Tests may run as root, who can read everything.
    monkeypatch.setattr("pathlib.Path.read_bytes", refuse)
    with pytest.raises(ValueError, match=r"text .*a.txt cannot be read: Permission denied"):
        data.load_text([str(tmp_path / "a.txt")], 1)
