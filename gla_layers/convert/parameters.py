"""From tensors to the parameters of a module and back, by rules, strictly and one at a time."""

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding

from .correspondence import Rule

DTYPES = ("float64", "float32", "float16", "bfloat16")
LISTED = 20
"""An error names so many tensors of a kind."""


class Tensors(Protocol):
    """Tensors by name, whose values need not be in memory."""

    @property
    def names(self) -> Collection[str]: ...
    def shape(self, name: str) -> tuple[int, ...]: ...
    def dtype(self, name: str) -> str: ...
    def read(self, name: str) -> np.ndarray: ...


@dataclasses.dataclass(frozen=True)
class TensorsInMemory:
    """Tensors that are."""

    arrays: Mapping[str, np.ndarray]

    @property
    def names(self) -> Collection[str]:
        return self.arrays.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self.arrays[name].shape

    def dtype(self, name: str) -> str:
        return self.arrays[name].dtype.name

    def read(self, name: str) -> np.ndarray:
        return self.arrays[name]


def fill[M: nnx.Module](
    module: M, rules: Iterable[Rule], tensors: Tensors, ignore: Sequence[str] = ()
) -> M:
    """The abstract module with its parameters from tensors, in the parameters' types.

    Args:
        module: what `nnx.eval_shape` makes.
        rules: of all tensors that a module of its kind may have.
        tensors: where the values come from.
        ignore: beginnings of the names of tensors that are not for the module.

    Raises:
        ValueError: naming the tensors that are missing, left over, or of another shape or type
            than the parameters need, and parameters that no tensor fills.
    """
    graph, state = nnx.split(module)
    flat = nnx.to_flat_state(state)
    parameters = {_dotted(path): parameter for path, parameter in flat}
    rules = rules_for(parameters, rules)
    _check(parameters, rules, tensors, ignore)
    values: dict[str, jax.Array] = {}
    for rule in rules:
        held = [parameters[path] for path in rule.parameters]
        values |= zip(rule.parameters, _read(rule, tensors, held), strict=True)
    filled = [(path, p.replace(values[_dotted(path)])) for path, p in flat]
    return nnx.merge(graph, nnx.from_flat_state(filled))


def parameters_of(module: nnx.Module) -> dict[str, nnx.Param]:
    """The parameters of a module by their paths, names joined by dots."""
    return {_dotted(path): parameter for path, parameter in nnx.to_flat_state(nnx.state(module))}


def rules_for(parameters: Collection[str], rules: Iterable[Rule]) -> list[Rule]:
    """The rules of tensors that hold these parameters."""
    return [rule for rule in rules if all(path in parameters for path in rule.parameters)]


def rules_of_all(parameters: Collection[str], rules: Iterable[Rule]) -> dict[str, Rule]:
    """The rules of the tensors that hold these parameters, by tensor.

    Raises:
        ValueError: naming parameters that no tensor holds.
    """
    by_tensor = {rule.tensor: rule for rule in rules_for(parameters, rules)}
    left = set(parameters).difference(*(rule.parameters for rule in by_tensor.values()))
    if left:
        raise ValueError(f"the checkpoint has no place for parameters: {listing(left)}")
    return by_tensor


def tensor(rule: Rule, parameters: Mapping[str, nnx.Param]) -> np.ndarray:
    """A tensor from the parameters of a module."""
    return rule.join([np.asarray(parameters[path][...]) for path in rule.parameters])


def listing(names: Collection[str]) -> str:
    """Some of the names, in order."""
    shown = sorted(names)[:LISTED]
    rest = len(names) - len(shown)
    return ", ".join(shown) + (f" and {rest} more" if rest else "")


def _dotted(path: Sequence[Any]) -> str:
    return ".".join(map(str, path))


def _read(rule: Rule, tensors: Tensors, held: list[nnx.Param]) -> list[jax.Array]:
    parts = rule.split(tensors.read(rule.tensor), [parameter.shape for parameter in held])
    return [_on_device(part, parameter) for part, parameter in zip(parts, held, strict=True)]


def _on_device(value: np.ndarray, parameter: nnx.Param) -> jax.Array:
    spec = parameter.get_metadata().get("out_sharding")
    array = np.asarray(value, parameter.dtype)
    if spec is None:
        return jnp.asarray(array)
    return jax.device_put(array, NamedSharding(jax.sharding.get_mesh(), spec))


def _check(parameters, rules, tensors, ignore):
    expected = {rule.tensor: rule for rule in rules}
    names = {name for name in tensors.names if not name.startswith(tuple(ignore))}
    filled = {path for rule in rules for path in rule.parameters}
    shapes, types = [], []
    for name in expected.keys() & names:
        shape = expected[name].tensor_shape(
            [parameters[p].shape for p in expected[name].parameters]
        )
        if tensors.shape(name) != shape:
            shapes.append(f"{name} {list(tensors.shape(name))}, expected {list(shape)}")
        if tensors.dtype(name) not in DTYPES:
            types.append(f"{name} {tensors.dtype(name)}")
    problems = {
        "missing tensors": expected.keys() - names,
        "unused tensors": names - expected.keys(),
        "parameters that no tensor fills": parameters.keys() - filled,
        "tensors of the wrong shape": shapes,
        f"tensors of a type other than {', '.join(DTYPES)}": types,
    }
    listed = [f"{what}: {listing(names)}" for what, names in problems.items() if names]
    if listed:
        raise ValueError("\n".join(["the checkpoint does not fit the model;", *listed]))
