"""The gated norm and its gradients against their definition, in float64."""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.tpu_compiler import TARGETS, compile_for
from gla_layers.activations import ACTIVATIONS, WITHOUT_KERNEL
from gla_layers.kernels.gated_norm import gated_rms_norm

from ..programs import equations

EPSILON = 0.1
every_implementation = pytest.mark.parametrize("implementation", ["pallas_tpu", "xla"])


def inputs(shape, size):
    rng = np.random.default_rng(0)
    shapes = {"x": shape, "gate": shape, "scale": (size,), "dy": shape}
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def definition(arrays, *, gated=True):
    """Outputs and gradients."""
    *tokens, scale = (np.asarray(arrays[name], np.float64) for name in ("x", "gate", "dy", "scale"))
    shape = tokens[0].shape
    x, gate, dy = (a.reshape(*shape[:-1], -1, scale.size) for a in tokens)
    sigmoid = 1 / (1 + np.exp(-gate))
    act, slope = gate * sigmoid, sigmoid * (1 + gate * (1 - sigmoid))
    if not gated:
        act = np.ones(act.shape)
    r = (np.mean(x**2, axis=-1, keepdims=True) + EPSILON) ** -0.5
    dn = scale * act * dy
    dx = r * dn - r**3 * x * np.mean(x * dn, axis=-1, keepdims=True)
    dscale = (act * r * x * dy).reshape(-1, scale.size).sum(axis=0)
    y, dx, dgate = (a.reshape(shape) for a in (scale * act * r * x, dx, slope * scale * r * x * dy))
    return (y, dx, dgate, dscale) if gated else (y, dx, dscale)


@functools.partial(jax.jit, static_argnames=("implementation", "partition", "gated"))
def run(arrays, implementation, partition=None, gated=True):
    """Outputs and gradients."""
    options = {"epsilon": EPSILON, "implementation": implementation, "partition": partition}

    def forward(x, gate, scale):
        return gated_rms_norm(x, gate, scale, **options)

    gate = arrays["gate"] if gated else None
    y, vjp = jax.vjp(forward, arrays["x"], gate, arrays["scale"])
    return tuple(x for x in (y, *vjp(arrays["dy"])) if x is not None)


def error(actual, expected):
    """The largest difference over the largest value, of the worst array."""
    return max(
        np.max(np.abs(np.asarray(a, np.float64) - e)) / np.max(np.abs(e))
        for a, e in zip(actual, expected, strict=True)
    )


@every_implementation
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize(
    ("shape", "size"),
    [((2, 300, 256), 128), ((2, 5, 128), 16), ((7, 512), 256), ((256,), 64), ((1, 2, 3, 256), 128)],
)
def test_definition(implementation, shape, size, gated):
    arrays = inputs(shape, size)
    actual = run(arrays, implementation, gated=gated)
    assert error(actual, definition(arrays, gated=gated)) < 2e-6


@pytest.mark.parametrize(
    ("shape", "size", "has_kernel"),
    [
        ((1, 4, 256), 128, True),
        ((1, 4, 128), 64, True),
        ((1, 4, 512), 512, True),
        ((1, 4, 96), 48, False),
        ((1, 4, 64), 16, False),
        ((1, 4, 1024), 1024, False),
        ((1, 1, 4, 256), 128, False),
        ((4, 256), 128, False),
        ((1, 0, 256), 128, False),
    ],
)
def test_plain_jax_where_there_is_no_kernel(shape, size, has_kernel):
    arrays = inputs(shape, size)
    program = jax.make_jaxpr(functools.partial(run, implementation="pallas_tpu"))(arrays)
    found = any(x.primitive.name == "pallas_call" for x in equations(program.jaxpr))
    assert found == has_kernel


@every_implementation
def test_bfloat16_is_computed_in_float32(implementation):
    arrays = inputs((1, 300, 256), 128)
    arrays |= {name: jnp.asarray(arrays[name], jnp.bfloat16) for name in ("x", "gate", "dy")}
    *actual, dscale = run(arrays, implementation)
    *expected, exact_dscale = definition(arrays)
    for a, e in zip(actual, expected, strict=True):
        assert a.dtype == jnp.bfloat16
        # Half a unit in the last of bfloat16's eight bits, for the one rounding of the result.
        assert np.all(np.abs(np.asarray(a, np.float64) - e) <= 2**-8 * np.abs(e) + 1e-5)
    assert error((dscale,), (exact_dscale,)) < (1e-5 if implementation == "pallas_tpu" else 2e-3)


@every_implementation
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_split_over_devices_equals_one(implementation, kind):
    arrays = inputs((2, 20, 256), 128)
    axes = {"data": 2, "sequence": 2, "tensor": 2}
    mesh = jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(kind,) * 3)
    partition = P(*axes)
    with jax.set_mesh(mesh):
        placed = {
            name: jax.device_put(x, NamedSharding(mesh, partition if x.ndim == 3 else P()))
            for name, x in arrays.items()
        }
        passed = partition if kind is AxisType.Auto else None
        actual = jax.device_get(run(placed, implementation, passed))
    assert error(actual, definition(arrays)) < 2e-6


def test_a_kernel_on_auto_axes_needs_a_partition():
    arrays = inputs((2, 4, 128), 128)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    with jax.set_mesh(mesh), pytest.raises(ValueError, match="partition must say how"):
        run(arrays, "pallas_tpu")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epsilon": float("nan")}, "epsilon must be a finite number above 0, got nan"),
        ({"epsilon": 0}, "epsilon must be a finite number above 0, got 0"),
        ({"activation": "silu"}, "activation must be a function, got 'silu'"),
        ({"partition": P("data")}, r"partition is for x of three axes, got shape \(4, 16\)"),
    ],
)
def test_wrong_options(options, message):
    x = jnp.ones((4, 16))
    with pytest.raises(ValueError, match=message):
        gated_rms_norm(x, x, jnp.ones(8), **options)


def test_heads_must_divide_over_the_mesh():
    mesh = jax.make_mesh((2,), ("tensor",), axis_types=(AxisType.Explicit,))
    x = jax.device_put(jnp.ones((1, 4, 24)), NamedSharding(mesh, P(None, None, "tensor")))
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=r"multiple of 2 heads.* got 3"):
        gated_rms_norm(x, None, jnp.ones(8))


# --- as programs for a TPU --------------------------------------------------------------------

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="libtpu exists for Linux alone")


def structs(shape, size, dtype):
    return {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype if name == "scale" else dtype)
        for name, x in inputs(shape, size).items()
    }


@on_linux
@pytest.mark.parametrize("size", [32, 256])
@pytest.mark.parametrize("target", TARGETS)
def test_compiles_for_every_generation(target, size):
    both = functools.partial(run, implementation=None)
    program = compile_for(target, both, structs((1, 300, 256), size, jnp.bfloat16)).as_text()
    assert program.count('custom_call_target="tpu_custom_call"') == 2


@on_linux
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("size", [16, 512])
def test_the_largest_blocks_compile(size, dtype):
    both = functools.partial(run, implementation=None)
    compile_for("v4", both, structs((1, 1000, 2048), size, dtype))


@on_linux
@pytest.mark.parametrize("name", sorted(set(ACTIVATIONS) - set(WITHOUT_KERNEL) - {"swish"}))
def test_every_activation_compiles(name):
    def gradients(x, scale):
        call = functools.partial(gated_rms_norm, activation=ACTIVATIONS[name])
        y, vjp = jax.vjp(call, x, x, scale)
        return vjp(y)

    x = jax.ShapeDtypeStruct((1, 300, 128), jnp.bfloat16)
    scale = jax.ShapeDtypeStruct((128,), jnp.float32)
    assert "tpu_custom_call" in compile_for("v5e", gradients, x, scale).as_text()


@on_linux
def test_few_tokens_are_left_to_plain_jax():
    both = functools.partial(run, implementation=None)
    program = compile_for("v5e", both, structs((8, 1, 256), 128, "bfloat16")).as_text()
    assert "tpu_custom_call" not in program
