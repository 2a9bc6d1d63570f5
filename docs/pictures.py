"""Draws what lives where in each TPU kernel: `python -m uv run python docs/pictures.py`.

One SVG a kernel, in `docs/pictures/`; a test compares them with this file.
"""

import argparse
import dataclasses
import io
from pathlib import Path

import matplotlib
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch

LINE, PADDING, GAP = 0.22, 0.09, 0.42
"""Inches: of a line of text, around a box's text, and between columns."""

WIDTHS = (2.75, 3.65, 2.75)
"""Inches of the columns: memory that is read, vector memory, memory that is written."""

HBM, VMEM, ARRAY, SAVED, SCRATCH = "#e8edf4", "#e9f2e2", "#ffffff", "#fbe0b8", "#bfe0b0"

Group = tuple[str, tuple[str, ...], str]
"""A box: what stands above it, its lines, and its colour."""


@dataclasses.dataclass(frozen=True)
class Kernel:
    """What a picture shows.

    Attributes:
        name: of the kernel, and of its file.
        order: in which the grid goes through a row.
        inputs: arrays of the call, name and shape.
        read: arrays that the forward pass saved.
        scratch: what stays in vector memory from one grid step to the next.
        computed: lines of a chunk's mathematics, in order.
        outputs: arrays that the call returns.
        saved: arrays among these that the backward pass reads.
    """

    name: str
    order: str
    inputs: tuple[str, ...]
    computed: tuple[str, ...]
    outputs: tuple[str, ...]
    scratch: tuple[str, ...] = ()
    read: tuple[str, ...] = ()
    saved: tuple[str, ...] = ()


FORWARD = "computed, from the first chunk to the last"
BACKWARD = "computed, from the last chunk to the first"
STATE, STATE_GRADIENT = ("S [heads, K, V] f32",), ("dS [heads, K, V] f32",)
KEYS = ("q, k [B, T, H K]",)
DELTA_INPUTS = (*KEYS, "v [B, T, HV V]", "g, beta [B, HV, T] f32", "states [B, N, HV, K, V]")
GRADIENT = ("do [B, T, HV V]", "dstates [B, N, HV, K, V]")
RESULTS = ("o [B, T, HV V]", "states [B, N, HV, K, V]")
STATES = "states [B, HV, n, K, V]"
CONVOLUTION_INPUTS = (
    "x [B, T, D], and the 16 tokens",
    "before each block of it",
    "history [B, 16, D]",
    "kernel [W, D], bias [D] f32",
    "visible [B, 1, T] int32",
)

KERNELS = (
    Kernel(
        "simple_gla_forward",
        FORWARD,
        inputs=(*KEYS, "v [B, T, HV V]", "g [B, HV, T] f32", "states [B, N, HV, K, V]"),
        scratch=STATE,
        computed=(
            "decays: pairs, start, end, total",
            "A = (q k^T) * pairs",
            "o = scale (A v + (q * start) S)",
            "S <- total S + k^T (end * v)",
        ),
        outputs=RESULTS,
        saved=(STATES,),
    ),
    Kernel(
        "simple_gla_backward",
        BACKWARD,
        inputs=(*KEYS, "v [B, T, HV V]", "g [B, HV, T] f32", *GRADIENT),
        read=(STATES,),
        scratch=STATE_GRADIENT,
        computed=(
            "decays: pairs, start, end, total",
            "A = (q k^T) * scale pairs",
            "dP = (do v^T) * scale pairs",
            "dv = A^T do + (end * k) dS",
            "dk = dP^T q + (end * v) dS^T",
            "dq = dP k + (scale start * do) S^T",
            "dg from q dq - k dk and dS S",
            "dS <- total dS + (scale start * q)^T do",
        ),
        outputs=(
            "dq, dk [B, T, H K]",
            "dv [B, T, HV V]",
            "dg [B, HV, T] f32",
            "dstates [B, N, HV, K, V]",
        ),
    ),
    Kernel(
        "gated_delta_rule_forward",
        FORWARD,
        inputs=DELTA_INPUTS,
        scratch=STATE,
        computed=(
            "decays: pairs, start, end, total",
            "M = strict(k k^T) * pairs * beta_j",
            "T = (I + M)^-1",
            "x = v - start * k S",
            "u = T x",
            "A = (q k^T) * pairs * beta_j",
            "o = scale (start * q S + A u)",
            "S <- total S + k^T (end * beta * u)",
        ),
        outputs=RESULTS,
        saved=(STATES, "inverse [B, HV, n, C, C] f32", "x [B, HV, n, C, V]"),
    ),
    Kernel(
        "gated_delta_rule_backward",
        BACKWARD,
        inputs=(*KEYS, "g, beta [B, HV, T] f32", *GRADIENT),
        read=(STATES, "inverse [B, HV, n, C, C] f32", "x [B, HV, n, C, V]"),
        scratch=STATE_GRADIENT,
        computed=(
            "decays: pairs, start, end, total; A",
            "u = T x",
            "d_after = end * beta * (k dS)",
            "du = scale A^T do + d_after",
            "dx = dv = T^T du",
            "dA, dM from do u^T and dx u^T",
            "dq, dk from dA, dM, S and dS",
            "dg, dbeta",
            "dS <- total dS + q^T (scale start * do)",
            "dS <- dS - k^T (start * dx)",
        ),
        outputs=(
            "dq, dk [B, T, H K]",
            "dv [B, T, HV V]",
            "dg, dbeta [B, HV, T] f32",
            "dstates [B, N, HV, K, V]",
        ),
    ),
    Kernel(
        "kda_forward",
        FORWARD,
        inputs=(
            *KEYS,
            "v [B, T, HV V]",
            "g [B, T, HV K] f32",
            "beta [B, HV, T] f32",
            "states [B, N, HV, K, V]",
        ),
        scratch=STATE,
        computed=(
            "decays: since, until; 7 levels, whole",
            "A_q, A_k, one product a level",
            "T = (I + beta A_k)^-1",
            "v_new = T beta (v - (k since) S)",
            "o = (q since) S + A_q v_new",
            "S <- total S + (k until)^T v_new",
        ),
        outputs=RESULTS,
        saved=(
            STATES,
            "inverse [B, HV, n, C, C] f32",
            "attention [B, HV, n, C, C]",
            "v_new [B, HV, n, C, V]",
        ),
    ),
    Kernel(
        "kda_backward",
        BACKWARD,
        inputs=(
            *KEYS,
            "g [B, T, HV K] f32",
            "beta [B, HV, T] f32",
            *GRADIENT,
            "masks of the levels",
        ),
        read=(
            STATES,
            "inverse [B, HV, n, C, C] f32",
            "attention [B, HV, n, C, C]",
            "v_new [B, HV, n, C, V]",
        ),
        scratch=STATE_GRADIENT,
        computed=(
            "decays: since, until; 7 levels, whole",
            "dv_new = A_q^T do + (k until) dS",
            "derror = T^T dv_new, dv = beta derror",
            "dA_q = do v_new^T, dA_k = -dv v_new^T",
            "dq, dk, dg from these, level by level",
            "dbeta = sum(derror * v_new) / beta",
            "dS <- total dS + (q since)^T do",
            "dS <- dS - (k since)^T dv",
        ),
        outputs=(
            "dq, dk [B, T, H K]",
            "dv [B, T, HV V]",
            "dg [B, T, HV K] f32",
            "dbeta [B, HV, T] f32",
            "dstates [B, N, HV, K, V]",
        ),
    ),
    Kernel(
        "one_token",
        "computed, up to 8 batch rows a step",
        inputs=(
            "states [B, HV, K, V] f32",
            "q, k [B, H K], v [B, HV V]",
            "g [B, HV] or [B, HV K] f32",
            "beta [B, HV] f32, if any",
        ),
        computed=(
            "D = exp(g) S",
            "u = beta (v - D^T k), or v",
            "S <- D + k u^T",
            "o = scale (D^T q + (q . k) u)",
        ),
        outputs=("o [B, HV V]", "states, over the old ones"),
    ),
    Kernel(
        "add_reads",
        "computed, 1024 tokens a step",
        inputs=("[o' | R] [B, T, HV (V + K)]", "X [B, HV, K, V]"),
        computed=("o = o' + R X",),
        outputs=("o [B, T, HV V]",),
    ),
    Kernel(
        "short_convolution_forward",
        "computed, 128 tokens at a time",
        inputs=CONVOLUTION_INPUTS,
        computed=(
            "u_s = x, s tokens later, where seen",
            "z = bias + sum_s kernel[W-1-s] u_s",
            "y = act(z)",
        ),
        outputs=("y [B, T, D]",),
    ),
    Kernel(
        "short_convolution_backward",
        "computed, from the last token to the first",
        inputs=(*CONVOLUTION_INPUTS, "dy [B, T, D]"),
        scratch=("what later tokens gave, [8, D] f32",),
        computed=(
            "z, as forward",
            "p = act'(z) dy",
            "dx = sum_s kernel[W-1-s] p, s earlier",
            "dkernel, dbias: sums of p u_s and p",
        ),
        outputs=("dx [B, T, D]", "dhistory [B, 8, D] f32", "dkernel, dbias [B, W+1, D]"),
    ),
    Kernel(
        "gated_norm_forward",
        "computed, 128 tokens at a time",
        inputs=("x, gate [B, T, H D]", "scale [D] f32"),
        computed=(
            "r = (mean(x^2) + epsilon)^(-1/2)",
            "y = scale (r x) act(gate)",
        ),
        outputs=("y [B, T, H D]",),
    ),
    Kernel(
        "gated_norm_backward",
        "computed, 128 tokens at a time",
        inputs=("x, gate, dy [B, T, H D]", "scale [D] f32"),
        computed=(
            "r, n = r x, a = act(gate)",
            "dn = scale a dy",
            "dx = r (dn - n mean(n dn))",
            "dgate = act'(gate) scale n dy",
            "dscale: sum of a n dy",
        ),
        outputs=("dx, dgate [B, T, H D]", "dscale [B, 1, H D] f32"),
    ),
)


def main() -> None:
    """Draw all pictures."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--folder", type=Path, default=Path(__file__).parent / "pictures")
    folder = parser.parse_args().folder
    for kernel in KERNELS:
        (folder / f"{kernel.name}.svg").write_text(draw(kernel))


def draw(kernel: Kernel) -> str:
    """The picture of a kernel, an SVG."""
    columns: tuple[tuple[str, str, tuple[Group, ...]], ...] = (
        (
            "HBM, read",
            HBM,
            (("", kernel.inputs, ARRAY), ("saved by the forward pass", kernel.read, SAVED)),
        ),
        (
            "vector memory",
            VMEM,
            (
                ("", ("this step's blocks of the arrays",), ARRAY),
                ("kept from step to step", kernel.scratch, SCRATCH),
                (kernel.order, kernel.computed, VMEM),
            ),
        ),
        (
            "HBM, written",
            HBM,
            (("", kernel.outputs, ARRAY), ("saved for the backward pass", kernel.saved, SAVED)),
        ),
    )
    height = max(column_height(groups) for _, _, groups in columns)
    width = sum(WIDTHS) + 2 * GAP
    settings = {"svg.fonttype": "none", "svg.hashsalt": kernel.name, "font.family": "monospace"}
    with matplotlib.rc_context(settings):
        figure = plt.figure(figsize=(width, height))
        axes = figure.add_axes((0, 0, 1, 1), xlim=(0, width), ylim=(height, 0))
        axes.axis("off")
        left = 0.0
        for column_width, (title, colour, groups) in zip(WIDTHS, columns, strict=True):
            draw_column(axes, left, column_width, height, title, colour, groups)
            left += column_width + GAP
            if left < width:
                arrow = {"arrowstyle": "-|>", "linewidth": 1.5, "color": "#555555"}
                ends = (left - 0.04, height / 2), (left - GAP + 0.04, height / 2)
                axes.annotate("", *ends, arrowprops=arrow)
        svg = io.StringIO()
        figure.savefig(
            svg, format="svg", facecolor="white", metadata={"Date": None, "Creator": None}
        )
        plt.close(figure)
    return svg.getvalue()


def column_height(groups: tuple[Group, ...]) -> float:
    """Inches of a column: its title, and of each box what stands above it, and its lines."""
    lines = sum(bool(label) + len(lines) for label, lines, _ in groups if lines)
    return LINE * (lines + 1) + 3 * PADDING * (1 + sum(bool(lines) for _, lines, _ in groups))


def draw_column(
    axes: Axes,
    left: float,
    width: float,
    height: float,
    title: str,
    colour: str,
    groups: tuple[Group, ...],
) -> None:
    """A kind of memory, and the boxes of what is in it."""

    def box(left, top, width, height, colour):
        style = "round,pad=0,rounding_size=0.06"
        edge = {"edgecolor": "#555555", "linewidth": 0.8}
        axes.add_patch(FancyBboxPatch((left, top), width, height, style, facecolor=colour, **edge))

    def text(left, top, line, **style):
        axes.text(left, top + LINE / 2, line, fontsize=9.5, verticalalignment="center", **style)

    box(left + 0.02, 0.02, width - 0.04, height - 0.04, colour)
    left, top, width = left + PADDING, PADDING, width - 2 * PADDING
    text(left, top, title, weight="bold")
    top += LINE + PADDING
    for label, lines, box_colour in groups:
        if not lines:
            continue
        if label:
            text(left, top, label, style="italic")
            top += LINE
        box(left, top, width, LINE * len(lines) + 2 * PADDING, box_colour)
        for number, line in enumerate(lines):
            text(left + PADDING, top + PADDING + LINE * number, line)
        top += LINE * len(lines) + 3 * PADDING


if __name__ == "__main__":
    main()
