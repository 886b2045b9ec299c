"""Kernels pinned by what a step takes: which calls they hold for, and how they are chosen."""

from __future__ import annotations

import copy
import pickle
from types import SimpleNamespace

import fake_cuda
import pytest
import torch
from torch import nn

import marlin_cutlass as mc
from marlin_cutlass import QuantLinear, library, ops, pin_kernels, pinning

SMALL, LARGE = (128, 64), (512, 512)


def model_of(*shapes: tuple[int, int]) -> nn.Sequential:
    return nn.Sequential(*(QuantLinear(k, n) for k, n in shapes))


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers that say they are on a GPU, and three kernels for every shape."""
    monkeypatch.setattr(QuantLinear, "device", torch.device("cuda", 0))
    monkeypatch.setattr(QuantLinear, "_codes_of", lambda self, kernel: {torch.float16: 7})
    monkeypatch.setattr(pinning, "candidates", lambda layer, rows: ["a", "b", "c"])


class Step:
    """Seconds of a step in which each layer's pinned kernel takes what `costs` says."""

    def __init__(self, model: nn.Module, costs: dict, rows: int = 16) -> None:
        self.model, self.costs, self.rows, self.calls = model, costs, rows, 0

    def __call__(self) -> float:
        self.calls += 1
        layers = [m for m in self.model.modules() if isinstance(m, QuantLinear)]
        return sum(self.costs[x.in_features, x.pins.get(self.rows)] for x in layers)


def test_pins_the_best_of_each_shape(on_gpu: None) -> None:
    model = model_of(SMALL, LARGE, SMALL)
    costs = {(128, None): 2.0, (128, "a"): 1.0, (128, "b"): 1.5, (128, "c"): 3.0}
    costs |= {(512, None): 5.0, (512, "a"): 6.0, (512, "b"): 5.5, (512, "c"): 5.2}
    step = Step(model, costs)
    found = pin_kernels(model, 16, step)
    # The largest first, and the table's choice where nothing is better.
    assert [(p.in_features, p.layers, p.kernel) for p in found] == [(512, 1, None), (128, 2, "a")]
    assert (found[0].seconds, found[0].table_seconds) == (9.0, 9.0)
    assert (found[1].seconds, found[1].table_seconds) == (7.0, 9.0)
    assert [layer.pins for layer in model] == [{16: "a"}, {}, {16: "a"}]
    assert step.calls == 2 * (1 + 3 + 4)


def test_a_gain_too_small_is_none(on_gpu: None) -> None:
    model = model_of(SMALL)
    costs = {(128, None): 1.0, (128, "a"): 0.996, (128, "b"): 1.0, (128, "c"): 2.0}
    assert pin_kernels(model, 16, Step(model, costs))[0].kernel is None
    assert pin_kernels(model, 16, Step(model, costs), least_gain=0.003)[0].kernel == "a"


def test_neither_a_lucky_time_nor_a_cool_gpu_decides(on_gpu: None) -> None:
    model = model_of(SMALL)
    # Warm-up; a, b, c; then the table and a in turns.
    times = iter((0.5, 0.9, 1.1, 1.1, 1.0, 1.02, 1.0, 0.98))
    found = pin_kernels(model, 16, lambda: next(times))[0]
    assert (found.kernel, model[0].pins, next(times, None)) == (None, {}, None)
    times = iter((0.5, 0.9, 1.1, 1.1, 1.0, 0.92, 1.0, 0.96))
    found = pin_kernels(model, 16, lambda: next(times))[0]
    assert (found.kernel, model[0].pins) == ("a", {16: "a"})
    assert (found.seconds, found.table_seconds) == (pytest.approx(0.94), 1.0)


def test_without_candidates_the_table_stays(on_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinning, "candidates", lambda layer, rows: [])
    model = model_of(SMALL)
    assert pin_kernels(model, 16, lambda: 2.0) == [pinning.Pin(128, 64, 1, None, 2.0, 2.0)]


def test_an_error_takes_pins_back(on_gpu: None) -> None:
    model = model_of(SMALL)
    model[0].pin(16, "before")

    def fails() -> float:
        if model[0].pins.get(16) == "b":
            raise RuntimeError("out of memory")
        return 1.0

    with pytest.raises(RuntimeError, match="out of memory"):
        pin_kernels(model, 16, fails)
    assert model[0].pins == {16: "before"}
    for wrong in (float("nan"), 0.0, -1.0):
        with pytest.raises(ValueError, match="seconds of a step are required"):
            pin_kernels(model, 16, lambda wrong=wrong: wrong)
    assert model[0].pins == {16: "before"}


def test_bad_arguments() -> None:
    layer = QuantLinear(*SMALL)
    for rows, error in ((0, ValueError), (-1, ValueError), (1.5, TypeError), (True, TypeError)):
        with pytest.raises(error, match=f"rows={rows}"):
            layer.pin(rows, None)
        with pytest.raises(error, match=f"rows={rows}"):
            pin_kernels(layer, rows, lambda: 1.0)
    with pytest.raises(TypeError, match="kernel=3 must be the name"):
        layer.pin(1, 3)
    with pytest.raises(ValueError, match="kernel='name' is a CUDA kernel and the layer is on cpu"):
        layer.pin(1, "name")
    with pytest.raises(ValueError, match=r"least_gain=1\.5"):
        pin_kernels(layer, 1, lambda: 1.0, least_gain=1.5)
    with pytest.raises(ValueError, match="no QuantLinear layer"):
        pin_kernels(nn.Linear(4, 4), 1, lambda: 1.0)
    with pytest.raises(ValueError, match="on cpu: one CUDA device is required"):
        pin_kernels(layer, 1, lambda: 1.0)
    assert layer.pins == {}


class Table(SimpleNamespace):
    """Of kernels with the names given; each is for float16."""

    def find(self, name: str, dtype: str, *form: object) -> int:
        if dtype != "f16" or name not in self.names:
            raise ValueError(f"kernel={name!r} is not built")
        return self.names.index(name)


@pytest.fixture
def one_table(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A GPU whose table has kernels "x" and "name"; variants that the operators are given."""
    table = Table(names=["x", "name"])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(library, "table_for_capability", lambda *capability: table)
    monkeypatch.setattr(library, "forced_index", lambda name, _, *form: table.find(name, *form))
    monkeypatch.setattr(QuantLinear, "device", torch.device("cuda", 0))
    calls: list[int] = []

    def compact(a, packed, scale, form, bias=None, perm=None, variant=ops.AUTO):
        calls.append(variant)
        return a[..., :64]

    monkeypatch.setattr(ops, "GEMM_COMPACT", compact)
    return calls


def test_a_pin_holds_for_its_rows_and_dtype(one_table: list[int]) -> None:
    layer = QuantLinear(*SMALL)
    layer.pin(4, "name")
    for x in (torch.zeros(4, 128), torch.zeros(2, 2, 128), torch.zeros(3, 128)):
        layer(x.half())
    layer(torch.zeros(4, 128).bfloat16())  # for which it is not built
    assert one_table == [1, 1, ops.AUTO, ops.AUTO]
    with pytest.raises(ValueError, match="'other' is not built"):
        layer.pin(4, "other")
    layer(torch.zeros(4, 128).half())
    assert one_table[-1] == 1 and layer.pins == {4: "name"}  # as before
    layer.pin(4, "x")
    layer(torch.zeros(4, 128).half())
    layer.pin(4, None)
    layer.pin(5, None)  # there was none
    layer(torch.zeros(4, 128).half())
    assert one_table[-2:] == [0, ops.AUTO] and layer.pins == {} and layer._pinned == {}


def test_pins_are_no_state_and_stay_on_their_device(
    one_table: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = QuantLinear(*SMALL)
    layer.pin(4, "name")
    assert "pin" not in "".join(layer.state_dict())
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), QuantLinear(*SMALL)):
        assert other.pins == {} and other._pinned == {}
    assert layer.bfloat16().pins == {4: "name"}
    monkeypatch.setattr(QuantLinear, "device", property(lambda self: self.packed.device))
    layer.to("meta")
    assert layer.pins == {} and layer._pinned == {}


def test_a_compiled_layer_sees_pins_without_a_graph_break() -> None:
    layer = QuantLinear(*SMALL)
    layer._pinned = {(5, torch.float16): 7}  # as on a GPU
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for rows in (4, 3):
        assert compiled(torch.zeros(rows, 128).half()).shape == (rows, 64)
    with pytest.raises(ValueError, match="variant=7 is a CUDA kernel"):
        compiled(torch.zeros(5, 128).half())


def test_a_layer_pickled_before_there_were_pins() -> None:
    old = QuantLinear(*SMALL)
    del old.pins, old._pinned
    new = pickle.loads(pickle.dumps(old))
    assert new.pins == {} and new(torch.zeros(2, 128).half()).shape == (2, 64)


def test_candidates_share_family_and_row_tile_of_the_choice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    entries = [
        fake_cuda.kernel("hopper", m_tile=16, n_sm=64),
        fake_cuda.kernel("hopper", m_tile=16, n_sm=128),
        fake_cuda.kernel("hopper", m_tile=16, n_sm=256),
        fake_cuda.kernel("hopper", m_tile=32, n_sm=64),
        fake_cuda.kernel("hopper", "bf16", m_tile=16, n_sm=64),
        fake_cuda.kernel("ampere", m_tile=16),
        fake_cuda.kernel("hopper", m_tile=16, n_sm=64, stages=3),  # compiled on demand
    ]
    names = [entry["name"] for entry in entries]
    kernels = [
        SimpleNamespace(
            **e, format=(e["dtype"], e["zeros"], e["group_size"]), geometry=f"of {e['name']}"
        )
        for e in entries
    ]
    table = SimpleNamespace(kernels=kernels, on_demand=1, select=lambda *a: (kernels[1], None))
    properties = SimpleNamespace(major=9, minor=0, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(library, "table_for_capability", lambda *capability: table)
    expected = [f"of {names[0]}", f"of {names[2]}"]
    assert pinning.candidates(QuantLinear(*SMALL), 16) == expected


def test_is_public() -> None:
    assert mc.pin_kernels is pin_kernels and "pin_kernels" in mc.__all__
