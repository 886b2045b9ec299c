"""Whole checkpoints: a Hugging Face folder in GPTQ, AWQ, compressed-tensors or MARLIN format, or in
floating point, becomes a folder of packed weights. Streaming, parallel, atomic.

The output keeps the shards of the input. A layer `x` becomes `x.packed`, `x.col_scale` and, with
act-order, `x.perm`; every other tensor is copied byte for byte. config.json and each file's
metadata carry the format's name and version and the form of every layer.
"""

from __future__ import annotations

import json
import os
import shutil
import time
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from .checkpoint_plan import EMBEDDING, INDEX_NAME, LayerPlan, Plan, make_plan
from .checkpoint_read import read_layer, read_tensor
from .checkpoint_scheme import FORMAT_NAME, Scheme
from .files import FORMAT_VERSION, format_metadata
from .layout import LAYOUT_VERSION, stored_group_size
from .locking import folder_lock
from .packed_weight import PackedWeight
from .progress import progress_bar
from .prune import CHUNK, SPARSITIES, check_sparsity
from .safetensors_stream import StreamWriter

SKIP_FILES = ("config.json", "quantize_config.json", INDEX_NAME)
SKIP_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx")
DENSE_SKIP = ("lm_head", "embed", "norm", "router", "gate", "wte", "wpe", "conv1d")
# Metadata of one layer, as JSON: six numbers, their names, and the layer's own name on top.
LAYER_METADATA_BYTES = 160


class CheckpointError(ValueError):
    """A folder cannot be converted; `problems` names every bad layer or tensor."""

    def __init__(self, folder: Path, problems: Sequence[str]) -> None:
        self.problems = list(problems)
        lines = "\n".join(f"  {problem}" for problem in self.problems)
        super().__init__(f"{folder} cannot be converted ({len(self.problems)} problems):\n{lines}")


@dataclass
class ConversionReport:
    """What a conversion read, wrote and noticed."""

    source_format: str
    layers: dict[str, dict] = field(default_factory=dict)
    passed: int = 0
    unused: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    bytes_in: int = 0
    bytes_out: int = 0
    seconds: float = 0.0

    def to_json(self) -> str:
        """All fields as JSON text."""
        return json.dumps(asdict(self), indent=1)


def plan_conversion(
    src: str | Path,
    *,
    group_size: int = 128,
    symmetric: bool = True,
    clip: str | None = None,
    sparsity: str | None = None,
    skip: Sequence[str] = DENSE_SKIP,
) -> Plan:
    """`make_plan`, and for a floating-point folder the choice of weights to quantise (rtn).

    sparsity: "2:4" prunes by magnitude before it rounds; of a quantised folder it packs the layers
    that have 2:4 sparsity for sparse kernels. skip: a dense weight whose name has a
    component containing one of these stays as it is; "gate" alone means a router: gate_proj and
    gate_up_proj are quantised.
    """
    plan = make_plan(Path(src))
    if sparsity not in SPARSITIES:
        raise ValueError(f"sparsity={sparsity!r} is unknown: '2:4' or None")
    plan.recognise = sparsity is not None and plan.scheme.name != "dense"
    if plan.scheme.name == "dense":
        check_sparsity(sparsity, CHUNK, group_size, symmetric)
        options = {"symmetric": symmetric, "clip": clip, "method": "rtn", "sparsity": sparsity}
        _choose_dense(plan, Scheme("dense", group_size, symmetric, source=options), skip)
    return plan


def _choose_dense(plan: Plan, scheme: Scheme, skip: Sequence[str]) -> None:
    plan.scheme = scheme
    try:
        stored_group_size(scheme.group_size)
    except ValueError as error:
        plan.problems.append(str(error))
        return
    for tensor, shard in list(plan.passed.items()):
        info = plan.info(tensor, shard)
        name = tensor.removesuffix(".weight")
        linear = tensor.endswith(".weight") and len(info.shape) == 2
        if not linear or not info.dtype.is_floating_point or _dense_skipped(name, skip):
            continue
        n, k = info.shape
        if scheme.group_size > 0 and k % scheme.group_size:
            plan.problems.append(
                f"{name}: K={k}, N={n}: K={k} is not a multiple of group_size={scheme.group_size}"
            )
        if scheme.source["sparsity"] and k % CHUNK:
            plan.problems.append(f"{name}: K={k}, N={n}: 2:4 sparsity needs a multiple of 4")
        del plan.passed[tensor]
        plan.layers.append(LayerPlan(name, {"weight": (tensor, shard)}, scheme, (k, n)))
    if not plan.layers:
        plan.problems.append("no two-dimensional floating-point *.weight to quantise")
    _name_stacked(plan)


def _name_stacked(plan: Plan) -> None:
    """Notes for stacked experts, which are large and stay as they are: models differ in which of
    their dimensions are inputs, and no tensor says."""
    for tensor, shard in plan.passed.items():
        info = plan.info(tensor, shard)
        if len(info.shape) == 3 and info.dtype.is_floating_point and min(info.shape[1:]) > 1:
            shape = list(info.shape)
            plan.notes.append(f"{tensor}: {shape} stays floating point (three dimensions)")


def _dense_skipped(name: str, skip: Sequence[str]) -> bool:
    if EMBEDDING.search(name):
        return True
    parts = name.lower().split(".")
    return any(part == s or (s != "gate" and s in part) for part in parts for s in skip)


def convert_checkpoint(
    src: str | Path,
    dst: str | Path,
    *,
    workers: int = 2,
    overwrite: bool = False,
    progress: bool = False,
    zero_rule: str = "word",
    **dense_options,
) -> ConversionReport:
    """Convert the folder `src` to `dst`; `dense_options` as in `plan_conversion`.

    Everything headers can show is checked first, and CheckpointError lists all problems before
    anything is written. The folder appears whole or not at all. Memory: `workers` + 1 layers.
    """
    start = time.perf_counter()
    src, dst = Path(src), Path(dst)
    plan = plan_conversion(src, **dense_options)
    if plan.problems:
        raise CheckpointError(src, plan.problems)
    if plan.scheme.zero_rule != zero_rule:
        scheme = Scheme(**{**plan.scheme.__dict__, "zero_rule": zero_rule})
        for layer in plan.layers:
            layer.scheme = scheme
    if dst.exists() and not overwrite and any(dst.iterdir()):
        raise FileExistsError(f"{dst} exists and is not empty: pass overwrite=True (--overwrite)")
    for tensor in plan.unused:
        warnings.warn(f"{src}: tensor {tensor} is not used", UserWarning, stacklevel=2)
    report = ConversionReport(
        plan.scheme.checkpoint_format if plan.scheme.name == "gptq" else plan.scheme.name,
        unused=plan.unused,
        notes=list(plan.notes),
        passed=len(plan.passed),
        bytes_in=plan.bytes_in(),
    )
    with new_folder(dst) as folder, progress_bar(progress, len(plan.layers), "convert") as tick:
        _write_folder(plan, folder, report, workers, tick)
        report.bytes_out = sum(f.stat().st_size for f in folder.glob("*.safetensors"))
    if plan.recognise:
        sparse = sum(bool(form.get("sparse")) for form in report.layers.values())
        report.notes.append(f"{sparse} of {len(report.layers)} layers have 2:4 sparsity")
    report.seconds = time.perf_counter() - start
    return report


@contextmanager
def new_folder(dst: Path) -> Iterator[Path]:
    """A temporary folder beside `dst` that becomes `dst` if the block succeeds.

    Whatever a killed run has left beside `dst` is cleared away first. FileExistsError while another
    process writes the same folder.
    """
    dst.parent.mkdir(parents=True, exist_ok=True)
    temporary, old = (dst.with_name(f".{dst.name}.{kind}") for kind in ("tmp", "old"))
    with folder_lock(dst):
        if old.exists() and not dst.exists():  # killed between the two renames below
            os.replace(old, dst)
        shutil.rmtree(old, ignore_errors=True)
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        try:
            yield temporary
            _exchange(temporary, dst, old)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
            shutil.rmtree(old, ignore_errors=True)


def _exchange(new: Path, dst: Path, old: Path) -> None:
    """Puts `new` in the place of `dst`, which comes back if that fails."""
    if dst.exists():
        os.replace(dst, old)
    try:
        os.replace(new, dst)
    except OSError:
        if old.exists():
            os.replace(old, dst)
        raise


def copy_others(src: Path, folder: Path) -> list[str]:
    """Copies the files of a checkpoint that hold no weights; returns the links left out.

    A link is followed inside of the checkpoint and into the blobs of a Hugging Face cache, nowhere
    else: a checkpoint from outside must not carry private files into its copy.
    """
    inside = [src.resolve(), src.resolve().parent.parent / "blobs"]
    left_out = []
    for path in sorted(src.iterdir()):
        if not path.is_file() or path.name in SKIP_FILES or path.suffix in SKIP_SUFFIXES:
            continue
        if not any(path.resolve().is_relative_to(root) for root in inside):
            left_out.append(path.name)
            continue
        shutil.copy2(path, folder / path.name)
    return left_out


def _write_folder(plan: Plan, folder: Path, report: ConversionReport, workers: int, tick) -> None:
    weight_map: dict[str, str] = {}
    for shard in plan.shards:
        layers = [x for x in plan.layers if _home(x) == shard]
        passed = [t for t, s in plan.passed.items() if s == shard]
        if layers or passed:
            names = _write_shard(plan, folder / shard, layers, passed, report, workers, tick)
            weight_map |= dict.fromkeys(names, shard)
    if len(plan.shards) > 1 or (plan.folder / INDEX_NAME).is_file():
        size = sum(f.stat().st_size for f in folder.glob("*.safetensors"))
        index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))}
        (folder / INDEX_NAME).write_text(json.dumps(index, indent=2))
    (folder / "config.json").write_text(json.dumps(_new_config(plan, report), indent=2))
    for name in copy_others(plan.folder, folder):
        report.notes.append(f"{name}: a link that leaves the checkpoint was not followed")


def _home(layer: LayerPlan) -> str:
    """The shard a layer is written to: the one that holds its codes (the first tensor)."""
    return next(iter(layer.tensors.values()))[1]


def _text_bytes(name: str) -> int:
    """Bytes of a name in a header, once more escaped inside of the metadata."""
    return len(json.dumps(json.dumps(name)))


def _write_shard(plan, path, layers, passed, report, workers, tick) -> list[str]:
    """Stream one shard; layers first, whose sizes keep every tensor aligned. Returns the names."""
    names = 4 * len(layers) + len(passed)
    name_bytes = sum(4 * _text_bytes(x.name) for x in layers)
    name_bytes += sum(_text_bytes(t) + 24 * len(plan.info(t, path.name).shape) for t in passed)
    metadata_bytes = 400 + sum(2 * (_text_bytes(x.name) + LAYER_METADATA_BYTES) for x in layers)
    forms: dict[str, dict] = {}
    with StreamWriter(path, names, name_bytes + 64 * len(layers), metadata_bytes) as writer:
        for layer, tensors, form in _packed_layers(plan, layers, workers):
            forms[layer.name] = form
            for role, tensor in tensors.items():
                writer.add(f"{layer.name}.{role}", tensor)
            tick(layer.name)
        by_size = sorted(passed, key=lambda t: -plan.info(t, path.name).dtype.itemsize)
        for tensor in by_size:
            writer.add(tensor, read_tensor(plan.folder / path.name, plan.info(tensor, path.name)))
        writer.close(format_metadata(forms))
    report.layers |= forms
    return list(writer.entries)


def _packed_layers(plan: Plan, layers: list[LayerPlan], workers: int):
    """(layer, tensors, form) in order, packed by `workers` threads that stay one layer ahead."""
    threads = torch.get_num_threads()
    torch.set_num_threads(max(1, threads // max(1, workers)))
    try:
        with ThreadPoolExecutor(max_workers=max(1, workers)) as pool:
            waiting: deque = deque()
            for layer in layers:
                waiting.append((layer, pool.submit(_pack_layer, plan, layer)))
                if len(waiting) > workers:
                    first, future = waiting.popleft()
                    yield first, *future.result()
            while waiting:
                first, future = waiting.popleft()
                yield first, *future.result()
    finally:
        torch.set_num_threads(threads)


def _pack_layer(plan: Plan, layer: LayerPlan) -> tuple[dict[str, torch.Tensor], dict]:
    packed, weights = [], read_layer(plan, layer)
    if plan.recognise:
        found = [weight.recognised() for weight in weights]
        weights = found if all(weight.sparse for weight in found) else weights
    for weight in weights:
        try:
            packed.append(weight.to_packed())
        except (ValueError, TypeError) as error:
            raise type(error)(f"{layer.name}: {error}") from None
    form = packed[0].metadata() | {"act_order": packed[0].perm is not None}
    if layer.experts is None:
        return packed[0].tensors(), form
    return _stack(layer, packed), form | {"experts": layer.experts}


def _stack(layer: LayerPlan, packed: list[PackedWeight]) -> dict[str, torch.Tensor]:
    kinds = {(w.has_zeros, w.perm is None, w.sparse) for w in packed}
    if len(kinds) != 1:
        raise ValueError(f"{layer.name}: experts differ in zero points, act-order or sparsity")
    return {role: torch.stack([w.tensors()[role] for w in packed]) for role in packed[0].tensors()}


def _new_config(plan: Plan, report: ConversionReport) -> dict:
    config = {k: v for k, v in plan.config.items() if k != "compression_config"}
    source = plan.scheme.source
    if any(name.split(".")[-1] == "lm_head" for name in report.layers):
        config["tie_word_embeddings"] = False
    keep = source.get("modules_to_not_convert") or source.get("ignore") or []
    config["quantization_config"] = {
        "quant_method": FORMAT_NAME,
        "format_version": FORMAT_VERSION,
        "layout_version": LAYOUT_VERSION,
        "source_format": report.source_format,
        "bits": 4,
        "group_size": plan.scheme.group_size,
        "modules_to_not_convert": keep,
        "layers": report.layers,
    }
    return config
