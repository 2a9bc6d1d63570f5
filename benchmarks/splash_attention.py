"""A layer of causal softmax attention on JAX's kernels for TPUs, to compare ours with."""

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

BLOCK = 1024
"""Of queries, and of keys: the least of what was tried at 8192 tokens on a v6e. Forward and
backward take 7.8 Mcycles, with blocks of 512 9.7, or 13.8 with the fused backward kernel, which
adds up dq over all blocks of keys afterwards (8.4 with blocks of 2048)."""

COMPUTED_KEYS = 512
"""Keys of a block that are multiplied at a time."""


class SplashAttention(nnx.Module):
    """Projections around splash attention, without positions."""

    def __init__(self, hidden_size: int, *, num_heads: int, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.num_heads = num_heads
        linear = functools.partial(
            nnx.Linear, hidden_size, hidden_size, use_bias=False, dtype=dtype, rngs=rngs
        )
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (linear() for _ in range(4))

    def __call__(
        self, x: jax.Array, *, state: None = None, segment_ids: jax.Array | None = None
    ) -> jax.Array:
        """Mix tokens `[B, T, hidden_size]`; T is a multiple of 1024. There is no state."""
        q, k, v = (self._heads(linear(x)) for linear in (self.q_proj, self.k_proj, self.v_proj))
        mask = masks.MultiHeadMask([masks.CausalMask((x.shape[1],) * 2)] * self.num_heads)
        sizes = splash.BlockSizes(
            block_q=BLOCK,
            block_kv=BLOCK,
            block_kv_compute=COMPUTED_KEYS,
            block_q_dkv=BLOCK,
            block_kv_dkv=BLOCK,
            block_kv_dkv_compute=COMPUTED_KEYS,
            block_q_dq=BLOCK,
            block_kv_dq=BLOCK,
        )
        attend = splash.make_splash_mha(mask, block_sizes=sizes, head_shards=1, q_seq_shards=1)
        ids = None if segment_ids is None else splash.SegmentIds(segment_ids, segment_ids)
        o = jax.vmap(attend)(q * q.shape[-1] ** -0.5, k, v, ids)
        return self.o_proj(o.swapaxes(1, 2).reshape(x.shape))

    def _heads(self, x):
        return x.reshape(*x.shape[:2], self.num_heads, -1).swapaxes(1, 2)


def computed_share(length: int) -> float:
    """The share of all blocks of a causal mask that the kernels do not skip."""
    blocks = length // BLOCK
    return (blocks + 1) / (2 * blocks)
