"""`quantize_model`: every nn.Linear of a torch model, layer by layer, with bounded memory."""

from __future__ import annotations

import copy
import hashlib
import re
from collections.abc import Iterable, Sequence

import torch
from torch import nn

from .. import host_library
from ..formats.weight import check_group_size
from ..progress import progress_bar
from ..prune import CHUNK, check_sparsity
from . import calibration as cal
from .gptq import GptqOptions
from .report import LayerReport, ModelReport
from .resume import ResumeFolder
from .sensitivity import measure
from .worker import LayerWorker

DEFAULT_SKIP = ("lm_head",)
MOMENT_BYTES = 2 << 30  # second moments kept at a time when blocks cannot be run on their own


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
    layers: dict[str, nn.Linear],
    group_size: int,
    on_illegal: str,
    report: ModelReport,
    sparsity: str | None = None,
) -> dict[str, nn.Linear]:
    """Drop or refuse layers that the group size or the sparsity does not fit: all of them named in
    one error."""
    if on_illegal not in ("raise", "skip"):
        raise ValueError(f"on_illegal={on_illegal!r}: 'raise' or 'skip' is required")
    bad = {}
    for name, layer in layers.items():
        try:
            check_group_size(group_size, layer.in_features)
            check_sparsity(sparsity, layer.in_features, group_size, symmetric=True)
        except ValueError as error:
            bad[name] = str(error)
    if bad and on_illegal == "raise":
        lines = "\n".join(f"  {name}: {reason}" for name, reason in bad.items())
        raise ValueError(f"{len(bad)} layers cannot be quantised:\n{lines}")
    report.skipped |= bad
    return {name: layer for name, layer in layers.items() if name not in bad}


def _stages(layers: dict[str, nn.Linear]) -> list[dict[str, nn.Linear]]:
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


class _Pass:
    """One run over the model: decides what runs together and advances the progress bar."""

    def __init__(self, worker: LayerWorker, report: ModelReport, tick) -> None:
        self.worker, self.report, self.tick = worker, report, tick

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
                for stage in _stages(inside):
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
        for group in cal.execution_order(current, inside):
            for stage in _stages(group):
                self.stage(streams, stage, twins)
        return original if last else cal.advance(original, None)


def _settings(method, options: GptqOptions, clip, compensate, layers, samples: int) -> dict:
    names = hashlib.sha256("\n".join(sorted(layers)).encode()).hexdigest()[:16]
    plain = {k: str(v) for k, v in vars(options).items()}
    return {
        **plain,
        "method": method,
        "rtn_clip": str(clip),
        "compensate": compensate,
        "layers": names,
        "samples": samples,
    }


def _check_sensitivity(sensitivity: bool, method: str, refine: int) -> None:
    """Before the backward pass is spent on it."""
    if type(sensitivity) is not bool:
        raise TypeError(f"sensitivity={sensitivity!r}: True or False is required")
    if sensitivity and method != "gptq":
        raise ValueError("sensitivity=True needs method='gptq': rounding to nearest weighs nothing")
    if sensitivity and refine:
        host_library.required()


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
    compensate: bool = True,
    sensitivity: bool = False,
    scale_dtype: torch.dtype | None = None,
    sparsity: str | None = None,
    refine: int = 4,
    signed_scales: bool = True,
    skip: Sequence[str] = DEFAULT_SKIP,
    on_illegal: str = "raise",
    resume: str | None = None,
    progress: bool = True,
) -> ModelReport:
    """Quantise the nn.Linear layers of `model` and replace them by `QuantLinear`, in place.

    calibration: samples the model is called with: tensors, tuples or dicts, of any length; tokens
    that an `attention_mask` leaves out do not count. Needed for gptq only.
    compensate: (gptq) quantise in order of execution, let each layer aim at the original model's
    outputs on inputs that carry the errors so far, and take the mean error into the bias where
    there is one. False is the plain recipe; it needs half the time.
    sensitivity: (gptq) one backward pass through the whole model first, which says what errors its
    output feels; takes the activations of one sample and N*N floats for each layer.
    sparsity: "2:4" prunes as well: by magnitude for rtn, in the sweep for gptq.
    skip: path components or "re:..." that stay as they are. on_illegal: "raise" names every layer
    the group size does not fit before any work is done, "skip" leaves them. resume: folder that
    keeps finished layers. Other arguments as in `quantize`; scale_dtype None follows the weights.

    Repeated blocks that feed each other are run one at a time on cached hidden states (kept on the
    CPU); other models are run whole, up to 2 GiB of second moments at a time. Returns the report.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    if method not in ("rtn", "gptq"):
        raise ValueError(f"method={method!r} is unknown: one of rtn, gptq")
    report = ModelReport()
    check_sparsity(sparsity, CHUNK, group_size, symmetric, act_order)
    layers = select_layers(model, skip, report)
    layers = check_layers(layers, group_size, on_illegal, report, sparsity)
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
    form = (group_size, symmetric, search, percdamp, act_order, scale_dtype, sparsity)
    options = GptqOptions(*form, refine, signed_scales)
    _check_sensitivity(sensitivity, method, refine)
    rtn_clip = "mse" if clip in ("mse", True) else None
    folder = ResumeFolder(
        resume,
        _settings(method, options, rtn_clip, compensate, layers, len(samples))
        | {"sensitivity": sensitivity},
    )
    worker = LayerWorker(method, options, rtn_clip, compensate, folder)
    with cal.evaluation_mode(model), progress_bar(progress, len(layers), "quantise") as tick:
        work = _Pass(worker, report, tick)
        _run(model, samples if method == "gptq" else None, layers, work, sensitivity)
    _replace(model, worker.packed)
    return report


def _run(model, samples, layers, work: _Pass, sensitivity: bool) -> None:
    if samples is None:
        work.stage(None, layers)
        return
    calls = cal.model_calls(model, samples)
    if sensitivity:
        work.worker.sensitivity = measure(calls, layers)
    blocks = cal.find_blocks(model, set(layers))
    done: set[str] = set()
    if blocks and cal.blocks_are_chained(calls, [block for _, block in blocks]):
        done = work.blocks(calls, blocks, layers)
    rest = {name: layer for name, layer in layers.items() if name not in done}
    for stage in _stages(rest):
        work.stage(cal.Streams(calls), stage)


def _replace(model: nn.Module, packed: dict) -> None:
    from ..nn import QuantLinear

    for name, weight in packed.items():
        old = model.get_submodule(name)
        weight = weight.to(old.weight.device)
        model.set_submodule(name, QuantLinear.from_packed(weight, old.bias).train(old.training))
