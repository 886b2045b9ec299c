"""What the output feels: measured sensitivities, coupled refinement, weighted moments."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from marlin_cutlass import host_library
from marlin_cutlass.errors import LibraryError
from marlin_cutlass.quantize import GptqOptions, Moments, quantize_gptq, quantize_model
from marlin_cutlass.quantize.calibration import model_calls
from marlin_cutlass.quantize.refine import _better_scale
from marlin_cutlass.quantize.sensitivity import OUTPUT_DAMPING, Sensitivity, measure

K, HIDDEN, N = 64, 96, 16


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(K, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, N)).eval()


def correlated(tokens: int, k: int = K, seed: int = 1) -> torch.Tensor:
    gen = torch.Generator().manual_seed(seed)
    mix = torch.randn(k, k, generator=gen) * torch.linspace(1, 0.05, k)
    return torch.randn(tokens, k, generator=gen) @ mix.t()


def normalised(matrix: torch.Tensor) -> torch.Tensor:
    return matrix / torch.diagonal(matrix).mean()


def test_the_measure_is_the_mean_jacobian():
    model, x = mlp(), correlated(20000)
    found = measure(model_calls(model, list(x.split(1000))), {"0": model[0], "2": model[2]})
    with torch.no_grad():
        active = (model[0](x) > 0).float()
    after = model[2].weight.detach()
    expected = (active.t() @ active / len(x)) * (after.t() @ after)
    expected = normalised(expected) + OUTPUT_DAMPING * torch.eye(HIDDEN)
    assert float((found["0"].output - expected).norm() / expected.norm()) < 0.06
    last = (1 + OUTPUT_DAMPING) * torch.eye(N)  # signs are independent
    assert float((found["2"].output - last).norm() / last.norm()) < 0.06
    weights = torch.cat(found["0"].weights)
    energy = active @ after.square().sum(0)
    assert weights.shape == (20000,) and float(weights.mean()) == pytest.approx(1, rel=1e-3)
    assert float(torch.corrcoef(torch.stack((weights, energy)))[0, 1]) > 0.1
    assert all(p.requires_grad and p.grad is None for p in model.parameters())


class Padded(nn.Module):
    """Returns a dict, like a model of Transformers; one layer leads nowhere, one runs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.twice, self.aside = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x, attention_mask=None):
        hidden = self.twice(self.twice(self.inside(x)))
        return {"hidden": hidden, "other": self.aside(hidden)}


def test_padding_layers_off_the_path_and_layers_that_run_twice():
    model = Padded().eval()
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    calls = model_calls(model, [{"x": torch.randn(2, 3, 8), "attention_mask": mask}])
    layers = dict(model.named_children())
    found = measure(calls, layers)
    assert set(found) == {"inside"}  # "twice" has no weights of its tokens, "aside" no gradient
    assert torch.equal(found["inside"].weights[0] > 0, mask.bool())


def test_weighted_moments():
    x, r = torch.randn(2, 5, 6), torch.randn(2, 5, 6)
    weights, mask = torch.rand(2, 5), torch.rand(2, 5) > 0.3
    weights[0, 0], mask[0, 0] = 0, True
    found = Moments(6, reference=True)
    for i in range(2):
        found.add(x[i : i + 1], mask[i : i + 1], r[i : i + 1], weights[i : i + 1])
    w = weights[mask] / weights[mask].sum()
    assert torch.allclose(found.matrix, 2 * (x[mask] * w[:, None]).t() @ x[mask], atol=1e-5)
    assert torch.allclose(found.cross, 2 * (r[mask] * w[:, None]).t() @ x[mask], atol=1e-5)
    assert torch.allclose(found.mean, w @ x[mask], atol=1e-5)
    assert torch.allclose(found.reference_mean, w @ r[mask], atol=1e-5)
    assert found.tokens == int(mask.sum())


@pytest.mark.parametrize("g", [32, -1])
@pytest.mark.parametrize("symmetric", [True, False])
def test_coupled_columns_are_refined_together(g, symmetric):
    moments = Moments(K)
    moments.add(correlated(1500))
    w = torch.randn(HIDDEN, K) * 0.05
    output = normalised(torch.cov(torch.randn(HIDDEN, 40))) + 0.1 * torch.eye(HIDDEN)
    damped = moments.matrix + 0.1 * torch.diagonal(moments.matrix).mean() * torch.eye(K)
    options = GptqOptions(group_size=g, symmetric=symmetric)
    errors = []
    for given in (None, output):
        found, loss = quantize_gptq(w, moments.matrix, options, output=given)
        left = found.dequantize() - w.t()
        assert loss == pytest.approx(float((left * (damped @ left)).sum()) / 2, rel=1e-3)
        errors.append(float((left * (damped @ left @ output)).sum()))
    assert errors[1] < 0.9 * errors[0]
    same, _ = quantize_gptq(w, moments.matrix, options, output=torch.eye(HIDDEN))
    plain, _ = quantize_gptq(w, moments.matrix, options)
    assert float((same.q != plain.q).float().mean()) < 0.01  # nothing is coupled


def test_a_model_quantised_by_what_its_output_feels():
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 32)).eval()
    samples, held_out = list(correlated(3000, 128).split(300)), correlated(600, 128, seed=1)
    expected, errors = model(held_out).detach(), []
    for felt in (False, True):
        work = copy.deepcopy(model)
        quantize_model(work, samples, group_size=128, sensitivity=felt, progress=False)
        errors.append(float((work(held_out).detach() - expected).norm() / expected.norm()))
    assert errors[1] < 0.97 * errors[0]


def test_coupling_keeps_what_sparsity_drops():
    moments = Moments(K)
    moments.add(correlated(1500))
    output = normalised(torch.cov(torch.randn(HIDDEN, 200))) + 0.1 * torch.eye(HIDDEN)
    options = GptqOptions(group_size=64, sparsity="2:4")
    found, _ = quantize_gptq(torch.randn(HIDDEN, K), moments.matrix, options, output=output)
    kept = (found.q != 8).view(K // 4, 4, HIDDEN).sum(1)
    assert int(kept.max()) <= 2 and float(kept.float().mean()) > 1.5
    assert found.to_packed().sparse


def test_a_column_without_steps_does_not_stop_the_others():
    torch.manual_seed(5)
    hessian = torch.cov(torch.randn(64, 300)) + 0.1 * torch.eye(64)
    output = normalised(torch.cov(torch.randn(4, 40))) + 0.1 * torch.eye(4)
    steps = torch.randint(-8, 8, (64, 4)).float()
    steps[:, 1] = 0
    gradient = hessian @ (0.1 * steps) @ output  # the scales are 0.1 too small
    scale = torch.full((4,), 0.4)
    shift = _better_scale(steps, hessian, gradient, scale, torch.float32, output)
    assert float(shift[1]) == 0 and bool((shift[[0, 2, 3]] > 0).all())
    assert bool(torch.isfinite(scale).all())


def test_a_gradient_that_overflows_says_nothing():
    item = Sensitivity(2, torch.device("cpu"))
    item.add(torch.tensor([[1.0, float("inf")]]), 0)
    assert item.finish(1) is None


def test_what_sensitivity_needs_is_said_before_the_work(monkeypatch):
    model, samples = nn.Sequential(nn.Linear(128, 64)), [torch.ones(2, 128)]
    with pytest.raises(ValueError, match="sensitivity=True needs method='gptq'"):
        quantize_model(model, method="rtn", sensitivity=True, progress=False)
    with pytest.raises(TypeError, match="sensitivity='yes'"):
        quantize_model(model, samples, sensitivity="yes", progress=False)
    monkeypatch.setattr(host_library, "_library", None)
    monkeypatch.setattr(host_library, "_failed", True)
    with pytest.raises(LibraryError, match="no C"):
        quantize_model(model, samples, sensitivity=True, progress=False)
    assert isinstance(model[0], nn.Linear)
