"""Family collective on a GPU: every built unit against fp32, ragged rows, views, streams, graphs.

`python -m pytest tests/gpu/test_collective_gpu.py`; the units are those beside the device's table
(python build.py --arch sm_90a --family collective). Skipped where none is built.
"""

from __future__ import annotations

import functools

import pytest
import torch

import marlin_cutlass as mc
from marlin_cutlass import bench, collective
from marlin_cutlass.errors import UnsupportedArchError

pytestmark = pytest.mark.gpu
TOLERANCE = {torch.float16: 1e-3, torch.bfloat16: 8e-3}
HOW = "no unit is built: python build.py --arch sm_90a --family collective"


def built_units() -> list[collective.Unit]:
    if not torch.cuda.is_available():
        return []
    try:
        return list(collective.built().values())
    except UnsupportedArchError:
        return []


UNITS = built_units()
every_unit = pytest.mark.parametrize(
    "unit", UNITS or [None], ids=lambda u: u.name if u else "none built"
)


@pytest.fixture(autouse=True)
def _built() -> None:
    if not UNITS:
        pytest.skip(HOW)


@functools.cache
def weight(k: int, n: int, group_size: int, act_order: bool = False) -> mc.PackedWeight:
    g = torch.Generator().manual_seed(k + n)
    q = torch.randint(0, 16, (k, n), dtype=torch.uint8, generator=g)
    scales = (torch.rand(k // group_size, n, generator=g) * 0.1 + 0.01).half()
    g_idx = (torch.arange(k) // group_size)[torch.randperm(k, generator=g)] if act_order else None
    return mc.pack(q, scales, group_size=group_size, g_idx=g_idx).to("cuda")


@functools.cache
def dense(*form) -> torch.Tensor:
    return mc.dequantize(weight(*form), torch.float32).double()


def activations(unit: collective.Unit, m: int, k: int) -> torch.Tensor:
    g = torch.Generator(device="cuda").manual_seed(m)
    return torch.randn(m, k, generator=g, device="cuda").to(collective.TORCH_DTYPES[unit.dtype])


def error(out: torch.Tensor, a: torch.Tensor, *form) -> float:
    exact = a.double() @ dense(*form)
    return float((out.double() - exact).norm() / exact.norm())


def wrong(unit: collective.Unit, out: torch.Tensor, a: torch.Tensor, *form) -> bool:
    return not error(out, a, *form) < TOLERANCE[a.dtype]


@every_unit
@pytest.mark.parametrize("group_size", [64, 128])
@pytest.mark.parametrize("m", [1, 7, 16, 65, 300])
def test_ragged_rows(unit, m: int, group_size: int) -> None:
    """K of 66 tiles, N that ends inside a tile and inside an atom; three calls, the same result."""
    k, n = 4224, 1032
    a, w = activations(unit, m, k), weight(k, n, group_size)
    out = torch.full((m, n), float("nan"), device="cuda", dtype=a.dtype)
    assert mc.gemm(a, w, out=out, kernel=unit.name) is out
    assert not wrong(unit, out, a, k, n, group_size)
    for _ in range(3):
        again = mc.gemm(a, w, kernel=unit.name)
        assert not wrong(unit, again, a, k, n, group_size)
        if unit.decomposition == "data_parallel":
            assert torch.equal(again, out)


@every_unit
@pytest.mark.parametrize("k, n, m", [(64, 8, 3), (128, 64, 16), (8192, 512, 33), (512, 8192, 130)])
def test_few_and_many_tiles(unit, k: int, n: int, m: int) -> None:
    a, w = activations(unit, m, k), weight(k, n, 64)
    assert not wrong(unit, mc.gemm(a, w, kernel=unit.name), a, k, n, 64)


@every_unit
def test_identity_gives_the_weight(unit) -> None:
    """Every code and scale in its place: one rounding of a product of two representable numbers."""
    k, n = 640, 200
    dtype = collective.TORCH_DTYPES[unit.dtype]
    out = mc.gemm(torch.eye(k, device="cuda", dtype=dtype), weight(k, n, 128), kernel=unit.name)
    expected = dense(k, n, 128)
    limit = 2.0**-10 if dtype == torch.float16 else 2.0**-7
    assert torch.all((out.double() - expected).abs() <= expected.abs() * limit)


@every_unit
def test_views_outputs_and_act_order(unit) -> None:
    k, n, m = 1024, 520, 19
    w = weight(k, n, 128)
    a = activations(unit, m, 2 * k + 8)  # rows of whole 16 bytes
    for view in (a[:, 8 : 8 + k], a[:, 1 : 1 + k], a[::2, :k]):
        assert not wrong(unit, mc.gemm(view, w, kernel=unit.name), view, k, n, 128)
    for width in (n, n + 8, n + 1):
        room = torch.full((m, width), 7.0, device="cuda", dtype=a.dtype)
        out = room[:, width - n :]
        mc.gemm(a[:, :k], w, out=out, kernel=unit.name)
        assert not wrong(unit, out, a[:, :k], k, n, 128)
        assert bool((room[:, : width - n] == 7).all())
    ordered = weight(k, n, 128, True)
    assert not wrong(unit, mc.gemm(a[:, :k], ordered, kernel=unit.name), a[:, :k], k, n, 128, True)
    batch = a[:18, :k].reshape(3, 6, k)
    assert torch.allclose(
        mc.gemm(batch, w, kernel=unit.name).view(18, n),
        mc.gemm(a[:18, :k], w, kernel=unit.name),
        rtol=2e-2,
        atol=2e-2,
    )


@every_unit
def test_streams_and_graphs(unit) -> None:
    k, n, m = 2048, 1024, 16
    a, w = activations(unit, m, k), weight(k, n, 128).clone()
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), pytest.raises(RuntimeError, match="before the capture"):
        mc.gemm(a, w, kernel=unit.name)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        eager = mc.gemm(a, w, kernel=unit.name)
    side.synchronize()
    assert not wrong(unit, eager, a, k, n, 128)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            out = mc.gemm(a, w, kernel=unit.name)
    for _ in range(2):
        out.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert not wrong(unit, out, a, k, n, 128)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_the_second_gpu() -> None:
    unit, k, n = UNITS[0], 512, 256
    a, w = activations(unit, 9, k), weight(k, n, 128)
    out = mc.gemm(a.to("cuda:1"), w.to("cuda:1"), kernel=unit.name)
    assert out.device.index == 1 and torch.cuda.current_device() == 0
    assert not wrong(unit, out.to("cuda:0"), a, k, n, 128)


def test_the_table_never_chooses_it() -> None:
    for m in (1, 16, 64, 512):
        assert not mc.explain(m, 4096, 4096).kernel.startswith(collective.PREFIX)


def test_explore_times_it() -> None:
    """The timer of explore runs a unit by name, in a chain of calls on copies of the weight."""
    from marlin_cutlass.explore_gpu import GpuTimer
    from marlin_cutlass.explore_measure import Format, measure

    unit = next(u for u in UNITS if u.dtype == "f16")
    timer = GpuTimer()
    copies = timer.open(1024, 1024, Format(), 16)
    (found,) = measure(timer, Format(), 16, {unit.name: 20.0}, copies, warm=True)
    timer.close()
    assert found.refused is None and 1 < found.us < 500 and found.us_warm


def test_the_peer_column() -> None:
    from benchmarks.candidates import Weight
    from benchmarks.collective import Collective

    provider = Collective()
    assert provider.missing() is None
    q, scales = bench.make_weight(1024, 1024)
    provider.prepare(Weight(q, scales, 128, l2_bytes=1 << 20))
    problem = bench.make_problem(16, q, scales)
    (result,) = bench.measure(provider.candidates(problem), problem)
    assert result.status == "ok" and result.note.startswith(collective.PREFIX)
