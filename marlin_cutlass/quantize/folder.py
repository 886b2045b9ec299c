"""A Hugging Face folder in floating point -> a folder of packed weights, by gptq."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from .report import ModelReport
from .texts import read_texts, vocabulary_texts

__all__ = ["load_transformers", "quantize_folder", "read_texts"]

MAX_TOKENS = 4096  # natural length up to this (paper.md a.7)
VOCABULARY = "vocabulary"  # texts made of the tokenizer's words
VOCABULARY_TEXTS = 1024


def load_transformers(folder: Path, empty: bool = False):
    """(model, tokenizer) of a folder by transformers, offline; empty: (model with no weights, None)
    to be filled by `load_model`."""
    try:
        import transformers
    except ImportError as error:
        raise ValueError(
            f"method=gptq on a folder needs transformers: {error}; pip install transformers"
        ) from None
    config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    names = getattr(config, "architectures", None) or []
    cls = next((getattr(transformers, n) for n in names if hasattr(transformers, n)), None)
    cls = cls or transformers.AutoModel
    if empty:
        # Not on meta: buffers that a model computes while it is built would have no values there.
        return cls._from_config(config), None
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    return cls.from_pretrained(folder, local_files_only=True, dtype="auto"), tokenizer


def quantize_folder(
    src: str | Path,
    dst: str | Path,
    texts: Sequence[str] | str,
    *,
    overwrite: bool = False,
    **options,
) -> ModelReport:
    """Load `src` with transformers, run `quantize_model` on `texts`, write `dst` atomically.

    texts: the calibration texts, or "vocabulary": 1,024 of `vocabulary_texts`. options: as in
    `quantize_model`. The model must fit memory, unlike `convert_checkpoint`.
    """
    from ..checkpoint import new_folder
    from ..files import save
    from .model import quantize_model

    src, dst = Path(src), Path(dst)
    if dst.exists() and not overwrite and any(dst.iterdir()):
        raise FileExistsError(f"{dst} exists and is not empty: pass overwrite=True (--overwrite)")
    if isinstance(texts, str) and texts != VOCABULARY:
        raise TypeError(f"texts={texts[:40]!r}: a list of texts or {VOCABULARY!r} is required")
    if not (src / "config.json").is_file():
        raise FileNotFoundError(f"{src} has no config.json")
    model, tokenizer = load_transformers(src)
    if texts == VOCABULARY:
        texts = vocabulary_texts(tokenizer, VOCABULARY_TEXTS)
    samples = [
        dict(tokenizer(t, return_tensors="pt", truncation=True, max_length=MAX_TOKENS))
        for t in texts
    ]
    report = quantize_model(model, samples, **options)
    with new_folder(dst) as folder:
        save(model, folder / "model.safetensors")
        _write_config(model, src, folder, report, options)
    return report


def _write_config(model, src: Path, folder: Path, report: ModelReport, options: dict) -> None:
    from ..checkpoint import copy_others
    from ..checkpoint_scheme import FORMAT_NAME
    from ..files import FORMAT_VERSION
    from ..json_file import read_object
    from ..layout import LAYOUT_VERSION
    from ..nn import QuantLinear

    layers = {
        name: m.weight_packed.metadata() | {"act_order": m.perm is not None}
        for name, m in model.named_modules()
        if isinstance(m, QuantLinear)
    }
    config = read_object(src / "config.json")
    config["quantization_config"] = {
        "quant_method": FORMAT_NAME,
        "format_version": FORMAT_VERSION,
        "layout_version": LAYOUT_VERSION,
        "source_format": "dense",
        "bits": 4,
        "group_size": options.get("group_size", 128),
        "modules_to_not_convert": sorted(report.skipped),
        "layers": layers,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    (folder / "quantize_report.json").write_text(report.to_json())
    copy_others(src, folder)
