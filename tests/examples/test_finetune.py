"""The fine-tuning script on what the training script leaves, and on wrong commands."""

import json
import shutil
import sys

import finetune
import generate
import jax
import numpy as np
import pytest
from flax import nnx
from parameters import names
from trained import load_trained

OPTIONS = (
    "--steps 3 --batch-size 2 --sequence-length 16 --held-out-bytes 300 --sample-bytes 4 "
    "--checkpoint-every 1 --dtype bfloat16 --attention-layers 0 --add-layers 1 "
    "--freeze embed/* layers/*/mlp/*"
)


def run(monkeypatch, capsys, *arguments):
    capsys.readouterr()
    monkeypatch.setattr(sys, "argv", ["finetune.py", *map(str, arguments)])
    finetune.main()
    return capsys.readouterr().out.splitlines()


def arrays(run_dir):
    model, step = load_trained(run_dir)
    values = jax.tree.leaves(nnx.state(model, nnx.Param))
    return dict(zip(names(model), map(np.asarray, values), strict=True)), step


@pytest.mark.slow
def test_frozen_stay_fresh_are_named_and_a_stopped_run_goes_on(
    small_run, tmp_path, monkeypatch, capsys
):
    path, text = tmp_path / "tuned", tmp_path / "text.txt"
    text.write_text("Once there was a kernel that lived in a chunk. " * 30)
    command = [*OPTIONS.split(), "--from-run", small_run, "--text", text, "--run-dir", path]
    output = run(monkeypatch, capsys, *command)
    assert output[0] == f"from step 2 of {small_run}"
    kinds = dict(line.split(": ") for line in output[1:4])
    assert [*kinds] == ["loaded", "fresh", "unused"]
    fresh = kinds["fresh"].split(", ")
    added = [name for name in fresh if name.startswith("layers/2/")]
    assert fresh == [f"layers/0/mixer/{name}_proj/kernel" for name in "koqv"] + added
    assert "layers/2/mixer/gk_proj/kernel" in added, "the turn of the first mixer"
    assert json.loads(output[-1])["final_step"] == 3

    before, _ = arrays(small_run)
    after, step = arrays(path)
    assert step == 3
    for name in kinds["loaded"].split(", "):
        frozen = name.startswith("embed/") or "/mlp/" in name
        assert np.array_equal(after[name], before[name]) == frozen, name

    options = ["--run-dir", path, "--prompt", "On", "a kernel", "--max-new-tokens", 3]
    monkeypatch.setattr(sys, "argv", ["generate.py", *map(str, options)])
    generate.main()
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["step"] == 3

    assert run(monkeypatch, capsys, *command)[-1] == output[-1]
    shutil.rmtree(path / "checkpoints" / "3")
    (path / "result.json").unlink()
    run(monkeypatch, capsys, *command)
    again, _ = arrays(path)
    assert all(again[name].tobytes() == after[name].tobytes() for name in after)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "text must name files to train on"),
        ("--text none.txt", "text must name files, but 'none.txt' matches none"),
        ("--text a.txt", "held_out_bytes must be from 1 to half of the text's 1000 bytes"),
        ("--text a.txt --add-layers -1", "add_layers must be at least 0, got -1"),
        ("--text a.txt --attention-layers 2", "attention_layers must be from 0 to 1, got 2"),
        ("--text a.txt --attention-layers 0 0", "attention_layers must be different, got (0, 0)"),
        ("--text a.txt --attention-layers 1", "but 1 has attention"),
        ("--text a.txt --held-out-bytes 9 --freeze mpl/*", "'mpl/*' matches none of embed/"),
        ("--text a.txt --held-out-bytes 9 --freeze *", "freeze must leave a parameter to train"),
        ("--text a.txt --steps 0", "steps must be at least 1, got 0"),
        ("--text a.txt --mixer kda", "--mixer"),
        ("--text a.txt --from-run nowhere", "a run is needed, but nowhere holds none"),
        ("--text a.txt --run-dir {small_run}", "run_dir must be another than from_run, got"),
    ],
)
def test_wrong_commands_end_with_a_sentence(
    arguments, message, small_run, tmp_path, monkeypatch, capsys
):
    (tmp_path / "a.txt").write_text("a" * 1000)
    monkeypatch.chdir(tmp_path)
    command = ["--from-run", small_run, "--run-dir", "new"]
    command += arguments.format(small_run=small_run).split()
    monkeypatch.setattr(sys, "argv", ["finetune.py", *map(str, command)])
    with pytest.raises(SystemExit) as caught:
        finetune.main()
    code = caught.value.code
    error = code if isinstance(code, str) else capsys.readouterr().err
    assert code not in (0, None)
    assert message in " ".join(error.split()), error
    assert "Traceback" not in error
    assert not (tmp_path / "new").exists()
