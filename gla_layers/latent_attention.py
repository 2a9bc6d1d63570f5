"""Multi-head latent attention without positions.

    c_t, s_t       = kv_a_proj(x_t)                    a latent for all heads; a key for all heads
    k_t,h, v_t,h   = kv_b_proj(norm(c_t))              keys and values of each head
    key_t,h        = [k_t,h, s_t]

The cache holds keys and values of every head, not the latents, which a decoder could expand at
every step in their place.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from .configuration import check_split, positive, sizes
from .linear_attention import default_kernel_init
from .rms_norm import RMSNorm
from .sharding import UNANNOTATED, ShardingConfig, metadata
from .softmax_attention import SoftmaxAttention


class LatentAttention(SoftmaxAttention):
    """Causal softmax attention whose keys and values come from one small latent a token.

    Example:

    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> from gla_layers import LatentAttention
    >>> layer = LatentAttention(
    ...     32, num_heads=4, kv_rank=16, head_dim=8, shared_head_dim=4, rngs=nnx.Rngs(0)
    ... )
    >>> layer(jnp.ones((1, 5, 32))).shape
    (1, 5, 32)
    >>> y, state = layer(jnp.ones((1, 1, 32)), state=layer.init_state(1, max_length=16))
    >>> state.keys.shape, state.values.shape
    ((1, 16, 4, 12), (1, 16, 4, 8))

    Source: DeepSeek-AI, "DeepSeek-V2" (arXiv:2405.04434); without positions, Kimi Team, "Kimi
    Linear" (arXiv:2510.26692).
    """

    def __init__(
        self,
        hidden_size: int,
        *,
        num_heads: int,
        kv_rank: int,
        head_dim: int,
        shared_head_dim: int,
        v_head_dim: int | None = None,
        norm_eps: float = 1e-6,
        dtype: jax.typing.DTypeLike | None = None,
        param_dtype: jax.typing.DTypeLike = jnp.float32,
        precision: jax.lax.Precision | str | None = None,
        kernel_init: nnx.Initializer = default_kernel_init,
        sharding: ShardingConfig = UNANNOTATED,
        rngs: nnx.Rngs,
    ):
        """Make the layer.

        Args:
            hidden_size: size of the inputs and outputs.
            num_heads: heads of queries, keys and values.
            kv_rank: size of the latent.
            head_dim: size of the part of a key that is a head's own.
            shared_head_dim: size of the part that all heads share.
            v_head_dim: size of a value; head_dim by default.
            norm_eps: of the latent's norm.
            dtype: of the computation; None takes the one that x and the parameters promote to.
                The softmax is float32 whatever it is.
            param_dtype: of the parameters, but for the norm's scale, which is float32.
            precision: of the matrix products.
            kernel_init: initializer of the kernels.
            sharding: layout of the parameters over a mesh.
            rngs: random keys.

        Raises:
            ValueError: an argument is wrong, or sizes do not divide over the mesh.
        """
        v_head_dim = head_dim if v_head_dim is None else v_head_dim
        hidden_size, num_heads, kv_rank, head_dim, shared_head_dim, v_head_dim = sizes(
            hidden_size=hidden_size,
            num_heads=num_heads,
            kv_rank=kv_rank,
            head_dim=head_dim,
            shared_head_dim=shared_head_dim,
            v_head_dim=v_head_dim,
        )
        norm_eps = positive("norm_eps", norm_eps)
        super().__init__(
            hidden_size,
            num_heads=num_heads,
            num_kv_heads=num_heads,
            key_size=head_dim + shared_head_dim,
            value_size=v_head_dim,
            dtype=dtype,
            param_dtype=param_dtype,
            precision=precision,
            kernel_init=kernel_init,
            sharding=sharding,
            rngs=rngs,
        )
        features, expanded = num_heads * self.key_size, num_heads * (head_dim + v_head_dim)
        check_split("num_heads * (head_dim + shared_head_dim)", features, sharding.in_kernel, 1)
        check_split(
            "num_heads * (head_dim + v_head_dim)", expanded, sharding.bottleneck_out_kernel, 1
        )
        check_split("num_heads * v_head_dim", num_heads * v_head_dim, sharding.out_kernel, 0)
        self.kv_rank = kv_rank
        self.head_dim = head_dim
        self.q_proj = self._linear(hidden_size, features, sharding.in_kernel, rngs)
        self.kv_a_proj = self._linear(
            hidden_size, kv_rank + shared_head_dim, sharding.bottleneck_in_kernel, rngs
        )
        self.kv_a_norm = RMSNorm(
            kv_rank, epsilon=norm_eps, scale_metadata=metadata(sharding.norm), rngs=rngs
        )
        self.kv_b_proj = self._linear(kv_rank, expanded, sharding.bottleneck_out_kernel, rngs)
        self.g_proj = nnx.data(None)
        self.o_proj = self._linear(num_heads * v_head_dim, hidden_size, sharding.out_kernel, rngs)

    def _project(self, x, position):
        del position
        batch, length, _ = x.shape
        q = self.q_proj(x).reshape(batch, length, self.num_heads, self.key_size)
        latent, shared = jnp.split(self.kv_a_proj(x), [self.kv_rank], axis=-1)
        expanded = self.kv_b_proj(self.kv_a_norm(latent))
        own, v = jnp.split(
            expanded.reshape(batch, length, self.num_heads, expanded.shape[2] // self.num_heads),
            [self.head_dim],
            axis=-1,
        )
        shared = jnp.broadcast_to(shared[:, :, None], (*own.shape[:3], shared.shape[-1]))
        return q, jnp.concatenate([own, shared], axis=-1), v
