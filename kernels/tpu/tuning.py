"""Block sizes per chip generation.

Found by compiling the kernels ahead of time for each generation and counting the bundles of the
final schedule, at B = 1, T = 8192, heads of 128, bfloat16.

A kernel's memory limit is found with its whole layer, as the compiler may keep what comes before
and after, weights above all, in what it leaves. It does not do so steadily. The packed layer of the
gated delta rule takes a v6e chip 1.78 million cycles forward with 64 MiB, 1.85 with 80, 1.87 with
96 and 1.90 with 32; but with 64 MiB backward too 5.87 rather than 5.56, and in rows of one document
5.93 where 96 MiB take 5.78. The packed layer of SimpleGLA takes 1.50 and 4.93 with 96 MiB, 1.59 and
5.22 with 64.
"""

import dataclasses

import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

MIB = 1 << 20


@dataclasses.dataclass(frozen=True)
class Tuning:
    """What one grid step holds.

    Attributes:
        heads: value heads of at most 128 channels, of one or several batch rows; fewer larger ones.
        chunks: chunks of so many heads; more of fewer, see `Blocks.of`.
        vmem_limit_bytes: vector memory that the kernel may take.
        cores: cores that the blocks of one program are divided among.
        split_chains: up to how many rows times value heads it pays to cut rows, see `../splits.py`.
    """

    heads: int
    chunks: int
    vmem_limit_bytes: int
    cores: int = 1
    split_chains: int = 0

    def heads_of(self, size: int) -> int:
        """As many channels in heads of `size`."""
        return max(1, self.heads * 128 // max(size, 128))


# A tracing host that knows of no TPU: small enough to compile for every generation, and quick to
# trace, to compile and to interpret.
DEFAULT = Tuning(heads=2, chunks=1, vmem_limit_bytes=16 * MIB)

TABLE: dict[str, dict[str, Tuning]] = {
    "gated_delta_rule_forward": {
        "v4": Tuning(4, 1, 16 * MIB, cores=2),
        "v5e": Tuning(16, 1, 96 * MIB, split_chains=1),
        "v5p": Tuning(8, 1, 48 * MIB, cores=2, split_chains=2),
        "v6e": Tuning(16, 1, 64 * MIB, split_chains=2),
        "7x": Tuning(16, 1, 48 * MIB, split_chains=2),
    },
    "gated_delta_rule_backward": {
        "v4": Tuning(4, 1, 16 * MIB, cores=2),
        "v5e": Tuning(16, 1, 96 * MIB),
        "v5p": Tuning(8, 1, 48 * MIB, cores=2),
        "v6e": Tuning(16, 1, 96 * MIB),
        "7x": Tuning(16, 1, 48 * MIB),
    },
    "kda_forward": {
        "v4": Tuning(2, 1, 16 * MIB, cores=2),
        "v5e": Tuning(8, 2, 96 * MIB),
        "v5p": Tuning(8, 2, 48 * MIB, cores=2, split_chains=2),
        "v6e": Tuning(8, 2, 96 * MIB, split_chains=1),
        "7x": Tuning(8, 2, 48 * MIB, split_chains=1),
    },
    "kda_backward": {
        "v4": Tuning(2, 1, 16 * MIB, cores=2),
        "v5e": Tuning(8, 1, 96 * MIB),
        "v5p": Tuning(8, 1, 48 * MIB, cores=2),
        "v6e": Tuning(16, 1, 96 * MIB),
        "7x": Tuning(8, 1, 48 * MIB),
    },
    "simple_gla_forward": {
        "v4": Tuning(4, 1, 16 * MIB, cores=2),
        "v5e": Tuning(16, 1, 64 * MIB),
        "v5p": Tuning(8, 1, 48 * MIB, cores=2),
        "v6e": Tuning(16, 2, 96 * MIB),
        "7x": Tuning(16, 1, 48 * MIB),
    },
    "simple_gla_backward": {
        "v4": Tuning(4, 1, 16 * MIB, cores=2),
        "v5e": Tuning(16, 1, 64 * MIB),
        "v5p": Tuning(8, 1, 48 * MIB, cores=2),
        "v6e": Tuning(16, 1, 96 * MIB),
        "7x": Tuning(16, 1, 48 * MIB),
    },
}


def vector_dtype(dtype: jnp.dtype) -> jnp.dtype:
    """The type to multiply operands of `dtype` in: bfloat16 where the vector unit has it."""
    if dtype == jnp.bfloat16 and _generation() >= 6:
        return jnp.dtype(jnp.bfloat16)
    return jnp.dtype(jnp.float32)


def has_sublane_gather() -> bool:
    """Whether the rows of a register can be permuted at will."""
    return _generation() != 4


def cores() -> int:
    """Cores that the blocks of one program are divided among."""
    return pltpu.get_tpu_info().num_cores if pltpu.is_tpu_device() else 1


def _generation() -> int:
    return pltpu.get_tpu_info().generation if pltpu.is_tpu_device() else 0


def tuning(kernel: str) -> Tuning:
    """The kernel's block sizes on the TPU that the ambient mesh or the default device is."""
    if not pltpu.is_tpu_device():
        return DEFAULT
    return TABLE[kernel].get(str(pltpu.get_tpu_info().chip_version), DEFAULT)


def split_chains(kernel: str, key_size: int, value_size: int) -> int:
    """`Tuning.split_chains`; none where heads would have to be padded to whole registers."""
    if key_size % 128 or value_size % 128:
        return 0
    return tuning(kernel).split_chains
