"""Which built kernels are worth timing for a shape: the cost model and the row tile decide."""

from __future__ import annotations

from collections.abc import Iterable

from generator.arch import GPUS, Arch, Gpu
from generator.cost import estimate, reference_gpu, sensible_rows
from generator.legality import why_not_for
from generator.problem import ProblemShape
from generator.variant import Variant

MARGIN = 1.6  # kept: predicted within this factor of the best prediction


def gpu_for(name: str, arch: Arch, sms: int) -> Gpu:
    """The modelled GPU whose name is part of `name` ("NVIDIA H200"), else the one that stands for
    `arch`."""
    named = [g for g in GPUS.values() if g.arch == arch.name and g.name in name]
    return max(named, key=lambda g: len(g.name)) if named else reference_gpu(arch, sms)


def gpu_named(name: str) -> Gpu:
    """The modelled GPU called `name`, in any spelling; ValueError lists them."""
    wanted = name.lower().replace(" ", "").replace("_", "").removeprefix("rtx")
    for gpu in GPUS.values():
        if gpu.name.lower().replace(" ", "").removeprefix("rtx") == wanted:
            return gpu
    raise ValueError(f"gpu={name!r} is not one of {', '.join(GPUS)}")


def predictions(problem: ProblemShape, variants: Iterable[Variant], gpu: Gpu) -> dict[str, float]:
    """Modelled microseconds by name, for the variants that can serve the problem."""
    mine = [v for v in variants if why_not_for(v, problem) is None]
    return {v.name: estimate(problem, v, gpu).total for v in mine}


def candidates(
    problem: ProblemShape,
    variants: Iterable[Variant],
    gpu: Gpu,
    *,
    margin: float = MARGIN,
    keep: Iterable[str] = (),
    top: int | None = None,
) -> dict[str, float]:
    """Names of what to time with the predicted us, best prediction first.

    keep: names that stay whatever the model says, such as the table's choice. top: at most so many
    besides those.
    """
    if margin < 1:
        raise ValueError(f"margin={margin} must be at least 1")
    variants = list(variants)
    predicted = predictions(problem, variants, gpu)
    tiles = {v.name: v.m_tile for v in variants}
    fitting = [n for n in predicted if sensible_rows(problem.m, tiles[n])] or list(predicted)
    fitting.sort(key=lambda name: predicted[name])
    near = [n for n in fitting if predicted[n] <= margin * predicted[fitting[0]]][:top]
    names = dict.fromkeys([*near, *(n for n in keep if n in predicted)])
    return {name: predicted[name] for name in names}
