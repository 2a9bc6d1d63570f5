"""A checkpoint's folder: `config.json`, and tensors in one safetensors file or several.

    model.safetensors                                                        or
    model-00001-of-00002.safetensors, ..., model.safetensors.index.json      {"weight_map": ...}

Tensors are read and files are written one at a time.
"""

import contextlib
import json
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self

import numpy as np

try:
    from safetensors import SafetensorError, safe_open
    from safetensors.numpy import save_file
except ImportError as error:
    raise ImportError('gla_layers.convert needs "pip install gla-layers[convert]"') from error

CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


class TensorFiles:
    """The tensors of a folder: names, shapes and types at once, values one by one.

    A context, within which the files are open. Entering it raises FileNotFoundError where a file is
    missing, and ValueError where one is not what its name says.
    """

    def __init__(self, folder: pathlib.Path):
        self._folder = folder
        self._stack = contextlib.ExitStack()
        self._files: dict[str, Any] = {}

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            if (self._folder / INDEX).exists():
                self._open_indexed(stack)
            elif (self._folder / SINGLE).exists():
                file = _open(self._folder / SINGLE, stack)
                self._files = dict.fromkeys(file.keys(), file)
            else:
                raise FileNotFoundError(f"{self._folder} has neither {SINGLE} nor {INDEX}")
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    @property
    def names(self) -> set[str]:
        """Names of the tensors."""
        return set(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape, from the file's header."""
        return tuple(self._files[name].get_slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """A tensor's type."""
        stored = self._files[name].get_slice(name).get_dtype()
        return DTYPES.get(stored, stored)

    def read(self, name: str) -> np.ndarray:
        """A tensor's value."""
        return self._files[name].get_tensor(name)

    def _open_indexed(self, stack: contextlib.ExitStack) -> None:
        weight_map = read_json(self._folder / INDEX).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ValueError(f"{self._folder / INDEX} must hold a weight_map, name to file")
        files = {name: _open(self._folder / name, stack) for name in set(weight_map.values())}
        held = {file_name: set(file.keys()) for file_name, file in files.items()}
        for name, file_name in weight_map.items():
            if name not in held[file_name]:
                raise ValueError(f"{file_name} has no {name}, which {INDEX} says is there")
        for file_name, names in held.items():
            self._files |= dict.fromkeys(names, files[file_name])
        self._files |= {name: files[file_name] for name, file_name in weight_map.items()}


def write_tensors(
    folder: pathlib.Path,
    sizes: Mapping[str, int],
    read: Callable[[str], np.ndarray],
    max_shard_size: int,
) -> None:
    """Write tensors, in several files with an index if one would be larger than allowed.

    Args:
        folder: where.
        sizes: by name, their bytes.
        read: gives a tensor's value by its name.
        max_shard_size: bytes of a file, unless one tensor alone has more.
    """
    shards = list(_shards(sizes, max_shard_size))
    if len(shards) == 1:
        _write(folder / SINGLE, list(sizes), read)
        return
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        file_name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        _write(folder / file_name, names, read)
        weight_map |= dict.fromkeys(names, file_name)
    index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
    write_json(folder / INDEX, index)


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it holds something else.
    """
    try:
        content = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold an object, got {type(content).__name__}")
    return content


def write_json(path: pathlib.Path, content: Mapping[str, Any]) -> None:
    """Write an object to a JSON file."""
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


def _open(path: pathlib.Path, stack: contextlib.ExitStack) -> Any:
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing")
    try:
        return stack.enter_context(safe_open(path, framework="np"))
    except SafetensorError as error:
        raise ValueError(f"{path} is not a safetensors file: {error}") from error


def _write(path: pathlib.Path, names: Sequence[str], read: Callable[[str], np.ndarray]) -> None:
    tensors = {name: np.ascontiguousarray(read(name)) for name in names}
    save_file(tensors, path, metadata={"format": "pt"})


def _shards(sizes: Mapping[str, int], max_shard_size: int) -> Iterator[list[str]]:
    names: list[str] = []
    total = 0
    for name, size in sizes.items():
        if names and total + size > max_shard_size:
            yield names
            names, total = [], 0
        names.append(name)
        total += size
    yield names
