"""Family collective, run side: the repacked weight, what is refused, and whole calls on a unit that
works on host memory."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import json
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import reference
import torch

import marlin_cutlass as mc
from benchmarks import collective as peer
from benchmarks.candidates import Weight
from generator.arch import GPUS
from generator.problem import ProblemShape
from marlin_cutlass import bench, collective, collective_weight, explore_collective
from marlin_cutlass.errors import LibraryError, TableError
from marlin_cutlass.explore import full_names
from marlin_cutlass.explore_measure import Format
from marlin_cutlass.manifest import MANIFEST_FORMAT
from marlin_cutlass.sparse import pack_sparse

NAME = "w4a16_collective_f16_m16_n128k64_coop_dp"
STREAM_K = "w4a16_collective_f16_m64_n128k64_coop_streamk"
GEOMETRY = "w4a16_collective_m16_n128k64_coop_dp"
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


def packed(k=384, n=72, group_size=128, dtype=torch.float16, seed=0, **more):
    """(weight, its values as float64 [K, N])."""
    g = torch.Generator().manual_seed(seed)
    q = torch.randint(0, 16, (k, n), dtype=torch.uint8, generator=g)
    scales = (torch.rand(k // group_size, n, generator=g) * 0.02 + 0.002).to(dtype)
    weight = mc.pack(q, scales, group_size=group_size, **more)
    g_idx = more.get("g_idx")
    values = reference.weights(q, scales.double(), group_size=group_size, g_idx=g_idx)
    return weight, values


def values_of(w: collective.CollectiveWeight) -> np.ndarray:
    """alpha * code * scale as float64 [K, N], from the documented place of each code."""
    flat = w.codes.numpy().reshape(-1)
    k, n = np.meshgrid(np.arange(w.k), np.arange(w.n), indexing="ij")
    inside = 32 * (n % 8) + 8 * (k // 2 % 4) + 4 * (k % 2) + 2 * (k % 16 // 8) + n % 16 // 8
    place = (k // 16 * w.codes.shape[1] + n // 16) * 256 + inside
    nibbles = flat[place // 2] >> (place % 2 * 4) & 15
    codes = np.where(nibbles > 7, nibbles.astype(np.int64) - 16, nibbles)
    return w.alpha * codes * w.scales.double().numpy()[k // w.group_size, n]


# ---- the weight ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=list(DTYPES))
@pytest.mark.parametrize(
    "k, n, group_size", [(64, 8, 64), (384, 72, 128), (512, 200, 256), (192, 128, 64)]
)
def test_the_repacked_weight_is_the_weight(dtype, k, n, group_size):
    weight, values = packed(k, n, group_size, dtype)
    found = collective.repack(weight, dtype)
    assert found.codes.shape == (k // 16, -(-n // 16), 128) and found.scales.dtype == dtype
    assert found.group_size == min(group_size, 128)
    assert np.array_equal(values_of(found), values)
    assert 0.5 <= float(found.scales.max()) < 1


def test_a_chunk_at_a_time_is_the_same(monkeypatch):
    weight, _ = packed(256, 328, 64)
    whole = collective.repack(weight, torch.float16)
    monkeypatch.setattr("marlin_cutlass.reference.CHUNK_WEIGHTS", 1)
    parts = collective.repack(weight, torch.float16)
    assert torch.equal(whole.codes, parts.codes) and torch.equal(whole.scales, parts.scales)


def test_scales_that_fp16_cannot_hold_keep_their_ratios():
    g = torch.Generator().manual_seed(3)
    q = torch.randint(0, 16, (128, 16), dtype=torch.uint8, generator=g)
    for factor in (2.0**-40, 2.0**40):
        scales = ((torch.rand(2, 16, generator=g) + 0.5) * factor).bfloat16()
        found = collective.repack(mc.pack(q, scales, group_size=64), torch.float16)
        expected = reference.weights(q, scales.double(), group_size=64)
        assert np.array_equal(values_of(found), expected)
    nothing = collective.repack(mc.pack(q, torch.zeros(2, 16), group_size=64), torch.float16)
    assert nothing.alpha == 1 and not values_of(nothing).any()


def test_large_scales_survive_another_default_dtype():
    weight = mc.pack(
        torch.randint(0, 16, (128, 16)).byte(), torch.full((2, 16), 1e6), group_size=64
    )
    expected = collective.repack(weight, torch.float16)
    torch.set_default_dtype(torch.float16)  # as engines do while they load
    try:
        found = collective.repack(weight, torch.float16)
    finally:
        torch.set_default_dtype(torch.float32)
    assert found.alpha == expected.alpha and torch.equal(found.scales, expected.scales)


def test_repack_wants_a_packed_weight_and_a_type_of_activations():
    weight, _ = packed(128, 64, 64)
    with pytest.raises(TypeError, match="PackedWeight, not Tensor"):
        collective.repack(torch.zeros(2, 2), torch.float16)
    with pytest.raises(ValueError, match=r"dtype=torch\.float32: torch\.float16 or"):
        collective.repack(weight, torch.float32)


def test_act_order_keeps_its_permutation():
    g_idx = torch.arange(256)[torch.randperm(256)] // 64
    weight, values = packed(256, 64, 64, g_idx=g_idx)
    found = collective.repack(weight, torch.float16)
    natural = np.empty_like(values)
    natural[found.perm.numpy()] = values_of(found)
    assert np.array_equal(natural, values)


@pytest.mark.parametrize(
    "make, rule",
    [
        (lambda q, s: mc.pack(q, s, torch.full_like(s, 3), group_size=64), "zero points"),
        (lambda q, s: mc.pack(q, s.repeat(2, 1), group_size=32), "group_size=32: .* take 64, 128"),
        (lambda q, s: mc.pack(q, s[:1], group_size=-1), "group_size=-1: .* take 64, 128"),
        (lambda q, s: mc.pack(q[:, :20], s[:, :20], group_size=64), "N=20 is not a multiple of 8"),
        (
            lambda q, s: pack_sparse(torch.full_like(q, 8), s, group_size=64),
            "2:4-sparse: collective kernels take dense",
        ),
    ],
)
def test_weights_that_it_cannot_take_are_refused_with_the_rule(make, rule):
    q = torch.randint(0, 16, (128, 64), dtype=torch.uint8)
    with pytest.raises(ValueError, match=rule):
        collective.repack(make(q, torch.rand(2, 64).half()), torch.float16)


def test_a_copy_is_kept_as_long_as_its_weight(monkeypatch):
    weight, _ = packed(128, 16, 64)
    first = collective_weight.repacked(weight, torch.float16)
    assert collective_weight.repacked(weight, torch.float16) is first
    assert collective_weight.repacked(weight, torch.bfloat16) is not first
    other, values = packed(128, 16, 64, seed=1)
    weight.copy_(other)
    assert np.array_equal(values_of(collective_weight.repacked(weight, torch.float16)), values)
    keys = [key for key in collective_weight._repacked if key[0] == id(weight)]
    assert len(keys) == 2
    del weight
    gc.collect()
    assert not any(key in collective_weight._repacked for key in keys)


# ---- units ---------------------------------------------------------------------------------------


def write_units(folder: Path, *names: str, abi: int = collective.ABI) -> Path:
    """A folder with a manifest and units that compute on the host."""
    source, library = Path(__file__).parent / "fake_collective.cpp", folder / "fake.so"
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++")
    command = [compiler, "-std=c++17", "-O2", "-shared", "-fPIC", f"-DABI={abi}"]
    subprocess.run([*command, source, "-o", library], check=True)
    entries = []
    for name in names:
        file = folder / f"{name}.so"
        shutil.copy(library, file)
        entries.append(
            {
                "name": name,
                "dtype": name.split("_")[2],
                "m_tile": int(name.split("_m")[1].split("_")[0]),
                "decomposition": "stream_k" if name.endswith("streamk") else "data_parallel",
                "registers": 168,
                "spills": 0,
                "file": file.name,
                "sha256": hashlib.sha256(file.read_bytes()).hexdigest(),
            }
        )
    manifest = {"format": MANIFEST_FORMAT, "variants": [], "dispatch": [], "collective": entries}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


@pytest.fixture
def folder(tmp_path) -> Path:
    return write_units(tmp_path, NAME, STREAM_K)


def test_units_come_from_the_manifest(folder, tmp_path):
    found = collective.units(folder)
    assert list(found) == [NAME, STREAM_K]
    assert found[NAME].m_tile == 16 and found[STREAM_K].decomposition == "stream_k"
    assert collective.load(found[NAME]).facts() == (384, 1000, 4)
    assert collective.units(tmp_path / "nowhere") == {}
    (folder / "manifest.json").write_text(json.dumps({"variants": []}))
    assert collective.units(folder) == {}


@pytest.mark.parametrize("change", [{"file": "../x.so"}, {"name": "w4a16_hopper"}, {"m_tile": "m"}])
def test_a_damaged_entry_is_refused(folder, change):
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["collective"][0].update(change)
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(TableError, match="list of collective units"):
        collective.units(folder)


def test_a_library_that_is_not_the_listed_one_is_not_loaded(folder):
    unit = collective.units(folder)[NAME]
    unit.file.write_bytes(unit.file.read_bytes() + b"\0")
    with pytest.raises(TableError, match=r"is not what the manifest lists; run build\.py"):
        collective.load(unit)
    unit.file.unlink()
    with pytest.raises(TableError, match="cannot be read"):
        collective.load(unit)


def test_a_library_of_another_version_or_none_is_named(tmp_path):
    unit = collective.units(write_units(tmp_path, NAME, abi=7))[NAME]
    with pytest.raises(TableError, match="of another version"):
        collective.load(unit)
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"no library")
    digest = hashlib.sha256(b"no library").hexdigest()
    with pytest.raises(LibraryError, match="does not load"):
        collective.load(collective.Unit(NAME, "f16", 16, "data_parallel", broken, digest))


def test_names_mean_a_unit_or_say_why_not(folder):
    known = collective.units(folder)
    assert collective.find(GEOMETRY, "f16", known) is known[NAME]
    assert collective.find(NAME, "f16", known) is known[NAME]
    with pytest.raises(ValueError, match="serves f16: the activations are bf16"):
        collective.find(NAME, "bf16", known)
    name = "w4a16_collective_bf16_m16_n128k64_coop_dp"
    with pytest.raises(ValueError, match=rf"not built .*--arch sm_90a --only {name}"):
        collective.find(GEOMETRY, "bf16", known)
    with pytest.raises(ValueError, match="can never exist: n_sm=64: two cooperating"):
        collective.find("w4a16_collective_m16_n64k64_coop_dp", "f16", known)
    with pytest.raises(ValueError, match=r"can never exist: .* is malformed"):
        collective.find("w4a16_collective_m16_n64k64_dp", "f16", known)


# ---- calls ---------------------------------------------------------------------------------------


@pytest.fixture
def on_host(monkeypatch, folder):
    """Units run on CPU tensors: only torch.cuda is replaced."""
    properties = SimpleNamespace(multi_processor_count=132)
    for name, value in {
        "device": lambda device: contextlib.nullcontext(),
        "current_stream": lambda device=None: SimpleNamespace(cuda_stream=0),
        "get_device_properties": lambda device=None: properties,
        "is_current_stream_capturing": lambda: False,
        "is_available": lambda: True,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(collective, "built", lambda device=None: collective.units(folder))
    monkeypatch.setattr(collective, "_on_cuda", lambda a: True)
    collective._found.cache_clear()


def product(a: torch.Tensor, values: np.ndarray) -> torch.Tensor:
    return (a.double() @ torch.from_numpy(values)).half()


@pytest.mark.parametrize("kernel", [NAME, GEOMETRY, STREAM_K])
def test_a_call_is_the_product(on_host, kernel):
    weight, values = packed(256, 40, 64)
    a = torch.randn(3, 256).half()
    assert torch.equal(mc.gemm(a, weight, kernel=kernel), product(a, values))


def test_views_and_outputs_of_every_kind(on_host):
    weight, values = packed(256, 40, 64)
    batch = torch.randn(2, 3, 256).half()
    expected = product(batch, values)
    assert torch.equal(mc.gemm(batch, weight, kernel=NAME), expected)
    assert torch.equal(mc.gemm(batch[0, 0], weight, kernel=NAME), expected[0, 0])
    assert mc.gemm(batch[:, :0], weight, kernel=NAME).shape == (2, 0, 40)
    odd = torch.randn(3, 257).half()[:, 1:]  # rows that TMA cannot address
    odd.copy_(batch[0])
    assert torch.equal(mc.gemm(odd, weight, kernel=NAME), expected[0])
    for storage in (torch.zeros(3, 40), torch.zeros(3, 48)[:, :40], torch.zeros(3, 41)[:, 1:]):
        out = storage.half() if storage.is_contiguous() else _view_like(storage)
        assert mc.gemm(batch[0], weight, out=out, kernel=NAME) is out
        assert torch.equal(out, expected[0])
    out = torch.zeros(3, 2, 40).half().transpose(0, 1)
    mc.gemm(batch, weight, out=out, kernel=NAME)
    assert torch.equal(out, expected)


def _view_like(view: torch.Tensor) -> torch.Tensor:
    """An fp16 view with the same strides and offset."""
    base = torch.zeros(view.untyped_storage().nbytes() // 4).half()
    return base.as_strided(view.shape, view.stride(), view.storage_offset())


def test_act_order_and_large_groups(on_host):
    g_idx = torch.arange(256)[torch.randperm(256)] // 128
    for weight, values in (packed(256, 40, 128, g_idx=g_idx), packed(512, 40, 256)):
        a = torch.randn(4, weight.k).half()
        assert torch.equal(mc.gemm(a, weight, kernel=NAME), product(a, values))


def test_what_it_does_not_do_is_said(on_host):
    weight, _ = packed(256, 40, 64)
    a = torch.randn(3, 256).half()
    with pytest.raises(ValueError, match="emits no bias"):
        mc.gemm(a, weight, bias=torch.zeros(40).half(), kernel=NAME)
    with pytest.raises(ValueError, match=r"no gradient; call it under torch.no_grad"):
        mc.gemm(a.clone().requires_grad_(), weight, kernel=NAME)
    with pytest.raises(ValueError, match="not batch-invariant"):
        mc.gemm(a, weight, kernel=STREAM_K, batch_invariant=True)
    with pytest.raises(ValueError, match="must be K=256"):
        mc.gemm(a[:, :128], weight, kernel=NAME)
    with pytest.raises(ValueError, match="serves f16"):
        mc.gemm(a.bfloat16(), weight, kernel=NAME)
    with pytest.raises(ValueError, match=r"cannot serve this call: group_size=32"):
        mc.gemm(a, packed(256, 40, 32)[0], kernel=NAME)
    large, _ = packed(4096 + 128, 8, 128)
    with pytest.raises(RuntimeError, match="was not launched: Error Invalid Problem"):
        mc.gemm(torch.randn(1, large.k).half(), large, kernel=NAME)


def test_a_capture_needs_the_copy(on_host, monkeypatch):
    weight, _ = packed(256, 40, 64)
    a = torch.randn(3, 256).half()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(collective_weight, "_on_cuda", lambda w: True)
    with pytest.raises(RuntimeError, match="make one before the capture"):
        mc.gemm(a, weight, kernel=NAME)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    first = mc.gemm(a, weight, kernel=NAME)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert torch.equal(mc.gemm(a, weight, kernel=NAME), first)


def test_without_a_gpu_it_is_refused():
    weight, _ = packed(128, 16, 64)
    with pytest.raises(ValueError, match="is a CUDA kernel and a is on cpu"):
        mc.gemm(torch.zeros(1, 128).half(), weight, kernel=NAME)


# ---- explore and the peers -----------------------------------------------------------------------


def test_explore_leaves_units_out_by_name_or_geometry():
    name = "w4a16_collective_f16_m16_n128k64_coop_dp"
    given = (name, name.replace("f16_", ""), "collective_m16_n128k64_coop_dp")
    assert full_names(given, Format()) == (name,) * 3
    with pytest.raises(ValueError, match="is malformed"):
        full_names(["collective_foo"], Format())


def test_built_units_are_candidates_of_explore(folder):
    gpu = GPUS["H200"]

    def names(problem, **overrides):
        return list(explore_collective.collective_rows(problem, gpu, folder, overrides))

    small, large = ProblemShape(16, 4096, 4096), ProblemShape(64, 4096, 4096)
    assert names(small) == [NAME]
    assert names(large) == [NAME, STREAM_K]
    assert names(large, decomposition=("stream_k",)) == [STREAM_K]
    assert names(small, family=("hopper",)) == []
    assert names(ProblemShape(16, 4096, 4096, 32)) == []
    assert names(ProblemShape(16, 4096, 4096, 128, "bf16")) == []
    assert names(ProblemShape(16, 4096, 4096, 128, "f16", True)) == []
    row = explore_collective.collective_rows(small, gpu, folder, {})[NAME]
    assert row.predicted_us > 0 and (row.registers, row.spill_bytes) == (168, 0)
    assert explore_collective.ours([row]) == []


def test_the_peer_is_the_fastest_unit(on_host, folder, monkeypatch):
    monkeypatch.setattr(peer, "built", lambda: collective.units(folder))
    provider = peer.Collective()
    assert provider.missing() is None
    q, scales = bench.make_weight(64, 256, device="cpu")
    provider.prepare(Weight(q, scales, 128, l2_bytes=1 << 14))
    times = {NAME: 9.0, STREAM_K: 5.0}

    def capture(calls):
        unit = provider.units[len(captured)]
        captured.append(SimpleNamespace(times=[times[unit.name]]))
        return captured[-1]

    captured: list = []
    monkeypatch.setattr(peer, "capture", capture)
    monkeypatch.setattr(peer, "replay_interleaved", lambda graphs: None)
    problem = bench.make_problem(64, q, scales)
    (candidate,) = provider.candidates(problem)
    assert candidate.note == STREAM_K and len(candidate.calls) == len(provider.weights) >= 2
    for call in candidate.calls:
        assert bench.relative_error(call(), problem.reference) < 1e-3


def test_the_peer_is_skipped_with_a_line(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(peer, "built", lambda: {})
    assert "--family collective" in peer.Collective().missing()
