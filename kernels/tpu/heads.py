"""Single heads out of blocks that hold heads side by side on the lanes, and back.

A head of 64 channels is half a register. It is computed with where it lies, with zeros in the other
half, since moving it along the lanes would cost more than the idle half: products that sum over
whole registers come out right, two such heads add up to the register that is stored, and a state
`[128, 128]` holds the head's own block where its halves meet.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

from ..packing import CHUNK
from .blocks import LANES, Blocks, chunk_rows, iota


class Sums:
    """Sums over several heads, each handed out when its last term has come."""

    def __init__(self):
        self._unfinished = {}

    def add(self, key: tuple[int, ...], count: int, *terms: Array) -> tuple[Array, ...] | None:
        """Add to the sums called `key`, and return them if that makes `count` additions."""
        additions, sums = self._unfinished.pop(key, (0, (0,) * len(terms)))
        sums = tuple(a + b for a, b in zip(sums, terms, strict=True)) if additions else terms
        if additions + 1 == count:
            return sums
        self._unfinished[key] = additions + 1, sums
        return None


class HeadWriter:
    """Stores heads into a block `[rows, heads * size]`."""

    def __init__(self, ref, size: int):
        self.ref = ref
        self.size = size
        self._registers = Sums()

    def write(self, chunk: int, head: int, x: Float[Array, "C lanes"]) -> None:
        """Store a head; of two that share a register the second stores both."""
        lanes = lanes_of(head, self.size)
        whole = self._registers.add((chunk, lanes.start), _heads_a_register(self.size), x)
        if whole is not None:
            self.ref[chunk_rows(chunk), lanes] = whole[0].astype(self.ref.dtype)


def read_head(ref, chunk: int, head: int, size: int) -> Float[Array, "C lanes"]:
    """A head out of a block `[rows, heads * size]`, at least a register wide."""
    x = ref[chunk_rows(chunk), lanes_of(head, size)]
    if _heads_a_register(size) == 1:
        return x
    own = iota(1) // size == head % _heads_a_register(size)
    return jnp.where(own, x, jnp.zeros_like(x))


def read_value(ref, chunk: int, head: int, blocks: Blocks) -> Float[Array, "C lanes"]:
    """A value head's values, and zeros for the columns of its state that none are written to."""
    x = read_head(ref, chunk, head, blocks.written_size)
    missing = blocks.value_size - blocks.written_size
    return jnp.concatenate([x, jnp.zeros((CHUNK, missing), x.dtype)], axis=1) if missing else x


def place_state(x: Float[Array, "K V"], head: int, blocks: Blocks) -> Float[Array, "lanes lanes"]:
    """A value head's state as the products take it."""
    key_head = head // blocks.group
    for axis, (index, size) in enumerate([(key_head, blocks.key_size), (head, blocks.value_size)]):
        parts = [jnp.zeros_like(x)] * _heads_a_register(size)
        parts[index % len(parts)] = x
        x = jnp.concatenate(parts, axis=axis)
    return x


def own_state(x: Float[Array, "lanes lanes"], head: int, blocks: Blocks) -> Float[Array, "K V"]:
    """The inverse of `place_state`."""
    return x[
        _within_register(head // blocks.group, blocks.key_size),
        _within_register(head, blocks.value_size),
    ]


def place_lanes(x: Float[Array, "C D"], head: int, size: int) -> Float[Array, "C lanes"]:
    """What `own_lanes` took, with zeros in another head's lanes."""
    parts = [jnp.zeros_like(x)] * _heads_a_register(size)
    parts[head % len(parts)] = x
    return jnp.concatenate(parts, axis=1)


def own_lanes(x: Float[Array, "C lanes"], head: int, size: int) -> Float[Array, "C D"]:
    """A head out of registers that it may share."""
    return x[:, _within_register(head, size)]


def move_lanes(x: Float[Array, "C lanes"], source: int, target: int, size: int):
    """A head from where head `source` lies to where head `target` does."""
    if _within_register(source, size) == _within_register(target, size):
        return x
    return place_lanes(own_lanes(x, source, size), target, size)


def _heads_a_register(size: int) -> int:
    return max(1, LANES // size)


def lanes_of(head: int, size: int) -> slice:
    width = max(size, LANES)
    start = head * size // width * width
    return slice(start, start + width)


def _within_register(head: int, size: int) -> slice:
    start = head % _heads_a_register(size) * size
    return slice(start, start + size)
