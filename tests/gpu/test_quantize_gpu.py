"""Quantising on a GPU: refinement there, coupled columns by way of the host, sensitivities."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from marlin_cutlass.nn import QuantLinear
from marlin_cutlass.quantize import GptqOptions, Moments, quantize_gptq, quantize_model

pytestmark = pytest.mark.gpu


def inputs(tokens: int, k: int = 256) -> torch.Tensor:
    gen = torch.Generator().manual_seed(0)
    mix = torch.randn(k, k, generator=gen) * torch.linspace(1, 0.05, k)
    return torch.randn(tokens, k, generator=gen) @ mix.t()


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("coupled", [False, True])
@pytest.mark.parametrize("group_size", [64, -1])
def test_the_gpu_reaches_the_error_of_the_cpu(symmetric, coupled, group_size):
    moments, weight = Moments(256), torch.randn(96, 256) * 0.02
    moments.add(inputs(2000))
    output = torch.cov(torch.randn(96, 200)) if coupled else None
    options = GptqOptions(group_size=group_size, symmetric=symmetric)
    _, expected = quantize_gptq(weight, moments.matrix, options, output=output)
    on_gpu = None if output is None else output.cuda()
    found, loss = quantize_gptq(weight.cuda(), moments.matrix.cuda(), options, output=on_gpu)
    assert found.q.is_cuda
    assert loss == pytest.approx(expected, rel=0.03)  # codes at ties fall either way
    left = found.dequantize().cpu() - weight.t()
    damped = moments.matrix + 0.1 * torch.diagonal(moments.matrix).mean() * torch.eye(256)
    assert loss == pytest.approx(float((left * (damped @ left)).sum()) / 2, rel=1e-2)


def test_a_model_on_the_gpu_with_sensitivities():
    model = nn.Sequential(nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 64)).cuda().eval()
    x = inputs(1200).cuda()
    expected, work = model(x).detach(), copy.deepcopy(model)
    report = quantize_model(
        work, list(x.split(200)), group_size=128, sensitivity=True, progress=False
    )
    assert [layer.method for layer in report.layers] == ["gptq", "gptq"]
    assert all(isinstance(work[i], QuantLinear) and work[i].packed.is_cuda for i in (0, 2))
    assert float((work(x).detach() - expected).norm() / expected.norm()) < 0.1
