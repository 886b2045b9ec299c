"""The passes over a model that feed GPTQ: which layers run together, on which hidden states."""

from __future__ import annotations

import copy

from torch import nn

from . import calibration as cal
from .reconstruct import LearntLayer, reconstruct_block
from .report import LayerReport, ModelReport
from .worker import HeldLayer, LayerWorker

MOMENT_BYTES = 2 << 30  # second moments kept at a time when blocks cannot be run on their own


def stages_of(layers: dict[str, nn.Linear]) -> list[dict[str, nn.Linear]]:
    """Layers in order, cut so that the second moments of one stage fit MOMENT_BYTES."""
    stages: list[dict[str, nn.Linear]] = [{}]
    size = 0
    for name, layer in layers.items():
        need = 4 * layer.in_features**2
        if stages[-1] and size + need > MOMENT_BYTES:
            stages.append({})
            size = 0
        stages[-1][name] = layer
        size += need
    return stages if stages[0] else []


class ModelPass:
    """One run over the model: decides what runs together and advances the progress bar.

    reconstruct_steps: of each block, after its layers (see `reconstruct_block`); 0: none.
    """

    def __init__(
        self, worker: LayerWorker, report: ModelReport, tick, reconstruct_steps: int = 0
    ) -> None:
        self.worker, self.report, self.tick = worker, report, tick
        self.reconstruct_steps = reconstruct_steps

    def stage(
        self, streams: cal.Streams | None, layers: dict, originals: dict | None = None
    ) -> None:
        """Quantise `layers`, whose inputs `streams` produce (None: no data needed)."""
        todo = {}
        for name, layer in layers.items():
            done = self.worker.finished(name, layer)
            if done is None:
                todo[name] = layer
            else:
                self._report(done)
        moments = {}
        if streams is not None and todo:
            paired = None if originals is None else {name: originals[name] for name in todo}
            felt = self.worker.sensitivity
            weights = {name: felt[name].weights for name in todo if name in felt}
            moments = cal.collect_moments(streams, todo, paired, weights)
        for name, layer in todo.items():
            # pop: a layer's moments are freed as soon as it is done.
            self._report(self.worker.run(name, layer, moments.pop(name, None)))

    def _report(self, layer: LayerReport) -> None:
        self.report.layers.append(layer)
        self.tick(layer.name)

    def blocks(self, calls: cal.Calls, blocks: list[tuple[str, nn.Module]], layers) -> set[str]:
        """Run blocks one after the other on cached hidden states; returns the layers done."""
        done: set[str] = set()
        current = cal.capture_block_calls(calls, blocks[0][1])
        original = cal.Calls(None, current.samples, current.device)
        for i, (name, block) in enumerate(blocks):
            inside = {n: m for n, m in layers.items() if n.startswith(name + ".")}
            done |= inside.keys()
            last = i + 1 == len(blocks)
            if self.worker.compensate:
                original = self._compensated(name, block, current, original, inside, last)
            else:
                for stage in stages_of(inside):
                    self.stage(cal.Streams(current), stage)
            if not last:
                current = cal.advance(current, blocks[i + 1][1])
        return done

    def _compensated(self, name, block, current, original, inside, last) -> cal.Calls:
        """One block in order of execution, against a copy of the original on original inputs.

        Returns the original's calls for the next block.
        """
        copied = copy.deepcopy(block)
        original = cal.Calls(copied, original.samples, original.device)
        twins = {n: copied.get_submodule(n.removeprefix(name + ".")) for n in inside}
        streams = cal.Streams(current, original)
        self.worker.held = {} if self.reconstruct_steps else None
        for group in cal.execution_order(current, inside):
            for stage in stages_of(group):
                self.stage(streams, stage, twins)
        held, self.worker.held = self.worker.held, None
        if last and not held:
            return original
        following = cal.advance(original, None)
        if held:
            self._reconstructed(name, block, current, following, held)
        return following

    def _reconstructed(
        self, name: str, block, current: cal.Calls, targets: cal.Calls, held: dict[str, HeldLayer]
    ) -> None:
        """Learn the layers that GPTQ has just done together, and finish all that are held."""
        dtype = self.worker.options.scale_dtype
        learnt = {
            n.removeprefix(name + "."): LearntLayer(h.layer, h.weight, h.original, dtype)
            for n, h in held.items()
            if h.report.method == "gptq"
        }
        note, better = "", False
        if learnt:
            errors = reconstruct_block(block, current, targets, learnt, self.reconstruct_steps)
            note = f"error of {name}: {errors.before:.3g}, reconstructed {errors.after:.3g}"
            better = errors.after < errors.before
        place = {report.name: i for i, report in enumerate(self.report.layers)}
        for full, item in held.items():
            found = learnt.get(full.removeprefix(name + "."))
            weight, bias = found.result() if found and better else (item.weight, item.layer.bias)
            report = self.worker.finish(full, item, weight, bias, note if found else "")
            self.report.layers[place[full]] = report
