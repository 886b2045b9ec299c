"""`quantize_model`: every nn.Linear of a torch model, layer by layer, with bounded memory."""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Iterable, Sequence

import torch
from torch import nn

from ..formats.weight import QuantizedWeight, check_group_size
from . import calibration as cal
from .gptq import GptqOptions, quantize_gptq
from .hessian import Hessian
from .report import LayerReport, ModelReport
from .resume import ResumeFolder
from .rtn import quantize_rtn

DEFAULT_SKIP = ("lm_head",)
HESSIAN_BYTES = 2 << 30  # second moments kept at a time when blocks cannot be run on their own


def select_layers(
    model: nn.Module, skip: Sequence[str], report: ModelReport
) -> dict[str, nn.Linear]:
    """Linear layers to quantise; skipped ones go to the report with the reason.

    A skip entry matches a whole path component ("lm_head" skips "model.lm_head"), or is a regular
    expression when it starts with "re:". Weights shared with an embedding are skipped too.
    """
    embeddings = {m.weight.data_ptr() for m in model.modules() if isinstance(m, nn.Embedding)} - {0}
    layers = {}
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear):
            continue
        reason = _skip_reason(name, skip)
        if reason is None and module.weight.data_ptr() in embeddings:
            reason = "shares its weight with an embedding"
        if reason is None:
            layers[name] = module
        else:
            report.skipped[name] = reason
    return layers


def _skip_reason(name: str, skip: Sequence[str]) -> str | None:
    for entry in skip:
        if entry.startswith("re:"):
            if re.search(entry[3:], name):
                return f"matches {entry}"
        elif f".{entry}." in f".{name}.":
            return f"in the skip list ({entry})"
    return None


def check_layers(
    layers: dict[str, nn.Linear], group_size: int, on_illegal: str, report: ModelReport
) -> dict[str, nn.Linear]:
    """Drop or refuse layers that the group size does not fit: all of them named in one error."""
    if on_illegal not in ("raise", "skip"):
        raise ValueError(f"on_illegal={on_illegal!r}: 'raise' or 'skip' is required")
    bad = {}
    for name, layer in layers.items():
        try:
            check_group_size(group_size, layer.in_features)
        except ValueError as error:
            bad[name] = str(error)
    if bad and on_illegal == "raise":
        lines = "\n".join(f"  {name}: {reason}" for name, reason in bad.items())
        raise ValueError(f"{len(bad)} layers cannot be quantised:\n{lines}")
    report.skipped |= bad
    return {name: layer for name, layer in layers.items() if name not in bad}


class _LayerWorker:
    """Quantises single layers and writes the rounded weights back for the layers behind."""

    def __init__(self, method: str, options: GptqOptions, rtn_clip, resume: ResumeFolder) -> None:
        self.method, self.options, self.rtn_clip = method, options, rtn_clip
        self.resume = resume
        self.packed: dict = {}

    def finished(self, name: str, layer: nn.Linear) -> LayerReport | None:
        """Take a layer from the resume folder, if it is there."""
        found = self.resume.load(name)
        if found is None:
            return None
        from ..reference import dequantize

        self.packed[name], report = found
        self._write_back(layer, dequantize(self.packed[name], torch.float32))
        return report

    def run(self, name: str, layer: nn.Linear, hessian: Hessian | None) -> LayerReport:
        """Quantise one layer; rtn where no calibration token reached it."""
        start = time.perf_counter()
        weight, method, loss, note = self._quantise(layer, hessian)
        dense = weight.dequantize()
        original = layer.weight.detach().t().float()
        error = float((dense - original).norm() / original.norm().clamp_min(1e-30))
        self._write_back(layer, dense)
        packed = weight.to_packed()
        if layer.weight.dtype in (torch.float16, torch.bfloat16):
            packed.dtype = layer.weight.dtype
        self.packed[name] = packed.to("cpu")
        report = LayerReport(
            name,
            layer.out_features,
            layer.in_features,
            method,
            self.options.group_size,
            error,
            loss,
            hessian.tokens if hessian else 0,
            time.perf_counter() - start,
            note,
        )
        self.resume.save(name, self.packed[name], report)
        return report

    def _quantise(self, layer, hessian) -> tuple[QuantizedWeight, str, float | None, str]:
        if self.method == "gptq" and hessian is not None and hessian.tokens:
            dead = int((torch.diagonal(hessian.matrix) == 0).sum())
            if dead < layer.in_features:
                weight, loss = quantize_gptq(layer.weight, hessian.matrix, self.options)
                return weight, "gptq", loss, f"{dead} inputs always 0" if dead else ""
        options = self.options
        weight = quantize_rtn(
            layer.weight.detach(),
            options.group_size,
            symmetric=options.symmetric,
            clip=self.rtn_clip,
            scale_dtype=options.scale_dtype,
        )
        note = "no calibration token reached it" if self.method == "gptq" else ""
        return weight, "rtn", None, note

    @staticmethod
    @torch.no_grad()
    def _write_back(layer: nn.Linear, dense: torch.Tensor) -> None:
        layer.weight.data.copy_(dense.t())


def _stages(layers: dict[str, nn.Linear]) -> list[dict[str, nn.Linear]]:
    """Layers in order, cut so that the second moments of one stage fit HESSIAN_BYTES."""
    stages: list[dict[str, nn.Linear]] = [{}]
    size = 0
    for name, layer in layers.items():
        need = 4 * layer.in_features**2
        if stages[-1] and size + need > HESSIAN_BYTES:
            stages.append({})
            size = 0
        stages[-1][name] = layer
        size += need
    return stages if stages[0] else []


class _Pass:
    """One run over the model: decides what runs together and advances the progress bar."""

    def __init__(self, worker: _LayerWorker, report: ModelReport, tick) -> None:
        self.worker, self.report, self.tick = worker, report, tick

    def stage(self, calls: cal.Calls | None, layers: dict[str, nn.Linear]) -> None:
        """Quantise `layers`, whose inputs `calls` produces (None: no data needed)."""
        todo = {}
        for name, layer in layers.items():
            done = self.worker.finished(name, layer)
            if done is None:
                todo[name] = layer
            else:
                self._report(done)
        hessians = cal.collect_hessians(calls, todo) if calls is not None and todo else {}
        for name, layer in todo.items():
            # pop: a layer's second moments are freed as soon as it is done.
            self._report(self.worker.run(name, layer, hessians.pop(name, None)))

    def _report(self, layer: LayerReport) -> None:
        self.report.layers.append(layer)
        self.tick(layer.name)

    def blocks(self, calls: cal.Calls, blocks: list[tuple[str, nn.Module]], layers) -> set[str]:
        """Run blocks one after the other on cached hidden states; returns the layers done."""
        done: set[str] = set()
        current = cal.capture_block_calls(calls, blocks[0][1])
        for i, (name, _block) in enumerate(blocks):
            inside = {n: m for n, m in layers.items() if n.startswith(name + ".")}
            for stage in _stages(inside):
                self.stage(current, stage)
            done |= inside.keys()
            if i + 1 < len(blocks):
                current = cal.advance(current, blocks[i + 1][1])
        return done


def _settings(method, options: GptqOptions, clip, layers, samples: int) -> dict:
    names = hashlib.sha256("\n".join(sorted(layers)).encode()).hexdigest()[:16]
    plain = {k: str(v) for k, v in vars(options).items()}
    return {**plain, "method": method, "rtn_clip": str(clip), "layers": names, "samples": samples}


def quantize_model(
    model: nn.Module,
    calibration: Iterable | None = None,
    *,
    method: str = "gptq",
    group_size: int = 128,
    symmetric: bool = True,
    clip: str | bool | None = "auto",
    percdamp: float = 0.1,
    act_order: bool | str = False,
    scale_dtype: torch.dtype | None = None,
    skip: Sequence[str] = DEFAULT_SKIP,
    on_illegal: str = "raise",
    resume: str | None = None,
    progress: bool = True,
) -> ModelReport:
    """Quantise the nn.Linear layers of `model` and replace them by `QuantLinear`, in place.

    calibration: samples the model is called with: tensors, tuples or dicts, of any length; tokens
    that an `attention_mask` leaves out do not count. Needed for gptq only.
    skip: path components or "re:..." that stay as they are. on_illegal: "raise" names every layer
    the group size does not fit before any work is done, "skip" leaves them. resume: folder that
    keeps finished layers. Other arguments as in `quantize`; scale_dtype None follows the weights.

    Repeated blocks that feed each other are run one at a time on cached hidden states (kept on the
    CPU); other models are run whole, up to 2 GiB of second moments at a time. Returns the report.
    """
    if method not in ("rtn", "gptq"):
        raise ValueError(f"method={method!r} is unknown: one of rtn, gptq")
    report = ModelReport()
    layers = check_layers(select_layers(model, skip, report), group_size, on_illegal, report)
    if not layers:
        raise ValueError("the model has no nn.Linear layer to quantise")
    if method == "gptq" and calibration is None:
        raise ValueError("method='gptq' needs calibration samples")
    samples = list(calibration) if calibration is not None else []
    if method == "gptq" and not samples:
        raise ValueError("calibration holds no samples")
    if scale_dtype is None:
        bf16 = all(m.weight.dtype == torch.bfloat16 for m in layers.values())
        scale_dtype = torch.bfloat16 if bf16 else torch.float16
    search = clip in ("auto", True)
    options = GptqOptions(group_size, symmetric, search, percdamp, act_order, scale_dtype)
    rtn_clip = "mse" if clip in ("mse", True) else None
    folder = ResumeFolder(resume, _settings(method, options, rtn_clip, layers, len(samples)))
    worker = _LayerWorker(method, options, rtn_clip, folder)
    with cal.evaluation_mode(model), _progress(progress, len(layers)) as tick:
        _run(model, samples if method == "gptq" else None, layers, _Pass(worker, report, tick))
    _replace(model, worker.packed)
    return report


def _run(model, samples, layers, work: _Pass) -> None:
    if samples is None:
        work.stage(None, layers)
        return
    calls = cal.model_calls(model, samples)
    blocks = cal.find_blocks(model, set(layers))
    done: set[str] = set()
    if blocks and cal.blocks_are_chained(calls, [block for _, block in blocks]):
        done = work.blocks(calls, blocks, layers)
    rest = {name: layer for name, layer in layers.items() if name not in done}
    for stage in _stages(rest):
        work.stage(calls, stage)


def _replace(model: nn.Module, packed: dict) -> None:
    from ..nn import QuantLinear

    for name, weight in packed.items():
        old = model.get_submodule(name)
        weight = weight.to(old.weight.device)
        model.set_submodule(name, QuantLinear.from_packed(weight, old.bias).train(old.training))


def _progress(show: bool, total: int, title: str = "quantise"):
    """Context manager giving tick(name); a rich bar on stderr if `show`."""
    from contextlib import contextmanager

    @contextmanager
    def bar():
        if not show:
            yield lambda _name: None
            return
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
        from rich.progress import TimeRemainingColumn

        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=Console(stderr=True)) as progress:
            task = progress.add_task(title, total=total)
            yield lambda name: progress.update(task, advance=1, description=name[-40:])

    return bar()
