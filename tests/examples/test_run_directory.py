"""A run's directory: new, resumed, foreign."""

import json

import pytest
from run_directory import RunDirectory, read_config

CONFIG = {"steps": 3, "mixer": ["kda"], "log_every": 1}


def open_run(path, **changes):
    run = RunDirectory(path, CONFIG | changes, may_change=frozenset({"log_every"}))
    run.claim()
    return run


def save_checkpoint(path):
    (path / "checkpoints" / "10").mkdir(parents=True)


def test_new_then_resumed_then_finished(tmp_path):
    path = tmp_path / "runs" / "a"
    assert open_run(path).result is None
    save_checkpoint(path)
    run = open_run(path, log_every=5)
    assert json.loads((path / "run.json").read_text())["log_every"] == 5
    run.finish({"final_step": 3})
    assert open_run(path).result == {"final_step": 3}


def test_nothing_is_written_before_the_claim(tmp_path):
    path = tmp_path / "runs" / "a"
    assert RunDirectory(path, CONFIG, may_change=frozenset()).result is None
    assert not path.parent.exists()


def test_a_changed_config_is_refused_once_something_is_saved(tmp_path):
    open_run(tmp_path)
    open_run(tmp_path, steps=4)
    save_checkpoint(tmp_path)
    with pytest.raises(ValueError, match="steps was 4 and is now 3; give the old values"):
        open_run(tmp_path)
    assert json.loads((tmp_path / "run.json").read_text())["steps"] == 4


def test_what_a_kill_leaves_of_the_first_moment_is_no_hindrance(tmp_path):
    (tmp_path / "run.tmp").write_text('{"st')
    assert open_run(tmp_path).result is None


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("thesis.tex", "x", "has no run.json and holds thesis.tex"),
        ("run.json", "{", "run.json is no JSON object"),
        ("run.json", "[1]", "run.json is no JSON object"),
        ("run.json", '{"pace": 5}', "holds a run with another config"),
    ],
)
def test_a_foreign_directory_is_left_alone(name, content, message, tmp_path):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        open_run(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_text() == content


@pytest.mark.parametrize(
    ("content", "message"),
    [("{", "run.json is no JSON object"), ('{"pace": 5}', "run.json tells of none")],
)
def test_a_config_of_no_model_is_refused(content, message, tmp_path):
    with pytest.raises(ValueError, match=r"it has no run\.json"):
        read_config(tmp_path)
    (tmp_path / "run.json").write_text(content)
    with pytest.raises(ValueError, match=message):
        read_config(tmp_path)


def test_a_path_that_cannot_be_a_directory(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"run_dir must be a directory, but .*file is a file"):
        open_run(tmp_path / "file")
    with pytest.raises(ValueError, match=r"run_dir .*run cannot be written: Not a directory"):
        open_run(tmp_path / "file" / "run")
