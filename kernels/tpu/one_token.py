"""One token of any of the recurrences on a Pallas TPU kernel, the states updated in place.

Per batch row and value head, with the state S [K, V], and a = exp(min(g, 0)), one number or one a
row of S:

    D  = a S
    u  = beta (v - D^T k)                        without beta: u = v
    S <- D + k u^T
    o  = scale (D^T q + (q . k) u)

which reads and writes a state once: the new state is never read for o. A grid step holds up to
eight batch rows, which are the sublanes of their tokens, and some heads, which lie side by side on
the lanes as projections make them. All is float32 on the vector unit. Against moving the states
that takes, for 64 rows, 0.35 (gated delta rule, heads of 256) to 0.86 (KDA, of 128) of the time on
a v6e, 0.69 to 1.77 on a v7x.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from ..implementation import Implementation, Options
from ..numerics import storage_dtype
from ..xla import one_token as xla
from .blocks import LANES, SUBLANES, heads_per_block
from .call import pallas_call
from .norm import normalize

STATE_BYTES = 2 << 20
"""Of a grid step's states: read and written, each twice, they take half of a v4's vector memory."""


@dataclasses.dataclass(frozen=True)
class Sizes:
    """A call's sizes, and its blocks'.

    Attributes:
        rows: batch rows a block; the last block may run past the last row.
        heads: value heads a block.
    """

    batch: int
    key_heads: int
    value_heads: int
    key_size: int
    value_size: int
    rows: int
    heads: int

    @classmethod
    def of(cls, k: Float[Array, "B 1 H K"], v: Float[Array, "B 1 HV V"]) -> "Sizes | None":
        """None where heads are not whole registers."""
        batch, _, key_heads, key_size = k.shape
        value_heads, value_size = v.shape[2:]
        if key_size % LANES or value_size % LANES:
            return None
        rows = min(batch, SUBLANES)
        limit = max(1, STATE_BYTES // (4 * rows * key_size * value_size))
        sizes = key_size, value_size
        heads = heads_per_block(value_heads, key_heads, sizes, limit)
        assert heads is not None, "heads of whole registers always make blocks"
        return cls(batch, key_heads, value_heads, *sizes, rows, heads)

    @property
    def group(self) -> int:
        """Value heads that read one key head."""
        return self.value_heads // self.key_heads

    @property
    def grid(self) -> tuple[int, int]:
        return pl.cdiv(self.batch, self.rows), self.value_heads // self.heads

    def keys(self) -> pl.BlockSpec:
        """Of q and k `[B, H * K]`."""
        heads, sharing = max(1, self.heads // self.group), max(1, self.group // self.heads)
        return pl.BlockSpec((self.rows, heads * self.key_size), lambda b, h: (b, h // sharing))

    def values(self, size: int) -> pl.BlockSpec:
        """Of `[B, HV * size]`."""
        return pl.BlockSpec((self.rows, self.heads * size), lambda b, h: (b, h))

    def numbers(self) -> pl.BlockSpec:
        """Of `[B, HV]`, of which a block holds all heads."""
        return pl.BlockSpec((self.rows, self.value_heads), lambda b, h: (b, 0))

    def states(self) -> pl.BlockSpec:
        """Of `[B, HV, K, V]`."""
        block = self.rows, self.heads, self.key_size, self.value_size
        return pl.BlockSpec(block, lambda b, h: (b, h, 0, 0))


def forward(
    options: Options, tokens: tuple[Array, ...], states: Float[Array, "B 1 HV K V"], *_: None
) -> tuple[tuple[Float[Array, "B 1 HV V"], Float[Array, "B 1 HV K V"]], dict[str, Array]]:
    """The outputs and the new states; in plain JAX where heads are not whole registers."""
    q, k, v, g, *beta = tokens
    sizes = Sizes.of(k, v)
    if sizes is None:
        return xla.forward(options, tokens, states)
    dtype = storage_dtype(q, k, v)
    q, k, values = (x.astype(dtype).reshape(sizes.batch, -1) for x in (q, k, v))
    per_channel = g.ndim == 4
    numbers = [x.astype(jnp.float32).reshape(sizes.batch, -1) for x in (g, *beta)]
    of_values = sizes.values(sizes.value_size)
    gates = [sizes.numbers() for _ in numbers]
    if per_channel:
        gates[0] = sizes.values(sizes.key_size)
    o, new_states = pallas_call(
        functools.partial(_step, sizes, options, per_channel),
        grid=sizes.grid,
        in_specs=[sizes.states(), sizes.keys(), sizes.keys(), of_values, *gates],
        out_specs=[of_values, sizes.states()],
        out_shape=[
            jax.ShapeDtypeStruct(values.shape, dtype),
            jax.ShapeDtypeStruct(states[:, 0].shape, jnp.float32),
        ],
        input_output_aliases={0: 1},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
        name="one_token",
    )(states[:, 0], q, k, values, *numbers)
    return (o.reshape(v.shape).astype(v.dtype), new_states[:, None]), {}


def _step(sizes, options, per_channel, states, q, k, v, g, *rest):
    *beta, o, new_states = rest
    first = pl.program_id(1) * sizes.heads
    for head in range(sizes.heads):
        q_head = _keys(sizes, options, q, head)
        k_head = _keys(sizes, options, k, head)
        qk = options.scale * jnp.sum(q_head * k_head, axis=1, keepdims=True)
        q_columns, k_columns = (options.scale * q_head).T, k_head.T
        if per_channel:
            decays = jnp.exp(jnp.minimum(_head(g, head, sizes.key_size), 0)).T
        else:
            decays = jnp.exp(jnp.minimum(_number(g, first + head), 0))
        beta_head = [_number(x, first + head) for x in beta]
        for lanes in _registers(head, sizes.value_size):
            v_head = v[:, lanes].astype(jnp.float32)
            columns = slice(lanes.start % sizes.value_size, lanes.start % sizes.value_size + LANES)
            outputs = []
            for row in range(sizes.rows):
                own = slice(row, row + 1)
                decay = decays[:, own] if per_channel else decays[own]
                decayed = decay * states[row, head, :, columns]
                k_column, q_column = k_columns[:, own], q_columns[:, own]
                written = v_head[own]
                for x in beta_head:
                    written = x[own] * (written - _read(decayed, k_column))
                new_states[row, head, :, columns] = decayed + k_column * written
                outputs.append(_read(decayed, q_column) + qk[own] * written)
            o[:, lanes] = jnp.concatenate(outputs, axis=0).astype(o.dtype)


def _keys(sizes, options, ref, head):
    """Keys or queries of a value head, in float32."""
    x = _head(ref, head // sizes.group, sizes.key_size)
    return normalize(x)[0] if options.qk_l2norm else x.astype(jnp.float32)


def _head(ref, head, size):
    return ref[:, head * size : (head + 1) * size]


def _registers(head, size):
    return [slice(start, start + LANES) for start in range(head * size, (head + 1) * size, LANES)]


def _number(ref, head):
    """A head's numbers `[rows, 1]` out of those of all heads."""
    lane = jax.lax.broadcasted_iota(jnp.int32, ref.shape, 1)
    return jnp.sum(jnp.where(lane == head, ref[...], 0), axis=1, keepdims=True)


def _read(state, column):
    return jnp.sum(state * column, axis=0, keepdims=True)


implementation = Implementation(forward, xla.backward)
