"""What a model quantisation did, layer by layer."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field


@dataclass(frozen=True)
class LayerReport:
    """One layer. loss: expected squared output error per token (gptq); weight_error: relative."""

    name: str
    n: int
    k: int
    method: str
    group_size: int
    weight_error: float
    loss: float | None
    tokens: int
    seconds: float
    note: str = ""


@dataclass
class ModelReport:
    """All quantised layers in order of work, and the ones left alone with the reason."""

    layers: list[LayerReport] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> str:
        """JSON text with `layers` and `skipped`."""
        return json.dumps(
            {"layers": [asdict(layer) for layer in self.layers], "skipped": self.skipped}, indent=1
        )

    def __str__(self) -> str:
        rows = [f"{'layer':<48} {'N':>6} {'K':>6} method {'rel. error':>10} {'loss':>10}  s"]
        for r in self.layers:
            loss = "-" if r.loss is None else f"{r.loss:.4g}"
            rows.append(
                f"{r.name:<48} {r.n:>6} {r.k:>6} {r.method:<6} {r.weight_error:>10.4f} {loss:>10}"
                f"  {r.seconds:.2f} {r.note}"
            )
        rows += [f"skipped {name}: {reason}" for name, reason in self.skipped.items()]
        return "\n".join(rows)
