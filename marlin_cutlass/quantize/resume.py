"""Finished layers on disk, so that an interrupted model quantisation goes on where it stopped."""

from __future__ import annotations

import json
from pathlib import Path

from torch import Tensor

from ..json_file import read_object
from ..packed_weight import PackedWeight
from .report import LayerReport

STATE_FILE = "state.json"


class ResumeFolder:
    """One file per finished layer plus the settings they were made with.

    `folder` None keeps nothing. Settings that differ from the ones on disk are refused: mixing them
    would give a model that no setting describes.
    """

    def __init__(self, folder: str | Path | None, settings: dict) -> None:
        self.folder = Path(folder) if folder is not None else None
        if self.folder is None:
            return
        from ..files import write_atomically

        self.folder.mkdir(parents=True, exist_ok=True)
        state = self.folder / STATE_FILE
        if not state.exists():
            text = json.dumps(settings, indent=1, sort_keys=True)
            write_atomically(state, lambda temporary: temporary.write_text(text))
            return
        found = read_object(state)
        if found != settings:
            differ = [k for k in settings if found.get(k) != settings[k]]
            raise ValueError(
                f"resume={self.folder} was begun with other settings ({', '.join(differ)}):"
                " use the same ones or another folder"
            )

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.safetensors"

    def load(self, name: str) -> tuple[PackedWeight, Tensor | None, LayerReport] | None:
        """(weight, bias, report) of a layer finished in an earlier run, or None."""
        if self.folder is None or not self._path(name).exists():
            return None
        from ..files import SINGLE, load_with_metadata

        found, metadata = load_with_metadata(self._path(name))
        report = LayerReport(**json.loads(metadata["report"]))
        if isinstance(found, PackedWeight):
            return found, None, report
        return found[SINGLE], found["bias"], report

    def save(
        self, name: str, weight: PackedWeight, bias: Tensor | None, report: LayerReport
    ) -> None:
        """Keep a finished layer; the file appears whole or not at all."""
        if self.folder is None:
            return
        from ..files import SINGLE, save

        content = {SINGLE: weight} if bias is None else {SINGLE: weight, "bias": bias}
        save(content, self._path(name), metadata={"report": json.dumps(report.__dict__)})
