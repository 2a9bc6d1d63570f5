"""A decoder-only language model whose token mixer is chosen layer by layer."""

import functools
from typing import Any, overload

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from .configuration import check_options, check_split, sizes
from .cross_entropy import chunked_cross_entropy
from .dot_general import dot_general
from .inputs import check_features, check_segment_ids
from .kernels.arguments import check_flags, check_integer, is_concrete
from .language_model_config import MIXERS, LanguageModelConfig
from .linear_attention import LinearAttention
from .rms_norm import RMSNorm
from .sharding import ShardingConfig, metadata, on_auto_axes, spec_of, split_as_x
from .state import AttentionState, LinearAttentionState, TokenMixer

default_kernel_init = nnx.initializers.normal(0.02)
default_sharding = ShardingConfig()

State = tuple[LinearAttentionState | AttentionState, ...]
"""A mixer's state for every layer."""


class SwiGLU(nnx.Module):
    """`down(silu(gate(x)) * up(x))`, without biases.

    Example:

    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> from gla_layers import SwiGLU
    >>> SwiGLU(32, 96, rngs=nnx.Rngs(0))(jnp.ones((2, 5, 32))).shape
    (2, 5, 32)
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        dtype: jax.typing.DTypeLike | None = None,
        param_dtype: jax.typing.DTypeLike = jnp.float32,
        precision: jax.lax.Precision | str | None = None,
        kernel_init: nnx.Initializer = default_kernel_init,
        sharding: ShardingConfig = default_sharding,
        rngs: nnx.Rngs,
    ):
        """Make the network.

        Args:
            hidden_size: size of the inputs and outputs.
            intermediate_size: features between them.
            dtype: of the computation; None takes the one that x and the parameters promote to.
            param_dtype: of the parameters.
            precision: of the matrix products.
            kernel_init: initializer of the kernels.
            sharding: layout of the parameters over a mesh.
            rngs: random keys.

        Raises:
            ValueError: an argument is wrong, or sizes do not divide over the mesh.
        """
        hidden_size, intermediate_size = sizes(
            hidden_size=hidden_size, intermediate_size=intermediate_size
        )
        check_options(
            dtype=dtype,
            param_dtype=param_dtype,
            precision=precision,
            kernel_init=kernel_init,
            sharding=sharding,
            rngs=rngs,
        )
        check_split("hidden_size", hidden_size, sharding.in_kernel, 0)
        check_split("intermediate_size", intermediate_size, sharding.in_kernel, 1)

        def linear(in_features, out_features, spec):
            return nnx.Linear(
                in_features,
                out_features,
                use_bias=False,
                dtype=dtype,
                param_dtype=param_dtype,
                precision=precision,
                dot_general=dot_general,
                kernel_init=kernel_init,
                kernel_metadata=metadata(spec),
                rngs=rngs,
            )

        self.hidden_size = hidden_size
        self.sharding = sharding
        self.gate_proj = linear(hidden_size, intermediate_size, sharding.in_kernel)
        self.up_proj = linear(hidden_size, intermediate_size, sharding.in_kernel)
        self.down_proj = linear(intermediate_size, hidden_size, sharding.out_kernel)

    @split_as_x
    def __call__(self, x: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
        """Apply the network to every token by itself.

        Raises:
            ValueError: x is of another size, or of a type that the layers do not take.
        """
        check_features(x, self.hidden_size)
        return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nnx.Module):
    """`x + mixer(norm(x))`, then `x + mlp(norm(x))`; with post_norm, `norm(mixer(x))` and so on."""

    def __init__(
        self,
        mixer: TokenMixer,
        mlp: nnx.Module,
        mixer_norm: nnx.Module,
        mlp_norm: nnx.Module,
        *,
        post_norm: bool,
    ):
        self.mixer_norm = mixer_norm
        self.mixer = mixer
        self.mlp_norm = mlp_norm
        self.mlp = mlp
        self.post_norm = post_norm

    def __call__(
        self,
        x: Float[Array, "B T D"],
        state: LinearAttentionState | AttentionState | None,
        segment_ids: Int[Array, "B T"] | None,
    ) -> tuple[Float[Array, "B T D"], LinearAttentionState | AttentionState | None]:
        """The outputs, and the mixer's new state where there was one."""
        y = x if self.post_norm else self.mixer_norm(x)
        y = self.mixer(y, state=state, segment_ids=segment_ids)
        if state is not None:
            y, state = y
        if self.post_norm:
            x = x + self.mixer_norm(y)
            return x + self.mlp_norm(self.mlp(x)), state
        x = x + y
        return x + self.mlp(self.mlp_norm(x)), state


class LanguageModel(nnx.Module):
    """Embedding, blocks of token mixer and SwiGLU, norm, and a head over the vocabulary.

    Example:

    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> from gla_layers import LanguageModel, LanguageModelConfig
    >>> config = LanguageModelConfig.preset("tiny", num_layers=1)
    >>> model = LanguageModel(config, rngs=nnx.Rngs(0))
    >>> tokens = jnp.zeros((2, 20), jnp.int32)
    >>> model(tokens).shape
    (2, 20, 257)
    >>> state = model.init_state(2)
    >>> logits, state = model(tokens[:, :19], state=state)
    >>> logits, state = model(tokens[:, 19:], state=state)
    >>> logits.shape
    (2, 1, 257)
    """

    def __init__(
        self,
        config: LanguageModelConfig,
        *,
        dtype: jax.typing.DTypeLike | None = None,
        param_dtype: jax.typing.DTypeLike = jnp.float32,
        precision: jax.lax.Precision | str | None = None,
        kernel_init: nnx.Initializer = default_kernel_init,
        sharding: ShardingConfig = default_sharding,
        implementation: str | None = None,
        remat: bool = False,
        rngs: nnx.Rngs,
    ):
        """Make the model.

        Args:
            config: the architecture.
            dtype: of the computation; None takes the parameters'.
            param_dtype: of the parameters, but for those that a mixer keeps in float32.
            precision: of the dots.
            kernel_init: of every matrix, the embedding among them.
            sharding: how the parameters are laid out over a mesh.
            implementation: of the mixers' ops.
            remat: whether the backward pass makes each block's activations again, which costs a
                third more time and saves nearly all of their memory.
            rngs: for the parameters.

        Raises:
            ValueError: an argument is wrong, or sizes do not divide over the mesh.
        """
        if not isinstance(config, LanguageModelConfig):
            raise ValueError(f"config must be a LanguageModelConfig, got {config!r}")
        arrays: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        matrices = {**arrays, "precision": precision, "kernel_init": kernel_init}
        check_options(**matrices, sharding=sharding, implementation=implementation)
        check_flags(remat=remat)
        check_split("vocab_size", config.vocab_size, sharding.embedding, 0)
        check_split("hidden_size", config.hidden_size, sharding.embedding, 1)
        if not config.tie_embeddings:
            check_split("vocab_size", config.vocab_size, sharding.head, 1)

        def norm() -> RMSNorm:
            return RMSNorm(
                config.hidden_size,
                epsilon=config.norm_eps,
                zero_centered=config.zero_centered_norms,
                scale_metadata=metadata(sharding.norm),
                rngs=rngs,
            )

        def block(name: str) -> Block:
            mixer_class = MIXERS[name]
            options = dict(config.mixer_options.get(name, {}))
            if issubclass(mixer_class, LinearAttention):
                options["implementation"] = implementation
            mixer = mixer_class(config.hidden_size, sharding=sharding, **matrices, **options)
            mlp = SwiGLU(
                config.hidden_size, config.intermediate_size, sharding=sharding, **matrices
            )
            return Block(mixer, mlp, norm(), norm(), post_norm=name in config.post_norm_mixers)

        self.config = config
        self.precision = precision
        self.remat = remat
        self.sharding = sharding
        self.embed = nnx.Embed(
            config.vocab_size,
            config.hidden_size,
            embedding_init=kernel_init,
            embedding_metadata=metadata(sharding.embedding),
            **arrays,
        )
        self.layers = nnx.List([block(name) for name in config.layer_mixers])
        self.norm = norm()
        if not config.tie_embeddings:
            self.head = nnx.Linear(
                config.hidden_size,
                config.vocab_size,
                use_bias=False,
                kernel_metadata=metadata(sharding.head),
                **matrices,
            )

    def init_state(self, batch_size: int, max_length: int | None = None) -> State:
        """The state of sequences that have not begun.

        Args:
            batch_size: number of rows.
            max_length: tokens that a row may come to hold, which layers of softmax attention
                need to know.

        Raises:
            ValueError: a size is wrong, or max_length is missing where a layer needs it.
        """
        return tuple(layer.mixer.init_state(batch_size, max_length) for layer in self.layers)

    @overload
    def __call__(
        self,
        tokens: Int[Array, "B T"],
        *,
        state: None = None,
        segment_ids: Int[Array, "B T"] | None = None,
    ) -> Float[Array, "B T vocab"]: ...

    @overload
    def __call__(
        self,
        tokens: Int[Array, "B T"],
        *,
        state: State,
        segment_ids: Int[Array, "B T"] | None = None,
    ) -> tuple[Float[Array, "B T vocab"], State]: ...

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        *,
        state: State | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
    ) -> Float[Array, "B T vocab"] | tuple[Float[Array, "B T vocab"], State]:
        """Logits of the token after each token.

        Args:
            tokens: token ids `[B, T]`; padding may hold any number.
            state: what came before each row, from `init_state` or an earlier call.
            segment_ids: a document starts where the id differs from the token before; 0 is
                padding. With a state, a row holds one document.

        Returns:
            float32 logits `[B, T, vocab]`; with a state also the new one.

        Raises:
            ValueError: an argument's shape or dtype is wrong, or there is a token outside of the
                vocabulary (where tokens are traced, what follows from it becomes NaN).
        """
        tokens = self._known(tokens, segment_ids, minimum=1)
        hidden, new_state = self._hidden(tokens, state, segment_ids)
        product = functools.partial(
            dot_general,
            dimension_numbers=(((2,), (0,)), ((), ())),
            precision=self.precision,
            preferred_element_type=jnp.float32,
        )
        head = self._head_kernel().astype(hidden.dtype)
        split = P(*spec_of(hidden)[:2], spec_of(head)[1])
        logits = on_auto_axes(product, split, hidden, head)
        return logits if state is None else (logits, new_state)

    def token_losses(
        self,
        tokens: Int[Array, "B T+1"],
        *,
        segment_ids: Int[Array, "B T+1"] | None = None,
        chunk_size: int = 128,
    ) -> tuple[Float[Array, "B T"], Bool[Array, "B T"]]:
        """Cross-entropy of each next token, without the logits of all of them at a time.

        Args:
            tokens: token ids `[B, T + 1]`: the first T are inputs, the last T targets.
            segment_ids: `[B, T + 1]`, as in a call.
            chunk_size: positions whose logits are held at one time.

        Returns:
            `[B, T]` float32 losses in nats, 0 where the next token is no target; and where it is
            one: a token of the same document, and not padding.

        Raises:
            ValueError: as in a call; a traced target outside of the vocabulary has the loss NaN.
        """
        tokens = self._known(tokens, segment_ids, minimum=2)
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        if segment_ids is None:
            is_target = jnp.ones(targets.shape, bool)
        else:
            inputs_ids, targets_ids = segment_ids[:, :-1], segment_ids[:, 1:]
            is_target = (inputs_ids == targets_ids) & (targets_ids != 0)
            targets = jnp.where(is_target, targets, 0)
            segment_ids = inputs_ids
        hidden, _ = self._hidden(inputs, None, segment_ids)
        loss = functools.partial(
            chunked_cross_entropy, chunk_size=chunk_size, precision=self.precision
        )
        losses = on_auto_axes(loss, spec_of(targets), hidden, self._head_kernel(), targets)
        return jnp.where(is_target, losses, 0), is_target

    def loss(
        self, tokens: Int[Array, "B T+1"], *, segment_ids: Int[Array, "B T+1"] | None = None
    ) -> Float[Array, ""]:
        """Mean cross-entropy of the next tokens in nats; arguments as for `token_losses`."""
        losses, is_target = self.token_losses(tokens, segment_ids=segment_ids)
        return jnp.sum(losses) / jnp.maximum(jnp.sum(is_target), 1)

    def _hidden(self, tokens, state, segment_ids):
        if state is not None:
            self._check_state(state)
        states = (None,) * len(self.layers) if state is None else state
        # A block as a tree: what is made again writes nothing back, which a loop's body must not.
        call = nnx.remat(Block.__call__, graph=False) if self.remat else Block.__call__
        x = self.embed(tokens, out_sharding=P(*spec_of(tokens), None))
        x = self.sharding.place_hidden(x)
        new_states = []
        for layer, layer_state in zip(self.layers, states, strict=True):
            x, layer_state = call(layer, x, layer_state, segment_ids)
            x = self.sharding.place_hidden(x)
            new_states.append(layer_state)
        return self.norm(x), tuple(new_states)

    def _known(self, tokens, segment_ids, *, minimum):
        """The tokens, checked, with 0 for padding.

        A traced token outside of the vocabulary becomes `vocab_size`, whose embedding and loss are
        NaN; a negative one would count from the embedding's end.
        """
        check_integer("tokens", tokens)
        if tokens.ndim != 2 or tokens.shape[1] < minimum:
            raise ValueError(f"tokens must be [B, T] with T >= {minimum}, got shape {tokens.shape}")
        check_segment_ids(segment_ids, tokens.shape)
        vocab_size = self.config.vocab_size
        tokens = jnp.asarray(tokens)
        tokens = tokens.astype(jnp.result_type(tokens.dtype, jnp.int32))
        if segment_ids is not None:
            tokens = jnp.where(segment_ids == 0, 0, tokens)
        unknown = (tokens < 0) | (tokens >= vocab_size)
        if is_concrete(unknown) and unknown.any():
            raise ValueError(
                f"tokens must be at least 0 and below vocab_size = {vocab_size}, where they are "
                f"not padding, got {int(tokens[unknown][0])}"
            )
        return jnp.where(unknown, vocab_size, tokens)

    def _check_state(self, state):
        expected = f"state must hold one state for each of {len(self.layers)} layers"
        if not isinstance(state, (tuple, list)):
            raise ValueError(f"{expected}, got {type(state).__name__}")
        if len(state) != len(self.layers):
            raise ValueError(f"{expected}, got {len(state)}")

    def _head_kernel(self) -> Float[Array, "D vocab"]:
        tied = self.config.tie_embeddings
        kernel = self.embed.embedding[...].T if tied else self.head.kernel[...]
        return self.sharding.place_head(kernel)
