"""The ops at the shapes that the benchmarks measure.

Each case is one program as a layer holds it: q, k, v (and a g per channel) are arguments
[B, T, H * D], as projections make them, and so are the outputs and the gradients.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from gla_layers import kernels

OPS = {
    "gated_delta_rule": kernels.chunk_gated_delta_rule,
    "gla": kernels.chunk_gla,
    "kda": kernels.chunk_kda,
    "simple_gla": kernels.chunk_simple_gla,
}
DECAY_PER_CHANNEL = ("gla", "kda")
WITH_BETA = ("gated_delta_rule", "kda")
WITHOUT_KERNEL = ("gla",)


@dataclasses.dataclass(frozen=True)
class Case:
    """An op at one shape.

    Attributes:
        documents: documents of equal length that the row is packed of; 0 for no packing.
        num_splits: as the ops take it.
        recompute: whether the backward pass makes the op's residuals again.
    """

    op: str
    batch: int = 1
    key_heads: int = 16
    value_heads: int = 16
    length: int = 8192
    head_size: int = 128
    dtype: str = "bfloat16"
    qk_l2norm: bool = True
    documents: int = 0
    recompute: bool = False
    num_splits: int | None = None

    def arguments(self) -> dict[str, jax.ShapeDtypeStruct]:
        """What the program takes, by name."""
        keys = self.key_heads * self.head_size
        values = self.value_heads * self.head_size
        per_channel = self.head_size if self.op in DECAY_PER_CHANNEL else 1

        def array(size, dtype):
            return jax.ShapeDtypeStruct((self.batch, self.length, size), dtype)

        arguments = {
            "q": array(keys, self.dtype),
            "k": array(keys, self.dtype),
            "v": array(values, self.dtype),
            "g": array(self.value_heads * per_channel, "float32"),
            "beta": array(self.value_heads, "float32"),
        }
        if self.op not in WITH_BETA:
            del arguments["beta"]
        return arguments

    def forward(self, implementation: str | None) -> Callable:
        """From the flat arguments to the flat outputs."""
        packing = {}
        if self.documents:
            document = jnp.arange(self.length) * self.documents // self.length
            ids = document.astype(jnp.int32) + 1
            packing["segment_ids"] = jnp.broadcast_to(ids, (self.batch, self.length))

        def run(arguments):
            heads = dict(arguments)
            for name in ("q", "k"):
                heads[name] = _split(heads[name], self.key_heads)
            heads["v"] = _split(heads["v"], self.value_heads)
            if self.op in DECAY_PER_CHANNEL:
                heads["g"] = _split(heads["g"], self.value_heads)
            o, _ = OPS[self.op](
                **heads,
                **packing,
                qk_l2norm=self.qk_l2norm,
                implementation=implementation,
                num_splits=self.num_splits,
            )
            return o.reshape(*o.shape[:2], -1)

        if self.recompute:
            return jax.checkpoint(run, policy=jax.checkpoint_policies.nothing_saveable)
        return run

    def forward_and_backward(self, implementation: str | None) -> Callable:
        """From the flat arguments and the cotangent of the outputs to outputs and gradients."""
        run = self.forward(implementation)

        def both(arguments, do):
            o, vjp = jax.vjp(run, arguments)
            return o, vjp(do)[0]

        return both


CASES = {
    "GDN": Case("gated_delta_rule"),
    "GDN, 32 value heads": Case("gated_delta_rule", value_heads=32),
    "GDN, 25 documents": Case("gated_delta_rule", documents=25),
    "GDN, float32": Case("gated_delta_rule", dtype="float32"),
    "GDN, T = 32768": Case("gated_delta_rule", length=32768),
    "GDN, recomputed": Case("gated_delta_rule", recompute=True),
    "SimpleGLA": Case("simple_gla", qk_l2norm=False),
    "SimpleGLA, 25 documents": Case("simple_gla", qk_l2norm=False, documents=25),
    "SimpleGLA, float32": Case("simple_gla", qk_l2norm=False, dtype="float32"),
    "GDN, one head, T = 131072": Case(
        "gated_delta_rule", key_heads=1, value_heads=1, length=131072, num_splits=1
    ),
    "GDN, one head, T = 131072, 8 stretches": Case(
        "gated_delta_rule", key_heads=1, value_heads=1, length=131072, num_splits=8
    ),
    "KDA, one head, T = 131072": Case(
        "kda", key_heads=1, value_heads=1, length=131072, num_splits=1
    ),
    "KDA, one head, T = 131072, 8 stretches": Case(
        "kda", key_heads=1, value_heads=1, length=131072, num_splits=8
    ),
    "KDA": Case("kda"),
    "KDA, 32 heads": Case("kda", key_heads=32, value_heads=32),
    "KDA, 32 heads, 25 documents": Case("kda", key_heads=32, value_heads=32, documents=25),
    "KDA, 32 heads, recomputed": Case("kda", key_heads=32, value_heads=32, recompute=True),
    "GLA": Case("gla", qk_l2norm=False),
}


def _split(x, heads):
    return x.reshape(*x.shape[:2], heads, -1)
