"""Checks of options that several scripts have, which name the option and what came."""

from typing import Any


def check_counts(config: Any, *names: str) -> None:
    """Check that options are at least 1.

    Raises:
        ValueError: one is not.
    """
    for name in names:
        if getattr(config, name) < 1:
            raise ValueError(f"{name} must be at least 1, got {getattr(config, name)}")


def check_positive(config: Any, *names: str) -> None:
    """Check that options are finite numbers above 0.

    Raises:
        ValueError: one is not.
    """
    for name in names:
        if not 0 < getattr(config, name) < float("inf"):
            raise ValueError(f"{name} must be a number above 0, got {getattr(config, name)}")


def check_seed(config: Any) -> None:
    """Check that `seed` is one for all random number generators.

    Raises:
        ValueError: it is not.
    """
    if not 0 <= config.seed < 2**32:
        raise ValueError(f"seed must be from 0 to 2**32 - 1, got {config.seed}")
