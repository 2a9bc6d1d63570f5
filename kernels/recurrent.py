"""The recurrent ops: a few tokens from a state, one after another.

A single token, as decoding has it, is all that its implementations compute, in one pass over the
states. More tokens, packed ones, and float64 go by the definition.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from .operation import Operation, Tokens
from .tpu import one_token as tpu
from .xla import one_token as xla


class RecurrentOperation(Operation):
    """An op whose implementations take one token a row."""

    def __init__(self, name: str, reference: Callable[..., Any]):
        one_token = {"pallas_tpu": tpu.implementation, "xla": xla.implementation}
        super().__init__(name, reference, one_token)

    def __call__(
        self, tokens: Tokens, *, implementation: str | None = None, **options: Any
    ) -> tuple[Float[Array, "B T HV V"], Float[Array, "..."] | None]:
        """As an `Operation`, by the definition where there is more than a token to compute."""
        if not self._is_one_token(tokens, options):
            if implementation in self.implementations:
                raise ValueError(
                    f"implementation must be None or 'reference' where {self.name} is given "
                    "anything but one token a row, or float64, segment_ids, cu_seqlens or "
                    f"num_splits; got {implementation!r} and q of shape {tokens[0].shape}"
                )
            implementation = implementation or "reference"
        return super().__call__(tokens, implementation=implementation, **options)

    def _is_one_token(self, tokens: Tokens, options: dict[str, Any]) -> bool:
        packed = any(options.get(name) is not None for name in ("segment_ids", "cu_seqlens"))
        wide = any(x.dtype == jnp.float64 for x in tokens)
        whole = options.get("num_splits") in (None, 1)
        return tokens[0].shape[1] == 1 and whole and not packed and not wide
