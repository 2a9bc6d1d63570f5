"""Memory of a whole training step on one device of a TPU generation, compiled with no TPU.

    python -m uv run python -m benchmarks.training_step --targets v5e v6e v7x --remat

One step of AdamW on a language model in bfloat16 with float32 parameters and optimizer, parameters
and optimizer donated. Compiling takes minutes a target.
"""

import argparse

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from gla_layers import LanguageModel, LanguageModelConfig, weight_decay_mask

from .tpu_compiler import TARGETS, compile_for


def abstract_training(config: LanguageModelConfig, remat: bool) -> tuple[nnx.Module, nnx.Optimizer]:
    """A model and its optimizer without arrays."""

    def make() -> tuple[nnx.Module, nnx.Optimizer]:
        model = LanguageModel(config, dtype=jnp.bfloat16, remat=remat, rngs=nnx.Rngs(0))
        adamw = optax.adamw(1e-3, weight_decay=0.1, mask=weight_decay_mask)
        return model, nnx.Optimizer(model, adamw, wrt=nnx.Param)

    return nnx.eval_shape(make)


def compile_step(
    target: str, config: LanguageModelConfig, *, batch: int, length: int, remat: bool
) -> jax.stages.Compiled:
    """The step for one device."""
    graph, state = nnx.split(abstract_training(config, remat))

    def step(state, tokens):
        model, optimizer = nnx.merge(graph, state)
        loss, gradients = nnx.value_and_grad(lambda model: model.loss(tokens))(model)
        optimizer.update(model, gradients)
        return loss, nnx.state((model, optimizer))

    tokens = jax.ShapeDtypeStruct((batch, length + 1), jnp.int32)
    return compile_for(target, step, state, tokens, donate_argnums=(0,))


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--targets", nargs="+", default=list(TARGETS), choices=list(TARGETS))
    parser.add_argument("--preset", default="340m")
    parser.add_argument("--mixers", nargs="+", default=["gated_deltanet"])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--remat", action="store_true")
    options = parser.parse_args()
    config = LanguageModelConfig.preset(options.preset, mixers=tuple(options.mixers))
    print("| target | memory, GB | parameters and optimizer | temporaries | programs | in all |")
    print("|---|---|---|---|---|---|")
    for target in options.targets:
        compiled = compile_step(
            target, config, batch=options.batch, length=options.length, remat=options.remat
        )
        memory = compiled.memory_analysis()
        parts = (
            memory.argument_size_in_bytes,
            memory.temp_size_in_bytes,
            memory.generated_code_size_in_bytes,
        )
        figures = (TARGETS[target].hbm_gb, *(round(x / 1e9, 2) for x in (*parts, sum(parts))))
        print(f"| {target} | " + " | ".join(map(str, figures)) + " |", flush=True)


if __name__ == "__main__":
    main()
