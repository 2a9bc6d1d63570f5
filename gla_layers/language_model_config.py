"""The architecture of a language model: widths, depth, and the token mixer of each layer."""

import dataclasses
import difflib
import inspect
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, Self

import numpy as np
from flax.core import FrozenDict

from .attention import Attention
from .configuration import positive, sizes
from .gated_deltanet import GatedDeltaNet
from .kda import KDA
from .kernels.arguments import check_flags
from .latent_attention import LatentAttention
from .simple_gla import SimpleGLA

MIXERS: Mapping[str, type[Any]] = MappingProxyType(
    {
        "gated_deltanet": GatedDeltaNet,
        "kda": KDA,
        "simple_gla": SimpleGLA,
        "attention": Attention,
        "latent_attention": LatentAttention,
    }
)
"""The token mixers by the names that a `LanguageModelConfig` calls them."""

SHARED_OPTIONS = frozenset(
    {
        "hidden_size",
        "dtype",
        "param_dtype",
        "precision",
        "kernel_init",
        "sharding",
        "implementation",
        "rngs",
    }
)
"""Arguments of the token mixers that are one for the whole model, so no option of a mixer."""


@dataclasses.dataclass(frozen=True)
class LanguageModelConfig:
    """The architecture of a `LanguageModel`: what a checkpoint of it depends on.

    Attributes:
        vocab_size: number of tokens.
        hidden_size: width of the residual stream.
        num_layers: number of blocks.
        intermediate_size: width of the feed-forward layers.
        mixers: names of token mixers, repeated down the layers: `("kda", "kda", "kda",
            "attention")` is three layers of KDA to one of attention.
        mixer_options: by mixer name, the keyword arguments of its layers, but for those that
            `LanguageModel` or another field here sets for the whole model.
        tie_embeddings: whether the output projection is the embedding.
        norm_eps: epsilon of the block norms and the final norm.
        post_norm_mixers: names of mixers whose blocks norm what they add to the residual stream, in
            place of what they read of it.
        zero_centered_norms: whether these norms add 1 to their scales, which then start from 0.

    Raises:
        ValueError: a field's value is wrong.

    Example:

    >>> from gla_layers import LanguageModelConfig
    >>> hybrid = LanguageModelConfig.preset("1.3b", mixers=("kda", "kda", "kda", "attention"))
    >>> hybrid.layer_mixers[:5]
    ('kda', 'kda', 'kda', 'attention', 'kda')
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    intermediate_size: int
    mixers: tuple[str, ...] = ("gated_deltanet",)
    mixer_options: Mapping[str, Mapping[str, Any]] = FrozenDict()
    tie_embeddings: bool = False
    norm_eps: float = 1e-6
    post_norm_mixers: tuple[str, ...] = ()
    zero_centered_norms: bool = False

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "num_layers", "intermediate_size"):
            (size,) = sizes(**{name: getattr(self, name)})
            object.__setattr__(self, name, size)
        check_flags(
            tie_embeddings=self.tie_embeddings, zero_centered_norms=self.zero_centered_norms
        )
        object.__setattr__(self, "norm_eps", positive("norm_eps", self.norm_eps))
        object.__setattr__(self, "mixers", _checked_names("mixers", self.mixers))
        if not 1 <= len(self.mixers) <= self.num_layers:
            raise ValueError(
                f"mixers must hold from 1 to num_layers = {self.num_layers} names, "
                f"got {len(self.mixers)}"
            )
        post_norm_mixers = _checked_names("post_norm_mixers", self.post_norm_mixers)
        object.__setattr__(self, "post_norm_mixers", post_norm_mixers)
        object.__setattr__(self, "mixer_options", _checked_options(self.mixer_options))
        for name in dict.fromkeys(self.mixers):
            _check_complete(name, self.mixer_options.get(name, {}))

    @property
    def layer_mixers(self) -> tuple[str, ...]:
        """The name of each layer's mixer."""
        return tuple(self.mixers[i % len(self.mixers)] for i in range(self.num_layers))

    @classmethod
    def preset(cls, name: str, **changes: Any) -> Self:
        """One of the named sizes, with some fields changed.

        Args:
            name: "tiny", which trains on a laptop's CPU in minutes, and "100m", both over bytes;
                "340m" or "1.3b", the sizes of the papers (with Gated DeltaNet throughout).
            **changes: fields that differ from the preset's.

        Raises:
            ValueError: there is no such preset or field.
        """
        if name not in PRESETS:
            raise ValueError(_unknown("preset", name, PRESETS))
        fields = [field.name for field in dataclasses.fields(cls)]
        for change in changes:
            if change not in fields:
                raise ValueError(_unknown("field of LanguageModelConfig", change, fields))
        return cls(**{**PRESETS[name], **changes})


PRESETS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "tiny": {
            "vocab_size": 257,
            "hidden_size": 128,
            "num_layers": 4,
            "intermediate_size": 384,
            "mixer_options": {
                "gated_deltanet": {"num_heads": 2, "head_dim": 64, "expand_v": 1},
                "kda": {"num_heads": 2, "head_dim": 64},
                "simple_gla": {"num_heads": 2},
                "attention": {"num_heads": 2},
            },
            "tie_embeddings": True,
        },
        "100m": {
            "vocab_size": 257,
            "hidden_size": 768,
            "num_layers": 13,
            "intermediate_size": 2048,
            "mixer_options": {
                "gated_deltanet": {"num_heads": 6, "head_dim": 128, "expand_v": 1},
                "kda": {"num_heads": 6, "head_dim": 128},
                "simple_gla": {"num_heads": 6},
                "attention": {"num_heads": 6},
            },
            "tie_embeddings": True,
        },
        "340m": {
            "vocab_size": 32000,
            "hidden_size": 1024,
            "num_layers": 21,
            "intermediate_size": 2816,
            "mixer_options": {
                "gated_deltanet": {"num_heads": 3, "head_dim": 256},
                "kda": {"num_heads": 8, "head_dim": 128},
                "simple_gla": {"num_heads": 4},
                "attention": {"num_heads": 8},
            },
            "tie_embeddings": True,
        },
        "1.3b": {
            "vocab_size": 32000,
            "hidden_size": 2048,
            "num_layers": 21,
            "intermediate_size": 5632,
            "mixer_options": {
                "gated_deltanet": {"num_heads": 6, "head_dim": 256},
                "kda": {"num_heads": 16, "head_dim": 128},
                "simple_gla": {"num_heads": 8},
                "attention": {"num_heads": 16},
            },
            "tie_embeddings": True,
        },
    }
)
"""The fields of the named sizes."""


def _checked_names(field: str, mixers: Iterable[str]) -> tuple[str, ...]:
    if not isinstance(mixers, (tuple, list)):
        raise ValueError(f"{field} must be a tuple of names, got {mixers!r}")
    for name in mixers:
        if name not in MIXERS:
            raise ValueError(_unknown("mixer", name, MIXERS))
    return tuple(mixers)


def _checked_options(mixer_options: Mapping[str, Mapping[str, Any]]) -> FrozenDict:
    if not isinstance(mixer_options, Mapping):
        raise ValueError(f"mixer_options must map names to options, got {mixer_options!r}")
    for name, options in mixer_options.items():
        if name not in MIXERS:
            raise ValueError(_unknown("mixer", name, MIXERS))
        if not isinstance(options, Mapping):
            raise ValueError(f"mixer_options of {name!r} must map names to values, got {options!r}")
        parameters = inspect.signature(MIXERS[name].__init__).parameters
        known = parameters.keys() - SHARED_OPTIONS - {"self"}
        for option in options:
            if option in SHARED_OPTIONS:
                raise ValueError(
                    f"mixer_options of {name!r} must leave {option!r} to the model, whose own "
                    f"argument it is, got {options[option]!r}"
                )
            if option not in known:
                raise ValueError(_unknown(f"option of mixer {name!r}", option, known))
    return FrozenDict(
        {
            name: {option: _plain(value) for option, value in options.items()}
            for name, options in mixer_options.items()
        }
    )


def _check_complete(mixer: str, options: Mapping[str, Any]) -> None:
    parameters = inspect.signature(MIXERS[mixer].__init__).parameters
    required = {name for name, x in parameters.items() if x.default is inspect.Parameter.empty}
    missing = required - SHARED_OPTIONS - {"self"} - options.keys()
    if missing:
        raise ValueError(
            f"mixer_options of {mixer!r} must hold {sorted(missing)}, got {sorted(options)}"
        )


def _plain(value: Any) -> Any:
    """A scalar of numpy as one of Python, which JSON takes."""
    return value.item() if isinstance(value, np.generic) else value


def _unknown(kind: str, name: object, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(str(name), known, n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"expected one of {sorted(known)}"
    return f"{name!r} is no {kind}; {hint}"
