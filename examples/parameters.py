"""Parameters by name: `layers/0/mixer/q_proj/kernel`."""

import dataclasses
import fnmatch
import re
from collections.abc import Sequence

import jax
from flax import nnx


@dataclasses.dataclass(frozen=True)
class CarryOver:
    """What became of the parameters of two models, when one took over those of the other.

    Attributes:
        loaded: names in both.
        fresh: names of the new model alone, which stay as they were initialized.
        unused: names of the old model alone.
    """

    loaded: tuple[str, ...]
    fresh: tuple[str, ...]
    unused: tuple[str, ...]

    def __str__(self) -> str:
        kinds = dataclasses.asdict(self).items()
        return "\n".join(f"{kind}: {', '.join(names) or 'none'}" for kind, names in kinds)


def name_of(path: jax.tree_util.KeyPath) -> str:
    """The name of the parameter at a path of a model's state."""
    keys = (getattr(key, "key", getattr(key, "name", getattr(key, "idx", None))) for key in path)
    return "/".join(str(key) for key in keys if key != "value")


def names(model: nnx.Module) -> list[str]:
    """The names of all parameters of a model."""
    leaves = jax.tree.leaves_with_path(nnx.state(model, nnx.Param))
    return [name_of(path) for path, _ in leaves]


def is_any(name: str, patterns: Sequence[str]) -> bool:
    """Whether a name matches one of the globs, whose `*` matches slashes too."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def check_frozen(model: nnx.Module, patterns: Sequence[str]) -> None:
    """Check that every glob matches a parameter, and that not all parameters are matched.

    Raises:
        ValueError: one does not, or all are.
    """
    all_names = names(model)
    for pattern in patterns:
        if not any(is_any(name, [pattern]) for name in all_names):
            globs = dict.fromkeys(re.sub(r"/\d+/", "/*/", name) for name in all_names)
            raise ValueError(
                f"freeze must name parameters, but {pattern!r} matches none of {', '.join(globs)}"
            )
    if all(is_any(name, patterns) for name in all_names):
        raise ValueError(f"freeze must leave a parameter to train, got {tuple(patterns)}")


def carry_over(old: nnx.Module, new: nnx.Module, replaced: Sequence[str]) -> CarryOver:
    """Give a model the parameters of another.

    Args:
        old: the model whose parameters are taken.
        new: the model that gets them.
        replaced: globs of the names that the models do not share, though both may have them.

    Raises:
        ValueError: any other parameter is in one model alone, or has another shape.
    """
    state = nnx.state(new, nnx.Param)
    before = {
        name_of(path): leaf for path, leaf in jax.tree.leaves_with_path(nnx.state(old, nnx.Param))
    }
    after = {name_of(path): leaf for path, leaf in jax.tree.leaves_with_path(state)}
    differing = [
        name
        for name in sorted(before.keys() | after.keys())
        if not is_any(name, replaced)
        and getattr(before.get(name), "shape", None) != getattr(after.get(name), "shape", None)
    ]
    if differing:
        raise ValueError(
            f"the models must have the same parameters, but differ in {', '.join(differing)}"
        )
    loaded = {name: leaf for name, leaf in before.items() if not is_any(name, replaced)}
    nnx.update(
        new, jax.tree.map_with_path(lambda path, leaf: loaded.get(name_of(path), leaf), state)
    )
    return CarryOver(
        loaded=tuple(loaded),
        fresh=tuple(name for name in after if name not in loaded),
        unused=tuple(name for name in before if name not in loaded),
    )
