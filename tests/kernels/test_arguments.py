"""Wrong calls: each gives one sentence that names the argument, before anything is traced."""

import fractions

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gla_layers import kernels

from .cases import GDN, GLA, KDA, OP_IDS, OP_IMPLEMENTATIONS, OPS, SIMPLE_GLA

B, T, H, HV, K, V = 2, 8, 2, 4, 16, 32


def zeros(*shape, dtype="float32"):
    return jnp.zeros(shape, dtype)


def good_call(op):
    gate = (B, T, HV, K) if op.per_channel else (B, T, HV)
    tokens = {
        "q": zeros(B, T, H, K),
        "k": zeros(B, T, H, K),
        "v": zeros(B, T, HV, V),
        "g": zeros(*gate),
        "beta": zeros(B, T, HV),
    }
    return {name: tokens[name] for name in op.tokens}


IDS = jnp.ones((B, T), jnp.int32)
ONE_ROW = {
    "q": zeros(1, T, H, K),
    "k": zeros(1, T, H, K),
    "v": zeros(1, T, HV, V),
    "g": zeros(1, T, HV),
    "beta": zeros(1, T, HV),
}

# Arguments to change, and the sentence they should give, for every op.
WRONG = {
    "q of three axes": (
        {"q": zeros(B, T, K)},
        r"q must be \[B, T, heads, size\], got shape \(2, 8, 16\)",
    ),
    "q of integers": ({"q": zeros(B, T, H, K, dtype="int32")}, "q must be an array .* got int32"),
    "q a list": ({"q": [[1.0]]}, "q must be an array .* got list"),
    "k of another shape": (
        {"k": zeros(B, T, H, K + 1)},
        r"k must have q's shape \(2, 8, 2, 16\), got \(2, 8, 2, 17\)",
    ),
    "k of another length": ({"k": zeros(B, T - 1, H, K)}, "k must have q's shape"),
    "v of another batch": (
        {"v": zeros(B + 1, T, HV, V)},
        r"v must begin with q's \[B, T\] = \[2, 8\], got shape \(3, 8, 4, 32\)",
    ),
    "v of heads that do not divide": (
        {"v": zeros(B, T, 3, V)},
        "v must have a multiple of q's 2 heads, got 3 heads",
    ),
    "v too wide": (
        {"v": zeros(B, T, HV, 257)},
        "v must have a head size of 1 to 256, got shape",
    ),
    "v of no width": ({"v": zeros(B, T, HV, 0)}, "v must have a head size of 1 to 256"),
    "no heads": (
        {"q": zeros(B, T, 0, K), "k": zeros(B, T, 0, K)},
        "q must have at least one head",
    ),
    "g of another shape": ({"g": zeros(B, T, H, 2, 2)}, r"g must be \[B, T, HV.*got shape"),
    "g of integers": ({"g": IDS}, "g must be an array .* got int32"),
    "state of another shape": (
        {"initial_state": zeros(B, HV, V, K)},
        r"initial_state must be \[2, 4, 16, 32\], got shape \(2, 4, 32, 16\)",
    ),
    "state of integers": (
        {"initial_state": zeros(B, HV, K, V, dtype="int32")},
        "initial_state must be an array .* got int32",
    ),
    "states without documents": (
        {"initial_state": zeros(B, 3, HV, K, V)},
        r"initial_state must be \[2, 4, 16, 32\], got",
    ),
    "states of another number of documents": (
        {"initial_state": zeros(B, 3, HV, K, V), "segment_ids": IDS, "max_num_segments": 2},
        r"initial_state must be \[2, 4, 16, 32\] or \[2, 2, 4, 16, 32\], got",
    ),
    "segment ids of another shape": (
        {"segment_ids": IDS[:, :-1]},
        r"segment_ids must be \[B, T\] = \[2, 8\], got shape \(2, 7\)",
    ),
    "segment ids of floats": (
        {"segment_ids": zeros(B, T)},
        "segment_ids must be an integer array, got float32",
    ),
    "both notations": (
        {"segment_ids": IDS, "cu_seqlens": jnp.asarray([0, T])},
        "segment_ids and cu_seqlens are both given",
    ),
    "cu_seqlens of several rows": (
        {"cu_seqlens": jnp.asarray([0, T])},
        "cu_seqlens needs a batch of 1, got q with a batch of 2",
    ),
    "final states of an unknown number": (
        {"segment_ids": IDS, "output_final_state": True},
        "output_final_state with segment_ids needs max_num_segments",
    ),
    "a number of documents without them": (
        {"max_num_segments": 2},
        "max_num_segments is given without segment_ids",
    ),
    "no documents": (
        {"segment_ids": IDS, "max_num_segments": 0},
        "max_num_segments must be an integer of at least 1, got 0",
    ),
    "scale an array": ({"scale": zeros(1)}, "scale must be None or a finite number"),
    "scale a flag": ({"scale": True}, "scale must be None or a finite number, got True"),
    "scale a text": ({"scale": "1"}, "scale must be None or a finite number, got '1'"),
    "scale infinite": ({"scale": float("inf")}, "scale must be None or a finite number"),
    "an unknown implementation": (
        {"implementation": "triton"},
        "implementation must be one of .*, got 'triton'",
    ),
    "no stretches": (
        {"num_splits": 0},
        "num_splits must be None or an integer of at least 1, got 0",
    ),
    "half a stretch": (
        {"num_splits": 0.5},
        "num_splits must be None or an integer of at least 1, got 0.5",
    ),
    "num_splits a flag": (
        {"num_splits": True},
        "num_splits must be None or an integer of at least 1, got True",
    ),
    "an unknown precision": (
        {"precision": "exact"},
        "precision must be None or a jax.lax.Precision, or its name .* got 'exact'",
    ),
    "a precision of another kind": ({"precision": 3}, "precision must be None .*, got 3"),
    "qk_l2norm a number": ({"qk_l2norm": 1}, "qk_l2norm must be True or False, got 1"),
    "qk_l2norm a text": ({"qk_l2norm": "no"}, "qk_l2norm must be True or False, got 'no'"),
    "output_final_state a text": (
        {"output_final_state": "no"},
        "output_final_state must be True or False, got 'no'",
    ),
    "a number of documents that is none": (
        {"segment_ids": IDS, "max_num_segments": True},
        "max_num_segments must be an integer of at least 1, got True",
    ),
    "segment ids a list": (
        {"segment_ids": [[1] * T] * B},
        "segment_ids must be an integer array, got list",
    ),
    "a state that is none": (
        {"initial_state": 0},
        "initial_state must be an array .* got int",
    ),
    "a partition of another kind": (
        {"partition": ("data",)},
        "partition must be None or a PartitionSpec",
    ),
    "output_final_state an array": (
        {"output_final_state": zeros(1)},
        "output_final_state must be True or False",
    ),
}


@pytest.mark.parametrize(("change", "message"), WRONG.values(), ids=WRONG.keys())
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_wrong_call(op, change, message):
    with pytest.raises(ValueError, match=message):
        op.chunk(**(good_call(op) | change))
    with pytest.raises(ValueError, match=message):
        op.recurrent(**(good_call(op) | change))


@pytest.mark.parametrize(
    "scale", [2, 0.5, np.float32(0.5), np.float16(0.5), np.int64(2), fractions.Fraction(1, 2)]
)
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_scale_is_any_real_number(op, scale):
    ones = {name: jnp.ones_like(x) for name, x in good_call(op).items()}
    o, _ = op.recurrent(**ones, scale=scale, qk_l2norm=np.bool_(True))
    expected, _ = op.recurrent(**ones, scale=float(scale), qk_l2norm=True)
    np.testing.assert_array_equal(o, expected)


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        ([0, 5, 3, T], "cu_seqlens must rise from 0 to at most T = 8"),
        ([1, T], "cu_seqlens must rise from 0"),
        ([0, T + 1], "cu_seqlens must rise from 0 to at most T = 8"),
        (np.array([0, 5, 3, T], "uint8"), "cu_seqlens must rise from 0 to at most T = 8"),
        ([[0, 1], [2, T]], r"cu_seqlens must be \[N \+ 1\] with N >= 1"),
        ([0], r"cu_seqlens must be \[N \+ 1\] with N >= 1"),
        ([[0, T]], r"cu_seqlens must be \[N \+ 1\] with N >= 1"),
        ([0.0, 8.0], "cu_seqlens must be an integer array"),
    ],
)
def test_wrong_cu_seqlens(offsets, message):
    with pytest.raises(ValueError, match=message):
        kernels.chunk_gated_delta_rule(**ONE_ROW, cu_seqlens=jnp.asarray(offsets))


def one_row(op):
    gate = (1, T, HV, K) if op.per_channel else (1, T, HV)
    return {name: x[:1] for name, x in good_call(op).items()} | {"g": zeros(*gate)}


@pytest.mark.parametrize("per_document", [False, True], ids=["row", "states"])
@pytest.mark.parametrize(
    ("op", "implementation"),
    [(op, "reference") for op in OPS] + OP_IMPLEMENTATIONS,
    ids=[f"{op.name}-reference" for op in OPS] + OP_IDS,
)
def test_wrong_cu_seqlens_that_are_traced_give_nan(op, implementation, per_document):
    @jax.jit
    def run(cu_seqlens):
        return op.chunk(
            **one_row(op),
            cu_seqlens=cu_seqlens,
            implementation=implementation,
            output_final_state=per_document,
        )

    for right in ([0, 3, 5, T], [0, 0, T, T], [0, 2, 4, 6], [0, 0, 0, 0]):
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(run(jnp.asarray(right))))
    for wrong in ([0, 5, 3, T], [1, 3, 5, T], [0, 3, 5, T + 1], [0, 5, T, 0], [-1, 3, 5, T]):
        assert all(np.isnan(x).all() for x in jax.tree.leaves(run(jnp.asarray(wrong))))


def test_wrong_gates():
    with pytest.raises(ValueError, match=r"g must be \[B, T, HV\] = \[2, 8, 4\], got shape"):
        GDN.chunk(**(good_call(GDN) | {"g": zeros(B, T, HV, K)}))
    with pytest.raises(ValueError, match=r"g must be \[B, T, HV, K\] = \[2, 8, 4, 16\], got"):
        KDA.chunk(**(good_call(KDA) | {"g": zeros(B, T, HV)}))
    with pytest.raises(ValueError, match=r"beta must be \[B, T, HV\] = \[2, 8, 4\], got shape"):
        GDN.chunk(**(good_call(GDN) | {"beta": zeros(B, T, H)}))
    simple = good_call(SIMPLE_GLA)
    with pytest.raises(ValueError, match="g and g_gamma are both given"):
        SIMPLE_GLA.chunk(**simple, g_gamma=zeros(HV))
    del simple["g"]
    with pytest.raises(ValueError, match=r"g_gamma must be \[HV\] = \[4\], got shape \(2,\)"):
        SIMPLE_GLA.chunk(**simple, g_gamma=zeros(H))


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_float64_is_for_the_reference(op):
    with jax.enable_x64(True):
        tokens = {name: x.astype("float64") for name, x in good_call(op).items()}
        with pytest.raises(ValueError, match="float64 arguments need implementation='reference'"):
            op.chunk(**tokens)


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_no_tokens_leave_a_state_of_the_same_type(op, dtype):
    with jax.enable_x64(True):
        tokens = {name: x.astype(dtype) for name, x in good_call(op).items()}
        for length in (0, 1):
            _, state = op.chunk(
                **{name: x[:, :length] for name, x in tokens.items()},
                output_final_state=True,
                implementation="reference",
            )
            assert state.dtype == jnp.promote_types(dtype, jnp.float32)


def test_a_kernel_that_does_not_exist():
    with pytest.raises(ValueError, match=r"'pallas_tpu' does not exist for chunk_gla; .*'xla'\]"):
        GLA.chunk(**good_call(GLA), implementation="pallas_tpu")


def test_an_unknown_argument():
    with pytest.raises(TypeError, match="chunk_size"):
        kernels.chunk_kda(**good_call(KDA), chunk_size=64)
    with pytest.raises(TypeError, match="chunk_size"):
        kernels.recurrent_kda(**good_call(KDA), chunk_size=64)
