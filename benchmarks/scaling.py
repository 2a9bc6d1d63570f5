"""Weak scaling of a training step on paper: what each device does, and what it sends.

    python -m uv run python -m benchmarks.scaling --target v5e --chips 2x2 2x4 4x4 8x8 16x16

The step of `training_step`, one row of 8192 tokens a device, parameters split over 8 devices or all
of fewer (`fsdp`) and rows over all. From programs of two and of three layers follows that of any
depth, since layers are alike. XLA's own estimate of all that is not a kernel is per device; the
kernels are the same on every device (`benchmarks.ops` counts them). Assumed for the time that
sending takes: a ring, all links of a chip busy, nothing waited for. What is sent while the device
computes costs no time of its own.
"""

import argparse
import dataclasses
import math
from collections.abc import Mapping

from gla_layers import LanguageModelConfig

from .collectives import collectives
from .hlo import Program
from .results import make_row, print_header, print_row, save
from .tpu_compiler import TARGETS, Target, compile_for, pod
from .training_step import TrainingStep

FSDP = 8
"""Devices over which parameters are split, at most."""


@dataclasses.dataclass(frozen=True)
class Step:
    """What one device does in a step.

    Attributes:
        cycles: of XLA's operations.
        kernels: how often kernels run.
        sent: bytes by kind of collective.
    """

    cycles: float
    kernels: int
    sent: Mapping[str, float]

    @classmethod
    def of(cls, program: Program, target: Target) -> "Step":
        operations = list(program.operations())
        sent: dict[str, float] = {}
        for collective in collectives(program):
            sent[collective.kind] = sent.get(collective.kind, 0) + collective.sent_bytes
        return cls(
            sum(x.times * x.estimated_cycles(target) for x in operations),
            sum(x.times for x in operations if x.is_kernel),
            sent,
        )

    def deepened(self, shallower: "Step", layers: int) -> "Step":
        """With so many layers more, each as the one that `shallower` lacks."""
        kinds = self.sent.keys() | shallower.sent.keys()
        pairs = {kind: (self.sent.get(kind, 0), shallower.sent.get(kind, 0)) for kind in kinds}
        sent = {kind: ours + layers * (ours - theirs) for kind, (ours, theirs) in pairs.items()}
        cycles = self.cycles + layers * (self.cycles - shallower.cycles)
        kernels = self.kernels + layers * (self.kernels - shallower.kernels)
        return Step(cycles, kernels, sent)


def step_of(target: str, chips: str, preset: str, mixers: tuple[str, ...], depth: int) -> Step:
    """The step of a model of `depth` layers on a pod slice."""
    devices = math.prod(int(n) for n in chips.split("x"))
    fsdp = min(FSDP, devices)
    mesh = pod(target, chips, {"data": devices // fsdp, "fsdp": fsdp, "tensor": 1})
    config = LanguageModelConfig.preset(preset, mixers=mixers, num_layers=depth)
    training = TrainingStep(config, batch=devices, length=8192, remat=True)
    step, arguments = training.program(mesh)
    compiled = compile_for(target, step, *arguments, donate_argnums=(0,), mesh=mesh)
    text = compiled.as_text()
    assert text is not None
    return Step.of(Program(text), TARGETS[target])


def measure(preset: str, mixers: list[str], chips: str, target: str) -> dict[str, float]:
    """What one device computes and sends in a step of the whole model."""
    names = tuple(mixers)
    layers = LanguageModelConfig.preset(preset).num_layers
    two, three = (step_of(target, chips, preset, names, n) for n in (2, 3))
    step = three.deepened(two, layers - 3)
    clock, links = TARGETS[target].clock_ghz, TARGETS[target].ici_gb_per_s
    sent = sum(step.sent.values())
    figures = {
        "kernels": step.kernels,
        "all else, Mcycles": round(step.cycles / 1e6, 1),
        "all else, ms": round(step.cycles / clock / 1e6),
        "sent, MB": round(sent / 1e6),
        "sending, ms": round(sent / links / 1e6),
    }
    kinds = {f"{kind}, MB": round(sent / 1e6) for kind, sent in sorted(step.sent.items()) if sent}
    return figures | kinds


def main() -> None:
    """Print a table, and with --save keep the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", default="v5e", choices=list(TARGETS))
    parser.add_argument("--chips", nargs="+", default=["1x1", "2x2", "2x4", "4x4", "8x8", "16x16"])
    parser.add_argument("--preset", default="340m")
    parser.add_argument("--mixers", nargs="+", default=["gated_deltanet"])
    parser.add_argument("--save", action="store_true", help="in benchmarks/results/scaling.json")
    options = parser.parse_args()
    print(f"{options.preset}, {options.target}, XLA's estimates, a device")
    columns = "kernels", "all else, Mcycles", "all else, ms", "sent, MB", "sending, ms"
    print_header("chips", *columns, "of which, MB")
    for chips in options.chips:
        of = {"preset": options.preset, "mixers": options.mixers, "chips": chips}
        of["target"] = options.target
        figures = measure(**of)
        kinds = ", ".join(f"{k.removesuffix(', MB')} {v}" for k, v in list(figures.items())[5:])
        print_row(chips, *(figures[column] for column in columns), kinds or "nothing")
        if options.save:
            save("scaling", [make_row(of, figures)])


if __name__ == "__main__":
    main()
