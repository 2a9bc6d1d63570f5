"""Kimi Delta Attention: the delta rule with a decay per key channel and token.

g_t    = -exp(A_log) softplus(f_proj(x_t) + dt_bias)                    per value head, channel
         or lower_bound sigmoid(exp(A_log) (f_proj(x_t) + dt_bias))     with a lower_bound
beta_t = sigmoid(b_proj(x_t)), doubled with allow_neg_eigval
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

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
from .kernels import chunk_kda, recurrent_kda
from .kernels.arguments import check_flags, is_finite_number
from .linear_attention import Heads, LinearAttention, default_kernel_init
from .sharding import UNANNOTATED, ShardingConfig, metadata


class KDA(LinearAttention):
    """Kimi Delta Attention layer.

    Parameters are named as in flash-linear-attention's KimiDeltaAttention, kernels being
    `[in, out]`, convolution kernels `[width, channels]`, a norm's weight `scale`, and the two maps
    of `f_proj` and `g_proj` `down` and `up` in place of 0 and 1.

    Example:

    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> from gla_layers import KDA
    >>> layer = KDA(32, num_heads=2, head_dim=16, rngs=nnx.Rngs(0))
    >>> layer(jnp.ones((1, 5, 32))).shape
    (1, 5, 32)
    >>> y, state = layer(jnp.ones((1, 1, 32)), state=layer.init_state(1))
    >>> y.shape, state.recurrent.shape
    ((1, 1, 32), (1, 2, 16, 16))

    Source: Kimi Team, "Kimi Linear" (arXiv:2510.26692).
    """

    _chunk = staticmethod(chunk_kda)
    _recurrent = staticmethod(recurrent_kda)
    _qk_l2norm = True

    def __init__(
        self,
        hidden_size: int = 2048,
        *,
        num_heads: int = 16,
        head_dim: int = 128,
        num_v_heads: int | None = None,
        expand_v: float = 1.0,
        use_short_conv: bool = True,
        conv_size: int = 4,
        conv_bias: bool = False,
        allow_neg_eigval: bool = False,
        safe_gate: bool = False,
        lower_bound: float | None = None,
        gate_bias: bool = True,
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
                reads key head `j // (num_v_heads // num_heads)`. Decay is per value head.
            expand_v: size of a value head over head_dim.
            use_short_conv: whether q, k and v go through short convolutions.
            conv_size: tokens that a convolution's output sees.
            conv_bias: whether the convolutions have biases.
            allow_neg_eigval: write strengths in (0, 2) in place of (0, 1), which lets a state
                change sign.
            safe_gate: require a lower_bound in [-5, 0), and start A_log from 0.
            lower_bound: bounds the decay per token from below, by another form of gate: a
                checkpoint trained without it needs None.
            gate_bias: whether the output gate has a bias. Kimi Linear's has none.
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
            use_short_conv=use_short_conv,
            conv_bias=conv_bias,
            allow_neg_eigval=allow_neg_eigval,
            safe_gate=safe_gate,
            gate_bias=gate_bias,
        )
        if lower_bound is not None:
            if not is_finite_number(lower_bound) or lower_bound >= 0:
                raise ValueError(
                    f"lower_bound must be None or a finite number below 0, got {lower_bound!r}"
                )
            lower_bound = float(lower_bound)
        if safe_gate and (lower_bound is None or lower_bound < -5):
            raise ValueError(f"safe_gate needs a lower_bound in [-5, 0), got {lower_bound}")
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
            activation="sigmoid",
            scale_metadata=metadata(sharding.norm),
            implementation=implementation,
            rngs=rngs,
        )
        self.allow_neg_eigval = allow_neg_eigval
        self.lower_bound = lower_bound
        decays = num_v_heads * head_dim
        wide: dict[str, Any] = {"preferred_element_type": jnp.float32}
        self.f_proj = self._bottleneck(decays, rngs, **wide)
        self.b_proj = self._linear(hidden_size, num_v_heads, sharding.in_kernel, rngs, **wide)
        self.g_proj = self._bottleneck(num_v_heads * head_v_dim, rngs, use_bias=gate_bias)
        rate = (
            jnp.zeros((num_v_heads,), jnp.float32)
            if safe_gate
            else log_of_uniform_rate(rngs.params(), (num_v_heads,), 1.0)
        )
        vector = metadata(sharding.features)
        self.A_log = nnx.Param(rate, **vector)
        self.dt_bias = nnx.Param(inverse_softplus_step(rngs.params(), (decays,)), **vector)

    def _gates(self, x: Float[Array, "B T D"]) -> tuple[Float[Array, "B T HV *K"], ...]:
        logits = self.f_proj(x) + self.dt_bias[...]
        rate = jnp.repeat(jnp.exp(self.A_log[...]), self.heads.key_size)
        if self.lower_bound is None:
            decay = -rate * jax.nn.softplus(logits)
        else:
            decay = self.lower_bound * jax.nn.sigmoid(rate * logits)
        decay = decay.reshape(*x.shape[:2], self.heads.output, self.heads.key_size)
        beta = jax.nn.sigmoid(self.b_proj(x))
        return decay, 2 * beta if self.allow_neg_eigval else beta
