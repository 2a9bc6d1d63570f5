"""Causal softmax attention, the token mixer that hybrids put between linear-attention layers.

Position is rotary, counted from the document's start, on all channels of a head or its first, or
none.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from .configuration import check_multiple, check_split, positive, sizes
from .kernels.arguments import check_flags
from .linear_attention import default_kernel_init
from .rms_norm import RMSNorm
from .sharding import UNANNOTATED, ShardingConfig, metadata
from .softmax_attention import SoftmaxAttention

QK_NORMS = ("per_head", "all_heads")


class Attention(SoftmaxAttention):
    """Causal softmax attention with grouped key and value heads.

    Query head h reads key and value head `h // (num_heads // num_kv_heads)`.

    Example:

    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> from gla_layers import Attention
    >>> layer = Attention(32, num_heads=4, num_kv_heads=2, rngs=nnx.Rngs(0))
    >>> layer(jnp.ones((1, 5, 32))).shape
    (1, 5, 32)
    >>> y, state = layer(jnp.ones((1, 1, 32)), state=layer.init_state(1, max_length=16))
    >>> y.shape, state.keys.shape
    ((1, 1, 32), (1, 16, 2, 8))
    """

    def __init__(
        self,
        hidden_size: int,
        *,
        num_heads: int,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        rope_theta: float | None = 10_000.0,
        rotary_dim: int | None = None,
        qkv_bias: bool = False,
        qk_norm: str | None = None,
        use_gate: bool = False,
        norm_eps: float = 1e-6,
        zero_centered_norms: bool = False,
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
            num_heads: query heads.
            num_kv_heads: key and value heads, a divisor of num_heads, which is the default.
            head_dim: size of a head; `hidden_size // num_heads` by default.
            rope_theta: base of the rotary position embedding, or None for no position.
            rotary_dim: channels of a head, from the first, that carry the position; all by default.
            qkv_bias: whether the projections to q, k and v have biases.
            qk_norm: what of q and k goes through an `RMSNorm` at a time: "per_head", a head;
                "all_heads", all of them; or None.
            use_gate: whether the output is multiplied by the sigmoid of a projection of x.
            norm_eps: of these norms.
            zero_centered_norms: whether these norms add 1 to their scales.
            dtype: of the computation; None takes the one that x and the parameters promote to.
                The softmax is float32 whatever it is.
            param_dtype: of the parameters, but for norm scales, which are float32.
            precision: of the matrix products.
            kernel_init: initializer of the kernels.
            sharding: layout of the parameters over a mesh.
            rngs: random keys.

        Raises:
            ValueError: an argument is wrong, or sizes do not divide over the mesh.
        """
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        hidden_size, num_heads, num_kv_heads = sizes(
            hidden_size=hidden_size, num_heads=num_heads, num_kv_heads=num_kv_heads
        )
        check_multiple("num_heads", num_heads, "num_kv_heads", num_kv_heads)
        if head_dim is None:
            check_multiple("hidden_size", hidden_size, "num_heads", num_heads)
            head_dim = hidden_size // num_heads
        rotary_dim = head_dim if rotary_dim is None else rotary_dim
        head_dim, rotary_dim = sizes(head_dim=head_dim, rotary_dim=rotary_dim)
        if rope_theta is not None:
            rope_theta = positive("rope_theta", rope_theta)
            if rotary_dim % 2 or rotary_dim > head_dim:
                raise ValueError(
                    f"rotary_dim must be even and at most head_dim = {head_dim}, "
                    f"got {rotary_dim}; or rope_theta None, for no rotation"
                )
        check_flags(
            qkv_bias=qkv_bias,
            use_gate=use_gate,
            zero_centered_norms=zero_centered_norms,
        )
        if qk_norm is not None and qk_norm not in QK_NORMS:
            raise ValueError(f"qk_norm must be None or one of {QK_NORMS}, got {qk_norm!r}")
        norm_eps = positive("norm_eps", norm_eps)
        super().__init__(
            hidden_size,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            key_size=head_dim,
            value_size=head_dim,
            dtype=dtype,
            param_dtype=param_dtype,
            precision=precision,
            kernel_init=kernel_init,
            sharding=sharding,
            rngs=rngs,
        )
        features, kv_features = num_heads * head_dim, num_kv_heads * head_dim
        check_split("num_heads * head_dim", features, sharding.in_kernel, 1)
        check_split("num_kv_heads * head_dim", kv_features, sharding.in_kernel, 1)
        self.head_dim = head_dim
        self.rope_theta = rope_theta
        self.rotary_dim = rotary_dim
        self.qk_norm = qk_norm
        into: dict[str, Any] = {"spec": sharding.in_kernel, "rngs": rngs}
        self.q_proj = self._linear(hidden_size, features, **into, use_bias=qkv_bias)
        self.k_proj = self._linear(hidden_size, kv_features, **into, use_bias=qkv_bias)
        self.v_proj = self._linear(hidden_size, kv_features, **into, use_bias=qkv_bias)
        self.g_proj = self._linear(hidden_size, features, **into) if use_gate else nnx.data(None)
        self.o_proj = self._linear(features, hidden_size, sharding.out_kernel, rngs)

        def norm(heads: int) -> RMSNorm:
            return RMSNorm(
                head_dim if qk_norm == "per_head" else heads * head_dim,
                epsilon=norm_eps,
                zero_centered=zero_centered_norms,
                scale_metadata=metadata(sharding.norm),
                rngs=rngs,
            )

        self.q_norm = nnx.data(None) if qk_norm is None else norm(num_heads)
        self.k_norm = nnx.data(None) if qk_norm is None else norm(num_kv_heads)

    def _project(self, x, position):
        q = self._normed_heads(self.q_proj(x), self.q_norm)
        k = self._normed_heads(self.k_proj(x), self.k_norm)
        v = self._normed_heads(self.v_proj(x), None)
        return self._rotate(q, position), self._rotate(k, position), v

    def _normed_heads(self, x, norm):
        heads = x.reshape(*x.shape[:2], x.shape[2] // self.head_dim, self.head_dim)
        if norm is None:
            return heads
        if self.qk_norm == "per_head":
            return norm(heads)
        return norm(x).reshape(heads.shape)

    def _rotate(self, x, position):
        if self.rope_theta is None:
            return x
        rotated = rotary_embedding(x[..., : self.rotary_dim], position, self.rope_theta)
        return jnp.concatenate([rotated, x[..., self.rotary_dim :]], axis=-1)


def rotary_embedding(
    x: Float[Array, "B T H D"], position: Int[Array, "B T"], theta: float
) -> Float[Array, "B T H D"]:
    """Rotate channels (i, i + D / 2) by the angle `position * theta**(-2 i / D)`, in float32."""
    half = x.shape[-1] // 2
    frequency = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = position[..., None, None] * frequency
    cosine, sine = jnp.cos(angle), jnp.sin(angle)
    first, second = x[..., :half], x[..., half:]
    rotated = (first * cosine - second * sine, second * cosine + first * sine)
    return jnp.concatenate(rotated, axis=-1).astype(x.dtype)
