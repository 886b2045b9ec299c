"""One layer at a time: moments in, packed weight and corrected bias out, rounded weight back."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import torch
from torch import nn

from ..formats.weight import QuantizedWeight
from ..prune import prune_2_4
from .gptq import GptqOptions, quantize_gptq
from .hessian import Moments, matched_weight
from .report import LayerReport
from .resume import ResumeFolder
from .rtn import quantize_rtn
from .sensitivity import Sensitivity


@dataclass
class HeldLayer:
    """A layer that is quantised but not finished: its block is still to be reconstructed."""

    layer: nn.Linear
    original: torch.Tensor  # weight [N, K]
    weight: QuantizedWeight
    report: LayerReport


class LayerWorker:
    """Quantises single layers and writes the rounded weights back for the layers behind.

    Where `held` is a dictionary, layers go there instead of being finished; `finish` does that.
    """

    def __init__(
        self, method: str, options: GptqOptions, rtn_clip, compensate: bool, resume: ResumeFolder
    ) -> None:
        self.method, self.options, self.rtn_clip = method, options, rtn_clip
        self.compensate, self.resume = compensate, resume
        self.packed: dict = {}
        self.sensitivity: dict[str, Sensitivity] = {}
        self.held: dict[str, HeldLayer] | None = None

    def finished(self, name: str, layer: nn.Linear) -> LayerReport | None:
        """Take a layer from the resume folder, if it is there."""
        found = self.resume.load(name)
        if found is None:
            return None
        from ..reference import dequantize

        self.packed[name], bias, report = found
        self._write_back(layer, dequantize(self.packed[name], torch.float32), bias)
        return report

    def run(self, name: str, layer: nn.Linear, moments: Moments | None) -> LayerReport:
        """Quantise one layer; rtn where no calibration token reached it."""
        start = time.perf_counter()
        tokens = moments.tokens if moments else 0
        original = layer.weight.detach().clone() if self.held is not None else layer.weight.detach()
        weight, bias, method, loss, note = self._quantise(name, layer, moments)
        error = self._relative_error(weight, original)
        self._write_back(layer, weight.dequantize(), bias)
        seconds = time.perf_counter() - start
        report = LayerReport(
            name,
            layer.out_features,
            layer.in_features,
            method,
            self.options.group_size,
            error,
            loss,
            tokens,
            seconds,
            note,
        )
        if self.held is not None:
            self.held[name] = HeldLayer(layer, original, weight, report)
        else:
            self._keep(name, layer, weight, bias, report)
        return report

    def finish(
        self,
        name: str,
        held: HeldLayer,
        weight: QuantizedWeight,
        bias: torch.Tensor | None,
        note: str,
    ) -> LayerReport:
        """Finish a held layer with what its block's reconstruction made of it."""
        bias = None if bias is None else bias.detach()
        self._write_back(held.layer, weight.dequantize(), bias)
        error = self._relative_error(weight, held.original)
        note = "; ".join(part for part in (held.report.note, note) if part)
        report = replace(held.report, weight_error=error, note=note)
        self._keep(name, held.layer, weight, bias, report)
        return report

    @staticmethod
    def _relative_error(weight: QuantizedWeight, original: torch.Tensor) -> float:
        original = original.t().float()
        return float((weight.dequantize() - original).norm() / original.norm().clamp_min(1e-30))

    def _keep(self, name, layer: nn.Linear, weight: QuantizedWeight, bias, report) -> None:
        packed = weight.to_packed()
        if layer.weight.dtype in (torch.float16, torch.bfloat16):
            packed.dtype = layer.weight.dtype
        self.packed[name] = packed.to("cpu")
        self.resume.save(name, self.packed[name], bias, report)

    def _quantise(self, name: str, layer: nn.Linear, moments: Moments | None):
        """(codes, new bias or None, method, loss, note)."""
        if self.method != "gptq":
            return self._rtn(layer), None, "rtn", None, ""
        if moments is None or not moments.tokens:
            return self._rtn(layer), None, "rtn", None, "no calibration token reached it"
        dead = int(moments.dead().sum())
        if dead == layer.in_features:
            return self._rtn(layer), None, "rtn", None, "its inputs are always 0"
        weight, bias, loss = self._gptq(name, layer, moments)
        return weight, bias, "gptq", loss, f"{dead} inputs always 0" if dead else ""

    def _gptq(self, name: str, layer: nn.Linear, moments: Moments):
        original = layer.weight.detach().float()
        target = original
        if self.compensate and moments.cross is not None:
            target = matched_weight(original, moments, self.options.percdamp)
        felt = self.sensitivity.pop(name, None)
        output = None if felt is None else felt.output
        weight, loss = quantize_gptq(target, moments.matrix, self.options, output=output)
        if not self.compensate or layer.bias is None:
            return weight, None, loss
        # What is left of the mean error goes into the bias. NOTE: second moments stay uncentred; to
        # leave the mean to the bias alone is worse on text of another kind than the calibration's.
        wanted = moments.mean if moments.reference_mean is None else moments.reference_mean
        shift = original @ wanted - weight.dequantize().t() @ moments.mean
        return weight, (layer.bias.detach().float() + shift).to(layer.bias.dtype), loss

    def _rtn(self, layer: nn.Linear) -> QuantizedWeight:
        options, weight = self.options, layer.weight.detach()
        return quantize_rtn(
            weight if options.sparsity is None else prune_2_4(weight),
            options.group_size,
            symmetric=options.symmetric,
            clip=self.rtn_clip,
            signed_scales=options.signed_scales,
            scale_dtype=options.scale_dtype,
            sparse=options.sparsity is not None,
        )

    @staticmethod
    @torch.no_grad()
    def _write_back(layer: nn.Linear, dense: torch.Tensor, bias: torch.Tensor | None) -> None:
        layer.weight.data.copy_(dense.t())
        if bias is not None:
            layer.bias.data.copy_(bias)
