"""Mixture-of-experts layers whose experts are quantised: a loop over the experts that were chosen.

Transformers 5 keeps all experts of a layer in two stacked parameters. Here each expert has its own
layers, by the names of the checkpoint: w1, w3, w2 or gate_proj, up_proj, down_proj.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

GATE, UP, DOWN = ("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")


def is_fused_experts(module: nn.Module) -> bool:
    """Whether this is Transformers' module with the stacked experts of a gated MLP."""
    names = ("gate_up_proj", "down_proj")
    return all(isinstance(getattr(module, name, None), nn.Parameter) for name in names)


class LoopedExperts(nn.Module):
    """Called like the stacked module that it replaces: (hidden [T, H], expert index [T, top_k],
    weight [T, top_k]) -> [T, H]."""

    def __init__(self, fused: nn.Module) -> None:
        super().__init__()
        self.act_fn = fused.act_fn
        self.num_experts = fused.gate_up_proj.shape[0]
        for i in range(self.num_experts):
            self.add_module(str(i), nn.Module())

    def put(self, index: int, name: str, layer: nn.Module) -> None:
        """Set layer `name` of expert `index`; ValueError for a name of no gated MLP."""
        if name not in (*GATE, *UP, *DOWN):
            raise ValueError(f"experts.{index}.{name} is no part of a gated MLP")
        if not 0 <= index < self.num_experts:
            raise ValueError(f"experts.{index}: the model has {self.num_experts} experts")
        self.get_submodule(str(index)).add_module(name, layer)

    def _layer(self, index: int, names: tuple[str, ...]) -> nn.Module:
        expert = self.get_submodule(str(index))
        for name in names:
            if hasattr(expert, name):
                return getattr(expert, name)
        raise ValueError(f"expert {index} has none of the layers {', '.join(names)}")

    def expert(self, index: int, x: Tensor) -> Tensor:
        """One expert's MLP: x [T, H] -> [T, H]."""
        hidden = self.act_fn(self._layer(index, GATE)(x)) * self._layer(index, UP)(x)
        return self._layer(index, DOWN)(hidden)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        total = torch.zeros_like(hidden_states)
        # Reads the choice back to the host: a loop with data-dependent sizes cannot be captured.
        for index in top_k_index.unique().tolist():
            if index >= self.num_experts:  # marks tokens that another rank serves
                continue
            token, position = torch.where(top_k_index == index)
            out = self.expert(index, hidden_states[token])
            out = out * top_k_weights[token, position, None]
            total.index_add_(0, token, out.to(total.dtype))
        return total
