"""How far off the ops are, against the recurrence in float64.

    python -m uv run python -m benchmarks.accuracy
    python -m uv run python -m benchmarks.accuracy --lengths 1024 8192 65536 --head-size 16 \\
        --dtypes float32 --implementations xla recurrence --inputs random "close keys"

The relative L2 error of the worst of output and final state, and of the worst gradient, on the
inputs that the tests hold every implementation to (see `tests/kernels/hard_inputs.py`, also for
what they allow). Kernels for TPUs run interpreted. The recurrence itself, token by token in
float32, is an implementation too, "recurrence": what it is off by is no fault of a chunked form.
"""

import argparse
import itertools
import math

from tests.kernels.cases import OPS, errors, evaluate, reference
from tests.kernels.hard_inputs import COLUMNS

from .results import make_row, print_header, print_row, save

SMALLEST = 1e-6
"""See `results`: smaller differences are those of the processor's sums."""

BY_NAME = {op.name: op for op in OPS}
RECURRENCE = "recurrence"


def measure(
    op: str, implementation: str, inputs: str, dtype: str, length: int, head_size: int
) -> dict[str, float]:
    """The errors of an op."""
    make, _ = COLUMNS[inputs]
    sizes = {"length": length, "key_size": head_size, "value_size": head_size}
    arrays = make(BY_NAME[op], **sizes)
    name = "reference" if implementation == RECURRENCE else implementation
    found = errors(
        evaluate(BY_NAME[op], name, arrays, dtype=dtype), reference(BY_NAME[op], arrays, dtype)
    )
    results = ("o", "final_state")
    return {
        "results": _worst(e for name, e in found.items() if name in results),
        "gradients": _worst(e for name, e in found.items() if name not in results),
    }


def _worst(found) -> float:
    """The largest, or NaN if one is."""
    found = list(found)
    worst = math.nan if any(map(math.isnan, found)) else max(found)
    return float(f"{worst:.1e}")


def main() -> None:
    """Print a table, and with --save keep the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ops", nargs="+", default=list(BY_NAME), choices=list(BY_NAME))
    parser.add_argument("--implementations", nargs="+", default=["xla", "pallas_tpu"])
    parser.add_argument("--inputs", nargs="+", default=list(COLUMNS), choices=list(COLUMNS))
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--lengths", nargs="+", type=int, default=[300])
    parser.add_argument("--head-size", type=int, default=64)
    parser.add_argument("--save", action="store_true", help="in benchmarks/results/accuracy.json")
    options = parser.parse_args()
    print_header(
        "op", "implementation", "inputs", "dtype", "tokens", "results", "gradients", "allowed"
    )
    for op, implementation, inputs, dtype, length in itertools.product(
        options.ops, options.implementations, options.inputs, options.dtypes, options.lengths
    ):
        if implementation not in (RECURRENCE, *BY_NAME[op].implementations):
            continue
        of = {"op": op, "implementation": implementation, "inputs": inputs}
        of |= {"dtype": dtype, "length": length, "head_size": options.head_size}
        figures = measure(**of)
        allowed = COLUMNS[inputs][1][dtype]
        print_row(op, implementation, inputs, dtype, length, *figures.values(), allowed)
        if options.save:
            save("accuracy", [make_row(of, figures)])


if __name__ == "__main__":
    main()
