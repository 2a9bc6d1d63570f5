"""Static cost of decoding one token at the 1.3B size, beside the bytes that it must move.

    python -m uv run python -m benchmarks.decoding --targets v6e --batch-sizes 1 8 64

A language model of the preset "1.3b" in bfloat16, with bfloat16 parameters, on one device: one
token a row from a state that is donated, up to the logits `[B, vocab]`. In Mcycles:

    step     all operations, and what they wait for (see `transfers.py`)
    floor    every parameter read once, every state read and written once, at the HBM's bandwidth

Counted are models of 2 and 4 layers, from which the others follow as layers are alike: compiling
takes half a minute to two minutes each. The last column is how much of the states the compiled
program of 4 layers updates in place.
"""

import argparse
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from gla_layers import LanguageModel, LanguageModelConfig

from .results import make_row, print_header, print_row, save
from .static_cost import static_cost
from .tpu_compiler import TARGETS

LAYERS = 2, 4


@dataclasses.dataclass(frozen=True)
class DecodingStep:
    """One token of every row.

    Attributes:
        batch: rows.
        mixer: of every layer.
        layers: of the model; None for as many as the preset has.
    """

    batch: int
    mixer: str = "gated_deltanet"
    layers: int | None = None

    @property
    def config(self) -> LanguageModelConfig:
        config = LanguageModelConfig.preset("1.3b", mixers=(self.mixer,))
        return dataclasses.replace(config, num_layers=self.layers or config.num_layers)

    def program(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """The step, and its parameters, state and tokens without arrays."""

        def make() -> LanguageModel:
            return LanguageModel(
                self.config, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0)
            )

        model = nnx.eval_shape(make)
        graph, parameters = nnx.split(model)
        state = jax.eval_shape(lambda: model.init_state(self.batch))
        tokens = jax.ShapeDtypeStruct((self.batch, 1), jnp.int32)

        def step(parameters, state, tokens):
            logits, state = nnx.merge(graph, parameters)(tokens, state=state)
            return logits[:, -1], state

        return step, (parameters, state, tokens)

    def bytes(self) -> tuple[int, int]:
        """Of the parameters, and of the states."""
        _, (parameters, state, _) = self.program()
        return _num_bytes(parameters), _num_bytes(state)


def measure(batch: int, mixer: str, target: str) -> dict[str, float]:
    """Mcycles of a step and of the floor, and the share of the states that is updated in place."""
    cycles = []
    for layers in LAYERS:
        step = DecodingStep(batch, mixer, layers)
        function, arguments = step.program()
        cost = static_cost(target, function, *arguments, donate_argnums=(1,))
        cycles.append(cost.cycles + cost.waiting_cycles)
    in_place = cost.aliased_bytes / step.bytes()[1]
    whole = DecodingStep(batch, mixer)
    a_layer = (cycles[1] - cycles[0]) / (LAYERS[1] - LAYERS[0])
    all_cycles = cycles[1] + a_layer * (whole.config.num_layers - LAYERS[1])
    parameters, states = whole.bytes()
    floor = TARGETS[target].memory_cycles(parameters + 2 * states)
    return {
        "step": round(all_cycles / 1e6, 2),
        "floor": round(floor / 1e6, 2),
        "step / floor": round(all_cycles / floor, 2),
        "in place": round(in_place, 3),
    }


def main() -> None:
    """Print a table, and with --save keep the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--targets", nargs="+", default=list(TARGETS), choices=list(TARGETS))
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=[1, 8, 64])
    parser.add_argument("--mixers", nargs="+", default=["gated_deltanet"])
    parser.add_argument("--save", action="store_true", help="in benchmarks/results/decoding.json")
    options = parser.parse_args()
    print_header("mixer", "rows", "target", "step", "floor", "step / floor", "in place")
    for mixer in options.mixers:
        for batch in options.batch_sizes:
            for target in options.targets:
                of = {"batch": batch, "mixer": mixer, "target": target}
                figures = measure(**of)
                print_row(mixer, batch, target, *figures.values())
                if options.save:
                    save("decoding", [make_row(of, figures)])


def _num_bytes(tree: Any) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


if __name__ == "__main__":
    main()
