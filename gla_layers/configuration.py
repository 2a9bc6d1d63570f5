"""Checks of a layer's configuration."""


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


def expanded_size(name: str, factor: float, size_name: str, size: int, heads: int = 1) -> int:
    """`factor * size / heads`, the size of a head, where that is an integer.

    Raises:
        ValueError: it is not, or it is below 1.
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
