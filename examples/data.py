"""Text as packed rows of bytes: documents, the held-out tail, and the training stream.

A token is a byte. One further token, `DOCUMENT_MARK`, begins every document, so that its first byte
is predicted from something, and ends it where it is trained on, so that the model learns to stop.
Rows are one token longer than the model's context: the first `sequence_length` tokens are its
inputs, the last `sequence_length` its targets.
"""

import dataclasses
import glob
import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from pydoc_data import topics

import grain
import jax
import numpy as np
from jaxtyping import Int32

DOCUMENT_MARK = 256
VOCAB_SIZE = 257

Rows = tuple[Int32[np.ndarray, "B T"], Int32[np.ndarray, "B T"]]


@dataclasses.dataclass(frozen=True)
class Text:
    """Documents to train on, and documents to measure with.

    Attributes:
        training: the text but for its end.
        held_out: its end.
        sha256: of all the documents, and of where each ends.
    """

    training: tuple[bytes, ...]
    held_out: tuple[bytes, ...]
    sha256: str


def load_text(patterns: Sequence[str], held_out_bytes: int, *, option: str = "text") -> Text:
    """The documents of the files that `patterns` name, or of Python's own manual without any.

    Args:
        patterns: paths or globs. A `.jsonl` file holds one document a line, under "text"; any
            other file is one document.
        held_out_bytes: length of the end that is not trained on; it may begin in the midst of a
            document.
        option: what the patterns are called in errors.

    Raises:
        ValueError: a pattern matches no file; a file cannot be read, is empty, or is not what its
            name says; less than half of the text would be left to train on.
    """
    if patterns:
        documents = [
            document for path in _matches(patterns, option) for document in _read(path, option)
        ]
    else:
        documents = _python_manual()
    hashed = hashlib.sha256()
    for document in documents:
        hashed.update(len(document).to_bytes(8, "little") + document)
    try:
        parts = _hold_out_tail(documents, held_out_bytes)
    except ValueError as error:
        raise ValueError(" for ".join([str(error), *patterns[:1]])) from error
    return Text(*parts, hashed.hexdigest())


def training_stream(
    documents: Sequence[bytes],
    *,
    sequence_length: int,
    batch_size: int,
    seed: int,
    sharding: jax.sharding.Sharding,
) -> grain.DatasetIterator:
    """An endless stream of packed batches, shuffled anew each epoch, whose place can be saved.

    The rows are made beforehand and fetched by index, so that a place is one number, the same for
    any number of processes. (grain's own packing, of a stream, holds back a whole epoch where
    documents fill their rows.)

    Args:
        documents: the text.
        sequence_length: tokens that the model sees at a time.
        batch_size: rows of a batch, over all processes.
        seed: of the order.
        sharding: of a batch; a process fetches the rows of its own devices.

    Returns:
        An iterator of dictionaries of `tokens` and `segment_ids`, int32
        `[batch_size, sequence_length + 1]`.
    """
    packed = dict(zip(("tokens", "segment_ids"), pack(documents, sequence_length + 1), strict=True))
    shape = batch_size, sequence_length + 1

    def fetch(numbers: Int32[np.ndarray, " B"]) -> dict[str, jax.Array]:
        def array(rows):
            return jax.make_array_from_callback(
                shape, sharding, lambda index: rows[numbers[index[0]]][:, index[1]]
            )

        return {name: array(rows) for name, rows in packed.items()}

    numbers = grain.MapDataset.range(len(packed["tokens"])).seed(seed).shuffle().repeat()
    batches = numbers.batch(batch_size, drop_remainder=True).map(fetch)
    # The rows lie in memory: reader threads would only cost.
    return iter(batches.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)))


def pack(documents: Sequence[bytes], length: int) -> Rows:
    """Rows that hold every token of the documents, marks at both ends, once.

    A document fills as many rows as it can; what is left of it shares rows with what is left of
    others.

    Returns:
        Tokens and segment ids (0 for the padding at the very end), `[rows, length]`.
    """
    full, rest = [], []
    for document in documents:
        tokens = np.append(_tokens(document), DOCUMENT_MARK)
        cut = len(tokens) // length * length
        full.append(tokens[:cut])
        rest.append(tokens[cut:])
    tokens = np.concatenate(full + rest)
    segments = np.repeat(np.arange(1, len(rest) + 1), list(map(len, rest)))
    segment_ids = np.concatenate([np.ones(len(tokens) - len(segments), int), segments])

    def rows(x: np.ndarray) -> np.ndarray:
        return np.pad(x, (0, -len(x) % length)).astype(np.int32).reshape(-1, length)

    return rows(tokens), rows(segment_ids)


def evaluation_rows(documents: Sequence[bytes], sequence_length: int) -> Rows:
    """Rows in which every byte is a target exactly once.

    Consecutive rows of a document share one token, the last target of one and the first input of
    the next.

    Returns:
        Tokens and segment ids (1, and 0 for padding), `[rows, sequence_length + 1]`.
    """
    rows = [
        tokens[start : start + sequence_length + 1]
        for tokens in map(_tokens, documents)
        for start in range(0, len(tokens) - 1, sequence_length)
    ]
    tokens = np.zeros((len(rows), sequence_length + 1), np.int32)
    segment_ids = np.zeros_like(tokens)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = row
        segment_ids[i, : len(row)] = 1
    return tokens, segment_ids


def encode(beginning: str) -> list[int]:
    """The tokens of a document's beginning.

    A command line's bytes that are no UTF-8, which Python shows as surrogates, stay what they are.
    """
    return [DOCUMENT_MARK, *beginning.encode(errors="surrogateescape")]


def decode(tokens: Iterable[int]) -> str:
    """Tokens as text; what is no UTF-8 shows as a replacement mark."""
    return bytes(t for t in tokens if t != DOCUMENT_MARK).decode("utf-8", errors="replace")


def _hold_out_tail(
    documents: Sequence[bytes], size: int
) -> tuple[tuple[bytes, ...], tuple[bytes, ...]]:
    total = sum(map(len, documents))
    if not 0 < size <= total // 2:
        raise ValueError(
            f"held_out_bytes must be from 1 to half of the text's {total} bytes, got {size}"
        )
    training, tail = list(documents), []
    while size > 0:
        document = training.pop()
        cut = max(len(document) - size, 0)
        tail.append(document[cut:])
        size -= len(document) - cut
        if cut:
            training.append(document[:cut])
    return tuple(training), tuple(reversed(tail))


def _tokens(document: bytes) -> Int32[np.ndarray, " T"]:
    """The document behind a mark."""
    return np.concatenate(([DOCUMENT_MARK], np.frombuffer(document, np.uint8))).astype(np.int32)


def _python_manual() -> list[bytes]:
    """The topics of `help()`, each paragraph once.

    Many topics repeat others whole; left in, a tenth of the held-out tail would also be in the
    training text.
    """
    seen: set[str] = set()
    documents = []
    for name in sorted(topics.topics):
        paragraphs = dict.fromkeys(topics.topics[name].strip().split("\n\n"))
        documents.append("\n\n".join(p for p in paragraphs if p not in seen).encode())
        seen.update(paragraphs)
    return [document for document in documents if document]


def _matches(patterns: Sequence[str], option: str) -> list[Path]:
    paths = []
    for pattern in patterns:
        found = [p for p in map(Path, sorted(glob.glob(pattern, recursive=True))) if p.is_file()]
        if not found:
            hint = "; it is a folder" if pattern and Path(pattern).is_dir() else ""
            raise ValueError(f"{option} must name files, but {pattern!r} matches none{hint}")
        paths.extend(found)
    return list(dict.fromkeys(paths))


def _read(path: Path, option: str) -> list[bytes]:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{option} {path} cannot be read: {error.strerror}") from error
    if not content.strip():
        raise ValueError(f"{option} must not be empty, but {path} holds nothing")
    if path.suffix != ".jsonl":
        return [content]
    return [
        _json_text(path, number, line, option)
        for number, line in enumerate(content.splitlines(), start=1)
        if line.strip()
    ]


def _json_text(path: Path, number: int, line: bytes, option: str) -> bytes:
    try:
        return json.loads(line)["text"].encode()
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f'{option} in {path} must have an object with a string "text" on every line, '
            f"but line {number} is {line[:40].decode(errors='replace')!r}"
        ) from error
