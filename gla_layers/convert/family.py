"""What is known of a kind of checkpoint: the names of its tensors, and its `config.json`."""

import dataclasses
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from ..language_model_config import MIXERS, SHARED_OPTIONS, LanguageModelConfig
from .correspondence import Rule

Rules = tuple[Rule, ...]


class CheckpointConfig(dict[str, Any]):
    """The content of a `config.json`."""

    def __missing__(self, key: str) -> Any:
        raise ValueError(f"config.json has no {key!r}")

    def require(self, **allowed: tuple[Any, ...]) -> None:
        """Check fields that a `LanguageModel` has no choice in; the first value is the default.

        Raises:
            ValueError: naming a field whose value is none of the allowed.
        """
        for key, values in allowed.items():
            if self.get(key, values[0]) not in values:
                expected = " or ".join(map(repr, values))
                raise ValueError(f"config.json has {key} = {self[key]!r}, expected {expected}")


@dataclasses.dataclass(frozen=True)
class MixerFamily:
    """A token mixer of a kind of checkpoint.

    Attributes:
        prefix: of its tensors, within a layer's.
        options: what a `config.json` says of it, as keyword arguments of the mixer here.
        layouts: its tensors, in as many namings as there are, the usual one first.
    """

    prefix: str
    options: Callable[[CheckpointConfig], Mapping[str, Any]]
    layouts: tuple[Rules, ...]

    def rules(self, names: Collection[str], options: Mapping[str, Any]) -> list[Rule]:
        """The rules of the naming that comes closest to these names, without the prefix."""
        heads = options["num_heads"]
        return [rule.of_heads(heads) for rule in _closest(self.layouts, names)]


@dataclasses.dataclass(frozen=True)
class Family:
    """A kind of checkpoint.

    Attributes:
        layer_mixers: what a `config.json` says of the layers: the mixers' names here.
        fields: what it says of the rest of a `LanguageModelConfig`.
        outside: tensors outside of the layers.
        layer: prefix of a layer's tensors, with its number as `{}`.
        blocks: tensors of a layer beside its mixer's, in as many namings as there are.
        mixers: by the mixer's name here.
        write_config: the `config.json` of a model, where it says all that one has to.
    """

    layer_mixers: Callable[[CheckpointConfig], Sequence[str]]
    fields: Callable[[CheckpointConfig], Mapping[str, Any]]
    outside: Rules
    layer: str
    blocks: tuple[Rules, ...]
    mixers: Mapping[str, MixerFamily]
    write_config: Callable[[LanguageModelConfig], dict[str, Any]] | None = None

    def read_config(self, config: CheckpointConfig) -> LanguageModelConfig:
        """The architecture that a `config.json` describes.

        Raises:
            ValueError: a field is missing, or there is no such architecture here.
        """
        mixers = tuple(self.layer_mixers(config))
        options = {name: self.mixers[name].options(config) for name in sorted(set(mixers))}
        return LanguageModelConfig(
            mixers=_one_period(mixers), mixer_options=options, **self.fields(config)
        )

    def rules(self, config: LanguageModelConfig, names: Collection[str]) -> list[Rule]:
        """The rules of a whole model, in the naming that comes closest to these names."""
        rules = list(self.outside)
        for number, name in enumerate(config.layer_mixers):
            prefix, mixer = self.layer.format(number), self.mixers[name]
            block = _closest(self.blocks, _inside(names, prefix))
            rules += [rule.within(prefix, f"layers.{number}.") for rule in block]
            inside = _inside(names, prefix + mixer.prefix)
            options = all_options(name, config.mixer_options.get(name, {}))
            for rule in mixer.rules(inside, options):
                rules.append(rule.within(prefix + mixer.prefix, f"layers.{number}.mixer."))
        return rules


def all_options(mixer: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a mixer, those included that are left at their default."""
    parameters = inspect.signature(MIXERS[mixer].__init__).parameters.values()
    defaults = {p.name: p.default for p in parameters if p.name not in SHARED_OPTIONS | {"self"}}
    return defaults | dict(options)


def _inside(names: Collection[str], prefix: str) -> set[str]:
    return {name.removeprefix(prefix) for name in names if name.startswith(prefix)}


def _closest(layouts: tuple[Rules, ...], names: Collection[str]) -> Rules:
    """The layout with most of these names, the first one of several."""
    return max(layouts, key=lambda rules: sum(rule.tensor in names for rule in rules))


def _one_period(mixers: tuple[str, ...]) -> tuple[str, ...]:
    """The shortest pattern that, repeated, gives these names."""
    count = len(mixers)
    lengths = range(1, count + 1)
    return next(mixers[:n] for n in lengths if (mixers[:n] * count)[:count] == mixers)
