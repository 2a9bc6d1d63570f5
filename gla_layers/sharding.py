"""How parameters and tokens are laid out over a mesh: one `PartitionSpec` per kind of array."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, Self, cast

import jax
from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float


@dataclasses.dataclass(frozen=True)
class ShardingConfig:
    """A `PartitionSpec`, or None for no annotation, per kind of array.

    The default annotates nothing, which needs no mesh. An annotated parameter needs one when the
    layer is made, and `tokens` when it runs, with the axes that the presets name: `data`, `fsdp`,
    `tensor` and `sequence`, any of which may have the size 1.

    Attributes:
        embedding: `[vocabulary, hidden]`; a head of its own is split alike.
        in_kernel: `[hidden, features]`, projections to heads, gates, feed-forward features.
        out_kernel: `[features, hidden]`, projections back.
        bottleneck_in_kernel: `[hidden, rank]`.
        bottleneck_out_kernel: `[rank, features]`.
        convolution_kernel: `[width, features]`.
        features: `[features]` or `[heads]`: biases, `A_log`, `dt_bias`.
        norm: `[size]`: norm scales.
        tokens: `[batch, time, heads]` of q, k, v and gates, as the ops take them; a mesh with
            Auto axes needs it (`partition` of `gla_layers.kernels.chunk_gated_delta_rule`). With
            Explicit axes a layer takes rows and time as the type of its inputs has them.

    Raises:
        ValueError: a field is no `PartitionSpec`, or of more axes than the array has.

    Example:

    >>> from gla_layers import ShardingConfig
    >>> tuple(ShardingConfig.fsdp_tensor().in_kernel)
    ('fsdp', 'tensor')
    >>> ShardingConfig().in_kernel is None
    True
    """

    embedding: P | None = None
    in_kernel: P | None = None
    out_kernel: P | None = None
    bottleneck_in_kernel: P | None = None
    bottleneck_out_kernel: P | None = None
    convolution_kernel: P | None = None
    features: P | None = None
    norm: P | None = None
    tokens: P | None = None

    def __post_init__(self):
        for name, spec in vars(self).items():
            axes = {"features": 1, "norm": 1, "tokens": 3}.get(name, 2)
            if spec is not None and (not isinstance(spec, P) or len(spec) > axes):
                raise ValueError(
                    f"{name} must be None or a PartitionSpec of at most {axes} axes, got {spec!r}"
                )

    @property
    def head(self) -> P | None:
        """Of a language model's head `[hidden, vocabulary]`."""
        return None if self.embedding is None else P(*reversed(self.embedding))

    @classmethod
    def fsdp(cls) -> Self:
        """Every matrix split along its hidden axis over `fsdp`; vectors replicated.

        Rows are split over `data` and `fsdp`.
        """
        return cls(
            embedding=P(None, "fsdp"),
            in_kernel=P("fsdp", None),
            out_kernel=P(None, "fsdp"),
            bottleneck_in_kernel=P("fsdp", None),
            bottleneck_out_kernel=P(None, None),
            convolution_kernel=P(None, None),
            features=P(None),
            norm=P(None),
            tokens=P(("data", "fsdp")),
        )

    @classmethod
    def fsdp_tensor(cls) -> Self:
        """As `fsdp`, and heads and features split over `tensor`."""
        return cls(
            embedding=P("tensor", "fsdp"),
            in_kernel=P("fsdp", "tensor"),
            out_kernel=P("tensor", "fsdp"),
            bottleneck_in_kernel=P("fsdp", None),
            bottleneck_out_kernel=P(None, "tensor"),
            convolution_kernel=P(None, "tensor"),
            features=P("tensor"),
            norm=P(None),
            tokens=P(("data", "fsdp"), None, "tensor"),
        )

    @classmethod
    def sequence(cls) -> Self:
        """As `fsdp_tensor`, and the time axis split over `sequence`, for rows of many tokens.

        The op exchanges states (`gla_layers.kernels.context_parallel`), and a convolution the
        `conv_size - 1` tokens that it sees of the neighbour. T is to be a multiple of the size of
        `sequence`.
        """
        return dataclasses.replace(
            cls.fsdp_tensor(), tokens=P(("data", "fsdp"), "sequence", "tensor")
        )

    def place_hidden(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Split rows and time as `tokens` are, and leave every token whole.

        Left to itself the compiler splits hidden features as the parameters are, and gathers
        tokens for every projection.
        """
        return x if self.tokens is None else _place(x, P(*self.tokens[:2]))

    def place_head(self, kernel: Float[Array, "D vocab"]) -> Float[Array, "D vocab"]:
        """Split the vocabulary as `head` says, and no hidden feature.

        The loss reads the head once a chunk of tokens, and gathering it each time would cost more
        than all the rest.
        """
        return kernel if self.head is None else _place(kernel, P(None, self.head[1]))


UNANNOTATED = ShardingConfig()


def metadata(spec: P | None) -> Mapping[str, Any]:
    """The keyword arguments that annotate an `nnx.Param` with a spec."""
    return {} if spec is None else {"out_sharding": spec}


def spec_of(x: Array) -> P:
    """How each axis of an array is split, as far as its type tells."""
    spec = jax.typeof(x).sharding.spec
    return P(*spec, *(None,) * (x.ndim - len(spec)))


def on_auto_axes(function: Callable[..., Any], out: Any, *arguments: Any) -> Any:
    """Call a function that leaves it to the compiler how what it computes is split.

    Args:
        function: of arrays.
        out: the `PartitionSpec` of each result, for a mesh with Explicit axes, where types tell.
        *arguments: of the function.
    """
    axes = jax.sharding.get_abstract_mesh().explicit_axes
    if axes:
        function = jax.sharding.auto_axes(function, axes=axes, out_sharding=out)
    return function(*arguments)


def split_as_x[F: Callable[..., Any]](call: F) -> F:
    """A layer's `__call__`; on a mesh with Explicit axes its results are split as x and the state.

    The type of x tells how rows and time are split, and `tokens` how heads are.
    """

    @functools.wraps(call)
    def call_on_mesh(self, x, **options):
        if not jax.sharding.get_abstract_mesh().explicit_axes:
            return call(self, x, **options)
        graph, parameters = nnx.split(self)
        tokens = P(*spec_of(x)[:2], *(self.sharding.tokens or P())[2:])

        def body(parameters, x, options):
            layer = nnx.merge(graph, parameters)
            layer.sharding = dataclasses.replace(layer.sharding, tokens=tokens)
            return call(layer, x, **options)

        state = options.get("state")
        out = spec_of(x) if state is None else (spec_of(x), jax.tree.map(spec_of, state))
        return on_auto_axes(body, out, parameters, x, options)

    return cast(F, call_on_mesh)


def _place(x: Array, spec: P) -> Array:
    if jax.sharding.get_abstract_mesh().explicit_axes:
        return jax.sharding.reshard(x, spec)
    return jax.lax.with_sharding_constraint(x, spec)
