"""Memory of a whole training step on every device, compiled with no TPU.

    python -m uv run python -m benchmarks.training_step --targets v5e v6e v7x --remat
    python -m uv run python -m benchmarks.training_step --targets v5e v6e --remat \
        --preset 1.3b --chips 16x16 --mesh data=32 fsdp=8 --batch 256

One step of AdamW on a language model in bfloat16 with float32 parameters and optimizer, parameters
and optimizer donated, laid out by `ShardingConfig.fsdp_tensor`. Compiling takes minutes a target.
"""

import argparse
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from gla_layers import LanguageModel, LanguageModelConfig, ShardingConfig, weight_decay_mask

from .results import make_row, print_header, print_row, save
from .tpu_compiler import TARGETS, compile_for, pod


@dataclasses.dataclass(frozen=True)
class TrainingStep:
    """One update of a language model's parameters.

    Attributes:
        batch: rows, over all devices.
        length: tokens a row.
        remat: see `LanguageModel`.
    """

    config: LanguageModelConfig
    batch: int
    length: int
    remat: bool

    def program(self, mesh: Mesh | None) -> tuple[Callable[..., Any], tuple[Any, Any]]:
        """The step and its arguments without arrays, on a mesh or on one device."""
        sharding = ShardingConfig() if mesh is None else ShardingConfig.fsdp_tensor()

        def make() -> tuple[nnx.Module, nnx.Optimizer]:
            model = LanguageModel(
                self.config,
                dtype=jnp.bfloat16,
                remat=self.remat,
                sharding=sharding,
                rngs=nnx.Rngs(0),
            )
            adamw = optax.adamw(1e-3, weight_decay=0.1, mask=weight_decay_mask)
            return model, nnx.Optimizer(model, adamw, wrt=nnx.Param)

        def step(state: nnx.State, tokens: jax.Array) -> tuple[jax.Array, nnx.State]:
            model, optimizer = nnx.merge(graph, state)
            loss, gradients = nnx.value_and_grad(lambda model: model.loss(tokens))(model)
            optimizer.update(model, gradients)
            return loss, nnx.state((model, optimizer))

        tokens = jax.ShapeDtypeStruct((self.batch, self.length + 1), jnp.int32)
        if mesh is None:
            graph, state = nnx.split(nnx.eval_shape(make))
            return step, (state, tokens)
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            graph, state = nnx.split(nnx.eval_shape(make))
        assert sharding.tokens is not None
        specs = nnx.get_partition_spec(state), P(sharding.tokens[0])

        def place(x: jax.ShapeDtypeStruct, spec: P) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

        return step, jax.tree.map(place, (state, tokens), specs)


def measure(
    preset: str,
    mixers: list[str],
    batch: int,
    length: int,
    remat: bool,
    chips: str | None,
    mesh: dict[str, int] | None,
    target: str,
) -> dict[str, float]:
    """GB that a device takes."""
    config = LanguageModelConfig.preset(preset, mixers=tuple(mixers))
    axes = {"data": 1, "fsdp": 1, "tensor": 1} | (mesh or {})
    devices = None if chips is None else pod(target, chips, axes)
    step, arguments = TrainingStep(config, batch, length, remat).program(devices)
    compiled = compile_for(target, step, *arguments, donate_argnums=(0,), mesh=devices)
    memory = compiled.memory_analysis()
    assert memory is not None
    parts = {
        "parameters and optimizer, GB": memory.argument_size_in_bytes / 1e9,
        "temporaries, GB": memory.temp_size_in_bytes / 1e9,
        "programs, GB": memory.generated_code_size_in_bytes / 1e9,
    }
    parts["in all, GB"] = sum(parts.values())
    return {part: round(size, 2) for part, size in parts.items()}


def main() -> None:
    """Print a table, and with --save keep the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--targets", nargs="+", default=list(TARGETS), choices=list(TARGETS))
    parser.add_argument("--preset", default="340m")
    parser.add_argument("--mixers", nargs="+", default=["gated_deltanet"])
    parser.add_argument("--batch", type=int, default=1, help="rows, over all devices")
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--remat", action="store_true")
    parser.add_argument("--chips", help="a pod slice, as 16x16; one device by default")
    parser.add_argument("--mesh", nargs="+", default=[], help="as data=32 fsdp=8")
    parser.add_argument(
        "--save", action="store_true", help="in benchmarks/results/training_step.json"
    )
    options = parser.parse_args()
    of = {name: value for name, value in vars(options).items() if name not in ("targets", "save")}
    of["mesh"] = {name: int(size) for name, size in (x.split("=") for x in options.mesh)} or None
    columns = "parameters and optimizer, GB", "temporaries, GB", "programs, GB", "in all, GB"
    print_header("target", "memory, GB", *columns)
    for target in options.targets:
        figures = measure(**of, target=target)
        print_row(target, TARGETS[target].hbm_gb, *figures.values())
        if options.save:
            save("training_step", [make_row(of | {"target": target}, figures)])


if __name__ == "__main__":
    main()
