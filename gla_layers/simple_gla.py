"""SimpleGLA: gated linear attention with one decay per head and token.

g_t = log_sigmoid(gk_proj(x_t)) / gate_logit_normalizer        per query head
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from .activations import ACTIVATIONS, check_activation_name
from .configuration import (
    check_key_size,
    check_multiple,
    expanded_size,
    positive,
    sizes,
    value_blocks,
)
from .gated_norm import GatedRMSNorm
from .kernels import chunk_simple_gla, recurrent_simple_gla
from .kernels.arguments import check_flags
from .linear_attention import Heads, LinearAttention, default_kernel_init
from .sharding import UNANNOTATED, ShardingConfig, metadata


class SimpleGLA(LinearAttention):
    """Simple gated linear attention layer.

    Parameters are named as in flash-linear-attention's SimpleGatedLinearAttention, kernels being
    `[in, out]`, convolution kernels `[width, channels]`, and the norm (there `g_norm_swish_gate`
    or `g_norm`, by gate) `o_norm`, its weight `scale`.

    Example:

    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> from gla_layers import SimpleGLA
    >>> layer = SimpleGLA(32, num_heads=2, rngs=nnx.Rngs(0))
    >>> layer(jnp.ones((1, 5, 32))).shape
    (1, 5, 32)
    >>> y, state = layer(jnp.ones((1, 1, 32)), state=layer.init_state(1))
    >>> y.shape, state.recurrent.shape
    ((1, 1, 32), (1, 2, 16, 16))

    Source: the scalar-decay case of Yang et al., "Gated Linear Attention Transformers"
    (arXiv:2312.06635).
    """

    _chunk = staticmethod(chunk_simple_gla)
    _recurrent = staticmethod(recurrent_simple_gla)
    _qk_l2norm = False

    def __init__(
        self,
        hidden_size: int = 1024,
        *,
        num_heads: int = 4,
        num_kv_heads: int | None = None,
        expand_k: float = 1.0,
        expand_v: float = 1.0,
        feature_map: str | None = None,
        gate_fn: str = "swish",
        gate_logit_normalizer: float = 16.0,
        use_short_conv: bool = True,
        conv_size: int = 4,
        conv_bias: bool = False,
        elementwise_affine: bool = True,
        norm_eps: float = 1e-5,
        dtype: jax.typing.DTypeLike | None = None,
        param_dtype: jax.typing.DTypeLike = jnp.float32,
        precision: jax.lax.Precision | str | None = None,
        kernel_init: nnx.Initializer = default_kernel_init,
        sharding: ShardingConfig = UNANNOTATED,
        implementation: str | None = None,
        rngs: nnx.Rngs,
    ):
        """Make the layer.

        Args:
            hidden_size: size of the inputs and outputs.
            num_heads: query heads, each with a decay and a state of its own.
            num_kv_heads: key and value heads, a divisor of num_heads, which is the default; query
                head h reads key and value head `h // (num_heads // num_kv_heads)`.
            expand_k: size of all query heads together over hidden_size.
            expand_v: size of all output heads together over hidden_size.
            feature_map: activation of q and k, by name, or None.
            gate_fn: activation of the output gate, by name.
            gate_logit_normalizer: divides the log decay.
            use_short_conv: whether q, k and v go through short convolutions.
            conv_size: tokens that a convolution's output sees.
            conv_bias: whether the convolutions have biases.
            elementwise_affine: whether the output norm has a scale.
            norm_eps: of the output norm.
            dtype: of the computation; None takes the one that x and the parameters promote to.
                Gates, norms and states are float32 whatever it is.
            param_dtype: of the parameters, but for norm scales, which are float32.
            precision: of the matrix products.
            kernel_init: initializer of the projections' kernels.
            sharding: layout of the parameters over a mesh.
            implementation: of the op, the convolutions and the norm; None takes the best for the
                platform.
            rngs: random keys.

        Raises:
            ValueError: an argument is wrong, or sizes do not divide over the mesh.
        """
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        hidden_size, num_heads, num_kv_heads, conv_size = sizes(
            hidden_size=hidden_size,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            conv_size=conv_size,
        )
        check_multiple("num_heads", num_heads, "num_kv_heads", num_kv_heads)
        head_k_dim = expanded_size("expand_k", expand_k, "hidden_size", hidden_size, num_heads)
        check_key_size("expand_k", head_k_dim)
        head_v_dim = expanded_size("expand_v", expand_v, "hidden_size", hidden_size, num_heads)
        check_activation_name("gate_fn", gate_fn)
        check_activation_name("feature_map", "identity" if feature_map is None else feature_map)
        gate_logit_normalizer = positive("gate_logit_normalizer", gate_logit_normalizer)
        norm_eps = positive("norm_eps", norm_eps)
        check_flags(
            use_short_conv=use_short_conv,
            conv_bias=conv_bias,
            elementwise_affine=elementwise_affine,
        )
        super().__init__(
            hidden_size,
            heads=Heads(
                query=num_heads,
                key=num_kv_heads,
                value=num_kv_heads,
                output=num_heads,
                key_size=head_k_dim,
                value_size=head_v_dim,
                value_blocks=value_blocks("expand_v", head_v_dim),
            ),
            conv_size=conv_size if use_short_conv else None,
            conv_bias=conv_bias,
            dtype=dtype,
            param_dtype=param_dtype,
            precision=precision,
            kernel_init=kernel_init,
            sharding=sharding,
            implementation=implementation,
            rngs=rngs,
        )
        self.o_norm = GatedRMSNorm(
            head_v_dim,
            epsilon=norm_eps,
            use_scale=elementwise_affine,
            activation=gate_fn,
            scale_metadata=metadata(sharding.norm),
            implementation=implementation,
            rngs=rngs,
        )
        self.feature_map = feature_map
        self.gate_logit_normalizer = gate_logit_normalizer
        self.gk_proj = self._linear(
            hidden_size,
            num_heads,
            sharding.in_kernel,
            rngs,
            use_bias=True,
            preferred_element_type=jnp.float32,
        )
        self.g_proj = self._linear(hidden_size, num_heads * head_v_dim, sharding.in_kernel, rngs)

    def _gates(self, x: Float[Array, "B T D"]) -> tuple[Float[Array, "B T H"]]:
        return (jax.nn.log_sigmoid(self.gk_proj(x)) / self.gate_logit_normalizer,)

    def _without_convolution(self, x: Float[Array, "B T F"]) -> Float[Array, "B T F"]:
        return x

    def _split_heads(self, q, k, v):
        q, k, v = super()._split_heads(q, k, v)
        group = self.heads.query // self.heads.key
        if group > 1:
            k, v = (jnp.repeat(x, group, axis=2) for x in (k, v))
        feature_map = ACTIVATIONS[self.feature_map or "identity"]
        return feature_map(q), feature_map(k), v
