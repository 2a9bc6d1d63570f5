"""What the ops share between their public functions and their implementations.

An `Operation` turns per-token arrays (`tokens`: q, k, v and the gates) and states into outputs
and new states, by one of its implementations (see `implementation.py`).
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, TypedDict

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from . import arguments
from .context_parallel import Stretches, context_parallel, matrix_map
from .implementation import Implementation, Options, on_platform
from .numerics import SMALLEST_DECAY
from .packing import Alignment, Packing, poisoned_unless_rising, zero_padding
from .sharding import Placement, implementation_on_mesh
from .splits import split_rows, splits_that_pay

Tokens = tuple[Array, ...]


class CallOptions(TypedDict, total=False):
    """The keyword arguments that every op takes; `chunk_gated_delta_rule` explains them."""

    scale: float | None
    initial_state: Float[Array, "B *N HV K V"] | None
    output_final_state: bool
    segment_ids: Int[Array, "B T"] | None
    cu_seqlens: Int[Array, " N+1"] | None
    max_num_segments: int | None
    qk_l2norm: bool
    precision: jax.lax.Precision | str | None
    implementation: str | None
    num_splits: int | None
    partition: PartitionSpec | None


class Operation:
    """An op: its definition, its implementations, and the one `custom_vjp` over them.

    `implementations` holds what there is of "xla" and, for a TPU, "pallas_tpu"; without the latter
    a TPU too runs "xla", and with neither every platform runs the definition. `affine_map` is how a
    stretch of tokens acts on the state (see `context_parallel.py`).
    """

    def __init__(
        self,
        name: str,
        reference: Callable[..., Any],
        implementations: Mapping[str, Implementation],
        affine_map: Callable[..., Any] = matrix_map,
    ):
        self.name = name
        self.reference = reference
        self.implementations = implementations
        self.affine_map = affine_map
        self._core = jax.custom_vjp(self._primal, nondiff_argnums=(0,))
        self._core.defvjp(self._forward, self._backward)

    def __call__(
        self,
        tokens: Tokens,
        *,
        scale: float | None = None,
        initial_state: Float[Array, "..."] | None = None,
        output_final_state: bool = False,
        segment_ids: Int[Array, "B T"] | None = None,
        cu_seqlens: Int[Array, " N+1"] | None = None,
        max_num_segments: int | None = None,
        qk_l2norm: bool = False,
        precision: jax.lax.Precision | str | None = None,
        implementation: str | None = None,
        num_splits: int | None = None,
        partition: PartitionSpec | None = None,
    ) -> tuple[Float[Array, "B T HV V"], Float[Array, "..."] | None]:
        """Check the shared arguments, and run the chosen implementation on the mesh, if any."""
        q, k, v, *gates = tokens
        batch, length, value_heads, value_size = v.shape
        state_shape = (batch, value_heads, k.shape[-1], value_size)
        arguments.check_options(scale, precision, implementation, qk_l2norm, output_final_state)
        arguments.check_packing(batch, length, segment_ids, cu_seqlens, max_num_segments)
        arguments.check_num_splits(num_splits)
        arguments.check_partition(partition)
        if implementation is None:
            implementation = self._default
        self._check_available(implementation, tokens)
        packed = segment_ids is not None or cu_seqlens is not None
        num_documents = _num_documents(
            initial_state, output_final_state, segment_ids, cu_seqlens, max_num_segments
        )
        arguments.check_initial_state(initial_state, state_shape, num_documents if packed else None)
        has_documents = initial_state is not None and initial_state.ndim == 5
        per_document = packed and (has_documents or output_final_state)
        if per_document and segment_ids is not None and num_documents is not None:
            _check_num_documents(segment_ids, num_documents)
        poison = None
        if cu_seqlens is not None and not arguments.is_concrete(cu_seqlens):
            cu_seqlens, poison = poisoned_unless_rising(cu_seqlens, length)
            if not per_document:
                state = jnp.float32(0) if initial_state is None else initial_state
                initial_state = jnp.broadcast_to(_add(state, poison), state_shape)
        placement = Placement.of({"q": q, "k": k, "v": v}, partition)
        if precision is not None:
            wide = (x.astype(jnp.promote_types(x.dtype, jnp.float32)) for x in (q, k, v))
            tokens = (*wide, *gates)
        options = Options(
            scale=float(k.shape[-1] ** -0.5 if scale is None else scale),
            qk_l2norm=bool(qk_l2norm),
            precision=None if precision is None else jax.lax.Precision(precision),
            implementation=implementation_on_mesh(implementation, partition),
            num_splits=None if num_splits is None else int(num_splits),
            time=() if placement is None else placement.split_time,
        )
        num_states = num_documents if per_document else None
        _check_stretches(options, num_states)
        run = functools.partial(self._lay_out, options, num_states, output_final_state)
        arrays = (tokens, initial_state, segment_ids, cu_seqlens)
        if placement is None:
            outputs = run(*arrays)
        else:
            outputs = placement.run(run, *arrays, state_per_document=per_document)
        if poison is not None and per_document:
            outputs = jax.tree.map(lambda x: _add(x, poison), outputs)
        o, states = outputs
        return o.astype(v.dtype), states

    @property
    def _default(self) -> str | None:
        """What to run unless asked: what suits the platform, where there is a kernel to choose."""
        if "pallas_tpu" in self.implementations:
            return None
        return "xla" if "xla" in self.implementations else "reference"

    def _lay_out(
        self,
        options,
        num_documents,
        output_final_state,
        tokens,
        initial_state,
        segment_ids,
        cu_seqlens,
    ):
        """Lay out one device's documents, with a state for each of `num_documents` if given."""
        _, k, v, *_ = tokens
        batch, length, value_heads, value_size = v.shape
        if initial_state is None:
            shape = (batch, value_heads, k.shape[-1], value_size)
            initial_state = jnp.zeros(shape, jnp.float32)
        if num_documents is not None:
            initial_state = _per_document(initial_state, num_documents)
        if batch == 0 or length == 0:
            states = initial_state.astype(jnp.promote_types(v.dtype, jnp.float32))
            return jnp.zeros_like(v), states if output_final_state else None
        if options.time:
            o, states = self._one_stretch(options, tokens, initial_state, segment_ids, cu_seqlens)
            return o, Stretches(options.time).leave(states) if output_final_state else None
        packing = None
        if segment_ids is not None:
            packing = Packing.from_segment_ids(segment_ids)
        elif cu_seqlens is not None:
            packing = Packing.from_cu_seqlens(cu_seqlens, length)
        if num_documents is None:
            o, states = self._one_state_a_row(options, tokens, initial_state, packing)
        else:
            o, states = self._one_state_a_document(options, tokens, initial_state, packing)
        return o, states if output_final_state else None

    def _check_available(self, implementation: str | None, tokens: Tokens) -> None:
        if implementation == "reference":
            return
        if implementation is not None and implementation not in self.implementations:
            raise ValueError(
                f"implementation {implementation!r} does not exist for {self.name}; "
                f"expected one of {[None, 'reference', *self.implementations]}"
            )
        if any(x.dtype == jnp.float64 for x in tokens):
            raise ValueError(
                f"float64 arguments need implementation='reference', got {implementation!r}"
            )

    def _one_state_a_row(self, options, tokens, state, packing):
        if packing is not None:
            state = jnp.where((packing.document[:, 0] == 0)[:, None, None, None], state, 0)
        if options.implementation == "reference" and packing is not None:
            states = _per_document(state, packing.document.shape[1])
            return self._run(options, tokens, states, packing)[0], None
        o, states = self._run(options, tokens, state[:, None], packing)
        return o, states[:, 0]

    def _one_stretch(self, options, tokens, states, segment_ids, cu_seqlens):
        """Lay out one device's stretch, with a state a row or one for its only document."""
        stretches = Stretches(options.time)
        packing = stretches.packing(segment_ids, cu_seqlens, tokens[0].shape[1])
        states = stretches.enter(states)
        if states.ndim == 4:
            return self._one_state_a_row(options, tokens, states, packing)
        o, states = self._run(options, tokens, states, packing)
        several = stretches.any(packing.document[:, -1] > 0)
        return o, jnp.where(several[:, None, None, None, None], jnp.nan, states)

    def _one_state_a_document(self, options, tokens, states, packing):
        num_documents = states.shape[1]
        lengths = packing.lengths(num_documents)
        if options.implementation == "reference" or num_documents == 1:
            o, new_states = self._run(options, tokens, states, packing)
            has_state = ~packing.valid | (packing.document < num_documents)
            o = jnp.where(has_state[..., None, None], o, jnp.nan)
        else:
            layout = Alignment.of(packing, num_documents)
            aligned = tuple(layout.align(x) for x in tokens)
            o, new_states = self._run(options, aligned, states, None, layout.chunk_document)
            o = zero_padding(layout.restore(o), packing)
        new_states = jnp.where((lengths == 0)[..., None, None, None], states, new_states)
        overflow = jnp.any(packing.document >= num_documents, axis=1)
        return o, jnp.where(overflow[:, None, None, None, None], jnp.nan, new_states)

    def _run(self, options, tokens, states, packing, chunk_document=None):
        if options.implementation == "reference":
            if packing is None:
                packing = Packing.unpacked(*tokens[0].shape[:2])
            return self.reference(
                *tokens, states, packing, scale=options.scale, qk_l2norm=options.qk_l2norm
            )
        states = states.astype(jnp.float32)
        return self._core(options, tokens, states, packing, chunk_document)

    def _primal(self, options, tokens, states, packing, chunk_document):
        return self._dispatch("outputs", options, tokens, states, packing, chunk_document)

    def _forward(self, options, tokens, states, packing, chunk_document):
        inputs = (tokens, states, packing, chunk_document)
        outputs, residuals = self._dispatch("forward", options, *inputs)
        named = {key: checkpoint_name(x, f"{self.name}_{key}") for key, x in residuals.items()}
        return outputs, (*inputs, named)

    def _backward(self, options, saved, cotangents):
        tokens, states, packing, chunk_document, residuals = saved
        dtokens, dstates = self._dispatch(
            "gradients", options, tokens, states, packing, chunk_document, residuals, *cotangents
        )
        return dtokens, dstates, None, None

    def _dispatch(self, direction, options, *arrays):
        tokens, _, _, chunk_document, *_ = arrays

        def bind(name):
            implementation = self.implementations[name]
            num_splits = options.num_splits
            if num_splits is None:
                may_split = direction == "outputs" and chunk_document is None and not options.time
                num_splits = splits_that_pay(implementation, *tokens[1:3]) if may_split else 1
            if num_splits > 1:
                implementation = split_rows(implementation, self.affine_map, num_splits)
            if options.time:
                stretches = Stretches(options.time)
                implementation = context_parallel(implementation, self.affine_map, stretches)
            return functools.partial(getattr(implementation, direction), options)

        return on_platform(options.implementation, bind, *arrays)


def clamp_decay(g: Float[Array, "..."]) -> Float[Array, "..."]:
    """A log decay above 0 acts as 0, and one below `SMALLEST_DECAY` as that: with gradient 0.

    What they get else, a difference of sums over the row, is rounding; and times g, as in the
    gradient of g's own factors, it grows without bound.
    """
    return jnp.where(g > 0, 0, jnp.where(g < SMALLEST_DECAY, SMALLEST_DECAY, g))


def _add(x: Array, scalar: Float[Array, ""]) -> Array:
    return x + scalar.astype(x.dtype)


def _num_documents(
    initial_state, output_final_state, segment_ids, cu_seqlens, max_num_segments
) -> int | None:
    if cu_seqlens is not None:
        return cu_seqlens.shape[0] - 1
    if segment_ids is None:
        return None
    if max_num_segments is not None:
        return int(max_num_segments)
    if initial_state is not None and initial_state.ndim == 5:
        return initial_state.shape[1]
    if output_final_state:
        raise ValueError(
            "output_final_state with segment_ids needs max_num_segments, the number of "
            "documents to return a state for; got None"
        )
    return None


def _check_stretches(options: Options, num_states: int | None) -> None:
    """Check that rows may be cut into stretches, where the mesh or `num_splits` does so."""
    cut = options.num_splits is not None and options.num_splits > 1
    if options.time:
        _check_whole_time("partition", options.implementation, num_states)
        if cut:
            raise ValueError(
                "num_splits must be None or 1 where partition splits the time axis, "
                f"got {options.num_splits} and axes {options.time}"
            )
    elif cut:
        _check_whole_time("num_splits", options.implementation, num_states)


def _check_whole_time(name: str, implementation: str | None, num_states: int | None) -> None:
    if implementation == "reference":
        raise ValueError(
            f"{name} must leave the time axis whole for implementation='reference', which runs "
            "token after token, got one that splits it"
        )
    if num_states is not None and num_states > 1:
        raise ValueError(
            f"{name} must leave the time axis whole where each document has a state of its own "
            "(initial_state [B, N, HV, K, V], or output_final_state with segment_ids or "
            f"cu_seqlens), got one that splits it and {num_states} documents a row"
        )


def _check_num_documents(segment_ids: Int[Array, "B T"], num_documents: int) -> None:
    document = Packing.from_segment_ids(segment_ids).document
    if document.size and arguments.is_concrete(document):
        count = int(document.max()) + 1
        if count > num_documents:
            raise ValueError(
                f"max_num_segments must be at least the {count} documents that segment_ids "
                f"holds in one row, got {num_documents}"
            )


def _per_document(state, num_documents):
    """One state per document: the given ones, or the row's for the first and zero for the rest."""
    if state.ndim == 5:
        return state
    return jnp.pad(state[:, None], ((0, 0), (0, num_documents - 1), (0, 0), (0, 0), (0, 0)))
