"""Language models and layers from checkpoints of other libraries, and back."""

import dataclasses
import os
import pathlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from flax import nnx
from jaxtyping import ArrayLike

from ..configuration import sizes
from ..language_model import LanguageModel
from ..language_model_config import MIXERS, LanguageModelConfig
from . import fla, kimi, olmo, qwen
from .family import CheckpointConfig, Family, MixerFamily, all_options
from .files import CONFIG, TensorFiles, read_json, write_json, write_tensors
from .parameters import TensorsInMemory, fill, listing, parameters_of, rules_of_all, tensor

FAMILIES: Mapping[str, Family] = {
    **fla.FAMILIES,
    **qwen.FAMILIES,
    **kimi.FAMILIES,
    **olmo.FAMILIES,
}
"""The kinds of checkpoints, by the `model_type` of their `config.json`."""

Path = str | os.PathLike[str]


def load_pretrained(path: Path, *, ignore: Sequence[str] = (), **options: Any) -> LanguageModel:
    """A language model from a checkpoint's folder.

    One tensor is in memory at a time beside the model.

    Args:
        path: a folder with `config.json` and `model.safetensors`, or several files and
            `model.safetensors.index.json`.
        ignore: beginnings of names of tensors that may be left out, such as `"model.visual."`.
        **options: of `LanguageModel`: `dtype`, `param_dtype`, `precision`, `sharding`,
            `implementation`, `remat`.

    Raises:
        FileNotFoundError: there is no such folder, or a file is missing.
        ValueError: a file is not what its name says, there is no such architecture here (a mixture
            of experts, for one), or the tensors are not those that the architecture needs.

    Example:

    >>> import tempfile
    >>> from flax import nnx
    >>> from gla_layers import LanguageModel, LanguageModelConfig
    >>> from gla_layers.convert import load_pretrained, save_pretrained
    >>> config = LanguageModelConfig.preset("tiny", num_layers=1, norm_eps=1e-5)
    >>> folder = tempfile.mkdtemp()
    >>> save_pretrained(LanguageModel(config, rngs=nnx.Rngs(0)), folder)
    >>> load_pretrained(folder).config.hidden_size
    128
    """
    _check_ignore(ignore)
    folder = pathlib.Path(path)
    checkpoint = _read_config(folder)
    family = _family(checkpoint)
    config = family.read_config(checkpoint)
    model = nnx.eval_shape(lambda: LanguageModel(config, **options, rngs=nnx.Rngs(0)))
    with TensorFiles(folder) as files:
        return fill(model, family.rules(config, files.names), files, ignore)


def save_pretrained(
    model: LanguageModel,
    path: Path,
    *,
    like: Path | None = None,
    ignore: Sequence[str] = (),
    max_shard_size: int = 5_000_000_000,
) -> None:
    """Write a language model as a checkpoint that other libraries read.

    Args:
        model: what to write.
        path: a folder, which is made; it must not hold a checkpoint.
        like: the folder of a checkpoint of the same architecture, whose `config.json` and tensors'
            names and types are taken. By default it is written as flash-linear-attention does, in
            the parameters' types.
        ignore: beginnings of names of tensors of `like` that are left out.
        max_shard_size: bytes of one file, which is also what is held in memory.

    Raises:
        FileExistsError: the folder holds a checkpoint.
        ValueError: an argument is wrong, the architecture or the tensors differ from those of
            `like`, or flash-linear-attention does not have it.

    Example: see `load_pretrained`.
    """
    if not isinstance(model, LanguageModel):
        raise ValueError(f"model must be a LanguageModel, got {type(model).__name__}")
    _check_ignore(ignore)
    (max_shard_size,) = sizes(max_shard_size=max_shard_size)
    folder = pathlib.Path(path)
    if any(folder.glob("*.safetensors")) or (folder / CONFIG).exists():
        raise FileExistsError(f"{folder} holds a checkpoint")
    checkpoint = _new_config(model) if like is None else _read_config(pathlib.Path(like))
    types = {} if like is None else _types(pathlib.Path(like), ignore)
    family = _family(checkpoint)
    _check_same(family.read_config(checkpoint), model.config)
    parameters = parameters_of(model)
    rules = rules_of_all(parameters, family.rules(model.config, types.keys()))
    if like is None:
        types = {name: parameters[rule.parameters[0]].dtype for name, rule in rules.items()}
    elif types.keys() != rules.keys():
        differing = types.keys() ^ rules.keys()
        raise ValueError(f"{like} and the model differ in tensors: {listing(differing)}")

    def bytes_of(name: str) -> int:
        count = sum(parameters[path].size for path in rules[name].parameters)
        return count * types[name].itemsize

    def read(name: str) -> np.ndarray:
        return tensor(rules[name], parameters).astype(types[name])

    folder.mkdir(parents=True, exist_ok=True)
    write_tensors(folder, {name: bytes_of(name) for name in rules}, read, max_shard_size)
    write_json(folder / CONFIG, checkpoint)


def layer_from_tensors(
    tensors: Mapping[str, ArrayLike], config: Mapping[str, Any], mixer: str, **options: Any
) -> nnx.Module:
    """A token mixer from its tensors in a checkpoint.

    Args:
        tensors: by their names within the layer, such as `"q_proj.weight"`.
        config: the content of the checkpoint's `config.json`.
        mixer: the layer's name in a `LanguageModelConfig`, such as `"gated_deltanet"`.
        **options: of the layer: `dtype`, `param_dtype`, `precision`, `sharding`, `implementation`.

    Raises:
        ValueError: there is no such layer, or the tensors are not those that it needs.

    Example:

    >>> from flax import nnx
    >>> from gla_layers import KDA
    >>> from gla_layers.convert import layer_from_tensors, layer_to_tensors
    >>> config = {"model_type": "kda", "hidden_size": 32, "num_heads": 2, "head_dim": 16}
    >>> tensors = layer_to_tensors(KDA(32, num_heads=2, head_dim=16, rngs=nnx.Rngs(0)), config)
    >>> tensors["f_proj.0.weight"].shape
    (16, 32)
    >>> layer_from_tensors(tensors, config, "kda").f_proj.down.kernel.shape
    (32, 16)
    """
    checkpoint = CheckpointConfig(config)
    family = _mixer_family(checkpoint, mixer)
    made = family.options(checkpoint)
    arrays = TensorsInMemory({name: np.asarray(x) for name, x in tensors.items()})
    size = checkpoint["hidden_size"]
    layer = nnx.eval_shape(lambda: MIXERS[mixer](size, **made, **options, rngs=nnx.Rngs(0)))
    return fill(layer, family.rules(arrays.names, made), arrays)


def layer_to_tensors(
    layer: nnx.Module, config: Mapping[str, Any], *, like: Collection[str] = ()
) -> dict[str, np.ndarray]:
    """The tensors of a token mixer as a checkpoint names them.

    Args:
        layer: a token mixer.
        config: the content of the checkpoint's `config.json`.
        like: names of the tensors, where a kind of checkpoint goes by several.

    Raises:
        ValueError: checkpoints of that kind have no such layer.

    Example: see `layer_from_tensors`.
    """
    checkpoint = CheckpointConfig(config)
    mixer = next((name for name, kind in MIXERS.items() if type(layer) is kind), None)
    family = _mixer_family(checkpoint, mixer)
    parameters = parameters_of(layer)
    rules = rules_of_all(parameters, family.rules(like, family.options(checkpoint)))
    return {name: tensor(rule, parameters) for name, rule in rules.items()}


def _check_ignore(ignore: Sequence[str]) -> None:
    if isinstance(ignore, str) or not all(isinstance(prefix, str) for prefix in ignore):
        raise ValueError(f"ignore must be a list of beginnings of names, got {ignore!r}")


def _read_config(folder: pathlib.Path) -> CheckpointConfig:
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no folder {folder}; only local ones are read")
    return CheckpointConfig(read_json(folder / CONFIG))


def _types(folder: pathlib.Path, ignore: Sequence[str]) -> dict[str, np.dtype]:
    with TensorFiles(folder) as files:
        names = [name for name in files.names if not name.startswith(tuple(ignore))]
        return {name: np.dtype(files.dtype(name)) for name in names}


def _family(config: CheckpointConfig) -> Family:
    model_type = config["model_type"]
    if model_type not in FAMILIES:
        experts = "mixtures of experts are not supported; " if "moe" in model_type else ""
        raise ValueError(
            f"config.json has model_type = {model_type!r}; {experts}expected one of "
            f"{sorted(FAMILIES)}"
        )
    return FAMILIES[model_type]


def _mixer_family(config: CheckpointConfig, mixer: str | None) -> MixerFamily:
    mixers = _family(config).mixers
    if mixer is None or mixer not in mixers:
        kind = config["model_type"]
        raise ValueError(f"mixer must be one of {kind}'s, {sorted(mixers)}, got {mixer!r}")
    return mixers[mixer]


def _new_config(model: LanguageModel) -> CheckpointConfig:
    """The `config.json` of flash-linear-attention."""
    for mixer in model.config.layer_mixers:
        family = FAMILIES.get(mixer)
        if family is not None and family.write_config is not None:
            written = family.write_config(model.config)
            return CheckpointConfig(written, dtype=model.embed.embedding.dtype.name)
    mixers = sorted(set(model.config.layer_mixers))
    raise ValueError(f"flash-linear-attention has no model of the layers {mixers}")


def _check_same(checkpoint: LanguageModelConfig, model: LanguageModelConfig) -> None:
    theirs, ours = _described(checkpoint), _described(model)
    if theirs["mixers"] != ours["mixers"]:
        theirs, ours = ({"mixers": described["mixers"]} for described in (theirs, ours))
    differences = [
        f"{key} = {theirs[key]}, not {value}" for key, value in ours.items() if theirs[key] != value
    ]
    if differences:
        raise ValueError(
            f"the checkpoint's architecture is not the model's: {', '.join(differences)}"
        )


def _described(config: LanguageModelConfig) -> dict[str, Any]:
    """What two configs of one architecture agree in."""
    described = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    given = described.pop("mixer_options")
    described["mixers"] = config.layer_mixers
    for mixer in sorted(set(config.layer_mixers)):
        options = all_options(mixer, given.get(mixer, {}))
        described |= {f"{mixer}.{option}": value for option, value in options.items()}
    return described
