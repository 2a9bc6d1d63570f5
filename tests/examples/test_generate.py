"""The generation script on what the training script leaves, and on wrong commands."""

import json
import sys

import generate
import jax
import jax.numpy as jnp
import pytest
import training_run
from mesh import make_mesh
from train_config import Config
from trained import load_trained


def run(monkeypatch, capsys, *arguments):
    capsys.readouterr()
    monkeypatch.setattr(sys, "argv", ["generate.py", *map(str, arguments)])
    generate.main()
    output = capsys.readouterr().out
    texts, _, result = output.rstrip("\n").rpartition("\n")
    return texts, json.loads(result)


def test_prompts_go_on_for_as_long_as_asked(small_run, monkeypatch, capsys):
    files = {path: path.stat().st_mtime_ns for path in small_run.rglob("*")}
    arguments = ["--run-dir", small_run, "--prompt", "größer", "a", "--max-new-tokens", "5"]
    texts, result = run(monkeypatch, capsys, *arguments, "--top-k", "40", "--top-p", "0.9")
    assert texts.startswith("--- 1 of 2\ngrößer")
    assert "\n--- 2 of 2\na" in texts
    assert result["step"] == 2
    assert len(result["new_bytes"]) == 2
    assert all(0 <= count <= 5 for count in result["new_bytes"])
    assert result["bytes_per_second"] > 0
    again = run(monkeypatch, capsys, *arguments, "--top-k", "40", "--top-p", "0.9")[0]
    assert again == texts
    assert run(monkeypatch, capsys, *arguments, "--seed", "1")[0] != texts
    assert {path: path.stat().st_mtime_ns for path in small_run.rglob("*")} == files


def test_the_type_and_the_implementation_are_those_asked_for(small_run, monkeypatch, capsys):
    models = []

    def load(*arguments, **options):
        models.append(load_trained(*arguments, **options))
        return models[-1]

    monkeypatch.setattr(generate, "load_trained", load)
    arguments = ["--run-dir", small_run, "--prompt", "a", "--max-new-tokens", "1"]
    run(monkeypatch, capsys, *arguments, "--dtype", "bfloat16", "--implementation", "reference")
    mixer = models[0][0].layers[0].mixer
    assert (mixer.dtype, mixer.implementation) == (jnp.bfloat16, "reference")


def test_the_sample_of_the_training_script_is_one_of_these(small_run, monkeypatch, capsys):
    model, _ = generate.load_trained(small_run)
    config = Config(prompt="The ", sample_bytes=12, seed=5)
    with jax.set_mesh(make_mesh(None)):
        expected = training_run.continue_prompt(model, config, model.config)
    arguments = ["--prompt", "The ", "--max-new-tokens", "12", "--seed", "5"]
    texts, _ = run(monkeypatch, capsys, "--run-dir", small_run, *arguments)
    assert texts == f"--- 1 of 1\n{expected}"


@pytest.mark.parametrize(
    ("arguments", "messages"),
    [
        (["--prompt", ""], ["prompt must be texts that are not empty, got ('',)"]),
        (["--prompt"], ["prompt must be texts that are not empty, got ()"]),
        (["--temperature", "-1"], ["temperature must be a number from 0 up, got -1.0"]),
        (["--top-p", "0"], ["top_p must be above 0 and at most 1, got 0.0"]),
        (["--top-p", "1.5"], ["top_p must be above 0 and at most 1, got 1.5"]),
        (["--top-k", "0"], ["top_k must be at least 1, got 0"]),
        (["--max-new-tokens", "0"], ["max_new_tokens must be at least 1, got 0"]),
        (["--seed", "-1"], ["seed must be from 0 to 2**32 - 1, got -1"]),
        (["--top-q", "1"], ["--top-q", "--top-p"]),
        ([], ["a run is needed", "tiny-gated_deltanet holds none: it has no run.json"]),
        (["--run-dir", "begun"], ["a checkpoint is needed, but begun/checkpoints holds none"]),
        (["--run-dir", "x" * 300], ["File name too long"]),
        (["--run-dir", "no_dict"], ["no_dict/run.json must tell of a model, but: "]),
        (
            ["--run-dir", "no_mixer"],
            ["no_mixer/run.json must tell of a model, but: 'rnn' is no mixer"],
        ),
        (["--run-dir", "no_field"], ["no_field/run.json must tell of a model, but: ", "width"]),
        (["--run-dir", "no_dtype"], ["no_dtype/run.json must tell of a dtype, but has 'float99'"]),
    ],
)
def test_wrong_commands_end_with_a_sentence(
    arguments, messages, small_run, tmp_path, monkeypatch, capsys
):
    begun = json.loads((small_run / "run.json").read_text())
    for name, change in {
        "begun": {},
        "no_dict": {"model": "x"},
        "no_mixer": {"model": begun["model"] | {"mixers": ["rnn"]}},
        "no_field": {"model": begun["model"] | {"width": 3}},
        "no_dtype": {"dtype": "float99"},
    }.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text(json.dumps(begun | change))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["generate.py", *arguments])
    with pytest.raises(SystemExit) as caught:
        generate.main()
    code = caught.value.code
    error = code if isinstance(code, str) else capsys.readouterr().err
    assert code not in (0, None)
    assert all(message in " ".join(error.split()) for message in messages), error
    assert "Traceback" not in error
