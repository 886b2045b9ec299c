"""Pinned kernels on a GPU: the call takes the kernel, and a model's step is measured with it."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

import marlin_cutlass as mc
from marlin_cutlass import QuantLinear, pinning

pytestmark = pytest.mark.gpu


def layer_of(n: int, k: int) -> QuantLinear:
    q = torch.randint(0, 16, (k, n), dtype=torch.uint8, device="cuda")
    scales = torch.rand(k // 128, n, device="cuda").half() * 0.01 + 0.005
    return QuantLinear.from_packed(mc.pack(q, scales, group_size=128))


def test_a_pinned_kernel_runs_for_its_rows() -> None:
    layer, x = layer_of(512, 1024), torch.randn(16, 1024, device="cuda").half()
    names = pinning.candidates(layer, 16)
    assert len(names) > 3
    for name in names:
        layer.pin(16, name)
        assert torch.equal(layer(x), mc.gemm(x, layer.weight_packed, kernel=name))
        assert torch.equal(layer(x[:3]), mc.gemm(x[:3], layer.weight_packed))
        assert torch.equal(layer(x.view(4, 4, -1)).view(16, -1), layer(x))
    with pytest.raises(ValueError, match="m_tile=99"):
        layer.pin(16, "w4a16_hopper_m99_n128k256_w2x2_p8_dp_c1")
    assert layer.pins == {16: names[-1]}
    compiled = torch.compile(layer, fullgraph=True)
    assert torch.equal(compiled(x), layer(x))


def test_pins_kernels_of_a_model_by_its_step() -> None:
    model = nn.Sequential(layer_of(4096, 4096), layer_of(12288, 4096), layer_of(4096, 12288))
    x = torch.randn(16, 4096, device="cuda").half()
    expected = model(x)

    def seconds() -> float:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = model(x)
        for _ in range(3):
            graph.replay()
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(20):
            graph.replay()
        torch.cuda.synchronize()
        assert torch.allclose(out.float(), expected.float(), atol=0.1, rtol=0.02)
        return time.perf_counter() - start

    found = pinning.pin_kernels(model, 16, seconds)
    assert len(found) == 3 and all(p.seconds <= p.table_seconds for p in found)
    for p in found:
        layers = [
            m for m in model if (m.in_features, m.out_features) == (p.in_features, p.out_features)
        ]
        assert len(layers) == p.layers == 1
        assert layers[0].pins == ({16: p.kernel} if p.kernel else {})
