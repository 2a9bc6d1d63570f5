"""The recall script: its rows, a run of it, and wrong commands."""

import json
import sys

import jax
import numpy as np
import pytest
import recall

SMALL = recall.Config(num_keys=8, writes=3, vocabulary=11, batch_size=4)


def run(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["recall.py", *map(str, arguments)])
    recall.main()


def test_answers_are_the_last_values_of_the_keys():
    rows = recall.draw_rows(jax.random.key(0), SMALL, 4)
    assert rows.tokens.shape == (4, 8 * 3 * 2 + 8)
    for row, documents in enumerate(recall.PACKING):
        tokens, segment_ids, answers = (
            np.asarray(x[row]) for x in (rows.tokens, rows.segment_ids, rows.answers)
        )
        assert set(segment_ids.tolist()) == set(range(1, documents + 1))
        for document in range(1, documents + 1):
            inside = segment_ids == document
            check_document(tokens[inside].tolist(), answers[inside].tolist(), 8 // documents)
    again = recall.draw_rows(jax.random.key(0), SMALL, 4)
    other = recall.draw_rows(jax.random.key(1), SMALL, 4)
    assert np.array_equal(again.tokens, rows.tokens)
    assert not np.array_equal(other.tokens, rows.tokens)


def check_document(tokens, answers, num_keys):
    pairs, queries = tokens[:-num_keys], tokens[-num_keys:]
    keys, values = pairs[::2], pairs[1::2]
    assert sorted(keys) == sorted(3 * queries)
    assert all(0 <= key < 11 for key in keys)
    assert all(11 <= value < 22 for value in values)
    last = dict(zip(keys, values, strict=True))
    assert answers == [-1] * len(pairs) + [last[query] for query in queries]


@pytest.mark.slow
def test_a_table_curves_and_a_plot(tmp_path, monkeypatch, capsys):
    options = (
        "--steps 3 --eval-every 2 --batch-size 4 --head-dim 4 --num-layers 1 --vocabulary 8 "
        "--writes 1 --out-dir"
    )
    tables = []
    for mixers in (["attention"], ["simple_gla", "attention"]):
        run(monkeypatch, *options.split(), tmp_path, "--mixer", *mixers)
        tables.append(capsys.readouterr().out)
    header, _, *rows = tables[1].splitlines()
    assert header == "| mixer | parameters | accuracy |"
    assert [row.split(" | ")[0] for row in rows] == ["| simple_gla", "| attention"]
    results = json.loads((tmp_path / "recall.json").read_text())
    assert [point["step"] for point in results["attention"]["curve"]] == [2, 3]
    assert (tmp_path / "recall.png").read_bytes().startswith(b"\x89PNG")
    assert rows[1] == tables[0].splitlines()[-1], "the same by the same seed"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--num-keys 12", "num_keys must be a multiple of 8, got 12"),
        ("--batch-size 6", "batch_size must be a multiple of 4, got 6"),
        ("--head-dim 7", "head_dim must be a multiple of 2, got 7"),
        ("--head-dim 258", "head_dim must be at most 256, got 258"),
        ("--writes 0", "writes must be at least 1, got 0"),
        ("--vocabulary 4", "vocabulary must be at least num_keys = 8, got 4"),
        ("--learning-rate nan", "learning_rate must be a number above 0, got nan"),
        ("--mixer kda kda", "mixer must be different names, got ('kda', 'kda')"),
        ("--seed -1", "seed must be from 0 to 2**32 - 1, got -1"),
        ("--mixer rnn", "--mixer"),
        ("--out-dir file", "file"),
    ],
)
def test_wrong_commands_end_with_a_sentence(arguments, message, tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("")
    monkeypatch.chdir(tmp_path)
    check_ends(monkeypatch, capsys, arguments.split(), message)


def test_a_plot_needs_matplotlib(monkeypatch, capsys):
    monkeypatch.setattr(recall.importlib.util, "find_spec", lambda name: None)
    check_ends(monkeypatch, capsys, [], "matplotlib must be installed to draw the curves")


def check_ends(monkeypatch, capsys, arguments, message):
    with pytest.raises(SystemExit) as caught:
        run(monkeypatch, *arguments)
    code = caught.value.code
    error = code if isinstance(code, str) else capsys.readouterr().err
    assert code not in (0, None)
    assert message in " ".join(error.split()), error
    assert "Traceback" not in error
