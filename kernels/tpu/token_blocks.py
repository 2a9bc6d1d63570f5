"""Blocks of [B, T, D] arrays for kernels that pass over tokens once and leave channels apart.

A grid step holds some tokens of all channels that fit, and its kernel works on the channels of a
few registers at a time. The last block may run past the last token, where what it reads is
undefined, and past the last channel, where nothing is kept of what it computes.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from .blocks import LANES
from .tuning import cores

HALO = 16
"""Tokens of the smallest block of a bfloat16 array."""

MOST_LANES = 2048
"""Of the blocks that all cores of a chip work on at a time, so that one row keeps two cores busy.

Blocks of half as many cost the forward kernels of a v6e chip a tenth more."""

STRIP = 128
"""Tokens that a kernel works on at a time; what it computes of more does not stay in registers.

With 256 the convolution of 8192 tokens of 2048 channels takes a v6e chip 0.067 million cycles
forward and 0.232 backward rather than 0.062 and 0.211."""

BLOCK_BYTES = 1 << 20
"""Of an array of so many lanes: with five such arrays, each twice, a kernel is within the 16 MiB of
vector memory that every generation has."""


def pays(length: int) -> bool:
    """Whether rows of so many tokens fill a strip; a kernel computes whole ones."""
    return length >= STRIP


@dataclasses.dataclass(frozen=True)
class TokenBlocks:
    """How `[batch, length, channels]` is cut.

    Attributes:
        rows: tokens a block.
        lanes: channels a block.
        group: channels that a kernel works on at a time.
        reverse: whether the grid walks through time backwards.
    """

    batch: int
    length: int
    channels: int
    rows: int
    lanes: int
    group: int
    reverse: bool

    @classmethod
    def of(
        cls, *arrays: Array | jax.ShapeDtypeStruct, group: int = LANES, reverse: bool = False
    ) -> "TokenBlocks":
        """Blocks of arrays `[B, T, D]` of one shape, in groups of whole registers."""
        batch, length, channels = arrays[0].shape
        most = MOST_LANES // cores()
        lanes = group * max(1, min(pl.cdiv(channels, group), most // group))
        widest = max(x.dtype.itemsize for x in arrays)
        rows = min(BLOCK_BYTES // (most * widest), pl.cdiv(length, STRIP) * STRIP)
        return cls(batch, length, channels, rows, lanes, group, reverse)

    @property
    def steps(self) -> int:
        return pl.cdiv(self.length, self.rows)

    @property
    def grid(self) -> tuple[int, int, int]:
        return self.batch, pl.cdiv(self.channels, self.lanes), self.steps

    @property
    def compiler_params(self) -> pltpu.CompilerParams:
        return pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary"))

    def time(self, step):
        """The block in time that a grid step works on."""
        return self.steps - 1 - step if self.reverse else step

    def groups(self) -> list[slice]:
        """The channels of a block that a kernel works on at a time."""
        return [slice(start, start + self.group) for start in range(0, self.lanes, self.group)]

    def each_strip(self, work: Callable[[pl.Slice], None]) -> None:
        """Call `work` with the tokens of every strip of a block, in the order of the grid."""
        count = self.rows // STRIP

        def one(i, _):
            start = (count - 1 - i if self.reverse else i) * STRIP
            work(pl.ds(pl.multiple_of(start, STRIP), STRIP))

        jax.lax.fori_loop(0, count, one, None)

    def clear(self, time, strip, x):
        """A strip's x with zeros for the tokens past the end."""
        if self.length % self.rows == 0:
            return x
        row = jax.lax.broadcasted_iota(jnp.int32, x.shape, 0)
        return jnp.where(row < self.length - time * self.rows - strip.start, x, 0)

    def tokens(self) -> pl.BlockSpec:
        return pl.BlockSpec((None, self.rows, self.lanes), lambda b, d, t: (b, self.time(t), d))

    def halo(self) -> pl.BlockSpec:
        """The tokens before a block; before the first, any."""
        a_block = self.rows // HALO

        def index(b, d, t):
            return b, jnp.maximum(self.time(t) * a_block - 1, 0), d

        return pl.BlockSpec((None, HALO, self.lanes), index)

    def numbers(self) -> pl.BlockSpec:
        """Of an array `[B, 1, T]`."""
        return pl.BlockSpec((None, 1, self.rows), lambda b, d, t: (b, 0, self.time(t)))

    def per_row(self, rows: int) -> pl.BlockSpec:
        """Of an array `[B, rows, D]`."""
        return pl.BlockSpec((None, rows, self.lanes), lambda b, d, t: (b, 0, d))

    def shared(self, rows: int) -> pl.BlockSpec:
        """Of an array `[rows, D]`."""
        return pl.BlockSpec((rows, self.lanes), lambda b, d, t: (0, d))

    def strips(self, more: int) -> pl.MemoryRef:
        """A strip of every group in float32, and `more` tokens."""
        shape = (self.lanes // self.group, STRIP + more, self.group)
        return pltpu.VMEM(shape, jnp.float32)
