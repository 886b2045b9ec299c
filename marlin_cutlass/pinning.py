"""Kernels chosen by what a model's own step takes, in the place of the dispatch table's bursts.

The table holds what is fastest in a chain of the same product. In a decode step small kernels stand
between products, so that rings of weights are full when rows arrive, and large weights run at the
power limit: other kernels of the same table may win there by a few percent (docs/performance.md).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import nn

from . import library
from .nn import QuantLinear, check_rows

# A kernel must make the step shorter by more than what two runs of the same step differ by.
LEAST_GAIN = 0.005
TURNS = 2  # of the best candidate beside the table's choice


@dataclass(frozen=True)
class Pin:
    """What `pin_kernels` found for the layers of one shape."""

    in_features: int
    out_features: int
    layers: int  # of that shape
    kernel: str | None  # its geometry; None: the table's choice, also where another was pinned
    seconds: float  # of the step with it
    table_seconds: float  # of the step with the table's choice


def pin_kernels(
    model: nn.Module,
    rows: int,
    measure: Callable[[], float],
    *,
    least_gain: float = LEAST_GAIN,
) -> list[Pin]:
    """Pin, for calls with exactly `rows` rows, the kernels with which measure() is smallest.

    model: holds QuantLinear layers on one CUDA device. rows: of the activations of a step, which is
    the batch where a step decodes one token. measure: seconds of a step as it will run, with fresh
    CUDA graphs where it uses any, since a captured graph keeps the kernels it was captured with.
    It is called once for each candidate and five times more for each shape. Layers of one shape and
    format are pinned together, the largest shapes first, each given those before it.

    Candidates are the kernels of the table with the family and row tile of its choice. Unless one
    makes the step shorter by `least_gain` (0.005: half a percent) the table's choice stays. Calls
    with other numbers of rows, state dicts and saved models know of no pins;
    `QuantLinear.pin(rows, None)` takes one back. If measure() raises, the error goes on: shapes
    that are done stay pinned, the one at hand has the pins of before.

    Returns what was found, by shape. Raises TypeError for rows that are no number, ValueError for
    rows < 1, a model without QuantLinear layers or with some elsewhere than on one CUDA device, and
    times that are none.
    """
    check_rows(rows)
    if not 0 <= least_gain < 1:
        raise ValueError(f"least_gain={least_gain!r}: a share from 0 to 1 is required")
    return [_pin_group(layers, rows, measure, least_gain) for layers in _by_form(model)]


def _by_form(model: nn.Module) -> list[list[QuantLinear]]:
    """Layers of one shape and format together, most bytes first."""
    groups: dict[tuple, list[QuantLinear]] = {}
    for layer in model.modules():
        if isinstance(layer, QuantLinear):
            form = (layer.in_features, layer.out_features, layer.dtype, layer.group_size)
            groups.setdefault((*form, layer.has_zeros, layer.sparse), []).append(layer)
    if not groups:
        raise ValueError("model has no QuantLinear layer to pin a kernel for")
    devices = {layer.device for layers in groups.values() for layer in layers}
    if len(devices) != 1 or next(iter(devices)).type != "cuda":
        where = ", ".join(sorted(map(str, devices)))
        raise ValueError(
            f"the model's QuantLinear layers are on {where}: one CUDA device is required"
        )
    return sorted(groups.values(), key=lambda g: -sum(layer.packed.numel() for layer in g))


def candidates(layer: QuantLinear, rows: int) -> list[str]:
    """Geometries of the kernels to try: the table's choice's family and row tile, without it."""
    device = torch.cuda.get_device_properties(layer.device)
    table = library.table_for_capability(device.major, device.minor)
    form = (library.KEYS_DTYPE[layer.dtype], layer.has_zeros)
    group, sms = layer.group_size, device.multi_processor_count
    n, k = layer.out_features, layer.in_features
    choice, _ = table.select(rows, n, k, group, *form, sms, layer.sparse)
    # Without those compiled on demand, of which some exist to be tried.
    built = table.kernels[: len(table.kernels) - table.on_demand]
    wanted = (choice.family, choice.format, choice.m_tile)
    alike = [x for x in built if (x.family, x.format, x.m_tile) == wanted]
    return [kernel.geometry for kernel in alike if kernel.name != choice.name]


def _pin_group(
    layers: list[QuantLinear], rows: int, measure: Callable[[], float], least_gain: float
) -> Pin:
    def timed(kernel: str | None) -> float:
        _pin_all(layers, rows, kernel)
        seconds = float(measure())
        if not math.isfinite(seconds) or seconds <= 0:
            raise ValueError(f"measure() returned {seconds!r}: seconds of a step are required")
        return seconds

    before = {id(layer): layer.pins.get(rows) for layer in layers}
    shape = (layers[0].in_features, layers[0].out_features, len(layers))
    try:
        measure()  # warms up: the first step after a pause finds a cool GPU, and would look fast
        times = {name: timed(name) for name in candidates(layers[0], rows)}
        # The smallest of many times is small by chance as well: once more, in turns.
        best = min(times, key=times.__getitem__, default=None)
        pairs = [(timed(None), timed(best)) for _ in range(TURNS)] if best else [(timed(None),) * 2]
        table, seconds = (sum(column) / len(column) for column in zip(*pairs))
        if not seconds < table * (1 - least_gain):
            best, seconds = None, table
    except BaseException:
        for layer in layers:
            layer.pin(rows, before[id(layer)])
        raise
    _pin_all(layers, rows, best)
    return Pin(*shape, best, seconds, table)


def _pin_all(layers: Iterable[QuantLinear], rows: int, kernel: str | None) -> None:
    for layer in layers:
        layer.pin(rows, kernel)
