"""The launcher library over host memory: what reaches the driver, for every kind of call.

A recorded driver (tests/fake_driver.cpp) computes each launch from its arguments, so that results
are checked end to end: padding, copies, strides, tensor maps, workspaces.
"""

from __future__ import annotations

import threading

import pytest
import torch
from runtime_cases import SHAPES, SMS, gemm, right, weight

from marlin_cutlass import dequantize, dispatch
from marlin_cutlass.manifest import MANIFEST_FORMAT

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


def test_many_plans_in_turn_are_each_found_again(fake, kernels):
    """More shapes and formats than a thread keeps at hand, so that they take each other's place."""
    kernels("hybrid")
    fake.compute(False)
    weights = [weight(k, n, group) for k in (256, 1024) for n in (96, 512) for group in (64, 128)]
    for _ in range(2):
        for w in weights:
            for m in (1, 2, 3, 40):
                for dtype in (torch.float16, torch.bfloat16):
                    gemm(torch.empty(m, w.k, dtype=dtype), w)
                    assert (fake.record.m, fake.record.n, fake.record.k) == (m, w.n, w.k)
                    form = f"_{'f16' if dtype == torch.float16 else 'bf16'}_g{w.group_size}_"
                    assert form in fake.last_kernel
    assert fake.record.launches == 2 * 64


def test_every_operand_is_given_back(fake, kernels):
    """The operators own their arguments: whatever comes of a call, none of them is kept."""
    kernels("hopper")
    w, a, bias = weight(act_order=True), torch.randn(2, 256).half(), torch.randn(96)
    out, wrong = torch.empty(2, 96).half(), torch.randn(2, 128).half()
    operands = (a, bias, out, wrong, w.packed, w.col_scale, w.perm)
    before = [tensor._use_count() for tensor in operands]
    for target in (None, out):
        gemm(a, w, bias, target)
        with pytest.raises(ValueError, match="a has shape"):
            gemm(wrong, w, bias, target)
        with pytest.raises(ValueError, match="bias has shape"):
            gemm(a, w, bias[1:], target)
        fake.fail("cuLaunchKernelEx")
        with pytest.raises(RuntimeError, match="cuLaunchKernelEx"):
            gemm(a, w, bias, target)
        fake.fail("", 0)
    assert gemm(a, w)._use_count() == 1
    assert [tensor._use_count() for tensor in operands] == before


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
    return {
        "format": MANIFEST_FORMAT,
        "arch": "sm_90a",
        "layout_version": 1,
        "variants": [],
        "dispatch": [],
    }


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
