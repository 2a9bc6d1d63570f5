"""The classification script on what the training script leaves, and on wrong commands."""

import json
import sys

import classify
import jax
import numpy as np
import pytest
from flax import nnx
from parameters import names
from trained import load_trained

from gla_layers import LanguageModel, LanguageModelConfig

OPTIONS = (
    "--steps 200 --batch-size 8 --document-bytes 24 --held-out-bytes 240 --learning-rate 3e-2 "
    "--freeze embed/* layers/*"
)


def run(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["classify.py", *map(str, arguments)])
    classify.main()


@pytest.mark.slow
def test_kinds_of_text_are_told_apart_by_the_head_alone(small_run, tmp_path, monkeypatch, capsys):
    rng = np.random.default_rng(0)
    for name, alphabet in (("low", b"abcdefgh "), ("high", b"QRSTUVWX.")):
        (tmp_path / name).write_bytes(bytes(rng.choice(list(alphabet), size=2000).tolist()))
    monkeypatch.chdir(tmp_path)
    models = []
    monkeypatch.setattr(
        classify,
        "load",
        lambda config, load=classify.load: models.append(load(config)) or models[0],
    )
    run(monkeypatch, "--classes", "low", "high", "--from-run", small_run, *OPTIONS.split())
    *output, result = capsys.readouterr().out.splitlines()
    result = json.loads(result)
    assert result["held_out_documents"] == 20
    assert result["accuracy_of_commonest_class"] == 0.5
    # Letters of two alphabets; a model of two layers and 16 channels, hardly trained.
    assert result["accuracy"] > 0.9

    kinds = dict(line.split(": ") for line in output[1:])
    assert kinds["fresh"] == "head/bias, head/kernel"
    assert kinds["unused"] == "head/kernel"
    old, step = load_trained(small_run)
    assert result["from_step"] == step
    ((model, _),) = models
    before, after = (
        dict(zip(names(m), map(np.asarray, jax.tree.leaves(nnx.state(m, nnx.Param))), strict=True))
        for m in (old, model)
    )
    assert all(
        np.array_equal(after[name], before[name]) == name.startswith(("embed/", "layers/"))
        for name in kinds["loaded"].split(", ")
    )


def test_a_document_is_classified_as_it_is_alone():
    config = LanguageModelConfig(
        vocab_size=257,
        hidden_size=16,
        num_layers=1,
        intermediate_size=16,
        mixers=("simple_gla",),
        mixer_options={"simple_gla": {"num_heads": 2}},
    )
    rngs = nnx.Rngs(0)
    model = classify.Classifier(LanguageModel(config, rngs=rngs), 3, rngs=rngs)
    call = nnx.jit(lambda model, *rows: model(*rows))
    together = classify.cut([[b"A text of many bytes."], [b"ab"], [b"c"]], 30)
    logits = call(model, together.tokens, together.segment_ids)
    alone = classify.cut([[b"ab"]], 30)
    assert alone.tokens.shape == (1, 3)
    # float32 sums in another order.
    np.testing.assert_allclose(
        call(model, alone.tokens, alone.segment_ids)[0], logits[1], atol=1e-6
    )
    assert not np.allclose(logits[1], logits[2], atol=1e-6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--classes a.txt", "classes must be at least 2 different globs, got ('a.txt',)"),
        ("--classes a.txt a.txt", "classes must be at least 2 different globs"),
        ("--classes none.txt a.txt", "classes must name files, but 'none.txt' matches none"),
        (
            "--classes a.txt b.txt --held-out-bytes 600",
            "1 to half of the text's 1000 bytes, got 600 for a.txt",
        ),
        ("--classes empty.txt a.txt", "classes must not be empty, but empty.txt holds nothing"),
        ("--classes a.txt ./a.txt --held-out-bytes 9", "classes must have different texts, but"),
        ("--classes a.txt b.txt --steps 0", "steps must be at least 1, got 0"),
        ("--classes a.txt b.txt --learning-rate 0", "learning_rate must be a number above 0"),
        ("--classes a.txt b.txt --seed -1", "seed must be from 0 to 2**32 - 1, got -1"),
        ("--classes a.txt b.txt --held-out-bytes 9 --freeze x", "'x' matches none of embed/"),
        ("--classes a.txt b.txt --held-out-bytes 9 --from-run no", "a run is needed, but no holds"),
    ],
)
def test_wrong_commands_end_with_a_sentence(
    arguments, message, small_run, tmp_path, monkeypatch, capsys
):
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(name * 1000)
    (tmp_path / "empty.txt").write_text("")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as caught:
        run(monkeypatch, "--from-run", small_run, *arguments.split())
    code = caught.value.code
    error = code if isinstance(code, str) else capsys.readouterr().err
    assert code not in (0, None)
    assert message in " ".join(error.split()), error
    assert "Traceback" not in error
