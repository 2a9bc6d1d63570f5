"""The short convolution and its gradients against their definition, in float64."""

import functools
import itertools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.tpu_compiler import TARGETS, compile_for
from gla_layers.activations import ACTIVATIONS, WITHOUT_KERNEL
from gla_layers.kernels.short_convolution import short_convolution, visible_tokens

IMPLEMENTATIONS = ("pallas_tpu", "xla")
every_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
NAMES = ("x", "kernel", "bias", "history")


def inputs(batch, length, features, width, *, documents=False):
    rng = np.random.default_rng(0)
    shapes = {
        "x": (batch, length, features),
        "kernel": (width, features),
        "bias": (features,),
        "history": (batch, width - 1, features),
        "dy": (batch, length, features),
    }
    arrays = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    document = None
    if documents:
        document = np.cumsum(rng.random((batch, length)) < 0.2, axis=1, dtype=np.int32)
    return arrays, document


def definition(arrays, document):
    """Outputs and gradients, a pair of tokens at a time."""
    x, kernel, bias, history, dy = (np.asarray(a, np.float64) for a in arrays.values())
    width, size = kernel.shape[0], history.shape[1]
    row = np.concatenate([history, x], axis=1)
    if document is None:
        document = np.zeros(x.shape[:2])
    document = np.concatenate([np.zeros(history.shape[:2]), document], axis=1)
    pairs = [
        (t, t + j, kernel[j], j, (document[:, t + size] == document[:, t + j])[:, None])
        for t, j in itertools.product(range(x.shape[1]), range(width))
    ]
    z = np.zeros(x.shape) + bias
    for t, source, weight, _, seen in pairs:
        z[:, t] += seen * weight * row[:, source]
    sigmoid = 1 / (1 + np.exp(-z))
    p = dy * sigmoid * (1 + z * (1 - sigmoid))
    drow, dkernel = np.zeros(row.shape), np.zeros(kernel.shape)
    for t, source, weight, j, seen in pairs:
        drow[:, source] += seen * weight * p[:, t]
        dkernel[j] += (seen * p[:, t] * row[:, source]).sum(axis=0)
    gradients = drow[:, size:], dkernel, p.sum(axis=(0, 1)), drow[:, :size]
    return z * sigmoid, *gradients


@functools.partial(jax.jit, static_argnames=("implementation", "partition"))
def run(arrays, document, implementation, partition=None):
    """Outputs and gradients."""
    visible = None if document is None else visible_tokens(document, arrays["kernel"].shape[0])

    def forward(x, kernel, bias, history):
        return short_convolution(
            x,
            kernel,
            bias,
            history=history,
            visible=visible,
            implementation=implementation,
            partition=partition,
        )

    y, vjp = jax.vjp(forward, *(arrays[name] for name in NAMES))
    return y, *vjp(arrays["dy"])


def error(actual, expected):
    """The largest difference over the largest value, of the worst array."""
    return max(
        np.max(np.abs(np.asarray(a, np.float64) - e), initial=0) / np.max(np.abs(e), initial=1e-30)
        for a, e in zip(actual, expected, strict=True)
    )


@every_implementation
@pytest.mark.parametrize(
    ("length", "features", "width", "documents"),
    [(1, 24, 4, False), (130, 160, 4, True), (300, 24, 4, True), (9, 24, 1, True), (128, 8, 9, 0)],
)
def test_definition(implementation, length, features, width, documents):
    # Tokens of less than a window and of several blocks, the last of them ragged or not.
    arrays, document = inputs(2, length, features, width, documents=documents)
    assert error(run(arrays, document, implementation), definition(arrays, document)) < 1e-6


@every_implementation
def test_without_bias_and_history(implementation):
    arrays, _ = inputs(1, 9, 24, 4)
    x, kernel, *_, dy = arrays.values()
    zero = {"bias": np.zeros(24), "history": np.zeros((1, 3, 24))}
    call = functools.partial(short_convolution, implementation=implementation)
    y, vjp = jax.vjp(call, x, kernel)
    expected = definition(arrays | zero, None)
    assert error((y, *vjp(jnp.asarray(dy))), expected[:3]) < 1e-6


@every_implementation
def test_bfloat16_is_computed_in_float32(implementation):
    # Of the third block of 256 tokens one strip is ragged and the other is beyond the end.
    arrays, document = inputs(1, 600, 24, 4, documents=True)
    arrays |= {name: jnp.asarray(arrays[name], jnp.bfloat16) for name in ("x", "history", "dy")}
    y, dx, *rest = run(arrays, document, implementation)
    exact_y, exact_dx, *exact_rest = definition(arrays, document)
    assert y.dtype == dx.dtype == jnp.bfloat16
    assert np.all(np.abs(np.asarray(y, np.float64) - exact_y) <= 2**-8 * np.abs(exact_y) + 1e-6)
    # Plain JAX rounds p, too, of which a gradient sums W or all.
    assert error((dx, *rest), (exact_dx, *exact_rest)) < 1e-2


def test_float16_and_float64_are_taken():
    arrays, _ = inputs(1, 9, 24, 4)
    x, kernel, *_ = arrays.values()
    exact = definition(arrays | {"bias": np.zeros(24), "history": np.zeros((1, 3, 24))}, None)[0]
    half = jnp.asarray(x, jnp.float16)
    y = short_convolution(half, kernel, implementation="pallas_tpu")
    assert y.dtype == jnp.float16
    assert error((y,), (exact,)) < 2e-3
    with jax.enable_x64():
        y = short_convolution(
            jnp.asarray(x, "float64"), jnp.asarray(kernel, "float64"), implementation="pallas_tpu"
        )
    assert y.dtype == jnp.float64
    assert error((y,), (exact,)) < 1e-14


@every_implementation
@pytest.mark.parametrize(
    ("kind", "length"), [(AxisType.Auto, 4), (AxisType.Auto, 40), (AxisType.Explicit, 40)]
)
def test_split_over_devices_equals_one(implementation, kind, length):
    # Two tokens a device are less than the history of three.
    arrays, document = inputs(2, length, 24, 4, documents=True)
    axes = {"data": 2, "sequence": 2, "tensor": 2}
    mesh = jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(kind,) * 3)
    partition = P(*axes)
    specs = {
        "x": partition,
        "kernel": P(None, "tensor"),
        "bias": P("tensor"),
        "history": P("data", None, "tensor"),
        "dy": partition,
    }
    with jax.set_mesh(mesh):
        placed = {
            name: jax.device_put(x, NamedSharding(mesh, specs[name])) for name, x in arrays.items()
        }
        ids = jax.device_put(document, NamedSharding(mesh, P("data")))
        passed = partition if kind is AxisType.Auto else None
        actual = jax.device_get(run(placed, ids, implementation, passed))
    assert error(actual, definition(arrays, document)) < 1e-6


@pytest.mark.parametrize("length", [0, 8])
def test_time_axes_in_any_order(length):
    arrays, _ = inputs(1, length, 4, 4)
    x, kernel = arrays["x"], arrays["kernel"]
    mesh = jax.make_mesh((2, 4), ("outer", "inner"), axis_types=(AxisType.Auto,) * 2)
    with jax.set_mesh(mesh):
        y = short_convolution(x, kernel, partition=P(None, ("inner", "outer")))
    assert y.shape == x.shape
    np.testing.assert_allclose(y, short_convolution(x, kernel), rtol=1e-6)


def test_a_kernel_on_auto_axes_needs_a_partition():
    arrays, _ = inputs(2, 4, 24, 4)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    with jax.set_mesh(mesh), pytest.raises(ValueError, match="partition must say how"):
        short_convolution(arrays["x"], arrays["kernel"], implementation="pallas_tpu")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"x": np.ones((4, 24), np.float32)}, r"x must be \[B, T, D\], got shape \(4, 24\)"),
        ({"x": np.ones((2, 4, 24), int)}, "x must be an array of one of .*, got int64"),
        ({"kernel": np.ones((4, 8), np.float32)}, r"kernel must be .* D = 24, got shape \(4, 8\)"),
        ({"bias": np.ones(8, np.float32)}, r"bias must be \[24\], got shape \(8,\)"),
        (
            {"history": np.ones((2, 4, 24), np.float32)},
            r"history must be \[2, 3, 24\], got shape \(2, 4, 24\)",
        ),
        ({"implementation": "cuda"}, "implementation must be one of .*, got 'cuda'"),
        ({"visible": np.ones((2, 4), np.float32)}, "visible must be an integer array, got float32"),
        ({"visible": [[1] * 4] * 2}, "visible must be an integer array, got list"),
        ({"bias": np.ones(24, int)}, "bias must be an array of one of .*, got int64"),
        ({"dtype": "int32"}, "dtype must be one of .*, got 'int32'"),
        ({"activation": "silu"}, "activation must be a function, got 'silu'"),
    ],
)
def test_wrong_calls(changed, message):
    arrays, _ = inputs(2, 4, 24, 4)
    arrays.pop("dy")
    with pytest.raises(ValueError, match=message):
        short_convolution(**(arrays | changed))


# --- as programs for a TPU --------------------------------------------------------------------

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="libtpu exists for Linux alone")


def structs(length, features, dtype):
    arrays, document = inputs(1, length, features, 4, documents=True)
    return {
        name: jax.ShapeDtypeStruct(x.shape, dtype if name in ("x", "dy") else x.dtype)
        for name, x in arrays.items()
    }, jax.ShapeDtypeStruct(document.shape, document.dtype)


@on_linux
@pytest.mark.parametrize(
    ("document", "width", "message"),
    [
        (np.zeros((1, 4)), 3, "document must be an integer array"),
        (np.zeros(4, int), 3, r"document must be \[B, T\], got shape"),
        (np.zeros((1, 4), int), 0, "width must be an integer of at least 1, got 0"),
    ],
)
def test_visible_tokens_names_what_is_wrong(document, width, message):
    with pytest.raises(ValueError, match=message):
        visible_tokens(document, width)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("target", TARGETS)
def test_compiles_for_every_generation(target, dtype):
    both = functools.partial(run, implementation=None)
    program = compile_for(target, both, *structs(300, 160, dtype)).as_text()
    assert program.count('custom_call_target="tpu_custom_call"') == 2


@on_linux
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_largest_blocks_compile(dtype):
    compile_for("v4", functools.partial(run, implementation=None), *structs(1000, 2048, dtype))


@on_linux
@pytest.mark.parametrize("name", sorted(set(ACTIVATIONS) - set(WITHOUT_KERNEL) - {"swish"}))
def test_every_activation_compiles(name):
    x = jax.ShapeDtypeStruct((1, 300, 128), jnp.bfloat16)
    kernel = jax.ShapeDtypeStruct((4, 128), jnp.float32)

    def gradients(x, kernel):
        call = functools.partial(short_convolution, activation=ACTIVATIONS[name])
        y, vjp = jax.vjp(call, x, kernel)
        return vjp(y)

    assert "tpu_custom_call" in compile_for("v5e", gradients, x, kernel).as_text()


@on_linux
def test_few_tokens_are_left_to_plain_jax():
    both = functools.partial(run, implementation=None)
    assert "tpu_custom_call" not in compile_for("v5e", both, *structs(4, 128, "bfloat16")).as_text()
