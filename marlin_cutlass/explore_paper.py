"""The MARLIN paper's kernel figures from the cost model, with the error of every point.

Figures 1, 9 and 11 of the PPoPP'25 version, on an A10 (600 GB/s; 125 TFLOP/s at 1695 MHz). Figure
1: the artifact's own re-run, in ms. Figure 9: speedup of a block's linear layers at batch 16, read
off the figure. Figure 11: read off the figure and converted from its count of two operations per
weight for dequantisation to what a matrix product does.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from generator.arch import ARCHS, Gpu
from generator.cost import FILL_US, LAUNCH_US, estimate
from generator.problem import ProblemShape
from generator.space import default_space
from marlin_cutlass.explore_candidates import gpu_named

FIG1_SHAPE = (18432, 73728)  # (n, k) of "72k x 18k"
FIG1_MS = {1: 1.21, 2: 1.21, 4: 1.21, 8: 1.21, 16: 1.22, 32: 1.23, 64: 1.54, 128: 3.04, 256: 6.68}
FIG1_SPEEDUP = {1: 3.87, 2: 3.88, 4: 3.89, 8: 3.89, 16: 3.90, 32: 3.83, 64: 3.08, 128: 1.55}
# Linear layers (n, k) of one block, as Hugging Face models have them with q, k, v and gate, up
# fused; the paper does not print its shapes.
FIG9_LAYERS = {
    "7B": ((12288, 4096), (4096, 4096), (22016, 4096), (4096, 11008)),
    "13B": ((15360, 5120), (5120, 5120), (27648, 5120), (5120, 13824)),
    "33B": ((19968, 6656), (6656, 6656), (35840, 6656), (6656, 17920)),
    "65B": ((24576, 8192), (8192, 8192), (44032, 8192), (8192, 22016)),
    "Falcon-180B": ((15872, 14848), (14848, 14848), (59392, 14848), (14848, 59392)),
}
FIG9_SPEEDUP = {
    "A10": {"7B": 3.69, "13B": 3.79, "33B": 3.83, "65B": 3.85, "Falcon-180B": 3.74},
    "RTX 3090": {"7B": 3.60, "13B": 3.69, "33B": 4.14, "65B": 4.05, "Falcon-180B": 4.25},
    "A6000": {"7B": 3.40, "13B": 3.65, "33B": 3.78, "65B": 3.86, "Falcon-180B": 3.80},
    "A100": {"7B": 2.22, "13B": 2.80, "33B": 3.04, "65B": 3.20, "Falcon-180B": 3.64},
}
FIG9_BATCH = 16
FIG11_US = {
    4096: {1: 21.7, 2: 21.0, 4: 21.0, 8: 20.9, 16: 23.8, 32: 25.2, 64: 36.8, 128: 52.5, 256: 88.7},
    8192: {1: 73.3, 2: 68.2, 4: 67.9, 8: 67.3, 16: 66.7, 32: 68.6, 64: 89.3, 128: 167, 256: 332},
    16384: {1: 248, 2: 247, 4: 248, 8: 248, 16: 251, 32: 256, 64: 325, 128: 650, 256: 1540},
    32768: {1: 964, 2: 962, 4: 966, 8: 965, 16: 992, 32: 1021, 64: 1291, 128: 2923, 256: 6556},
}
# The baseline is FP16 PyTorch, which reaches this share of the data sheet on the largest layer:
# 1.21 ms x 3.87 for 2.72 GB is 580 of 600 GB/s; 6.68 ms x 1.64 at batch 256 is 63 of 125 TFLOP/s.
FP16_BANDWIDTH = 0.967
FP16_TENSOR = 0.7


@dataclass(frozen=True)
class Point:
    """One point of a figure: the paper's number and the model's, in the figure's unit."""

    figure: str
    where: str
    paper: float
    model: float

    @property
    def error(self) -> float:
        return self.model / self.paper - 1


class Model:
    """The fastest declared kernel by the cost model, on one GPU."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        fmt = ("f16", False, 128)
        entries = default_space(ARCHS[gpu.arch])
        every = (e.variant for e in entries)
        self.variants = [v for v in every if (v.dtype, v.zeros, v.group_size) == fmt]

    def int4_us(self, m: int, n: int, k: int) -> float:
        problem = ProblemShape(m, n, k)
        return min(estimate(problem, v, self.gpu).total for v in self.variants)

    def fp16_us(self, m: int, n: int, k: int) -> float:
        """A product in FP16: reading its operands or multiplying, whichever is longer."""
        moved = 2.0 * (n * k + m * k + m * n) / (self.gpu.bandwidth * FP16_BANDWIDTH)
        work = 2.0 * m * n * k / (self.gpu.tensor_flops * FP16_TENSOR)
        return LAUNCH_US + FILL_US + max(moved, work) * 1e6

    def speedup(self, m: int, layers: tuple[tuple[int, int], ...]) -> float:
        fp16 = sum(self.fp16_us(m, n, k) for n, k in layers)
        return fp16 / sum(self.int4_us(m, n, k) for n, k in layers)


def points(gpu: Gpu) -> list[Point]:
    """Every point of the figures that exist for a GPU: 1 and 11 for the A10, 9 for four GPUs."""
    model, found = Model(gpu), []
    if gpu.name == "A10":
        n, k = FIG1_SHAPE
        for m, ms in FIG1_MS.items():
            found.append(Point("1, ms", f"batch {m}", ms, model.int4_us(m, n, k) / 1e3))
        for m, speedup in FIG1_SPEEDUP.items():
            found.append(
                Point("1, speedup", f"batch {m}", speedup, model.speedup(m, (FIG1_SHAPE,)))
            )
    for name, speedup in FIG9_SPEEDUP.get(gpu.name, {}).items():
        found.append(
            Point("9, speedup", name, speedup, model.speedup(FIG9_BATCH, FIG9_LAYERS[name]))
        )
    if gpu.name == "A10":
        for size, times in FIG11_US.items():
            for m, us in times.items():
                where = f"{size} x {size}, batch {m}"
                found.append(Point("11, us", where, us, model.int4_us(m, size, size)))
    if not found:
        raise ValueError(
            f"the paper has no figure for {gpu.name}; it has {', '.join(FIG9_SPEEDUP)}"
        )
    return found


def figures(name: str) -> str:
    """All points of a GPU as a Markdown table, and the median error of each figure."""
    gpu = gpu_named(name)
    found = points(gpu)
    lines = [
        f"MARLIN paper, {gpu.name}: paper and cost model, group size 128",
        "",
        "| figure | point | paper | model | error |",
        "| --- | --- | ---: | ---: | ---: |",
    ]
    lines += [
        f"| {p.figure} | {p.where} | {p.paper:.4g} | {p.model:.4g} | {p.error:+.0%} |"
        for p in found
    ]
    lines.append("")
    for figure in dict.fromkeys(p.figure for p in found):
        errors = [abs(p.error) for p in found if p.figure == figure]
        lines.append(
            f"figure {figure}: median error {statistics.median(errors):.1%}, "
            f"largest {max(errors):.1%}"
        )
    return "\n".join(lines)
