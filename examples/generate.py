"""Continue prompts with a model that train_lm.py has trained.

Prompts of any lengths are one batch. A text ends where the model ends it, or after
--max-new-tokens. The last line of output is one JSON object.
"""

import devices  # noqa: F401, I001  before JAX

import dataclasses
import json
import time
from pathlib import Path
from typing import Literal

import data
import jax
import numpy as np
import tyro
from checks import check_counts, check_seed
from errors import one_sentence_errors
from sampling import Sampling, decode, pad_left, prefill
from trained import load_trained


@dataclasses.dataclass(frozen=True)
class Config(Sampling):
    """What to continue, and how."""

    run_dir: Path = Path("runs", "tiny-gated_deltanet")
    """Where train_lm.py has left a run."""
    prompt: tuple[str, ...] = ("The ", "A function is ")
    """Beginnings of texts."""
    max_new_tokens: int = 200
    """Bytes to add at most."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Of the computation; the run's by default."""
    implementation: Literal["pallas_tpu", "xla", "reference"] | None = None
    """Of the ops that read the prompts; the best for the platform by default."""
    seed: int = 0
    """Of the random choices."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.prompt or not all(self.prompt):
            raise ValueError(f"prompt must be texts that are not empty, got {self.prompt}")
        check_counts(self, "max_new_tokens")
        check_seed(self)


def main() -> None:
    """Print each prompt with what the model makes of it, and the result."""
    with one_sentence_errors(ValueError, OSError):
        config = tyro.cli(Config, description=__doc__)
        model, step = load_trained(
            config.run_dir, dtype=config.dtype, implementation=config.implementation
        )
    prompts = [data.encode(prompt) for prompt in config.prompt]
    options = {
        "max_new_tokens": config.max_new_tokens,
        "stop_token": data.DOCUMENT_MARK,
        "sampling": Sampling(config.temperature, config.top_k, config.top_p),
    }
    key = jax.random.key(config.seed)
    logits, state = prefill(model, *pad_left(prompts), max_new_tokens=config.max_new_tokens)
    # Compiled apart, so that the time below is that of the tokens.
    program = decode.lower(model, logits, state, key, **options).compile()
    began = time.perf_counter()
    new_tokens = np.asarray(program(model, logits, state, key))
    seconds = time.perf_counter() - began

    for number, (prompt, row) in enumerate(zip(prompts, new_tokens, strict=True), start=1):
        print(f"--- {number} of {len(prompts)}\n{data.decode([*prompt, *row.tolist()])}")
    new_bytes = np.sum(new_tokens != data.DOCUMENT_MARK, axis=1).tolist()
    result = {
        "step": step,
        "new_bytes": new_bytes,
        "bytes_per_second": sum(new_bytes) / seconds,
        "state_megabytes": sum(x.nbytes for x in jax.tree.leaves(state)) / 1e6,
        "run_dir": str(config.run_dir),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
