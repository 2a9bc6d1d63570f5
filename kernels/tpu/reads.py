"""What a stretch's tokens read of the state that enters it, added to their outputs.

Per row and value head, with o' and R side by side on the lanes (see `../context_parallel.py`):

    o = o' + R X

Plain JAX would lay both out anew: eight rows of 16384 tokens and one head, in bfloat16, take it
0.26 million cycles of a v6e chip, of which their bytes are 0.11.
"""

import functools

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from ..implementation import Options
from ..implementation import add_reads as plain_add_reads
from .blocks import LANES, flat_tokens
from .call import pallas_call
from .dots import dot

ROWS = 1024


def add_reads(
    options: Options, outputs: Float[Array, "B T HV V+K"], x: Float[Array, "B HV K V"]
) -> Float[Array, "B T HV V"]:
    """o out of [o' | R] and X."""
    batch, length, heads, both = outputs.shape
    key_size, value_size = x.shape[2:]
    if key_size % LANES or value_size % LANES:
        return plain_add_reads(options, outputs, x)
    tokens = flat_tokens(outputs, both, outputs.dtype)

    def block(size):
        return pl.BlockSpec((None, ROWS, size), lambda b, h, t: (b, t, h))

    o = pallas_call(
        functools.partial(_kernel, options.precision),
        grid=(batch, heads, pl.cdiv(length, ROWS)),
        in_specs=[
            block(both),
            pl.BlockSpec((None, None, key_size, value_size), lambda b, h, t: (b, h, 0, 0)),
        ],
        out_specs=block(value_size),
        out_shape=jax.ShapeDtypeStruct((*tokens.shape[:2], heads * value_size), tokens.dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "parallel")
        ),
        name="add_reads",
    )(tokens, x)
    return o[:, :length].reshape(batch, length, heads, value_size)


def _kernel(precision, outputs, x, o):
    value_size = o.shape[1]
    read = dot(outputs[:, value_size:], x[...].astype(outputs.dtype), precision)
    o[...] = (outputs[:, :value_size] + read).astype(o.dtype)
