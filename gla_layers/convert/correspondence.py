"""How a tensor of a checkpoint and parameters of a model correspond: data, and both directions.

A tensor has its output channels first, as torch keeps them. Where it holds several parameters,
their channels lie one parameter after the other, or so within each head:

    tensor [heads * (a + b), ...] = heads times (a channels of the first, b of the second)
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Self

import numpy as np

Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Form:
    """How one parameter is laid out in a tensor, and back; neither copies."""

    to_tensor: Callable[[np.ndarray], np.ndarray]
    from_tensor: Callable[[np.ndarray], np.ndarray]


SAME = Form(lambda x: x, lambda x: x)
TRANSPOSED = Form(lambda x: x.T, lambda x: x.T)
DEPTHWISE = Form(lambda x: x.T[:, None], lambda x: x[:, 0].T)
PER_HEAD_4D = Form(lambda x: x[None, None, :, None], lambda x: x[0, 0, :, 0])


@dataclasses.dataclass(frozen=True)
class Rule:
    """One tensor and the parameters in it.

    Attributes:
        tensor: its name.
        parameters: their paths, in the order of their channels.
        form: of each of them.
        per_head: whether the channels of a head lie together.
        heads: number of heads, once it is known.
    """

    tensor: str
    parameters: tuple[str, ...]
    form: Form
    per_head: bool = False
    heads: int = 1

    def within(self, tensor_prefix: str, parameter_prefix: str) -> Self:
        """The same rule for a part of a model."""
        return dataclasses.replace(
            self,
            tensor=tensor_prefix + self.tensor,
            parameters=tuple(parameter_prefix + path for path in self.parameters),
        )

    def of_heads(self, heads: int) -> Self:
        """The same rule where the number of heads is known."""
        return dataclasses.replace(self, heads=heads)

    def tensor_shape(self, shapes: Sequence[Shape]) -> Shape:
        """The tensor's shape from those of the parameters."""
        channels, *rest = zip(*self._part_shapes(shapes), strict=True)
        return sum(channels), *(sizes[0] for sizes in rest)

    def split(self, tensor: np.ndarray, shapes: Sequence[Shape]) -> list[np.ndarray]:
        """The parameters, of these shapes, from the tensor."""
        if len(self.parameters) == 1:
            return [self.form.from_tensor(tensor)]
        groups = self.heads if self.per_head else 1
        ends = np.cumsum([part[0] // groups for part in self._part_shapes(shapes)])
        parts = np.split(_by_group(tensor, groups), ends[:-1], axis=1)
        return [self.form.from_tensor(_flat(part)) for part in parts]

    def join(self, parameters: Sequence[np.ndarray]) -> np.ndarray:
        """The tensor from the parameters."""
        parts = [self.form.to_tensor(parameter) for parameter in parameters]
        if len(parts) == 1:
            return parts[0]
        groups = self.heads if self.per_head else 1
        return _flat(np.concatenate([_by_group(part, groups) for part in parts], axis=1))

    def _part_shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        return [self.form.to_tensor(np.broadcast_to(np.int8(0), shape)).shape for shape in shapes]


def linear(name: str, *modules: str, per_head: bool = False) -> Rule:
    """The weight of a linear map, or of several in one, that go by another name or the same."""
    return _rule(name, modules, "weight", "kernel", TRANSPOSED, per_head)


def bias(name: str, *modules: str) -> Rule:
    """The bias of a linear map or a convolution."""
    return _rule(name, modules, "bias", "bias", SAME)


def convolution(name: str, *modules: str) -> Rule:
    """The kernel of a depthwise convolution, or of several in one."""
    return _rule(name, modules, "weight", "kernel", DEPTHWISE)


def norm(name: str, *modules: str) -> Rule:
    """The weight of a norm."""
    return _rule(name, modules, "weight", "scale", SAME)


def embedding(name: str, *modules: str) -> Rule:
    """The weight of an embedding."""
    return _rule(name, modules, "weight", "embedding", SAME)


def vector(name: str, parameter: str | None = None, form: Form = SAME) -> Rule:
    """A parameter that is no module's."""
    return Rule(name, (parameter or name,), form)


def _rule(name, modules, tensor_leaf, parameter_leaf, form, per_head=False):
    parameters = tuple(f"{module}.{parameter_leaf}" for module in modules or (name,))
    return Rule(f"{name}.{tensor_leaf}", parameters, form, per_head)


def _by_group(x: np.ndarray, groups: int) -> np.ndarray:
    return x.reshape(groups, -1, *x.shape[1:])


def _flat(x: np.ndarray) -> np.ndarray:
    return x.reshape(-1, *x.shape[2:])
