"""`quantize_model`: every nn.Linear of a torch model, layer by layer, with bounded memory."""

from __future__ import annotations

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
from .model_pass import ModelPass, stages_of
from .report import ModelReport
from .resume import ResumeFolder
from .sensitivity import measure
from .worker import LayerWorker

DEFAULT_SKIP = ("lm_head",)


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


def _samples(method: str, calibration: Iterable | None) -> list | None:
    """The calibration samples; None where the method needs none."""
    if method != "gptq":
        return None
    if calibration is None:
        raise ValueError("method='gptq' needs calibration samples")
    samples = list(calibration)
    if not samples:
        raise ValueError("calibration holds no samples")
    return samples


def _common_dtype(layers: dict[str, nn.Linear]) -> torch.dtype:
    """Of the scales: bfloat16 where all weights are, else float16."""
    bf16 = all(layer.weight.dtype == torch.bfloat16 for layer in layers.values())
    return torch.bfloat16 if bf16 else torch.float16


def _settings(method, options: GptqOptions, clip, compensate, layers, samples: int) -> dict:
    """What a resume folder must agree with."""
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


def _check_reconstruct(steps: int, method: str, compensate: bool) -> None:
    if type(steps) is not int or steps < 0:
        raise ValueError(f"reconstruct={steps!r}: a number of steps from 0 on is required")
    if steps and (method != "gptq" or not compensate):
        raise ValueError(f"reconstruct={steps} needs method='gptq' and compensate=True")


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
    reconstruct: int = 0,
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
    reconstruct: (gptq, compensate) so many steps of gradient descent on codes, scales and biases of
    each block together, towards what the block gives in the original model; needs repeated blocks.
    sparsity: "2:4" prunes as well: by magnitude for rtn, in the sweep for gptq.
    skip: path components or "re:..." that stay as they are. on_illegal: "raise" names every layer
    the group size does not fit before any work is done, "skip" leaves them. resume: folder that
    keeps finished layers. Other arguments as in `quantize`; scale_dtype None follows the weights.

    Repeated blocks that feed each other are run one at a time on cached hidden states (kept on the
    CPU); other models are run whole, up to 2 GiB of second moments at a time. Returns the report.
    Raises TypeError or ValueError for wrong arguments before any layer is changed; ValueError for
    NaN or infinity when it meets them: layers before that have been rounded.
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
    samples = _samples(method, calibration)
    scale_dtype = scale_dtype or _common_dtype(layers)
    search = clip in ("auto", True)
    form = (group_size, symmetric, search, percdamp, act_order, scale_dtype, sparsity)
    options = GptqOptions(*form, refine, signed_scales)
    _check_sensitivity(sensitivity, method, refine)
    _check_reconstruct(reconstruct, method, compensate)
    rtn_clip = "mse" if clip in ("mse", True) else None
    folder = ResumeFolder(
        resume,
        _settings(method, options, rtn_clip, compensate, layers, len(samples or ()))
        | {"sensitivity": sensitivity, "reconstruct": reconstruct},
    )
    worker = LayerWorker(method, options, rtn_clip, compensate, folder)
    with cal.evaluation_mode(model), progress_bar(progress, len(layers), "quantise") as tick:
        work = ModelPass(worker, report, tick, reconstruct)
        _run(model, samples, layers, work, sensitivity)
    _replace(model, worker.packed)
    return report


def _run(model, samples, layers, work: ModelPass, sensitivity: bool) -> None:
    if samples is None:
        work.stage(None, layers)
        return
    calls = cal.model_calls(model, samples)
    blocks = cal.find_blocks(model, set(layers))
    chained = blocks and cal.blocks_are_chained(calls, [block for _, block in blocks])
    if work.reconstruct_steps and not chained:
        raise ValueError(
            f"reconstruct={work.reconstruct_steps}: the model has no blocks that feed each other"
        )
    if sensitivity:
        work.worker.sensitivity = measure(calls, layers)
    done: set[str] = set()
    if chained:
        done = work.blocks(calls, blocks, layers)
    rest = {name: layer for name, layer in layers.items() if name not in done}
    for stage in stages_of(rest):
        work.stage(cal.Streams(calls), stage)


def _replace(model: nn.Module, packed: dict) -> None:
    from ..nn import QuantLinear

    for name, weight in packed.items():
        old = model.get_submodule(name)
        weight = weight.to(old.weight.device)
        model.set_submodule(name, QuantLinear.from_packed(weight, old.bias).train(old.training))
