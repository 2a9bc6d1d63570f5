"""A training step on a pod slice that is not there: what its devices exchange."""

import math

import pytest

from benchmarks.collectives import collectives
from benchmarks.hlo import Program
from benchmarks.tpu_compiler import compile_for, pod
from benchmarks.training_step import TrainingStep
from gla_layers import LanguageModelConfig

BATCH, LENGTH = 8, 384
CONFIG = LanguageModelConfig(
    vocab_size=1024,
    hidden_size=512,
    num_layers=2,
    intermediate_size=1024,
    mixers=("gated_deltanet", "attention"),
    mixer_options={
        "gated_deltanet": {"num_heads": 2, "head_dim": 128},
        "attention": {"num_heads": 2},
    },
)


@pytest.mark.parametrize("axes", [{"data": 2, "fsdp": 4, "tensor": 1}, {"fsdp": 4, "tensor": 2}])
def test_tokens_stay_where_they_are(axes):
    """Parameters are gathered, each once a pass, and tokens never."""
    mesh = pod("v5e", "2x4", {"data": 1} | axes)
    step, arguments = TrainingStep(CONFIG, batch=BATCH, length=LENGTH, remat=True).program(mesh)
    compiled = compile_for("v5e", step, *arguments, donate_argnums=(0,), mesh=mesh)
    found = collectives(Program(compiled.as_text()))
    gathered = [x for x in found if x.kind == "all-gather"]
    assert gathered
    for collective in gathered:
        assert collective.times == 1, collective
        for shape in collective.shapes:
            one_number_a_token = math.prod(shape) <= BATCH * LENGTH
            assert LENGTH not in shape or one_number_a_token, collective
