"""What the backward pass keeps of a layer or block, by remat policy and by name.

    python -m uv run python -m benchmarks.memory --layers KDA "KDA block"

In kB a token of one row, beside x and the parameters; the layers are those of `benchmarks.layers`,
which also counts what a compiled program needs for a while. Here nothing is compiled: shapes say it
all. Names are those that a policy can pick; all of them together are the op's values.
"""

import argparse
from typing import Any

import jax

from .layer_cases import LAYERS, Case
from .results import make_row, print_header, print_row, save

jax.config.update("jax_platforms", "cpu")  # else libtpu looks for a TPU, and warns of having none

POLICIES = {
    "everything": None,
    "products": jax.checkpoint_policies.dots_saveable,
    "the op's values": jax.checkpoint_policies.save_any_names_but_these(),
    "the input": jax.checkpoint_policies.nothing_saveable,
}


def measure(layer: str, length: int, documents: int) -> dict[str, float]:
    """kB a token."""
    case = Case(layer, length, documents)
    kept = {name: case.residual_bytes(policy) for name, policy in POLICIES.items()}
    return {name: round(size / 1e3, 2) for name, size in (kept | _by_name(case)).items()}


def _by_name(case: Case) -> dict[str, float]:
    """The bytes a token of every value with a checkpoint name."""
    function, arguments = case.program(backward=True)
    equations = jax.make_jaxpr(function)(*arguments).jaxpr.eqns
    named: dict[str, Any] = {
        e.params["name"]: e.outvars[0].aval for e in equations if e.primitive.name == "name"
    }
    return {name: x.size * x.dtype.itemsize / case.length for name, x in named.items()}


def main() -> None:
    """Print a table, and with --save keep the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", nargs="+", default=list(LAYERS), choices=list(LAYERS))
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--documents", type=int, default=0, help="in a row; 0 for no packing")
    parser.add_argument("--save", action="store_true", help="in benchmarks/results/memory.json")
    options = parser.parse_args()
    print_header("layer", "what is kept", "kB a token")
    for layer in options.layers:
        of = {"layer": layer, "length": options.length, "documents": options.documents}
        figures = measure(**of)
        for name, size in figures.items():
            print_row(layer, name, size)
        if options.save:
            save("memory", [make_row(of, figures)])


if __name__ == "__main__":
    main()
