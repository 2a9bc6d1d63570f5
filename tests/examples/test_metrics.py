"""The record of a run across kills, and its plot."""

import json

import pytest
from metrics import Metrics, plot_loss


def rows(*steps):
    return [{"step": step, "bits_per_byte": 1 / step} for step in steps]


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_rows_after_the_resumed_step_are_written_once(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with Metrics(path, last_step=0) as metrics:
        metrics.write(rows(1, 2))
        metrics.write(rows(3, 4))
    with Metrics(path, last_step=2) as metrics:
        assert metrics.rows == read(path) == rows(1, 2)
        metrics.write(rows(3, 4, 5))
        assert metrics.rows == read(path) == rows(1, 2, 3, 4, 5)


def test_a_line_cut_short_by_a_kill_is_dropped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with Metrics(path, last_step=0) as metrics:
        metrics.write(rows(1, 2))
    path.write_text(path.read_text()[:-5])
    with Metrics(path, last_step=1) as metrics:
        metrics.write(rows(2))
    assert read(path) == rows(1, 2)


@pytest.mark.parametrize("line", [b'{"st#p"', b"{}", b"3", b"\xff\x00"])
def test_a_damaged_file_is_named(line, tmp_path):
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1}\n' + line + b"\n")
    with pytest.raises(ValueError, match=r"metrics.jsonl must hold an object of JSON"):
        Metrics(tmp_path / "metrics.jsonl", last_step=1)


def test_tensorboard_gets_the_same_numbers(tmp_path):
    with Metrics(tmp_path / "metrics.jsonl", last_step=0, tensorboard=tmp_path / "tb") as metrics:
        metrics.write(rows(1, 2))
    (events,) = (tmp_path / "tb").iterdir()
    assert b"bits_per_byte" in events.read_bytes()


def test_plot_is_a_picture(tmp_path):
    plot_loss(
        [*rows(1, 2), {"step": 3, "bits_per_byte": 1.0, "eval_bits_per_byte": 2.0}],
        path := tmp_path / "loss.png",
    )
    assert path.read_bytes().startswith(b"\x89PNG")
    plot_loss(rows(1), path)
    plot_loss([], path)
