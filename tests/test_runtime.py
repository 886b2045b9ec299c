"""The launcher library over host memory: what reaches the driver, for every kind of call and fault.

A recorded driver (tests/fake_driver.cpp) computes each launch from its arguments, so that results
are checked end to end: padding, copies, strides, tensor maps, workspaces.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import threading
from pathlib import Path

import fake_cuda
import pytest
import reference
import torch

from marlin_cutlass import dequantize, dispatch, library, pack
from marlin_cutlass.errors import LibraryError

REPO = Path(__file__).resolve().parent.parent
SMS = 132
SPLIT = {"family": "hopper", "decomposition": "split_k", "split": 2}
SHAPES = {
    "ampere": {"family": "ampere"},
    "striped": {"family": "ampere", "decomposition": "striped", "ctas_per_sm": 2},
    "hopper": {"family": "hopper", "m_tile": 64, "n_sm": 256, "k_sm": 256},
    "split": SPLIT,
    "streamk": {"family": "hopper", "decomposition": "stream_k", "n_sm": 256},
    "hybrid": {"family": "hopper", "decomposition": "hybrid", "n_sm": 256},
    "multicast": {"family": "hopper", "n_sm": 256, "multicast": 2},
}


@pytest.fixture
def kernels(fake, tmp_path):
    """A function that registers a table in which one geometry serves everything."""

    def register(shape: str, **fields):
        shared = {**SHAPES[shape], **fields}
        entries = [fake_cuda.kernel(**shared, **form) for form in fake_cuda.formats()]
        folder = fake_cuda.write_table(tmp_path, entries, [fake_cuda.row(entries[0])])
        table = dispatch.load_table(folder)
        fake.launcher.add_table(table, 9, 0)
        return table

    return register


def weight(k=256, n=96, group_size=128, zeros=False, act_order=False):
    rows = 1 if group_size < 0 else k // group_size
    q = torch.randint(0, 16, (k, n), dtype=torch.uint8)
    z = torch.randint(0, 17, (rows, n)) if zeros else None
    g_idx = (torch.arange(k) // group_size)[torch.randperm(k)] if act_order else None
    return pack(q, torch.rand(rows, n).half() * 0.1 + 0.01, z, group_size=group_size, g_idx=g_idx)


def gemm(a, w, bias=None, out=None, variant=-1):
    form = (a, w.packed, w.col_scale, bias, w.perm, w.n, w.k, w.group_size, w.has_zeros)
    if out is None:
        return torch.ops.marlin_cutlass_host.gemm(*form, variant)
    torch.ops.marlin_cutlass_host.gemm_out(*form, out, variant)
    return out


def right(out, a, w, bias=None):
    reference.check(out, a, dequantize(w, a.dtype), None if bias is None else bias.to(a.dtype))


# ---- results ----


@pytest.mark.parametrize("shape", ["ampere", "split"])
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("group_size", [32, 64, 128, 256, -1])
def test_identity_activations_give_the_dequantized_weight(kernels, group_size, zeros, shape):
    kernels(shape)
    w = weight(256, 70, group_size, zeros, act_order=group_size in (64, 128))
    for dtype in (torch.float16, torch.bfloat16):
        assert torch.equal(gemm(torch.eye(256, dtype=dtype), w), dequantize(w, dtype))


@pytest.mark.parametrize("shape", list(SHAPES))
@pytest.mark.parametrize(("k", "n"), [(200, 70), (64, 8), (10944 // 8, 33), (1, 1)])
def test_any_size_is_right(kernels, shape, k, n):
    kernels(shape)
    w = weight(k, n, -1)
    for m in (1, 5):
        a, bias = torch.randn(m, k).half(), torch.randn(n)
        right(gemm(a, w, bias), a, w, bias)


def test_k_is_padded_for_the_family(fake, kernels):
    w, a = weight(200, 64, -1), torch.randn(3, 200).half()
    kernels("ampere")
    gemm(a, w)
    assert (fake.record.k, fake.record.lda) == (200, 200)
    kernels("hopper")
    right(gemm(a, w), a, w)
    assert (fake.record.k, fake.record.lda, fake.record.map_slices) == (256, 256, 4)
    w = weight(100, 64, -1)
    a = torch.randn(3, 100).half()
    kernels("ampere")
    right(gemm(a, w), a, w)
    assert (fake.record.k, fake.record.lda) == (104, 104)


def views(k):
    big, flat = torch.randn(8, 4 * k).half(), torch.randn(1 + 8 * k).half()
    yield "row stride", big[:, k : 2 * k], True
    yield "every second row", torch.randn(16, k).half()[::2], True
    yield "one row, odd stride", torch.randn(1, k + 1).half()[:, :k], True
    yield "three dimensions", torch.randn(2, 4, k).half(), True
    yield "transposed", torch.randn(k, 8).half().t(), False
    yield "expanded", torch.randn(1, k).half().expand(4, k), False
    yield "misaligned base", flat[1:].view(8, k), False
    yield "misaligned rows", torch.randn(8, k + 1).half()[:, :k], False
    yield "overlapping rows", flat.as_strided((8, k), (8, 1)), False
    yield "swapped leading dimensions", torch.randn(4, 2, k).half().transpose(0, 1), False
    yield "channels last", torch.randn(2, k, 3, 4).half().permute(0, 2, 3, 1), False


@pytest.mark.parametrize("family", ["ampere", "hopper"])
@pytest.mark.parametrize(("name", "a", "direct"), list(views(256)), ids=[v[0] for v in views(256)])
def test_views_are_read_in_place_or_copied(fake, kernels, name, a, direct, family):
    kernels(family)
    w = weight()
    right(gemm(a, w), a, w)
    if name == "one row, odd stride":
        return
    strided = direct and a.dim() == 2
    assert fake.record.lda == (a.stride(0) if strided else 256)


def test_out_is_written_in_place(fake, kernels):
    kernels("ampere")
    w, a = weight(), torch.randn(4, 256).half()
    big = torch.full((6, 200), 7.0).half()
    for columns, vector in [(slice(16, 112), 1), (slice(1, 97), 0)]:
        big.fill_(7)
        out = big[1:5, columns]
        gemm(a, w, out=out)
        right(out, a, w)
        assert fake.record.vector_store == vector and fake.record.ldc == 200
        out.fill_(7)
        assert (big == 7).all(), "nothing outside of out was written"


@pytest.mark.parametrize(("n", "vector"), [(96, 1), (98, 0), (4, 1)])
def test_vector_stores_need_whole_quads(fake, kernels, n, vector):
    kernels("ampere")
    gemm(torch.randn(2, 256).half(), weight(256, n))
    assert fake.record.vector_store == vector


def test_bias_of_another_type_or_stride_is_converted(kernels):
    kernels("ampere")
    w = weight(256, 192)
    a = torch.zeros(2, 256).half()
    for bias in (torch.arange(192.0), torch.arange(192).bfloat16(), torch.arange(384).half()[::2]):
        assert torch.equal(gemm(a, w, bias), bias.half().expand(2, 192))


def test_no_rows_launch_nothing(fake, kernels):
    kernels("hopper")
    out = gemm(torch.empty(2, 0, 256).bfloat16(), weight())
    assert out.shape == (2, 0, 96) and out.dtype == torch.bfloat16
    gemm(torch.empty(0, 256).half(), weight(), out=torch.empty(0, 96).half())
    assert fake.record.launches == 0


# ---- launches ----


@pytest.mark.parametrize("m", [33, 200])
@pytest.mark.parametrize("shape", list(SHAPES))
def test_a_launch_has_the_numbers_of_the_table_and_the_schedule(fake, kernels, shape, m):
    table = kernels(shape)
    gemm(torch.randn(m, 4096).half(), weight(4096, 512))
    kernel = table.kernels[table.index(fake.last_kernel)]
    numbers = dispatch.schedule(kernel, m, 512, 4096, SMS)
    record = fake.record
    assert (record.grid, record.threads) == (numbers.grid, kernel.threads)
    assert record.shared_bytes == record.max_shared == kernel.shared_bytes
    assert record.cluster == kernel.cluster
    assert (record.k_steps, record.raster) == (numbers.k_steps, numbers.raster)
    assert record.programmatic == (kernel.family == "hopper")
    assert (record.flags != 0) == (numbers.flags > 0)
    if kernel.family == "hopper":
        assert (record.map_rows, record.map_slices) == (m, 64)
        slices = kernel.k_sm // 64 // kernel.multicast
        # Fewer rows than the tile has: no box reaches outside A.
        box = (kernel.m_tile, slices) if m >= kernel.m_tile else (m, 1)
        assert (record.map_box_rows, record.map_box_slices) == box
        assert record.map_stride == 2 * 4096


def test_programmatic_launch_can_be_turned_off(fake, kernels):
    kernels("split")
    fake.launcher.set_option("pdl", False)
    gemm(torch.randn(1, 256).half(), weight())
    assert fake.record.programmatic == 0 and fake.record.cluster == 2


def test_repeated_calls_reuse_kernel_plan_and_tensor_map(fake, kernels):
    kernels("hopper")
    w, a = weight(), torch.randn(4, 256).half()
    for _ in range(5):
        gemm(a, w)
    record = fake.record
    assert (record.launches, record.function_count, record.encodes) == (5, 1, 1)
    gemm(a[:2], w)
    assert fake.record.encodes == 2, "another number of rows needs another map"
    gemm(a.clone(), w)
    assert fake.record.encodes == 3


def test_a_call_waits_while_tables_are_being_registered(fake, kernels):
    """Another thread's first call makes the operators callable before their tables are there."""
    w, a, done = weight(), torch.randn(4, 256).half(), []
    fake.launcher.set_loading(True)
    thread = threading.Thread(target=lambda: done.append(gemm(a, w)))
    thread.start()
    thread.join(0.3)
    assert thread.is_alive() and not done
    kernels("hopper")
    fake.launcher.set_loading(False)
    thread.join(20)
    right(done[0], a, w)


def test_a_new_table_takes_effect(fake, kernels):
    w, a = weight(), torch.randn(4, 256).half()
    kernels("ampere")
    gemm(a, w)
    assert "_ampere_" in fake.last_kernel
    kernels("hopper")
    gemm(a, w)
    assert "_hopper_" in fake.last_kernel


def test_a_forced_variant_is_used(fake, kernels):
    table = kernels("ampere")
    w, a = weight(), torch.randn(4, 256).half()
    index = table.find(table.kernels[0].geometry, "f16", False, 128)
    gemm(a, w, variant=index)
    assert fake.last_kernel == table.kernels[index].name
    with pytest.raises(
        ValueError, match="it cannot serve M=4, N=96, K=256, group_size=128, float16"
    ):
        gemm(a, w, variant=index + 1)


def test_batch_invariant_calls_take_one_kernel(fake, kernels):
    kernels("hopper")
    w = weight()
    names = set()
    for m in (1, 16, 257):
        gemm(torch.randn(m, 256).half(), w, variant=-2)
        names.add(fake.last_kernel)
    assert len(names) == 1


@pytest.mark.parametrize("shape", ["striped", "streamk"])
def test_batch_invariant_calls_go_by_row_tiles_where_k_is_cut_by_them(fake, kernels, shape):
    kernels(shape)
    w = weight()
    big = torch.randn(40, 300).half()
    for a in (big[:1, :256], big[:16, :256], big[:, :256]):
        out = torch.full((a.shape[0], 128), 7.0).half()
        before = fake.record.launches
        gemm(a, w, out=out[:, :96], variant=-2)
        right(out[:, :96], a, w)
        assert (out[:, 96:] == 7).all()
        assert fake.record.launches - before == -(-a.shape[0] // 16)
    fake.launcher.clear_tables()
    fake.launcher.add_table(dispatch.parse_table(empty_manifest(), "."), 9, 0)
    with pytest.raises(ValueError, match="no kernel for batch_invariant=True"):
        gemm(big[:1, :256], w, variant=-2)


def empty_manifest():
    return {"format": 1, "arch": "sm_90a", "layout_version": 1, "variants": [], "dispatch": []}


def test_the_current_context_is_restored(fake, kernels):
    kernels("ampere")
    fake.context(0x7000)
    gemm(torch.randn(1, 256).half(), weight())
    assert fake.record.pushes > 0
    pushes = fake.record.pushes
    fake.context(0x1000)
    gemm(torch.randn(1, 256).half(), weight())
    assert fake.record.pushes == pushes, "the device's context is current: nothing to switch"


def test_threads_without_a_context_can_launch(fake, kernels):
    kernels("hopper")
    w, errors = weight(), []

    def work():
        try:
            a = torch.randn(3, 256).half()
            right(gemm(a, w), a, w)
        except Exception as error:  # reported below
            errors.append(error)

    fake.context(0)
    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and fake.record.launches == 4


def test_debug_checks_after_each_launch(fake, kernels):
    table = kernels("ampere")
    w, a = weight(), torch.randn(1, 256).half()
    gemm(a, w)
    assert fake.record.synchronisations == 0
    fake.launcher.set_option("debug", True)
    gemm(a, w)
    assert fake.record.synchronisations == 1
    fake.fail("cuStreamSynchronize", 700)
    with pytest.raises(
        RuntimeError, match=r"cuStreamSynchronize failed \(error 700.*kernel w4a16_amp"
    ):
        gemm(a, w)
    assert table


# ---- workspaces ----


def launch(fake, stream, m=64, n=4096, k=1024, group_size=128):
    """A launch by address that computes nothing: only what reaches the driver matters."""
    a = torch.zeros(m, k).half()
    fake.launcher.launch(
        [a.data_ptr(), a.data_ptr(), a.data_ptr(), 0, 0, stream],
        [k, n, m, n, k, group_size, 0, 0, 0, -1],
    )
    return fake.record.flags


@pytest.fixture
def streamk(fake, kernels):
    kernels("streamk")
    return fake


def test_flags_are_zero_and_streams_share_nothing(streamk):
    # Streams of this test only: a workspace lives as long as the process.
    first, second = launch(streamk, 0xA10), launch(streamk, 0xA20)
    assert first != second and streamk.record.dirty_flags == 0
    assert launch(streamk, 0xA10) == first and launch(streamk, 0xA20) == second
    assert streamk.record.allocations == 2


def test_a_workspace_grows_and_keeps_its_flags_zero(streamk):
    small = launch(streamk, 0xB10, m=1, n=256, k=256)
    large = launch(streamk, 0xB10)
    assert launch(streamk, 0xB10, m=1, n=256, k=256) == large != small
    assert streamk.record.allocations == 2 and streamk.record.dirty_flags == 0


def test_a_capture_owns_its_workspace_until_its_graph_is_destroyed(streamk):
    eager = launch(streamk, 0xC10)
    streamk.capture(0xC10, 1, 0x9001)
    captured = launch(streamk, 0xC10)
    assert captured != eager and launch(streamk, 0xC10) == captured
    streamk.capture(0xC20, 1, 0x9001)
    assert launch(streamk, 0xC20) not in (captured, eager), "a forked stream has its own"
    streamk.capture(0xC10, 0, 0, active=False)
    streamk.capture(0xC20, 0, 0, active=False)
    assert launch(streamk, 0xC10) == eager
    streamk.capture(0xC10, 2, 0x9002)
    second = launch(streamk, 0xC10)
    assert second != captured, "the first graph still owns its memory"
    allocations = streamk.record.allocations
    streamk.capture(0xC10, 3, 0x9003)
    streamk.destroy_graph(0x9001)
    assert launch(streamk, 0xC10) == captured, "memory of a destroyed graph is used again"
    assert streamk.record.allocations == allocations and streamk.record.dirty_flags == 0
    streamk.destroy_graph(0x9002)
    streamk.destroy_graph(0x9003)


def test_a_first_call_inside_a_capture_works(fake, kernels):
    kernels("streamk", stages=5)
    fake.capture(0xD10, 7, 0x9007)
    assert launch(fake, 0xD10) != 0
    assert fake.record.function_count == 1 and fake.record.relaxed > 0
    fake.destroy_graph(0x9007)


def test_a_full_device_says_what_was_asked_for(streamk):
    streamk.fail("cuMemAlloc", 2)
    with pytest.raises(RuntimeError, match=r"cuMemAlloc failed \(error 2.*bytes of workspace"):
        launch(streamk, 0xE10)
    streamk.fail("", 0)
    assert launch(streamk, 0xE10) != 0


# ---- faults ----


@pytest.mark.parametrize(
    ("symbol", "text"),
    [
        ("cuLaunchKernelEx", "cuLaunchKernelEx failed.*kernel w4a16_hopper.*M=13, N=96, K=256"),
        ("cuModuleLoadData", "cuModuleLoadData failed.*kernel w4a16_hopper.*cubin"),
        ("cuFuncSetAttribute", "asks for 65536 bytes of shared memory"),
        ("cuTensorMapEncodeTiled", "cuTensorMapEncodeTiled failed.*row stride 256"),
    ],
)
def test_driver_errors_name_the_kernel_and_pass(fake, kernels, symbol, text):
    kernels("hopper")
    # Thirteen rows as nowhere else: a descriptor of an earlier test at the same address would be
    # reused, not encoded.
    w, a = weight(), torch.randn(13, 256).half()
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


# ---- compiling and loading the library ----


def test_the_library_needs_no_cuda_and_no_symbol_newer_than_its_target():
    path = library.build()
    needed = subprocess.run(["ldd", str(path)], capture_output=True, text=True).stdout
    assert "libcuda" not in needed and "libpython" not in needed
    symbols = subprocess.run(
        ["nm", "-D", "--undefined-only", str(path)], capture_output=True, text=True
    )
    assert symbols.returncode == 0 and "aoti_torch_get_sizes" in symbols.stdout
    assert (
        " _Py" not in symbols.stdout
        and "_ZN2at" not in symbols.stdout
        and "_ZN3c10" not in symbols.stdout
    )


def test_a_second_build_compiles_nothing(monkeypatch):
    path = library.build()
    monkeypatch.setattr(library, "_compile", lambda *_: pytest.fail("compiled again"))
    assert library.build() == path


def test_a_failing_compiler_shows_its_last_lines(tmp_path, monkeypatch):
    tool = tmp_path / "cxx"
    tool.write_text("#!/bin/sh\nfor i in $(seq 50); do echo line $i; done >&2\nexit 3\n")
    tool.chmod(0o755)
    monkeypatch.setenv("CXX", str(tool))
    with pytest.raises(LibraryError, match=r"failed \(3\).*(?s:.*)line 50") as caught:
        library.build(folder=tmp_path / "out")
    assert "line 30\n" not in str(caught.value) and f"command: {tool}" in str(caught.value)
    assert not list((tmp_path / "out").iterdir())
    monkeypatch.setenv("CXX", "/nowhere/g++")
    with pytest.raises(LibraryError, match="cannot run the C\\+\\+ compiler /nowhere/g\\+\\+"):
        library.build(folder=tmp_path / "out")


def test_without_a_compiler_the_call_says_so(monkeypatch, tmp_path):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LibraryError, match="no C\\+\\+ compiler: install g\\+\\+ or set CXX"):
        library.compiler()


def test_folders_that_cannot_be_written(monkeypatch, tmp_path):
    blocker = tmp_path / "file"
    blocker.write_text("")
    writable = tmp_path / "cache"
    monkeypatch.setattr(library, "library_folders", lambda: [blocker / "runtime", writable])
    assert library._writable_folder() == writable
    monkeypatch.setattr(library, "library_folders", lambda: [blocker / "a", blocker / "b"])
    with pytest.raises(LibraryError, match=r"can be written.*file/a.*file/b.*MARLIN_CUTLASS_BUILD"):
        library._writable_folder()


def test_a_library_that_does_not_load_keeps_the_loaders_text(tmp_path):
    path = tmp_path / "libbroken.so"
    path.write_bytes(b"not a library")
    with pytest.raises(
        LibraryError, match=r"libbroken.so does not load: .*(invalid ELF|too short)"
    ):
        library._open(path)


def test_the_command_line_prints_the_path():
    done = subprocess.run(
        [sys.executable, "-m", "marlin_cutlass.library", "build"],
        capture_output=True,
        text=True,
        cwd=REPO,
        env=os.environ,
    )
    assert done.returncode == 0 and done.stdout.strip() == str(library.build())
    assert library.main(["bild"]) == 2


def test_loading_without_a_gpu_is_refused():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(LibraryError, match="no CUDA device is available to torch"):
        library.load()
