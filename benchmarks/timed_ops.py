"""Time of the ops on the accelerator that JAX finds here, beside the bytes of temporaries.

    python -m uv run python -m benchmarks.timed_ops

The median of repeated runs after a warm-up, in milliseconds, forward and forward + backward;
`op_cases` says what the programs are.
"""

import argparse
import statistics
import time

import jax
import jax.numpy as jnp

from .op_cases import CASES


def median_milliseconds(compiled: jax.stages.Compiled, *args, repeats: int) -> float:
    """Each run is waited for; two come first that are not counted."""
    times = []
    for _ in range(repeats + 2):
        start = time.perf_counter()
        jax.block_until_ready(compiled(*args))
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times[2:])


def random_arguments(structs: dict[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    """Normal q, k and v; a decay of about -0.1 a token; a write strength of 0.5."""
    keys = jax.random.split(jax.random.key(0), len(structs))
    arguments = {
        name: jax.random.normal(key, struct.shape, struct.dtype)
        for key, (name, struct) in zip(keys, structs.items(), strict=True)
    }
    arguments["g"] = -0.1 * jnp.abs(arguments["g"])
    if "beta" in arguments:
        arguments["beta"] = jnp.full_like(arguments["beta"], 0.5)
    return arguments


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--implementation", default=None)
    parser.add_argument("--repeats", type=int, default=20)
    options = parser.parse_args()
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}")
    print("| case | forward, ms | forward + backward, ms | temporaries, MB |")
    print("|---|---|---|---|")
    for name in options.cases:
        case = CASES[name]
        arguments = random_arguments(case.arguments())
        do = jnp.ones_like(arguments["v"])
        forward = jax.jit(case.forward(options.implementation)).lower(arguments).compile()
        jitted = jax.jit(case.forward_and_backward(options.implementation))
        both = jitted.lower(arguments, do).compile()
        times = (
            median_milliseconds(forward, arguments, repeats=options.repeats),
            median_milliseconds(both, arguments, do, repeats=options.repeats),
        )
        memory = both.memory_analysis()
        assert memory is not None
        temporaries = memory.temp_size_in_bytes / 1e6
        print(f"| {name} | {times[0]:.2f} | {times[1]:.2f} | {temporaries:.0f} |", flush=True)


if __name__ == "__main__":
    main()
