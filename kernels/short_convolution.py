"""Short convolution: an op on tokens that reads a few tokens before each.

Devices that split the time axis hand the last W - 1 tokens of their stretch to the next one, which
takes them as its history.
"""

import functools
import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from . import arguments
from .implementation import on_platform
from .sharding import Placement, implementation_on_mesh
from .tpu import short_convolution as tpu
from .tpu.token_blocks import pays
from .xla import short_convolution as xla

_IMPLEMENTATIONS = {"pallas_tpu": tpu, "xla": xla}


class _Options(NamedTuple):
    activation: Callable[[Array], Array]
    dtype: jnp.dtype
    implementation: str | None


def short_convolution(
    x: Float[Array, "B T D"],
    kernel: Float[Array, "W D"],
    bias: Float[Array, " D"] | None = None,
    *,
    history: Float[Array, "B W-1 D"] | None = None,
    visible: Int[Array, "B T"] | None = None,
    activation: Callable[[Array], Array] = jax.nn.silu,
    dtype: jax.typing.DTypeLike | None = None,
    implementation: str | None = None,
    partition: PartitionSpec | None = None,
) -> Float[Array, "B T D"]:
    """Convolve every channel by itself, causally, and apply an activation.

        y_t = activation(bias + sum_j kernel[j] x_(t - W + 1 + j)),   j = 0 .. W - 1

    Args:
        x: inputs `[B, T, D]`.
        kernel: `[W, D]`.
        bias: `[D]`, or None for 0.
        history: the W - 1 inputs before each row, oldest first; None for 0.
        visible: how many tokens before it each token sees, history included; those further back
            act as 0. None is all W - 1.
        activation: elementwise, computed in float32, of what Pallas lowers for a TPU.
        dtype: of the outputs; x's by default.
        implementation: "pallas_tpu" (interpreted, slowly, where there is no TPU), "xla" (any
            backend; also called "reference") or None, the best for the platform that the program is
            lowered for, which for rows of less than 128 tokens is plain JAX. Kernels of more than 9
            tokens, and float64, are computed in plain JAX whatever it is.
        partition: how `[B, T, D]` are split over the mesh in context. Needed where the mesh has
            Auto axes; with Explicit ones x's type tells it.

    Returns:
        The outputs `[B, T, D]`.

    Raises:
        ValueError: an argument's shape, dtype or combination is wrong.

    Example:

    >>> import jax.numpy as jnp
    >>> from gla_layers.kernels.short_convolution import short_convolution
    >>> x, kernel = jnp.ones((1, 3, 1)), jnp.ones((2, 1))
    >>> short_convolution(x, kernel, activation=lambda z: z)[0, :, 0].tolist()
    [1.0, 2.0, 2.0]
    """
    _check(x, kernel, bias, history, visible)
    arguments.check_activation(activation)
    dtype = x.dtype if dtype is None else arguments.float_dtype("dtype", dtype)
    arguments.check_implementation(implementation)
    arguments.check_partition(partition)
    placement = Placement.of({"x": x}, partition, parts="features")
    unused = implementation is None and not pays(x.shape[1])
    has_kernel = tpu.has_kernel(x, kernel) and dtype != jnp.float64
    if unused or implementation == "reference" or not has_kernel:
        implementation = "xla"
    options = _Options(
        activation,
        dtype,
        implementation_on_mesh(implementation, partition),
    )
    arrays = x, kernel, bias, history, visible
    if placement is None:
        return _core(options, *arrays)
    rows, time, features = placement.rows, placement.time, placement.heads
    specs = (
        P(rows, time, features),
        P(None, features),
        P(features),
        P(rows, None, features),
        P(rows, time),
    )
    one_device = functools.partial(_one_stretch, options, placement.split_time)
    return placement.on_every_device(one_device, arrays, specs, specs[0])


def visible_tokens(document: Int[Array, "B T"], width: int) -> Int[Array, "B T"]:
    """How many tokens before it each token sees of its own document: `visible` for packed rows.

    Args:
        document: of each token; the tokens before the row are of document 0.
        width: W, the tokens that a kernel spans.

    Returns:
        `[B, T]`, from 0 to W - 1.

    Raises:
        ValueError: an argument is wrong.

    Example:

    >>> import jax.numpy as jnp
    >>> from gla_layers.kernels.short_convolution import visible_tokens
    >>> visible_tokens(jnp.asarray([[0, 0, 1, 1, 1]]), width=3).tolist()
    [[2, 2, 0, 1, 2]]
    """
    arguments.check_integer("document", document)
    if document.ndim != 2:
        raise ValueError(f"document must be [B, T], got shape {document.shape}")
    if not arguments.is_integer(width) or width < 1:
        raise ValueError(f"width must be an integer of at least 1, got {width!r}")
    before = jnp.pad(document, ((0, 0), (width - 1, 0)))
    length = document.shape[1]
    windows = [before[:, start : start + length] for start in range(width - 1)]
    return sum(((x == document).astype(jnp.int32) for x in windows), jnp.zeros_like(document))


def _one_stretch(options, time, x, kernel, bias, history, visible):
    """One device's stretch of tokens, with the end of the stretch before as its history."""
    size = kernel.shape[0] - 1
    batch, length, features = x.shape
    if time and size and length:
        first = jnp.zeros((batch, size, features), x.dtype) if history is None else history
        history = first = first.astype(x.dtype)
        time, stretches = _in_mesh_order(time)
        to_next = list(itertools.pairwise(stretches))
        # Stretches shorter than the history pass on what came before them.
        for _ in range(-(-size // length)):
            end = jnp.concatenate([history, x], axis=1)[:, length:]
            received = jax.lax.ppermute(end, time, to_next)
            history = jnp.where(jax.lax.axis_index(time) == 0, first, received)
    return _core(options, x, kernel, bias, history, visible)


def _in_mesh_order(time: tuple[str, ...]) -> tuple[tuple[str, ...], list[int]]:
    """The axes as `ppermute` wants them, and where along these the stretches of a row lie."""
    axes = sorted(time, key=jax.sharding.get_abstract_mesh().axis_names.index)
    sizes = [jax.lax.axis_size(axis) for axis in axes]
    index = np.arange(math.prod(sizes)).reshape(sizes)
    return tuple(axes), index.transpose([axes.index(axis) for axis in time]).ravel().tolist()


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _core(options, x, kernel, bias, history, visible):
    def bind(name):
        forward = _IMPLEMENTATIONS[name].forward
        return functools.partial(forward, options.activation, options.dtype)

    return on_platform(options.implementation, bind, x, kernel, bias, history, visible)


def _forward(options, *arrays):
    return _core(options, *arrays), arrays


def _backward(options, saved, dy):
    def bind(name):
        return functools.partial(_IMPLEMENTATIONS[name].backward, options.activation)

    _, kernel, bias, history, _ = saved
    dx, dkernel, dbias, dhistory = on_platform(options.implementation, bind, *saved, dy)
    return (
        dx,
        dkernel.astype(kernel.dtype),
        None if bias is None else dbias.astype(bias.dtype),
        None if history is None else dhistory.astype(history.dtype),
        None,
    )


_core.defvjp(_forward, _backward)


def _check(x, kernel, bias, history, visible):
    arguments.check_float("x", x)
    if x.ndim != 3:
        raise ValueError(f"x must be [B, T, D], got shape {x.shape}")
    batch, length, features = x.shape
    arguments.check_float("kernel", kernel)
    if kernel.ndim != 2 or kernel.shape[0] < 1 or kernel.shape[1] != features:
        raise ValueError(f"kernel must be [W, D] with D = {features}, got shape {kernel.shape}")
    expected = {
        "bias": (bias, (features,)),
        "history": (history, (batch, kernel.shape[0] - 1, features)),
        "visible": (visible, (batch, length)),
    }
    for name, (array, shape) in expected.items():
        if array is None:
            continue
        check = arguments.check_integer if name == "visible" else arguments.check_float
        check(name, array)
        if array.shape != shape:
            raise ValueError(f"{name} must be {list(shape)}, got shape {array.shape}")
