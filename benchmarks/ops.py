"""Static cost of the ops on every TPU generation.

    python -m uv run python -m benchmarks.ops --targets v6e v5e --implementations xla

Each case is one program as a layer holds it: q, k, v (and KDA's g) are arguments [B, T, H * D], as
projections make them, and so are the outputs and the gradients. Counted in Mcycles, forward and
forward + backward; see `static_cost` for what that means.
"""

import argparse
import dataclasses
import json
from collections.abc import Callable

from . import tpu_compiler  # before jax

import jax  # isort: skip
import jax.numpy as jnp  # isort: skip

from gla_layers import kernels

from .static_cost import StaticCost, static_cost

OPS = {
    "gated_delta_rule": kernels.chunk_gated_delta_rule,
    "kda": kernels.chunk_kda,
    "simple_gla": kernels.chunk_simple_gla,
}


@dataclasses.dataclass(frozen=True)
class Case:
    """An op at one shape.

    Attributes:
        documents: documents of equal length that the row is packed of; 0 for no packing.
        recompute: whether the backward pass makes the op's residuals again.
    """

    op: str
    key_heads: int = 16
    value_heads: int = 16
    length: int = 8192
    head_size: int = 128
    dtype: str = "bfloat16"
    qk_l2norm: bool = True
    documents: int = 0
    recompute: bool = False

    def arguments(self) -> dict[str, jax.ShapeDtypeStruct]:
        """What the program takes, by name."""
        keys = self.key_heads * self.head_size
        values = self.value_heads * self.head_size
        per_channel = self.head_size if self.op == "kda" else 1

        def array(size, dtype):
            return jax.ShapeDtypeStruct((1, self.length, size), dtype)

        arguments = {
            "q": array(keys, self.dtype),
            "k": array(keys, self.dtype),
            "v": array(values, self.dtype),
            "g": array(self.value_heads * per_channel, "float32"),
            "beta": array(self.value_heads, "float32"),
        }
        if self.op == "simple_gla":
            del arguments["beta"]
        return arguments

    def forward(self, implementation: str | None) -> Callable:
        """From the flat arguments to the flat outputs."""
        packing = {}
        if self.documents:
            document = jnp.arange(self.length) * self.documents // self.length
            packing["segment_ids"] = document[None].astype(jnp.int32) + 1

        def run(arguments):
            heads = dict(arguments)
            for name in ("q", "k"):
                heads[name] = _split(heads[name], self.key_heads)
            heads["v"] = _split(heads["v"], self.value_heads)
            if self.op == "kda":
                heads["g"] = _split(heads["g"], self.value_heads)
            o, _ = OPS[self.op](
                **heads, **packing, qk_l2norm=self.qk_l2norm, implementation=implementation
            )
            return o.reshape(*o.shape[:2], -1)

        if self.recompute:
            return jax.checkpoint(run, policy=jax.checkpoint_policies.nothing_saveable)
        return run

    def cost(self, target: str, implementation: str | None) -> tuple[StaticCost, StaticCost]:
        """Forward, and forward + backward."""
        run, arguments = self.forward(implementation), self.arguments()

        def both(arguments, do):
            o, vjp = jax.vjp(run, arguments)
            return o, vjp(do)[0]

        return static_cost(target, run, arguments), static_cost(
            target, both, arguments, arguments["v"]
        )


CASES = {
    "GDN": Case("gated_delta_rule"),
    "GDN, 32 value heads": Case("gated_delta_rule", value_heads=32),
    "GDN, 25 documents": Case("gated_delta_rule", documents=25),
    "GDN, float32": Case("gated_delta_rule", dtype="float32"),
    "GDN, T = 32768": Case("gated_delta_rule", length=32768),
    "GDN, recomputed": Case("gated_delta_rule", recompute=True),
    "SimpleGLA": Case("simple_gla", qk_l2norm=False),
    "SimpleGLA, 25 documents": Case("simple_gla", qk_l2norm=False, documents=25),
    "KDA": Case("kda"),
    "KDA, 32 heads": Case("kda", key_heads=32, value_heads=32),
    "KDA, 32 heads, 25 documents": Case("kda", key_heads=32, value_heads=32, documents=25),
    "KDA, 32 heads, recomputed": Case("kda", key_heads=32, value_heads=32, recompute=True),
}


def _split(x, heads):
    return x.reshape(*x.shape[:2], heads, -1)


def main() -> None:
    """Print a table, and with --json write the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--targets", nargs="+", default=list(tpu_compiler.TARGETS))
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--implementations", nargs="+", default=["pallas_tpu", "xla"])
    parser.add_argument("--json", help="file to write the figures to")
    arguments = parser.parse_args()
    rows = []
    print("| case | implementation | target | forward | forward + backward | temporaries, MB |")
    print("|---|---|---|---|---|---|")
    for case in arguments.cases:
        for implementation in arguments.implementations:
            for target in arguments.targets:
                forward, both = CASES[case].cost(target, implementation)
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
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump({"jax": jax.__version__, "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
