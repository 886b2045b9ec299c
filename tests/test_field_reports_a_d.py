"""Behaviours owed to users of other kernels: field reports, groups A (shapes) to D (installing).

A test is named after the report's number. Reports of the same fault are one test.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import fake_cuda
import pytest
import reference
import torch

import marlin_cutlass as mc
from marlin_cutlass import dispatch, library
from marlin_cutlass.errors import LibraryError, UnsupportedArchError

REPO = Path(__file__).resolve().parent.parent
CUDA = torch.cuda.is_available()
gpu = pytest.mark.gpu
DTYPES = (torch.float16, torch.bfloat16)


def weight(k, n, group_size=128, *, zeros=False, act_order=False, device="cpu", scale=0.05):
    rows = 1 if group_size < 0 else k // group_size
    q = torch.randint(0, 16, (k, n), dtype=torch.uint8)
    z = torch.randint(0, 17, (rows, n)) if zeros else None
    g_idx = (torch.arange(k) // group_size)[torch.randperm(k)] if act_order else None
    scales = (torch.rand(rows, n) * scale + 0.2 * scale).half()
    return mc.pack(q, scales, z, group_size=group_size, g_idx=g_idx).to(device)


def right(a, w, bias=None, out=None):
    """Multiplies and checks against the oracle; returns the product."""
    got = mc.gemm(a, w, bias, out=out)
    assert got.shape == (*a.shape[:-1], w.n) and got.dtype == a.dtype and got.device == a.device
    bias = None if bias is None else bias.to(a.dtype)
    reference.check(got, a, mc.dequantize(w, a.dtype), bias)
    return got


def on_both(function):
    """Runs a test on the CPU, and on the GPU where there is one."""
    devices = ["cpu", pytest.param("cuda", marks=gpu)]
    return pytest.mark.parametrize("device", devices)(function)


@pytest.fixture(scope="module")
def declared_tables(tmp_path_factory):
    """Manifests of the default tables as build.py would write them, without the cubins."""
    space = pytest.importorskip("generator.space")
    from generator.arch import ARCHS
    from generator.rows import build_table

    root = tmp_path_factory.mktemp("tables")
    for arch in ("sm_80", "sm_86", "sm_89", "sm_90a"):
        variants = [entry.variant for entry in space.default_space(ARCHS[arch])]
        rows = build_table(ARCHS[arch], variants).to_json()
        entries = [_entry(variant) for variant in variants]
        fake_cuda.write_table(root, entries, rows, arch)
    return root


def _entry(variant) -> dict:
    names = ("threads", "shared_bytes", "cluster")
    fields = {name: getattr(variant, name) for name in (*variant.__dataclass_fields__, *names)}
    file = f"{variant.name}.cubin"
    return {**fields, "name": variant.name, "file": file, "sha256": "0" * 64}


@pytest.fixture
def tables(declared_tables, monkeypatch):
    monkeypatch.setenv("MARLIN_CUTLASS_BUILD", str(declared_tables))
    monkeypatch.delenv("MARLIN_CUTLASS_KERNEL", raising=False)
    return declared_tables


# ---- A. shapes and divisibility ----


@on_both
@pytest.mark.parametrize(
    ("k", "n", "group_size", "rows"),
    [
        pytest.param(192, 320, 64, (5,), id="1"),
        pytest.param(10944, 256, 64, (1, 33), id="2"),
        pytest.param(7392, 256, 32, (1, 16), id="3"),
        pytest.param(256, 8, 128, (7,), id="4-8"),
        pytest.param(256, 16, 128, (7,), id="4-16"),
        pytest.param(256, 32, 128, (7,), id="4-32"),
        pytest.param(256, 48, 128, (7,), id="4-48"),
        pytest.param(512, 1440, 128, (1, 17), id="9"),
    ],
)
def test_a1_to_a9_sizes_that_others_refuse_are_right(device, k, n, group_size, rows):
    w = weight(k, n, group_size, device=device)
    for m in rows:
        assert right(torch.randn(m, k, device=device).half(), w).is_contiguous()


def test_a3_the_operator_itself_refuses_what_does_not_fit():
    w = weight(256, 256, 32)
    form = [w.packed, w.col_scale, None, None, w.n, w.k, w.group_size, w.has_zeros]
    a = torch.randn(2, 256).half()
    for index, value in [(0, w.packed[:4096]), (4, 512), (6, 64), (7, True)]:
        bad = [*form[:index], value, *form[index + 1 :]]
        with pytest.raises(ValueError, match=r"K=256, N=\d+, group_size=\d+ needs"):
            torch.ops.marlin_cutlass.gemm(a, *bad)


def test_a5_padding_is_never_visible():
    w = weight(192, 192, 64)
    assert mc.dequantize(w).shape == w.shape == (w.size_k, w.size_n) == (192, 192)


def test_a6_whatever_packs_has_a_kernel_for_every_number_of_rows(tables):
    grid = itertools.product(
        (64, 192, 256, 4096, 5472, 10944), (8, 64, 200, 4096, 28672), (32, 64, 128, 256, -1)
    )
    checked = 0
    for k, n, group_size in grid:
        if group_size > 0 and k % group_size:
            with pytest.raises(ValueError, match=f"K={k} is not a multiple"):
                mc.explain(1, n, k, group_size, arch=86)
            continue
        for arch, m in itertools.product((80, 86, 89, 90), (1, 16, 17, 64, 65, 512, 4096)):
            checked += 1
            dtype, zeros = ("f16", "bf16")[checked % 2], checked % 3 == 0
            found = mc.explain(m, n, k, group_size, dtype, arch, zeros)
            assert found.kernel is not None, str(found)
    assert checked > 2500


def test_a7_the_logical_size_survives_a_round_trip():
    w = mc.PackedWeight.from_state(weight(200, 64, -1).state())
    assert w.k == 200
    right(torch.randn(3, 200).half(), w)
    with pytest.raises(ValueError, match="must be K=200"):
        mc.gemm(torch.randn(3, 256).half(), w)


def test_a8_a_cut_group_is_refused_with_the_sizes():
    q, scales = torch.zeros(4304, 64, dtype=torch.uint8), torch.ones(134, 64).half()
    with pytest.raises(ValueError, match="K=4304, N=64, group_size=32: K=4304 is not a multiple"):
        mc.pack(q, scales, group_size=32)


@on_both
def test_a10_no_rows(device):
    w = weight(2048, 1408, device=device)
    a = torch.empty(0, 2048, device=device, dtype=torch.bfloat16, requires_grad=True)
    out = mc.gemm(a, w)
    assert out.shape == (0, 1408) and out.dtype == torch.bfloat16 and out.device == a.device
    out.sum().backward()
    assert a.grad.shape == (0, 2048)
    compiled = torch.compile(lambda x: mc.gemm(x, w), backend="aot_eager", fullgraph=True)
    assert compiled(a.detach()).shape == (0, 1408)


@on_both
def test_a12_act_order_takes_any_number_of_rows(device):
    w = weight(512, 256, act_order=True, device=device)
    for m in (1, 8192 if device == "cuda" else 600):
        right(torch.randn(m, 512, device=device).half(), w)


@on_both
def test_a15_and_b40_group_sizes_are_right_or_refused(device):
    for group_size in (32, 64, 128, 256, -1):
        w = weight(512, 256, group_size, device=device)
        for m in (1, 16, 100):
            right(torch.randn(m, 512, device=device).half(), w)
    for group_size in (8, 16, 48, 96):
        with pytest.raises(ValueError, match="use 32, 64, 128, a multiple of 128, or -1"):
            mc.pack(torch.zeros(384, 8, dtype=torch.uint8), torch.ones(1, 8), group_size=group_size)


@gpu
@pytest.mark.timeout(60)
def test_a16_a_single_k_tile_finishes():
    for k, group_size in itertools.product((64, 128, 192), (32, 64)):
        right(torch.randn(1, k, device="cuda").half(), weight(k, 128, group_size, device="cuda"))


@on_both
def test_a18_leading_dimensions(device):
    w = weight(256, 96, device=device)
    a = torch.randn(2, 3, 256, device=device).half()
    assert torch.equal(right(a, w), mc.gemm(a.view(6, 256), w).view(2, 3, 96))
    assert right(a[0, 0], w).shape == (96,)


def test_a19_refusals_name_the_dimension():
    with pytest.raises(ValueError, match=r"N=59136.*group_size=16"):
        mc.explain(1, 59136, 2048, 16, arch=86)


def test_a21_shards_equal_the_whole_bit_for_bit():
    q = torch.randint(0, 16, (512, 512), dtype=torch.uint8)
    scales = (torch.rand(4, 512) * 0.1 + 0.01).half()
    whole = mc.dequantize(mc.pack(q, scales, group_size=128))
    parts = list(zip(q.chunk(4, 1), scales.chunk(4, 1)))
    assert torch.equal(torch.hstack([_dense(*part) for part in parts]), whole)
    parts = list(zip(q.chunk(4, 0), scales.chunk(4, 0)))
    assert torch.equal(torch.vstack([_dense(*part) for part in parts]), whole)


def _dense(q, scales):
    return mc.dequantize(mc.pack(q, scales, group_size=128))


@gpu
def test_a22_every_column_is_written():
    for n in (64, 128, 192, 256, 320, 448, 576, 8256):
        out = torch.full((1, n), 1e4, device="cuda").half()
        right(torch.randn(1, 256, device="cuda").half(), weight(256, n, device="cuda"), out=out)
        assert not (out == 1e4).any()


def test_a23_an_unsupported_device_is_known_without_it(tables):
    assert "sm_75 unsupported" in mc.explain(m=8, n=1536, k=1024, g=128, arch=75).why
    assert mc.explain(m=8, n=1536, k=1024, g=256, arch=86).kernel


# ---- B. numerics ----


@on_both
def test_b24_partial_sums_beyond_fp16(device):
    q = torch.full((4096, 64), 1, dtype=torch.uint8)
    q[:2048] = 15
    w = mc.pack(q, torch.full((32, 64), 0.125).half(), group_size=128).to(device)
    assert not mc.gemm(torch.full((1, 4096), 64.0, device=device).half(), w).any()


@gpu
def test_b25_splitting_k_costs_no_accuracy():
    w = weight(8192, 256, device="cuda")
    a = torch.randn(1, 8192, device="cuda").half()
    exact = a.double() @ mc.dequantize(w, torch.float32).double()
    errors = {}
    kernels = library.table_for_capability(*torch.cuda.get_device_capability()).kernels
    for kernel in (k for k in kernels if not k.sparse):
        if (kernel.dtype, kernel.zeros, kernel.group_size) == ("f16", False, 128):
            out = mc.gemm(a, w, kernel=kernel.name).double()
            whole = kernel.decomposition == "data_parallel"
            errors.setdefault(whole, []).append(float((out - exact).abs().max()))
    if True in errors and False in errors:
        assert max(errors[False]) <= 1.5 * max(errors[True])


@gpu
@pytest.mark.parametrize(
    ("m", "n", "k"), [(16, 512, 3584), (16, 1024, 8192), (64, 512, 8192), (1, 512, 8192)]
)
def test_b26_one_bit_pattern(m, n, k):
    w, a = weight(k, n, device="cuda"), torch.randn(m, k, device="cuda").half()
    first, side = mc.gemm(a, w), torch.cuda.Stream()
    noise = torch.empty(1 << 22, device="cuda")
    for _ in range(200):
        with torch.cuda.stream(side):
            noise.clone()
        assert torch.equal(mc.gemm(a, w), first)


@on_both
def test_b27_batch_invariance(device):
    w = weight(4096, 512, device=device)
    a = torch.randn(257 if device == "cuda" else 65, 4096, device=device).half()
    first = mc.gemm(a[:1], w, batch_invariant=True)
    for m in (2, 4, 16, 64, a.shape[0]):
        assert torch.equal(mc.gemm(a[:m], w, batch_invariant=True)[:1], first)


@on_both
def test_b29_bf16_keeps_its_accuracy(device):
    m, n, k = (128, 2048, 2048) if device == "cuda" else (32, 256, 2048)
    w = weight(k, n, device=device)
    a = torch.randn(m, k, device=device).bfloat16()
    exact = a.double() @ mc.dequantize(w, torch.float32).double()
    ideal = (
        (a.double() @ mc.dequantize(w, torch.bfloat16).double()).bfloat16().double()
    )  # one rounding
    error = (mc.gemm(a, w).double() - exact).norm()
    assert error <= 1.2 * (ideal - exact).norm()


@gpu
def test_b31_every_kernel_on_a_grid_its_cluster_must_divide():
    kernels = library.table_for_capability(*torch.cuda.get_device_capability()).kernels
    for kernel in (k for k in kernels if not k.sparse):
        dtype = {"f16": torch.float16, "bf16": torch.bfloat16}[kernel.dtype]
        w = weight(512, 512, kernel.group_size, zeros=kernel.zeros, device="cuda")
        a = torch.randn(320, 512, device="cuda", dtype=dtype)
        reference.check(mc.gemm(a, w, kernel=kernel.name), a, mc.dequantize(w, dtype))


@on_both
def test_b32_scales_of_many_magnitudes(device):
    k, n = 4096, 256
    q = torch.randint(0, 16, (k, n), dtype=torch.uint8)
    scales = (10.0 ** (-4 * torch.rand(k // 128, n))).half()
    w = mc.pack(q, scales, group_size=128).to(device)
    a = torch.randn(16, k, device=device).half()
    exact = a.double() @ mc.dequantize(w).double()
    theirs = torch.matmul(a.float(), mc.dequantize(w).float()).half().double()
    ours = mc.gemm(a, w).double()
    assert (ours - exact).norm() <= 1.2 * (theirs - exact).norm()


@pytest.mark.parametrize("fault", ["half", "swapped columns", "zeroed rows"])
def test_b33_the_oracle_fails_on_known_faults(fault):
    w = weight(256, 64)
    a = torch.randn(32, 256).half()
    out = mc.gemm(a, w)
    if fault == "half":
        out *= 0.5
    elif fault == "swapped columns":
        out[:, [10, 11]] = out[:, [11, 10]]
    else:
        out[8:16] = 0
    with pytest.raises(AssertionError):
        reference.check(out, a, mc.dequantize(w))


def test_b37_every_combination_of_dtypes():
    for a_dtype, s_dtype in itertools.product((*DTYPES, torch.float32), repeat=2):
        q = torch.randint(0, 16, (128, 64), dtype=torch.uint8)
        w = mc.pack(q, torch.rand(1, 64).to(s_dtype), group_size=128)
        a = torch.randn(4, 128).to(a_dtype)
        if a_dtype == torch.float32:
            with pytest.raises(TypeError, match=r"a has dtype float32.*float16 or bfloat16"):
                mc.gemm(a, w)
        else:
            right(a, w)


def test_b38_one_group_keeps_its_shape():
    for k, n, group_size in ((128, 64, 128), (64, 8, 64)):
        w = weight(k, n, group_size)
        again = mc.PackedWeight.from_state(w.state())
        assert again == w and mc.dequantize(again).shape == (k, n)
    with pytest.raises(ValueError, match=r"scales have shape \(64,\)"):
        mc.pack(torch.zeros(128, 64, dtype=torch.uint8), torch.ones(64), group_size=128)


@on_both
def test_b39_bias_in_natural_order(device):
    q = torch.full((256, 192), 8, dtype=torch.uint8)
    w = mc.pack(q, torch.ones(2, 192).half(), group_size=128).to(device)
    a = torch.randn(3, 256, device=device).half()
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        bias = torch.arange(192, device=device).to(dtype)
        assert torch.equal(mc.gemm(a, w, bias), bias.half().expand(3, 192))
    assert not mc.gemm(a, w).any()


def test_b42_untested_architectures_are_refused(tables):
    for arch in (120, 121, 100, 87):
        found = mc.explain(1, 4096, 4096, arch=arch)
        assert found.kernel is None and f"sm_{arch} unsupported" in found.why


@on_both
def test_b43_each_group_has_its_scale_for_one_row_and_two(device):
    for group_size in (32, 64, 128, 256):
        rows = 1024 // group_size
        scales = (2.0 ** -(torch.arange(rows) % 8)).view(rows, 1).expand(rows, 64).half()
        q = torch.randint(0, 16, (1024, 64), dtype=torch.uint8)
        w = mc.pack(q, scales.contiguous(), group_size=group_size).to(device)
        for m in (1, 2):
            right(torch.randn(m, 1024, device=device).half(), w)


# ---- C. memory, streams, graphs ----


@on_both
def test_c46_a_view_as_out_leaves_the_rest_alone(device):
    w = weight(8192, 96, device=device)
    big = torch.full((4, 256), 7.0, device=device).half()
    right(torch.randn(2, 8192, device=device).half(), w, out=big[1:3, 64:160])
    big[1:3, 64:160] = 7
    assert (big == 7).all()


@gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_c47_and_c51_two_devices_from_one_thread():
    torch.cuda.set_device(0)
    w = weight(4096, 512)
    for device in ("cuda:0", "cuda:1", "cuda:0"):
        right(torch.randn(16, 4096, device=device).half(), w.to(device))
        assert torch.cuda.current_device() == 0


@gpu
def test_c50_three_layers_in_a_graph():
    layers = [weight(1024, 1024, device="cuda", scale=0.01) for _ in range(3)]
    a = torch.randn(4, 1024, device="cuda").half()

    def forward():
        x = a
        for layer in layers:
            x = mc.gemm(x, layer)
        return x

    forward()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = forward()
    a.copy_(torch.randn(4, 1024))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, forward())


@gpu
def test_c51_operands_on_different_devices_are_refused():
    w, a = weight(256, 64, device="cuda"), torch.randn(2, 256).half()
    for call in (lambda: mc.gemm(a, w), lambda: mc.gemm(a.cuda(), w.cpu())):
        with pytest.raises(ValueError, match=r"is not on|is on cpu"):
            call()


@on_both
def test_c52_and_c53_strided_and_misaligned_activations(device):
    w = weight(256, 96, device=device)
    big = torch.randn(4, 1024, device=device).half()
    flat = torch.randn(1 + 4 * 256, device=device).half()
    for a in (
        big[:, 128 : 128 + 256],
        torch.randn(256, 4, device=device).half().t(),
        torch.randn(8, 256, device=device).half()[::2],
        torch.randn(1, 256, device=device).half().expand(4, 256),
        flat[1:].view(4, 256),
        torch.randn(4, 257, device=device).half()[:, :256],
    ):
        right(a, w)
    with pytest.raises(ValueError, match="out has column stride"):
        mc.gemm(big[:, :256], w, out=torch.empty(96, 4, device=device).half().t())


@gpu
def test_c53_a_misaligned_weight_is_refused():
    w = weight(256, 96, device="cuda")
    room = torch.empty(w.packed.numel() + 8, dtype=torch.uint8, device="cuda")
    w.packed = room[8:].copy_(w.packed)
    with pytest.raises(ValueError, match="packed is not aligned to 16 bytes"):
        mc.gemm(torch.randn(1, 256, device="cuda").half(), w)
    torch.cuda.synchronize()


def test_c54_no_kernel_asks_for_more_shared_memory_than_there_is(tables):
    limits = {"sm_80": 163, "sm_86": 99, "sm_89": 99, "sm_90a": 227}
    for arch, limit in limits.items():
        for kernel in dispatch.load_table(tables / arch).kernels:
            assert kernel.shared_bytes <= limit * 1024, kernel.name


@on_both
def test_c55_group_indices_on_any_device(device):
    q = torch.randint(0, 16, (256, 64), dtype=torch.uint8)
    g_idx = (torch.arange(256) // 64)[torch.randperm(256)]
    scales = torch.rand(4, 64).half()
    want = mc.pack(q, scales, group_size=64, g_idx=g_idx)
    for dtype in (torch.int32, torch.int64):
        assert mc.pack(q, scales, group_size=64, g_idx=g_idx.to(device, dtype)) == want
    with pytest.raises(TypeError, match="g_idx has dtype float32"):
        mc.pack(q, scales, group_size=64, g_idx=g_idx.float())


@on_both
def test_c56_a_call_changes_no_bytes_of_the_weight(device):
    w = weight(256, 96, act_order=True, device=device)
    before, a = w.clone(), torch.randn(4, 256, device=device).half()
    first = mc.gemm(a, w)
    assert w == before
    assert torch.equal(mc.gemm(a, w.cpu().to(device)), first)


def test_c57_variants_that_differ_in_one_parameter_have_their_own_names():
    names = {fake_cuda.kernel(stages=stages)["name"] for stages in (3, 4)}
    assert len(names) == 2


# ---- D. build and install ----


def run(code: str, **env: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": str(REPO), **env}
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd="/"
    )


def test_d61_import_whatever_cuda_packages_are_installed(tmp_path):
    # Packages of the names that clash elsewhere, each of which fails if it is imported.
    for name in ("cutlass", "cutlass_library", "pycute", "cutlass_cppgen", "pycuda"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('imported ' + __name__)")
    done = run(
        "import torch, marlin_cutlass as mc\n"
        "q = torch.zeros(128, 8, dtype=torch.uint8)\n"
        "w = mc.pack(q, torch.ones(1, 8).half(), group_size=128)\n"
        "print(mc.dequantize(w)[0, 0].item(), mc.gemm(torch.ones(1, 128).half(), w)[0, 0].item())",
        PYTHONPATH=f"{tmp_path}{os.pathsep}{REPO}",
        CUDA_VISIBLE_DEVICES="",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["-8.0", "-1024.0"]


def _tool(folder: Path, name: str, version: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tool = folder / name
    tool.write_text(f'#!/bin/sh\necho "Cuda compilation tools, release {version}, V{version}.1"\n')
    tool.chmod(0o755)
    return tool


def test_d62_two_compilers_are_both_named(tmp_path, monkeypatch):
    home = _tool(tmp_path / "home" / "bin", "nvcc", "13.0")
    path = _tool(tmp_path / "path", "nvcc", "12.4")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PATH", f"{path.parent}{os.pathsep}{os.environ['PATH']}")
    found = mc.build_info()["nvcc"]
    assert [entry["path"] for entry in found[:2]] == [str(home), str(path)]
    assert "13.0" in found[0]["version"] and "12.4" in found[1]["version"]


def test_d63_a_missing_compiler_or_folder_is_named(tmp_path, monkeypatch):
    toolchain = pytest.importorskip("generator.toolchain")
    with pytest.raises(toolchain.BuildError, match=r"\$NVCC.*(?s:.*)CUDA_HOME.*(?s:.*)pip install"):
        toolchain.find_nvcc({"PATH": str(tmp_path), "CUDA_HOME": ":/usr/local/cuda"})
    blocker = tmp_path / "file"
    blocker.write_text("")
    monkeypatch.setattr(library, "library_folders", lambda: [blocker / "runtime"])
    with pytest.raises(LibraryError, match=r"no folder .* can be written.*MARLIN_CUTLASS_BUILD"):
        library._writable_folder()


def test_d65_the_host_compiler_is_passed_on(monkeypatch):
    toolchain = pytest.importorskip("generator.toolchain")
    from generator.arch import ARCHS

    command = toolchain.flags(ARCHS["sm_86"], {"CXX": "g++", "PATH": os.environ["PATH"]})
    assert command[command.index("-ccbin") + 1] == "g++"
    monkeypatch.setenv("CXX", "clang++ -stdlib=libstdc++")
    assert library.compile_command(Path("out.so"))[:2] == ["clang++", "-stdlib=libstdc++"]


def test_d66_a_missing_architecture_says_what_is_built(tmp_path, monkeypatch):
    fake_cuda.write_table(tmp_path, [], [], "sm_80")
    fake_cuda.write_table(tmp_path, [], [], "sm_86")
    monkeypatch.setenv("MARLIN_CUTLASS_BUILD", str(tmp_path))
    with pytest.raises(
        UnsupportedArchError, match=r"built for \[sm_80, sm_86\], device sm_89; run"
    ):
        dispatch.arch_for(8, 9)


def test_d67_hopper_kernels_are_for_capability_9_0_alone(tmp_path, monkeypatch):
    arch = pytest.importorskip("generator.arch")
    assert arch.resolve_arch("90")[0].name == "sm_90a" and arch.resolve_arch("90")[1]
    fake_cuda.write_table(tmp_path, [], [], "sm_90a")
    monkeypatch.setenv("MARLIN_CUTLASS_BUILD", str(tmp_path))
    assert dispatch.arch_for(9, 0) == "sm_90a"
    for capability in ((8, 9), (9, 1), (10, 0), (12, 0)):
        with pytest.raises(UnsupportedArchError):
            dispatch.arch_for(*capability)
    monkeypatch.setattr(torch.version, "hip", "6.0")
    with pytest.raises(LibraryError, match="ROCm: the kernels need an NVIDIA GPU"):
        library._check_torch()


def test_d68_the_work_of_a_build_is_bounded(tables):
    toolchain = pytest.importorskip("generator.toolchain")
    assert toolchain.default_jobs({"MAX_JOBS": "1"}) == 1
    for arch in ("sm_80", "sm_86", "sm_89", "sm_90a"):
        # One small file each, of 1.3 s: ten minutes on two cores (docs/performance.md).
        assert len(dispatch.load_table(tables / arch).kernels) <= 720
    assert len(library.SOURCES) <= 8


def test_d69_a_library_that_fails_to_load_shows_the_loaders_text(tmp_path):
    path = tmp_path / "libmarlin_cutlass_0.so"
    source = tmp_path / "broken.cpp"
    source.write_text('extern "C" void absent_function(); void* f = (void*)absent_function;')
    flags = ["-shared", "-fPIC", str(source), "-o", str(path)]
    subprocess.run([*library.compiler(), *flags], check=True)
    with pytest.raises(LibraryError, match=r"does not load: .*absent_function"):
        library._open(path)
    assert mc.build_info()["launcher_torch_target"] == library.TORCH_TARGET


def test_d70_an_old_gpu_is_refused_at_once(monkeypatch, tables):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
    with pytest.raises(UnsupportedArchError, match="needs sm_80 or newer, found sm_75"):
        library.require_device("cuda:0")


def test_d71_a_second_copy_of_the_package_says_so(tmp_path):
    done = run(
        "import shutil, sys, marlin_cutlass\n"
        f"shutil.copytree({str(REPO / 'marlin_cutlass')!r}, {str(tmp_path / 'vendored')!r})\n"
        f"sys.path.insert(0, {str(tmp_path)!r})\n"
        "try:\n"
        "    import vendored\n"
        "except ImportError as error:\n"
        "    print(error)"
    )
    assert "is already loaded from" in done.stdout and "keep one of them" in done.stdout
