"""Static cost of the ops on every TPU generation.

    python -m uv run python -m benchmarks.ops --targets v6e v5e --implementations xla

Counted in Mcycles, forward and forward + backward; `static_cost` says what that means, and
`op_cases` what the programs are.
"""

import argparse

from .op_cases import CASES, WITHOUT_KERNEL
from .results import make_row, print_header, print_row, save
from .static_cost import static_cost
from .tpu_compiler import TARGETS


def measure(case: str, implementation: str, target: str) -> dict[str, float]:
    """Mcycles of a case, and its temporaries in MB."""
    arguments = CASES[case].arguments()
    forward = static_cost(target, CASES[case].forward(implementation), arguments)
    both = static_cost(
        target, CASES[case].forward_and_backward(implementation), arguments, arguments["v"]
    )
    return {
        "forward": round(forward.cycles / 1e6, 3),
        "forward + backward": round(both.cycles / 1e6, 3),
        "temporaries, MB": round(both.temporary_bytes / 1e6, 1),
    }


def main() -> None:
    """Print a table, and with --save keep the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--targets", nargs="+", default=list(TARGETS))
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--implementations", nargs="+", default=["pallas_tpu", "xla"])
    parser.add_argument("--save", action="store_true", help="in benchmarks/results/ops.json")
    options = parser.parse_args()
    columns = "forward", "forward + backward", "temporaries, MB"
    print_header("case", "implementation", "target", *columns)
    for case in options.cases:
        for implementation in options.implementations:
            if implementation == "pallas_tpu" and CASES[case].op in WITHOUT_KERNEL:
                continue
            for target in options.targets:
                of = {"case": case, "implementation": implementation, "target": target}
                figures = measure(**of)
                print_row(*of.values(), *figures.values())
                if options.save:
                    save("ops", [make_row(of, figures)])


if __name__ == "__main__":
    main()
