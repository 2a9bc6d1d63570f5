"""Checks of a layer's configuration."""

from .kernels.arguments import IMPLEMENTATIONS, MAX_HEAD_SIZE
from .sharding import ShardingConfig


def check_sizes(**sizes: int) -> None:
    """Check that the named arguments are integers of at least 1.

    Raises:
        ValueError: naming the argument, what came and what is expected.
    """
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"{name} must be an integer of at least 1, got {size!r}")


def check_heads(name: str, heads: int, divisor_name: str, divisor: int) -> None:
    """Check that one number of heads is a multiple of another.

    Raises:
        ValueError: naming the argument, what came and what is expected.
    """
    check_sizes(**{name: heads, divisor_name: divisor})
    if heads % divisor:
        raise ValueError(f"{name} must be a multiple of {divisor_name} = {divisor}, got {heads}")


def check_key_size(name: str, size: int) -> None:
    """Check that the ops take a query and key head of this size, which comes from an argument.

    Raises:
        ValueError: naming the argument, what came and what is expected.
    """
    if size > MAX_HEAD_SIZE:
        raise ValueError(f"{name} must make key heads of at most {MAX_HEAD_SIZE}, got {size}")


def value_blocks(name: str, size: int) -> int:
    """How many value heads of the op a value head of this size, from an argument, makes.

    Raises:
        ValueError: naming the argument, what came and what is expected.
    """
    blocks = -(-size // MAX_HEAD_SIZE)
    if size % blocks:
        raise ValueError(
            f"{name} must make value heads of at most {MAX_HEAD_SIZE}, or such that {blocks} equal "
            f"parts are, got {size}"
        )
    return blocks


def expanded_size(name: str, factor: float, size_name: str, size: int, heads: int = 1) -> int:
    """`factor * size / heads`, the size of a head, where that is a whole number.

    Raises:
        ValueError: it is not.
    """
    exact = factor * size / heads
    rounded = round(exact)
    if rounded < 1 or abs(exact - rounded) > 1e-5 * rounded:
        over = f" / {heads} heads" if heads > 1 else ""
        raise ValueError(
            f"{name} must make {name} * {size_name}{over} a whole head size, "
            f"got {factor} * {size}{over} = {exact}"
        )
    return rounded


def check_layer_options(sharding: ShardingConfig, implementation: str | None) -> None:
    """Check the options that every layer takes and uses only when it is called.

    Raises:
        ValueError: naming the argument, what came and what is expected.
    """
    if not isinstance(sharding, ShardingConfig):
        raise ValueError(f"sharding must be a ShardingConfig, got {sharding!r}")
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation must be one of {IMPLEMENTATIONS}, got {implementation!r}")
