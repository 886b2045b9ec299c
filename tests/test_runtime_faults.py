"""Faults that the launcher library reports: of the driver, of files, of operands and weights."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path

import pytest
import torch
from runtime_cases import gemm, right, weight

from marlin_cutlass import library


@pytest.mark.parametrize(
    ("m", "symbol", "text"),
    # Numbers of rows as nowhere else: a descriptor of an earlier test at the same address would be
    # reused, not encoded.
    [
        (13, "cuLaunchKernelEx", "cuLaunchKernelEx failed.*kernel w4a16_hopper.*M=13, N=96, K=256"),
        (17, "cuModuleLoadData", "cuModuleLoadData failed.*kernel w4a16_hopper.*cubin"),
        (19, "cuFuncSetAttribute", "asks for 65536 bytes of shared memory"),
        (23, "cuTensorMapEncodeTiled", "cuTensorMapEncodeTiled failed.*row stride 256"),
    ],
)
def test_driver_errors_name_the_kernel_and_pass(fake, kernels, m, symbol, text):
    kernels("hopper")
    w, a = weight(), torch.randn(m, 256).half()
    fake.fail(symbol)
    with pytest.raises(RuntimeError, match=text):
        gemm(a, w)
    fake.fail("", 0)
    right(gemm(a, w), a, w)


def test_a_damaged_cubin_never_reaches_the_driver(fake, kernels):
    table = kernels("ampere")
    kernel = table.kernels[table.index(table.kernels[2].name)]
    (table.folder / kernel.file).write_text("something else")
    with pytest.raises(RuntimeError, match=r"has sha256 [0-9a-f]{64} and the manifest says"):
        gemm(torch.randn(1, 256).half(), weight())
    (table.folder / kernel.file).unlink()
    with pytest.raises(RuntimeError, match="cannot read"):
        gemm(torch.randn(1, 256).half(), weight())
    assert fake.record.function_count == 0


def test_kernels_that_wait_for_each_other_must_be_resident(fake, kernels):
    w = weight(4096, 8192)
    for shape, fields, resident in [
        ("striped", {"ctas_per_sm": 2}, 132),
        ("hybrid", {"multicast": 4}, 132),
    ]:
        kernels(shape, **fields)
        fake.occupancy(1)
        text = f"launches .* blocks that wait for each other and this device holds {resident}"
        if shape == "hybrid":
            fake.occupancy(0)
            text = "and this device holds 0"
        with pytest.raises(RuntimeError, match=text):
            gemm(torch.randn(1, 4096).half(), w)
    kernels("ampere")
    gemm(torch.randn(1, 4096).half(), w)


def test_no_table_says_what_is_built(fake):
    fake.launcher.set_built_archs(["sm_86"])
    with pytest.raises(RuntimeError, match=r"built for \[sm_86\], device sm_90; run python build"):
        gemm(torch.randn(1, 256).half(), weight())


def test_sha256_is_the_standard_one(fake):
    for size in (0, 1, 55, 56, 63, 64, 65, 1000):
        data = bytes(range(256)) * 4
        assert fake.launcher.sha256(data[:size]) == hashlib.sha256(data[:size]).hexdigest()


def refusals():
    w = weight()
    a = torch.randn(4, 256).half()
    wide = torch.randn(4, 400).half()
    yield "float32", lambda: gemm(a.float(), w), "a has dtype float32: activations must be float16"
    yield "narrow", lambda: gemm(a[:, :255], w), r"a has shape \(4, 255\).*K=256"
    yield "scalar", lambda: gemm(torch.tensor(1.0).half(), w), r"a has shape \(\)"
    yield "bias size", lambda: gemm(a, w, torch.zeros(95)), r"bias has shape \(95\)"
    yield "bias type", lambda: gemm(a, w, torch.zeros(96).int()), "bias has dtype int32"
    yield (
        "out type",
        lambda: gemm(a, w, out=torch.empty(4, 96)),
        "out has dtype float32 and a float16",
    )
    yield "out shape", lambda: gemm(a, w, out=torch.empty(4, 95).half()), "out has shape"
    yield "out columns", lambda: gemm(a, w, out=torch.empty(96, 4).half().t()), "column stride 4"
    yield "out rows", lambda: gemm(a, w, out=torch.empty(96).half().expand(4, 96)), "row stride"
    yield "aliasing", lambda: gemm(wide[:, :256], w, out=wide[:, 200:296]), "out overlaps a"


@pytest.mark.parametrize(("name", "call", "text"), list(refusals()), ids=[r[0] for r in refusals()])
def test_operands_that_do_not_fit_are_refused(fake, kernels, name, call, text):
    kernels("ampere")
    with pytest.raises(ValueError, match=text):
        call()
    assert fake.record.launches == 0


def test_columns_of_one_buffer_may_hold_a_and_out(kernels):
    kernels("ampere")
    w, buffer = weight(), torch.randn(4, 400).half()
    a = buffer[:, :256].clone()
    gemm(buffer[:, :256], w, out=buffer[:, 304:400])
    right(buffer[:, 304:400], a, w)


def broken_weights():
    w = weight(256, 96, 64, act_order=True)
    form = [w.packed, w.col_scale, None, w.perm, w.n, w.k, w.group_size, w.has_zeros]
    aligned = torch.empty(w.packed.numel() + 8, dtype=torch.uint8)[8:]
    for index, value, text in [
        (0, w.packed[:-1], "packed has shape"),
        (0, w.packed.repeat(2)[::2], "packed is not contiguous"),
        (0, w.packed.view(torch.int32), "packed has dtype int32"),
        (0, aligned, "packed is not aligned to 16 bytes"),
        (1, w.col_scale.half(), "col_scale has dtype float16"),
        (1, w.col_scale[:96], r"col_scale has shape \(96\).*needs \(128,\)"),
        (3, w.perm[:-1], "perm has shape"),
        (3, w.perm.float(), "perm has dtype float32"),
        (4, 129, "packed has shape"),
        (4, 0, "K and N must be at least 1"),
        (4, -5, "K and N must be at least 1"),
        (4, 2**33, "must be below"),
        (5, 320, "the last dimension must be K=320"),
        (6, 32, "packed has shape"),
        (6, 48, "group_size=48 is not supported"),
        (6, 512, "K=256 is not a multiple of group_size=512"),
        (7, True, "packed has shape"),
    ]:
        yield [*form[:index], value, *form[index + 1 :]], text


@pytest.mark.parametrize(("form", "text"), list(broken_weights()))
def test_weights_that_do_not_fit_are_refused(fake, kernels, form, text):
    kernels("ampere")
    with pytest.raises(ValueError, match=text):
        torch.ops.marlin_cutlass_host.gemm(torch.randn(4, 256).half(), *form)
    assert fake.record.launches == 0


def test_driver_declarations_match_cuda_h(tmp_path):
    header = Path("/usr/local/cuda/include/cuda.h")
    if not header.is_file():
        pytest.skip("no cuda.h here")
    pairs = {
        "CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT": "kMultiprocessorCount",
        "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR": "kCapabilityMajor",
        "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR": "kCapabilityMinor",
        "CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES": "kMaxDynamicSharedBytes",
        "CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION": "kClusterDimension",
        "CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION": "kProgrammaticStreamSerialization",
        "CU_STREAM_CAPTURE_STATUS_ACTIVE": "kCaptureActive",
        "CU_STREAM_CAPTURE_MODE_RELAXED": "kCaptureModeRelaxed",
        "CU_STREAM_NON_BLOCKING": "kStreamNonBlocking",
        "CU_USER_OBJECT_NO_DESTRUCTOR_SYNC": "kNoDestructorSync",
        "CU_GRAPH_USER_OBJECT_MOVE": "kUserObjectMove",
        "CU_TENSOR_MAP_DATA_TYPE_FLOAT16": "kMapFloat16",
        "CU_TENSOR_MAP_DATA_TYPE_BFLOAT16": "kMapBfloat16",
        "CU_TENSOR_MAP_INTERLEAVE_NONE": "kInterleaveNone",
        "CU_TENSOR_MAP_SWIZZLE_128B": "kSwizzle128B",
        "CU_TENSOR_MAP_L2_PROMOTION_L2_256B": "kPromotion256B",
        "CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE": "kFillZeros",
    }
    lines = ["#include <cstddef>", "#include <cuda.h>", '#include "driver.h"']
    lines.append("namespace d = marlin_cutlass::driver;")
    lines += [f"static_assert(int({theirs}) == int(d::{ours}));" for theirs, ours in pairs.items()]
    for theirs, ours in [
        ("CUtensorMap", "TensorMap"),
        ("CUlaunchConfig", "LaunchConfig"),
        ("CUlaunchAttribute", "LaunchAttribute"),
    ]:
        lines.append(f"static_assert(sizeof({theirs}) == sizeof(d::{ours}));")
    for theirs, ours in [
        ("sharedMemBytes", "shared_bytes"),
        ("hStream", "stream"),
        ("attrs", "attributes"),
    ]:
        lines.append(
            f"static_assert(offsetof(CUlaunchConfig, {theirs}) "
            f"== offsetof(d::LaunchConfig, {ours}));"
        )
    lines.append(
        "static_assert(offsetof(CUlaunchAttribute, value) == offsetof(d::LaunchAttribute, value));"
    )
    source = tmp_path / "check.cpp"
    source.write_text("\n".join(lines) + "\n")
    includes = [f"-I{path}" for path in (*library.include_folders(), header.parent)]
    subprocess.run(
        [*library.compiler(), "-std=c++17", "-fsyntax-only", *includes, str(source)], check=True
    )
