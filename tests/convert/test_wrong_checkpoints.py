"""Checkpoints that are broken, or that no model here has: errors that say what is wrong."""

import json
import pathlib
import re
import shutil

import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from gla_layers import LanguageModel, LanguageModelConfig
from gla_layers.convert import load_pretrained, save_pretrained

DATA = pathlib.Path(__file__).parents[1] / "data"


@pytest.fixture
def checkpoint(tmp_path):
    """A copy that a test may break."""
    return shutil.copytree(DATA / "lm_gdn", tmp_path / "checkpoint")


def change_config(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def change_tensors(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def in_two_files(folder):
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    weight_map = {}
    for number, names in enumerate((sorted(tensors)[:7], sorted(tensors)[7:])):
        save_file({name: tensors[name] for name in names}, folder / f"{number}.safetensors")
        weight_map |= dict.fromkeys(names, f"{number}.safetensors")
    write_index(folder, {"weight_map": weight_map})
    return weight_map


def write_index(folder, index):
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def refuses(folder, message, error=ValueError):
    with pytest.raises(error, match=re.escape(message)):
        load_pretrained(folder)


def test_no_folder(tmp_path):
    refuses(tmp_path / "nowhere", "there is no folder", FileNotFoundError)


def test_no_config(checkpoint):
    (checkpoint / "config.json").unlink()
    refuses(checkpoint, "config.json", FileNotFoundError)


def test_no_tensors(checkpoint):
    (checkpoint / "model.safetensors").unlink()
    refuses(checkpoint, "has neither model.safetensors nor model", FileNotFoundError)


def test_config_is_not_json(checkpoint):
    (checkpoint / "config.json").write_text("{")
    refuses(checkpoint, "config.json is not JSON")
    (checkpoint / "config.json").write_text("[]")
    refuses(checkpoint, "config.json must hold an object, got list")


@pytest.mark.parametrize("content", [b"", b"not tensors at all", bytes(100)])
def test_file_is_not_safetensors(checkpoint, content):
    (checkpoint / "model.safetensors").write_bytes(content)
    refuses(checkpoint, "model.safetensors is not a safetensors file")


def test_truncated_file(checkpoint):
    whole = (checkpoint / "model.safetensors").read_bytes()
    (checkpoint / "model.safetensors").write_bytes(whole[:-100])
    refuses(checkpoint, "model.safetensors is not a safetensors file")


def test_index(checkpoint):
    weight_map = in_two_files(checkpoint)
    assert load_pretrained(checkpoint).config.num_layers == 2
    write_index(checkpoint, {"weight_map": weight_map | {"lm_head.weight": "2.safetensors"}})
    refuses(checkpoint, "2.safetensors is missing", FileNotFoundError)
    write_index(checkpoint, {"weight_map": weight_map | {"extra.weight": "1.safetensors"}})
    refuses(
        checkpoint, "1.safetensors has no extra.weight, which model.safetensors.index.json says"
    )
    weight_map.pop("lm_head.weight")
    write_index(checkpoint, {"weight_map": weight_map})
    assert load_pretrained(checkpoint).config.num_layers == 2
    write_index(checkpoint, {})
    refuses(checkpoint, "must hold a weight_map")


def test_missing_tensor(checkpoint):
    change_tensors(checkpoint, lambda tensors: tensors.pop("model.layers.1.attn.A_log"))
    refuses(checkpoint, "missing tensors: model.layers.1.attn.A_log")


def test_unused_tensors(checkpoint):
    extra = {"model.visual.x": np.zeros(2, np.float32), "model.layers.2.y": np.zeros(2, np.float16)}
    change_tensors(checkpoint, lambda tensors: tensors.update(extra))
    refuses(checkpoint, "unused tensors: model.layers.2.y, model.visual.x")
    with pytest.raises(ValueError, match=r"unused tensors: model\.layers\.2\.y$"):
        load_pretrained(checkpoint, ignore=["model.visual."])
    load_pretrained(checkpoint, ignore=["model.visual.", "model.layers.2."])


def test_quantised_tensor(checkpoint):
    narrow = {"lm_head.weight": np.zeros((300, 64), np.int8)}
    change_tensors(checkpoint, lambda tensors: tensors.update(narrow))
    refuses(checkpoint, "float32, float16, bfloat16: lm_head.weight I8")


def test_another_vocabulary(checkpoint):
    change_config(checkpoint, vocab_size=301)
    refuses(
        checkpoint, "lm_head.weight [300, 64], expected [301, 64], model.embeddings.weight [300"
    )


def test_tied_and_untied(checkpoint):
    change_config(checkpoint, tie_word_embeddings=True)
    refuses(checkpoint, "unused tensors: lm_head.weight")


def test_long_lists_are_cut(checkpoint):
    change_tensors(checkpoint, lambda tensors: [tensors.pop(name) for name in sorted(tensors)[5:]])
    refuses(checkpoint, " and 14 more")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "llama"}, "model_type = 'llama'; expected one of ['gated_deltanet', "),
        ({"model_type": "qwen3_5_moe_text"}, "mixtures of experts are not supported"),
        ({"hidden_act": "powlu"}, "hidden_act = 'powlu', expected 'swish' or 'silu'"),
        ({"attnres_block_size": 2}, "attnres_block_size = 2, expected None"),
        ({"attn": {"layers": [1], "num_heads": 2, "window_size": 8}}, "window_size = 8"),
        ({"attn": {"num_heads": 2}}, "config.json has no 'layers'"),
        (
            {"attn": [{"layers": [0], "num_heads": 2}, {"layers": [1], "num_heads": 4}]},
            "attention layers of several kinds",
        ),
    ],
)
def test_architectures_that_are_not_here(checkpoint, changes, message):
    change_config(checkpoint, **changes)
    refuses(checkpoint, message)


@pytest.mark.parametrize("key", ["model_type", "vocab_size", "num_heads", "num_hidden_layers"])
def test_config_lacks_a_field(checkpoint, key):
    config = json.loads((checkpoint / "config.json").read_text())
    config.pop(key)
    (checkpoint / "config.json").write_text(json.dumps(config))
    refuses(checkpoint, f"config.json has no {key!r}")


def model(**changes) -> LanguageModel:
    fields = {
        "vocab_size": 20,
        "hidden_size": 16,
        "num_layers": 2,
        "intermediate_size": 16,
        "mixer_options": {
            "gated_deltanet": {"num_heads": 2, "head_dim": 8},
            "attention": {"num_heads": 2},
        },
        "norm_eps": 1e-5,
    }
    config = LanguageModelConfig(**fields | changes)
    return nnx.eval_shape(lambda: LanguageModel(config, rngs=nnx.Rngs(0)))


def test_nothing_is_overwritten(tmp_path):
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(FileExistsError, match="holds a checkpoint"):
        save_pretrained(model(), tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mixers": ("attention",)}, "has no model of the layers ['attention']"),
        ({"mixers": ("kda", "gated_deltanet")}, "mixers"),
        ({"norm_eps": 1e-6}, "gated_deltanet.norm_eps = 1e-06, not 1e-05"),
        (
            {
                "mixer_options": {
                    "gated_deltanet": {"num_heads": 2, "head_dim": 8, "conv_bias": True}
                }
            },
            "gated_deltanet.conv_bias = False, not True",
        ),
    ],
)
def test_models_that_flash_linear_attention_has_not(tmp_path, changes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        save_pretrained(model(**changes), tmp_path)
    assert not list(tmp_path.iterdir())


def test_like_another_architecture(tmp_path):
    with pytest.raises(ValueError, match="vocab_size = 300, not 20"):
        save_pretrained(model(), tmp_path / "new", like=DATA / "lm_gdn")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda path: load_pretrained(DATA / "lm_gdn", ignore="lm_head"), "ignore must be a list"),
        (lambda path: save_pretrained(model(), path, ignore=[1]), "ignore must be a list"),
        (
            lambda path: save_pretrained(model(), path, max_shard_size=0),
            "max_shard_size must be an",
        ),
        (lambda path: save_pretrained(model().head, path), "model must be a LanguageModel, got"),
    ],
)
def test_wrong_calls_name_the_argument(tmp_path, call, message):
    with pytest.raises(ValueError, match=message):
        call(tmp_path)
