"""Block reconstruction: codes, scales and biases of a block learnt together, after GPTQ.

GPTQ rounds one layer at a time for a quadratic model of its own output. Here all layers of a block
are adjusted to each other by gradient descent on what the block gives in the original model, from
inputs that carry the errors so far (BRECQ, Li et al., 2021; learnt rounding as in AutoRound, Cheng
et al., 2023; scales as in LSQ, Esser et al., 2020). Codes are rounded latent values whose gradient
passes straight through the rounding; the forward pass only ever sees weights that can be packed.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.func import functional_call

from ..formats.weight import SYMMETRIC_ZERO, QuantizedWeight
from .calibration import Calls, first_output, to_device
from .grid import MAX_CODE, round_mantissa
from .sensitivity import without_parameters

STEP_TOKENS = 512  # samples are taken together up to this: short ones alone say too little
# On all-MiniLM-L6-v2's last block, judged on sentences that are neither in calibration nor test
# (CPU, 2026-11-30), 5e-4 to 3e-3 did equally well; 5e-3, with PULL = 1 and on the whole model, lost
# more than it found.
CODE_RATE = 2e-3  # steps of the grid
SCALE_RATE = 1e-3  # of a layer's mean scale
PULL = 0.5  # latent values start between the code (0) and the original weight (1)
WARM_UP = 10  # steps until the rates are whole: Adam's moments are empty before


class _Rounded(torch.autograd.Function):
    """(round(v) within its limits) * scale for v [G, g, N], scale [G, 1, N] of `dtype`'s mantissa.

    Both roundings pass gradients straight through.
    """

    @staticmethod
    def forward(ctx, v, scale, low, high, dtype):
        steps = v.round().clamp(low, high)
        scale = round_mantissa(scale, dtype)
        ctx.save_for_backward(steps, scale)
        return steps * scale

    @staticmethod
    def backward(ctx, gradient):
        steps, scale = ctx.saved_tensors
        return gradient * scale, (gradient * steps).sum(1, keepdim=True), None, None, None


class LearntLayer:
    """One layer's latent codes [G, g, N], scales [G, 1, N] and bias [N] or None, in float32."""

    def __init__(
        self,
        layer: nn.Linear,
        weight: QuantizedWeight,
        original: torch.Tensor,
        scale_dtype: torch.dtype,
    ) -> None:
        self.layer, self.weight, self.dtype = layer, weight, scale_dtype
        # Rows of a group side by side, and the way back; None where they are already.
        self.order = None if weight.g_idx is None else torch.argsort(weight.groups, stable=True)
        self.inverse = None if self.order is None else torch.argsort(self.order)
        self.scale = weight.scales.float().unsqueeze(1).clone()
        zeros = torch.full_like(self.scale, SYMMETRIC_ZERO)
        self.zeros = zeros if weight.zeros is None else weight.zeros.float().unsqueeze(1)
        steps = self._grouped(weight.q.float()) - self.zeros
        self.low, self.high = self._limits(steps)
        safe = torch.where(self.scale != 0, self.scale, 1)
        rest = (self._grouped(original.t().float()) / safe - steps) * PULL
        self.v = steps + rest.clamp_(-0.49, 0.49)
        self.bias = None if layer.bias is None else layer.bias.detach().float().clone()

    def _grouped(self, rows: torch.Tensor) -> torch.Tensor:
        rows = rows if self.order is None else rows[self.order]
        return rows.reshape(self.scale.shape[0], -1, rows.shape[1])

    def _natural(self, grouped: torch.Tensor) -> torch.Tensor:
        rows = grouped.flatten(0, 1)
        return rows if self.inverse is None else rows[self.inverse]

    def _limits(self, steps) -> tuple[torch.Tensor, torch.Tensor]:
        """Least and largest step; what sparsity dropped, and groups of zeros, stay as they are."""
        free = self.scale != 0  # [G, 1, N]; with sparsity [G, g, N]
        if self.weight.sparse:
            free = free & (steps != 0)
        return torch.where(free, -self.zeros, 0.0), torch.where(free, MAX_CODE - self.zeros, 0.0)

    def parameters(self) -> list[dict]:
        """Adam's parameter groups, each with its rate; from now on they want gradients."""
        size = float(self.scale.abs().mean())
        groups = [
            {"params": [self.v], "lr": CODE_RATE},
            {"params": [self.scale], "lr": SCALE_RATE * size},
        ]
        if self.bias is not None:
            # What steps of CODE_RATE in all codes of a column do to it, at random, for inputs of 1.
            depth = math.sqrt(self.v.shape[0] * self.v.shape[1])
            groups.append({"params": [self.bias], "lr": CODE_RATE * size * depth})
        for group in groups:
            group["params"][0].requires_grad_(True)
        return groups

    def dense(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Weight [N, K] and bias as the layer would have them, in its dtype."""
        rounded = _Rounded.apply(self.v, self.scale, self.low, self.high, self.dtype)
        bias = None if self.bias is None else self.bias.to(self.layer.bias.dtype)
        return self._natural(rounded).t().to(self.layer.weight.dtype), bias

    @torch.no_grad()
    def result(self) -> tuple[QuantizedWeight, torch.Tensor | None]:
        """What was learnt: codes and scales, and the bias."""
        steps = self.v.round().clamp(self.low, self.high)
        q = self._natural(steps + self.zeros).to(torch.uint8)
        scales = round_mantissa(self.scale.detach(), self.dtype).squeeze(1)
        bias = None if self.bias is None else self.bias.detach().to(self.layer.bias.dtype)
        return replace(self.weight, q=q, scales=scales), bias


@dataclass(frozen=True)
class Errors:
    """Squared error of a block's output, as a share of its energy, before and after."""

    before: float
    after: float


def reconstruct_block(
    block: nn.Module,
    calls: Calls,
    targets: Calls,
    learnt: dict[str, LearntLayer],
    steps: int,
    seed: int = 0,
) -> Errors:
    """Learn `learnt` (by name inside `block`) for `steps` steps; the same seed gives the same.

    calls: the block's inputs in the quantised model. targets: the original block's outputs, as
    first arguments. Memory: about eight float32 copies of the block's weights, and the activations
    of STEP_TOKENS tokens or of the longest sample.
    """
    groups = [group for layer in learnt.values() for group in layer.parameters()]
    rates = [group["lr"] for group in groups]
    optimiser = torch.optim.Adam(groups, betas=(0.9, 0.99))
    samples = list(zip(calls.samples, targets.samples, strict=True))
    with torch.no_grad():
        before = float(_error(block, calls.device, samples, {}))
    batches = _batches(samples, random.Random(seed))
    for step in range(steps):
        for group, rate in zip(optimiser.param_groups, rates, strict=True):
            group["lr"] = rate * _share(step, steps)
        optimiser.zero_grad()
        with torch.enable_grad(), without_parameters(block):
            _error(block, calls.device, next(batches), _replaced(learnt)).backward()
        optimiser.step()
    with torch.no_grad():
        return Errors(before, float(_error(block, calls.device, samples, _replaced(learnt))))


def _share(step: int, steps: int) -> float:
    """Of the rates, at a step: WARM_UP steps up, and half a cosine down to 0."""
    return min(1.0, (step + 1) / WARM_UP) * 0.5 * (1 + math.cos(math.pi * step / steps))


def _replaced(learnt: dict[str, LearntLayer]) -> dict[str, torch.Tensor]:
    """Parameters of the block in place of its own."""
    found = {}
    for name, layer in learnt.items():
        weight, bias = layer.dense()
        found[f"{name}.weight"] = weight
        if bias is not None:
            found[f"{name}.bias"] = bias
    return found


def _batches(samples: list, generator: random.Random) -> Iterator[list]:
    """Endless random batches of at least STEP_TOKENS tokens; every sample once in a round."""
    batch, tokens = [], 0
    while True:
        for index in generator.sample(range(len(samples)), len(samples)):
            batch.append(samples[index])
            hidden = samples[index][1][0][0]
            tokens += hidden.numel() // hidden.shape[-1]
            if tokens >= STEP_TOKENS:
                yield batch
                batch, tokens = [], 0


def _kept(hidden: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Rows of `hidden` [..., d] that are not padding, float32."""
    hidden = hidden.float()
    if mask is None or mask.shape != hidden.shape[:-1]:
        return hidden.reshape(-1, hidden.shape[-1])
    return hidden[mask.to(hidden.device)]


def _squared(block, device, call, target, replaced) -> tuple[torch.Tensor, float]:
    """Squared error of one sample, and the energy of its target."""
    (args, kwargs, mask), wanted = call, target[0][0]
    args, kwargs = to_device(args, device), to_device(kwargs, device)
    found = first_output(functional_call(block, replaced, args, kwargs))
    wanted = _kept(wanted.to(device), mask)
    return (_kept(found, mask) - wanted).square().sum(), float(wanted.square().sum())


def _error(block, device, samples: list, replaced: dict[str, torch.Tensor]) -> torch.Tensor:
    """Squared error of the block over `samples` as a share of their targets' energy."""
    parts = [_squared(block, device, *pair, replaced) for pair in samples]
    return sum(error for error, _ in parts) / max(sum(energy for _, energy in parts), 1e-30)
