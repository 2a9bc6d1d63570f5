"""Static cost of whole layers and blocks, beside those of softmax attention.

    python -m uv run python -m benchmarks.layers --targets v6e v5e --lengths 8192

One row, hidden size 2048, 16 heads of 128, bfloat16 with float32 parameters; gradients are those of
the parameters and of x. In Mcycles, forward and forward + backward, of

    projections     products of matrices, by XLA's estimate
    op              its Pallas kernels, by their schedules
    rest            all else

and of what the backward pass keeps of the forward pass, beside x and the parameters, in kB a token.
Attention is JAX's splash attention between the same projections. Its kernels skip the blocks of
keys that come after the queries, which a schedule does not tell: here only the others are counted.
A block has a SwiGLU of 5632 features too, whose products are among the projections.
"""

import argparse
import re

from .layer_cases import LAYERS, Case
from .results import make_row, print_header, print_row, save
from .splash_attention import computed_share
from .static_cost import static_cost
from .tpu_compiler import TARGETS

OP_KERNELS = re.compile("gated_delta_rule|kda|simple_gla|splash")


def measure(layer: str, length: int, documents: int, target: str) -> dict[str, float]:
    """Mcycles of a layer by what costs them, temporaries in MB, and what is kept in kB a token."""
    case = Case(layer, length, documents)
    figures = {}
    for direction, backward in {"forward": False, "forward + backward": True}.items():
        function, arguments = case.program(backward=backward)
        cost = static_cost(target, function, *arguments)
        share = computed_share(length) if layer.startswith("attention") else 1
        op = sum(k.cycles * k.calls for k in cost.kernels if OP_KERNELS.search(k.name))
        parts = {
            "projections": cost.product_cycles,
            "op": op * share,
            "rest": cost.cycles - op - cost.product_cycles,
        }
        parts["all"] = sum(parts.values())
        for part, cycles in parts.items():
            figures[f"{direction}, {part}"] = round(cycles / 1e6, 2)
    figures["temporaries, MB"] = round(cost.temporary_bytes / 1e6)
    figures["kept, kB a token"] = round(case.residual_bytes() / 1e3, 1)
    return figures


def main() -> None:
    """Print a table, and with --save keep the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--targets", nargs="+", default=list(TARGETS), choices=list(TARGETS))
    parser.add_argument("--layers", nargs="+", default=list(LAYERS), choices=list(LAYERS))
    parser.add_argument("--lengths", nargs="+", type=int, default=[2048, 8192, 32768])
    parser.add_argument("--documents", type=int, default=0, help="in a row; 0 for no packing")
    parser.add_argument("--save", action="store_true", help="in benchmarks/results/layers.json")
    options = parser.parse_args()
    parts = ("projections", "op", "rest", "all")
    columns = *parts, *parts, "temporaries, MB", "kept, kB a token"
    print_header("layer", "tokens", "target", *columns)
    for layer in options.layers:
        for length in options.lengths:
            for target in options.targets:
                of = {"layer": layer, "length": length, "documents": options.documents}
                of["target"] = target
                figures = measure(**of)
                print_row(layer, length, target, *figures.values())
                if options.save:
                    save("layers", [make_row(of, figures)])


if __name__ == "__main__":
    main()
