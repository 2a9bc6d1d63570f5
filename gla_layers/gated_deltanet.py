"""Gated DeltaNet: the delta rule with one decay per head and token.

g_t    = -exp(A_log) softplus(a_proj(x_t) + dt_bias)        per value head
beta_t = sigmoid(b_proj(x_t)), doubled with allow_neg_eigval
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from .activations import check_activation_name
from .configuration import (
    check_key_size,
    check_multiple,
    expanded_size,
    positive,
    sizes,
    value_blocks,
)
from .decay_init import inverse_softplus_step, log_of_uniform_rate
from .gated_norm import GatedRMSNorm
from .kernels import chunk_gated_delta_rule, recurrent_gated_delta_rule
from .kernels.arguments import check_flags
from .linear_attention import Heads, LinearAttention, default_kernel_init
from .sharding import UNANNOTATED, ShardingConfig, metadata


class GatedDeltaNet(LinearAttention):
    """Gated DeltaNet layer.

    Parameters are named as in flash-linear-attention, kernels being `[in, out]`, convolution
    kernels `[width, channels]`, and a norm's weight called `scale`.

    Example:

    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> from gla_layers import GatedDeltaNet
    >>> layer = GatedDeltaNet(32, num_heads=2, head_dim=8, rngs=nnx.Rngs(0))
    >>> layer(jnp.ones((1, 5, 32))).shape
    (1, 5, 32)
    >>> y, state = layer(jnp.ones((1, 1, 32)), state=layer.init_state(1))
    >>> y.shape, state.recurrent.shape
    ((1, 1, 32), (1, 2, 8, 16))

    Source: Yang et al., "Gated Delta Networks" (arXiv:2412.06464).
    """

    _chunk = staticmethod(chunk_gated_delta_rule)
    _recurrent = staticmethod(recurrent_gated_delta_rule)
    _qk_l2norm = True

    def __init__(
        self,
        hidden_size: int = 2048,
        *,
        num_heads: int = 6,
        head_dim: int = 256,
        num_v_heads: int | None = None,
        expand_v: float = 2.0,
        use_gate: bool = True,
        gate_activation: str = "swish",
        use_short_conv: bool = True,
        conv_size: int = 4,
        conv_bias: bool = False,
        allow_neg_eigval: bool = False,
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
            num_heads: query and key heads.
            head_dim: size of a query and key head.
            num_v_heads: value heads, a multiple of num_heads, which is the default; value head j
                reads key head `j // (num_v_heads // num_heads)`.
            expand_v: size of a value head over head_dim.
            use_gate: whether the normed output is multiplied by an activated projection of x.
            gate_activation: of that gate, by name: "swish", "sigmoid" or another.
            use_short_conv: whether q, k and v go through short convolutions.
            conv_size: tokens that a convolution's output sees.
            conv_bias: whether the convolutions have biases.
            allow_neg_eigval: write strengths in (0, 2) in place of (0, 1), which lets a state
                change sign.
            norm_eps: of the output norm.
            dtype: of the computation; None takes the one that x and the parameters promote to.
                Gates, norms and states are float32 whatever it is.
            param_dtype: of the parameters, but for `A_log`, `dt_bias` and norm scales, which are
                float32.
            precision: of the matrix products.
            kernel_init: initializer of the projections' kernels.
            sharding: layout of the parameters over a mesh.
            implementation: of the op, the convolutions and the norm; None takes the best for the
                platform.
            rngs: random keys.

        Raises:
            ValueError: an argument is wrong, or sizes do not divide over the mesh.
        """
        num_v_heads = num_heads if num_v_heads is None else num_v_heads
        hidden_size, num_heads, num_v_heads, head_dim, conv_size = sizes(
            hidden_size=hidden_size,
            num_heads=num_heads,
            num_v_heads=num_v_heads,
            head_dim=head_dim,
            conv_size=conv_size,
        )
        check_key_size("head_dim", head_dim)
        check_multiple("num_v_heads", num_v_heads, "num_heads", num_heads)
        head_v_dim = expanded_size("expand_v", expand_v, "head_dim", head_dim)
        norm_eps = positive("norm_eps", norm_eps)
        check_flags(
            use_gate=use_gate,
            use_short_conv=use_short_conv,
            conv_bias=conv_bias,
            allow_neg_eigval=allow_neg_eigval,
        )
        check_activation_name("gate_activation", gate_activation)
        super().__init__(
            hidden_size,
            heads=Heads(
                query=num_heads,
                key=num_heads,
                value=num_v_heads,
                output=num_v_heads,
                key_size=head_dim,
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
            activation=gate_activation,
            scale_metadata=metadata(sharding.norm),
            implementation=implementation,
            rngs=rngs,
        )
        self.allow_neg_eigval = allow_neg_eigval
        per_head: dict[str, Any] = {
            "spec": sharding.in_kernel,
            "rngs": rngs,
            "preferred_element_type": jnp.float32,
        }
        self.a_proj = self._linear(hidden_size, num_v_heads, **per_head)
        self.b_proj = self._linear(hidden_size, num_v_heads, **per_head)
        vector = metadata(sharding.features)
        self.A_log = nnx.Param(log_of_uniform_rate(rngs.params(), (num_v_heads,), 0.0), **vector)
        self.dt_bias = nnx.Param(inverse_softplus_step(rngs.params(), (num_v_heads,)), **vector)
        self.g_proj = (
            self._linear(hidden_size, num_v_heads * head_v_dim, sharding.in_kernel, rngs)
            if use_gate
            else nnx.data(None)
        )

    def _gates(self, x: Float[Array, "B T D"]) -> tuple[Float[Array, "B T HV"], ...]:
        step = jax.nn.softplus(self.a_proj(x) + self.dt_bias[...])
        beta = jax.nn.sigmoid(self.b_proj(x))
        return -jnp.exp(self.A_log[...]) * step, 2 * beta if self.allow_neg_eigval else beta
