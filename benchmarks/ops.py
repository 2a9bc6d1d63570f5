"""Static cost of the ops on every TPU generation.

    python -m uv run python -m benchmarks.ops --targets v6e v5e --implementations xla

Counted in Mcycles, forward and forward + backward; `static_cost` says what that means, and
`op_cases` what the programs are.
"""

import argparse
import json
from importlib.metadata import version

from .op_cases import CASES
from .static_cost import static_cost
from .tpu_compiler import TARGETS


def main() -> None:
    """Print a table, and with --json write the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--targets", nargs="+", default=list(TARGETS))
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--implementations", nargs="+", default=["pallas_tpu", "xla"])
    parser.add_argument("--json", help="file to write the figures to")
    options = parser.parse_args()
    rows = []
    print("| case | implementation | target | forward | forward + backward | temporaries, MB |")
    print("|---|---|---|---|---|---|")
    for case in options.cases:
        for implementation in options.implementations:
            for target in options.targets:
                arguments = CASES[case].arguments()
                forward = static_cost(target, CASES[case].forward(implementation), arguments)
                both = static_cost(
                    target,
                    CASES[case].forward_and_backward(implementation),
                    arguments,
                    arguments["v"],
                )
                row = {
                    "case": case,
                    "implementation": implementation,
                    "target": target,
                    "forward_mcycles": round(forward.cycles / 1e6, 3),
                    "forward_backward_mcycles": round(both.cycles / 1e6, 3),
                    "temporaries_mb": round(both.temporary_bytes / 1e6, 1),
                }
                rows.append(row)
                print("| " + " | ".join(map(str, row.values())) + " |", flush=True)
    if options.json:
        with open(options.json, "w") as file:
            json.dump(
                {"jax": version("jax"), "libtpu": version("libtpu"), "rows": rows}, file, indent=1
            )


if __name__ == "__main__":
    main()
