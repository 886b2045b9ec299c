"""How much the model's output feels an error of each layer: per token, and per pair of outputs.

One backward pass over the calibration data, through random signs put on the model's first output,
gives gradients g of a layer's output whose mean g g^T says which errors of its columns matter, and
which cancel (Gauss-Newton: the squared error of the model's output is the mean of g E[e e^T] g). As
in K-FAC (Martens & Grosse, 2015) it is split in two factors: O = mean g g^T for the outputs, and
|g|^2 as weights of the tokens whose second moments are the other factor.
"""

from __future__ import annotations

import math
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from .calibration import Calls, to_device

OUTPUT_DAMPING = 0.1  # of the mean diagonal: a factorised curvature is not to be taken at its word
# A few tokens (separators) can have most of the gradient; beyond this many times the mean they
# count no more, since other text has other ones.
MAX_WEIGHT = 16.0


class Sensitivity:
    """Of one layer: `output` float32 [N, N], and `weights`, of each sample float32 [...] by token
    (None: no gradient came, or the layer ran more than once)."""

    def __init__(self, n: int, device: torch.device) -> None:
        self.output = torch.zeros((n, n), dtype=torch.float32, device=device)
        self.weights: list[torch.Tensor | None] = []

    def add(self, gradient: torch.Tensor, sample: int) -> None:
        """Gradient [..., N] of one run of the layer in sample number `sample`."""
        rows = gradient.detach().float().reshape(-1, gradient.shape[-1])
        self.output.addmm_(rows.t(), rows)
        known = len(self.weights)
        self.weights += [None] * (sample + 1 - known)
        if sample >= known:
            self.weights[sample] = rows.square().sum(-1).view(gradient.shape[:-1]).cpu()
        else:
            self.weights[sample] = None

    def finish(self, samples: int) -> Sensitivity | None:
        """Normalised: a mean weight of 1, a mean diagonal of 1 and damping; None without data, or
        where a gradient overflowed."""
        self.weights += [None] * (samples - len(self.weights))
        present = [w for w in self.weights if w is not None]
        mean = float(torch.diagonal(self.output).mean())
        if not present or not 0 < mean < math.inf:
            return None
        self.output /= mean
        torch.diagonal(self.output).add_(OUTPUT_DAMPING)
        usual = float(torch.cat([w[w > 0] for w in present]).mean())
        self.weights = [
            None if w is None else (w / usual).clamp_max(MAX_WEIGHT) for w in self.weights
        ]
        return self


def measure(calls: Calls, layers: dict[str, nn.Linear], seed: int = 0) -> dict[str, Sensitivity]:
    """Sensitivities of `layers`, by name; layers that the output does not depend on are left out.

    Memory: the activations of one sample, and N*N floats for each layer.
    """
    found = {n: Sensitivity(m.out_features, m.weight.device) for n, m in layers.items()}
    generator = torch.Generator().manual_seed(seed)
    with without_parameters(calls.run), torch.enable_grad():
        for sample, (args, kwargs, mask) in enumerate(calls.samples):
            with ExitStack() as stack:
                for name, layer in layers.items():
                    hook = _observer(found[name], sample)
                    stack.callback(layer.register_forward_hook(hook).remove)
                output = _first_tensor(
                    calls.run(*to_device(args, calls.device), **to_device(kwargs, calls.device))
                )
            if output.requires_grad:
                _signed_sum(output, mask, generator).backward()
    finished = {name: item.finish(len(calls.samples)) for name, item in found.items()}
    return {name: item for name, item in finished.items() if item is not None}


def _observer(item: Sensitivity, sample: int):
    def observe(_module, _args, output):
        if not output.requires_grad:  # the first layer: nothing before it has a gradient
            output = output.detach().requires_grad_().clone()
        output.register_hook(lambda gradient: item.add(gradient, sample))
        return output

    return observe


@contextmanager
def without_parameters(model: nn.Module):
    """Parameters need no gradients of their own."""
    wanted = [p for p in model.parameters() if p.requires_grad]
    for parameter in wanted:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in wanted:
            parameter.requires_grad_(True)


def _first_tensor(output) -> torch.Tensor:
    """The first tensor of what a model returns: hidden states, logits."""
    while not isinstance(output, torch.Tensor):
        values = list(output.values()) if hasattr(output, "values") else list(output)
        output = values[0]
    return output


def _signed_sum(output: torch.Tensor, mask, generator) -> torch.Tensor:
    signs = torch.randint(0, 2, output.shape, generator=generator).mul_(2).sub_(1)
    signs = signs.to(output.device, output.dtype)
    if mask is not None and mask.shape == output.shape[:-1]:
        signs = signs * mask.to(output.device).unsqueeze(-1)
    return (output * signs).sum()
