"""gemm on a GPU: every built variant bit for bit, ragged rows, streams, graphs, determinism.

Reads the manifest of the device's table, so that a new variant is tested because it is built:
`python -m pytest tests/gpu/test_gemm_gpu.py`; `-k identity` is the quickest check of all variants.
"""

from __future__ import annotations

import functools
import itertools

import pytest
import reference
import torch

import marlin_cutlass as mc
from benchmarks import host
from marlin_cutlass import bench, dispatch, library

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
DTYPES = {"f16": torch.float16, "bf16": torch.bfloat16}
GUARD = 2048  # elements around a poisoned output: 4 KiB


def built_kernels() -> list[dispatch.Kernel]:
    if not torch.cuda.is_available():
        return []
    capability = torch.cuda.get_device_capability()
    try:
        kernels = library.table_for_capability(*capability).kernels
    except mc.errors.UnsupportedArchError:
        return []
    return [k for k in kernels if not k.sparse]  # those: test_sparse_gpu.py


KERNELS = built_kernels()
every_kernel = pytest.mark.parametrize(
    "kernel", KERNELS or [None], ids=lambda k: k.name if k else "none built"
)


def parts(k: int, n: int, group_size: int, zeros: bool, seed: int = 0):
    """Random codes [k, n], scales and zero points (or None) [groups, n]."""
    generator = torch.Generator().manual_seed(seed)
    rows = 1 if group_size < 0 else k // group_size
    q = torch.randint(0, 16, (k, n), dtype=torch.uint8, generator=generator)
    z = torch.randint(0, 17, (rows, n), generator=generator) if zeros else None
    return q, (torch.rand(rows, n, generator=generator) * 0.1 + 0.01).half(), z


@functools.cache
def weight(k=640, n=200, group_size=128, zeros=False, act_order=False, seed=0) -> mc.PackedWeight:
    """A random weight; ragged in both directions unless sizes are given."""
    q, scales, z = parts(k, n, group_size, zeros, seed)
    order = torch.randperm(k, generator=torch.Generator().manual_seed(seed))
    g_idx = (torch.arange(k) // group_size)[order] if act_order else None
    return mc.pack(q, scales, z, group_size=group_size, g_idx=g_idx).to(DEVICE)


@functools.cache
def dense(dtype: torch.dtype, *form) -> torch.Tensor:
    return mc.dequantize(weight(*form), dtype)


def poisoned(
    m: int, n: int, dtype: torch.dtype, value=float("nan")
) -> tuple[torch.Tensor, torch.Tensor]:
    """An [m, n] output inside a guard region, both filled with `value`."""
    region = torch.full((m * n + 2 * GUARD,), value, dtype=dtype, device=DEVICE)
    return region, region[GUARD : GUARD + m * n].view(m, n)


def assert_guarded(region: torch.Tensor, count: int) -> None:
    assert region[:GUARD].isnan().all() and region[GUARD + count :].isnan().all(), (
        "wrote outside of out"
    )


def assert_close_to_torch(out: torch.Tensor, a: torch.Tensor, w: mc.PackedWeight) -> None:
    """At most twice the error of torch on the dequantised weight, against the unrounded product."""
    exact = a.double() @ mc.dequantize(w, torch.float32).double()
    theirs = (a @ mc.dequantize(w, a.dtype)).double()
    assert torch.isfinite(out).all()
    error, bound = (out.double() - exact).norm(), (theirs - exact).norm()
    assert error <= 2 * bound + 1e-6 * exact.norm(), f"{error:.3g} against {bound:.3g} of torch"


def assert_nearest(out: torch.Tensor, k: int, n: int, group_size: int, zeros: bool) -> None:
    """Every weight of `parts` is the nearest number to the exact product of code and scale."""
    name = str(out.dtype).removeprefix("torch.")
    exact = reference.unrounded_weights(
        *parts(k, n, group_size, zeros), group_size=group_size, dtype=name
    )
    right = reference.nearest(reference.to_numpy(out), exact)
    assert right.all(), f"{int((~right).sum())} of {right.size} weights are not the nearest"


# ---- every built variant ----


@every_kernel
def test_identity_activations_give_the_dequantized_weight(kernel):
    """Bit for bit; with a running scale the number nearest to the exact product."""
    if kernel is None:
        pytest.skip("no table for this device: run build.py")
    dtype = DTYPES[kernel.dtype]
    form = (640, 200, kernel.group_size, kernel.zeros)
    out = mc.gemm(torch.eye(640, dtype=dtype, device=DEVICE), weight(*form), kernel=kernel.name)
    if reference.has_running_scale(kernel):
        assert_nearest(out, *form)
        return
    want = dense(dtype, *form)
    assert torch.equal(out, want), f"{int((out != want).sum())} of {want.numel()} weights differ"


@every_kernel
def test_ragged_rows_of_random_activations(kernel):
    if kernel is None:
        pytest.skip("no table for this device: run build.py")
    dtype, tile = DTYPES[kernel.dtype], kernel.m_tile
    w = weight(640, 200, kernel.group_size, kernel.zeros)
    for m in sorted({1, max(1, tile - 1), tile, tile + 1, 3 * tile + 5}):
        a = torch.randn(m, 640, dtype=dtype, device=DEVICE)
        region, out = poisoned(m, 200, dtype)
        mc.gemm(a, w, out=out, kernel=kernel.name)
        assert_close_to_torch(out, a, w)
        assert_guarded(region, m * 200)


@every_kernel
def test_deep_and_wide_problems_repeat_bit_for_bit(kernel):
    """More tiles than SMs and many k steps: every reduction across CTAs runs."""
    if kernel is None:
        pytest.skip("no table for this device: run build.py")
    dtype = DTYPES[kernel.dtype]
    w = weight(4096, 3072, kernel.group_size, kernel.zeros)
    a = torch.randn(min(kernel.m_tile, 64) + 3, 4096, dtype=dtype, device=DEVICE)
    first = mc.gemm(a, w, kernel=kernel.name)
    assert_close_to_torch(first, a, w)
    for _ in range(8):
        assert torch.equal(mc.gemm(a, w, kernel=kernel.name), first)


# ---- the table's choice: shapes ----


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_every_number_of_rows(dtype):
    w = weight(256, 128)
    for m in [*range(1, 131), 329]:
        a = torch.randn(m, 256, dtype=dtype, device=DEVICE)
        region, out = poisoned(m, 128, dtype)
        mc.gemm(a, w, out=out)
        reference.check(out, a, dense(dtype, 256, 128))
        assert_guarded(region, m * 128)


@pytest.mark.parametrize("group_size", [32, 64, 128, 256, -1])
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_every_format(group_size, zeros, dtype):
    for act_order in (False, True) if group_size > 0 else (False,):
        form = (512, 256, group_size, zeros, act_order)
        for m in (1, 16, 100):
            a = torch.randn(m, 512, dtype=dtype, device=DEVICE)
            reference.check(mc.gemm(a, weight(*form)), a, dense(dtype, *form))
        eye = torch.eye(512, dtype=dtype, device=DEVICE)
        assert torch.equal(mc.gemm(eye, weight(*form)), dense(dtype, *form))


@pytest.mark.parametrize(
    ("k", "n", "group_size"),
    [
        (192, 320, 64),
        (10944, 256, 64),
        (7392, 256, 32),
        (256, 8, 128),
        (256, 48, 128),
        (512, 1440, 128),
        (200, 70, -1),
        (100, 33, -1),
        (1, 1, -1),
        (128, 8256, 128),
    ],
)
def test_odd_sizes(k, n, group_size):
    for m in (1, 7, 33):
        a = torch.randn(m, k, device=DEVICE).half()
        bias = torch.randn(n, device=DEVICE)
        _, out = poisoned(m, n, torch.float16, 1e4)
        mc.gemm(a, weight(k, n, group_size), bias, out=out)
        want = dense(torch.float16, k, n, group_size)
        reference.check(out, a, want, bias.half())


def test_views():
    w = weight(256, 200)
    big, flat = torch.randn(8, 1024, device=DEVICE).half(), torch.randn(2049, device=DEVICE).half()
    views = [
        big[:, 128:384],
        big[:, 129:385],
        torch.randn(256, 8, device=DEVICE).half().t(),
        torch.randn(16, 256, device=DEVICE).half()[::2],
        torch.randn(1, 256, device=DEVICE).half().expand(4, 256),
        flat[1:].view(8, 256),
        torch.randn(8, 257, device=DEVICE).half()[:, :256],
        torch.randn(2, 3, 256, device=DEVICE).half(),
        torch.randn(4, 2, 256, device=DEVICE).half().transpose(0, 1),
        torch.randn(256, device=DEVICE).half(),
        torch.empty(0, 256, device=DEVICE).half(),
    ]
    for a in views:
        out = mc.gemm(a, w)
        assert out.shape == (*a.shape[:-1], 200) and out.is_contiguous()
        if a.numel():
            reference.check(out, a, dense(torch.float16, 256, 200))


def test_strided_out_leaves_the_rest_alone():
    w, a = weight(256, 96), torch.randn(40, 256, device=DEVICE).half()
    for start in (0, 1, 2, 4):
        big = torch.full((42, 256), 7.0, device=DEVICE).half()
        mc.gemm(a, w, out=big[1:41, start : start + 96])
        reference.check(big[1:41, start : start + 96], a, dense(torch.float16, 256, 96))
        big[1:41, start : start + 96] = 7
        assert (big == 7).all()


def test_sums_beyond_fp16_stay_finite():
    k = 4096
    q = torch.full((k, 64), 1, dtype=torch.uint8)
    q[: k // 2] = 15
    w = mc.pack(q, torch.full((k // 128, 64), 0.125).half(), group_size=128).to(DEVICE)
    a = torch.full((1, k), 64.0, device=DEVICE).half()
    assert not mc.gemm(a, w).any()
    for kernel in KERNELS:
        if (kernel.dtype, kernel.zeros, kernel.group_size) == ("f16", False, 128):
            assert not mc.gemm(a, w, kernel=kernel.name).any(), kernel.name


def test_act_order_needs_no_scratch_size():
    form = (512, 256, 128, False, True)
    for m in (1, 8192):
        a = torch.randn(m, 512, device=DEVICE).half()
        reference.check(mc.gemm(a, weight(*form)), a, dense(torch.float16, *form))


@pytest.mark.parametrize("zeros", [False, True])
def test_the_cpu_path_agrees(zeros):
    form = (512, 200, 64, zeros)
    w = weight(*form)
    a, bias = torch.randn(33, 512, device=DEVICE).half(), torch.randn(200, device=DEVICE)
    ours, theirs = mc.gemm(a, w, bias), mc.gemm(a.cpu(), w.cpu(), bias.cpu())
    for out in (ours, theirs.to(DEVICE)):
        reference.check(out, a, dense(torch.float16, *form), bias)
    if not zeros:  # the same rounded weights; with zero points Hopper rounds none for few rows
        torch.testing.assert_close(ours.cpu(), theirs, rtol=2e-3, atol=2e-3)


def test_packing_on_the_gpu_gives_the_same_bytes():
    q = torch.randint(0, 16, (512, 200), dtype=torch.uint8)
    scales, zeros = torch.rand(8, 200).half(), torch.randint(0, 17, (8, 200))
    g_idx = (torch.arange(512) // 64)[torch.randperm(512)].int()
    on_cpu = mc.pack(q, scales, zeros, group_size=64, g_idx=g_idx)
    moved = (x.to(DEVICE) for x in (q, scales, zeros))
    assert mc.pack(*moved, group_size=64, g_idx=g_idx.to(DEVICE)).cpu() == on_cpu
    assert mc.pack(q, scales, zeros, group_size=64, g_idx=g_idx.to(DEVICE)) == on_cpu
    assert torch.equal(mc.dequantize(on_cpu.to(DEVICE)).cpu(), mc.dequantize(on_cpu))


# ---- repeatability ----


@pytest.mark.parametrize(
    ("m", "n", "k"), [(16, 512, 3584), (16, 1024, 8192), (64, 512, 8192), (1, 512, 8192)]
)
def test_results_repeat_while_another_stream_is_busy(m, n, k):
    w, a = weight(k, n), torch.randn(m, k, device=DEVICE).half()
    first, side = mc.gemm(a, w), torch.cuda.Stream()
    source = torch.empty(1 << 24, device=DEVICE)
    for _ in range(200):
        with torch.cuda.stream(side):
            source.clone()
        assert torch.equal(mc.gemm(a, w), first)


def test_batch_invariance():
    w, a = weight(4096, 512), torch.randn(257, 4096, device=DEVICE).half()
    first = mc.gemm(a[:1], w, batch_invariant=True)
    for m in (2, 4, 16, 64, 257):
        assert torch.equal(mc.gemm(a[:m], w, batch_invariant=True)[:1], first)


def test_a_forced_kernel_is_refused_rather_than_replaced():
    w, a = weight(256, 200), torch.randn(2, 256, device=DEVICE).half()
    with pytest.raises(ValueError, match="is not built for sm_"):
        mc.gemm(a, w, kernel="w4a16_ampere_m8_n64k64_w1x1_p99_dp_c1")
    other = next((k for k in KERNELS if k.dtype == "bf16"), None)
    if other is not None:
        with pytest.raises(ValueError, match="this call has f16"):
            mc.gemm(a, w, kernel=other.name)


# ---- streams, graphs, threads ----


def crossing_kernels() -> list[str]:
    """One kernel of each decomposition, f16 symmetric group 128; some use a workspace."""
    found = {}
    for kernel in KERNELS:
        if (kernel.dtype, kernel.zeros, kernel.group_size) == ("f16", False, 128):
            found.setdefault((kernel.family, kernel.decomposition), kernel.name)
    return list(found.values())


def test_streams_do_not_share_workspaces():
    w = weight(8192, 1024)
    streams = [torch.cuda.Stream() for _ in range(4)]
    for name in crossing_kernels():
        inputs = [torch.randn(16, 8192, device=DEVICE).half() for _ in streams]
        want = [mc.gemm(a, w, kernel=name) for a in inputs]
        torch.cuda.synchronize()
        for _ in range(20):
            results = []
            for stream, a in zip(streams, inputs):
                with torch.cuda.stream(stream):
                    results.append(mc.gemm(a, w, kernel=name))
            torch.cuda.synchronize()
            assert all(torch.equal(got, right) for got, right in zip(results, want)), name


def test_a_chain_of_dependent_calls():
    """Each launch may start before the previous one ends; it must still see its results."""
    first, second = weight(1024, 4096), weight(4096, 1024)
    a = torch.randn(4, 1024, device=DEVICE).half()

    def chain(between) -> torch.Tensor:
        x = a
        for _ in range(30):
            hidden = mc.gemm(x, first)
            between()
            y = mc.gemm(hidden, second)
            between()
            x = y / y.abs().amax()
        return x

    direct, checked = chain(lambda: None), chain(torch.cuda.synchronize)
    assert torch.isfinite(checked).all() and torch.equal(direct, checked)


def test_chains_without_a_kernel_between():
    w = weight(2048, 2048)
    x = [torch.randn(8, 2048, device=DEVICE).half() * 0.01]
    for _ in range(3):
        x.append(mc.gemm(x[-1], w))
    torch.cuda.synchronize()
    for before, after in itertools.pairwise(x):
        reference.check(after, before, dense(torch.float16, 2048, 2048))


@pytest.mark.parametrize("name", [None, *crossing_kernels()], ids=lambda n: n or "table")
def test_graphs_replay_what_eager_computes(name):
    layers = [weight(2048, 2048, seed=i) for i in range(3)]
    a = torch.randn(16, 2048, device=DEVICE).half() * 0.01

    def forward(x):
        for w in layers:
            x = mc.gemm(x, w, kernel=name) * 0.01
        return x

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        forward(a)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = forward(a)
    for seed in range(3):
        a.copy_(torch.randn(16, 2048, device=DEVICE).half() * 0.01 * (seed + 1))
        graph.replay()
        eager = forward(a)
        torch.cuda.synchronize()
        assert torch.equal(out, eager)


def test_two_graphs_and_eager_interleave():
    w = weight(8192, 1024)
    inputs = [torch.randn(16, 8192, device=DEVICE).half() for _ in range(2)]
    for name in crossing_kernels():
        graphs, outs = [], []
        for a in inputs:
            graphs.append(torch.cuda.CUDAGraph())
            with torch.cuda.graph(graphs[-1]):
                outs.append(mc.gemm(a, w, kernel=name))
        want = [mc.gemm(a, w, kernel=name) for a in inputs]
        streams = [torch.cuda.Stream() for _ in graphs]
        torch.cuda.synchronize()
        for _ in range(20):
            for stream, graph in zip(streams, graphs):
                with torch.cuda.stream(stream):
                    graph.replay()
            mc.gemm(inputs[0], w, kernel=name)
            torch.cuda.synchronize()
            assert all(torch.equal(got, right) for got, right in zip(outs, want)), name
        del graphs, outs


def test_weights_reloaded_in_place_reach_a_captured_graph():
    w, new = weight(512, 256, seed=3).clone(), weight(512, 256, seed=4)
    a = torch.randn(4, 512, device=DEVICE).half()
    mc.gemm(a, w)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = mc.gemm(a, w)
    address = w.packed.data_ptr()
    w.copy_(new)
    graph.replay()
    torch.cuda.synchronize()
    assert w.packed.data_ptr() == address and torch.equal(out, mc.gemm(a, new))


def test_empty_calls_inside_a_capture():
    w = weight(256, 200)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = mc.gemm(torch.empty(0, 256, device=DEVICE).half(), w)
        torch.zeros(1, device=DEVICE)
    graph.replay()
    assert out.shape == (0, 200)


def test_threads():
    import threading

    w, errors = weight(1024, 1024), []

    def work(seed):
        try:
            torch.cuda.set_device(DEVICE)
            with torch.cuda.stream(torch.cuda.Stream()):
                for m in range(1, 20):
                    a = torch.randn(m, 1024, device=DEVICE).half()
                    reference.check(mc.gemm(a, w), a, dense(torch.float16, 1024, 1024))
        except BaseException as error:  # reported below
            errors.append(error)

    dense(torch.float16, 1024, 1024)
    torch.cuda.synchronize()
    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors[0]


def test_calls_leave_no_memory_behind():
    w, a = weight(1024, 1024), torch.randn(16, 1024, device=DEVICE).half()
    mc.gemm(a, w)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(50):
        mc.gemm(a, w)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before


# ---- torch ----


def form(w, bias=None):
    return w.packed, w.col_scale, bias, w.perm, w.n, w.k, w.group_size, w.has_zeros


def test_opcheck():
    w = weight(256, 200, 128, False, True)
    a = torch.randn(8, 256, device=DEVICE).half()
    ops = torch.ops.marlin_cutlass
    bias = torch.randn(200, device=DEVICE)
    torch.library.opcheck(ops.gemm.default, (a, *form(w, bias)))
    out = torch.empty(8, 200, device=DEVICE).half()
    torch.library.opcheck(ops.gemm_out.default, (a, *form(w), out))
    torch.library.opcheck(ops.gemm_autograd.default, (a.clone().requires_grad_(), *form(w)))


def test_compile():
    w = weight(256, 200)
    compiled = torch.compile(lambda a: torch.relu(mc.gemm(a, w)), fullgraph=True, dynamic=True)
    for m in (1, 7, 64):
        a = torch.randn(m, 256, device=DEVICE).half()
        torch.testing.assert_close(compiled(a), torch.relu(mc.gemm(a, w)))


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_gradients(dtype):
    w = weight(256, 200, 64, True, True)
    a = torch.randn(2, 3, 256, device=DEVICE, dtype=dtype, requires_grad=True)
    bias = torch.randn(200, device=DEVICE, requires_grad=True)
    grad = torch.randn(2, 3, 200, device=DEVICE, dtype=dtype)
    mc.gemm(a, w, bias).backward(grad)
    reference.check(a.grad, grad, dense(dtype, 256, 200, 64, True, True).t())
    torch.testing.assert_close(bias.grad, grad.float().sum((0, 1)), rtol=2e-2, atol=2e-2)


def test_operands_that_do_not_fit_are_refused():
    w, a = weight(256, 200), torch.randn(4, 256, device=DEVICE).half()
    for call, text in [
        (lambda: mc.gemm(a.float(), w), "a has dtype float32"),
        (lambda: mc.gemm(a.cpu(), w), "a is"),
        (lambda: mc.gemm(a, w.cpu()), "is not on cuda"),
        (lambda: mc.gemm(a[:, :200], w), "K=256"),
        (lambda: mc.gemm(a, w, torch.zeros(200)), "bias is not on cuda"),
        (lambda: torch.ops.marlin_cutlass.gemm(a, w.packed[:-1], *form(w)[1:]), "packed has shape"),
        (lambda: torch.ops.marlin_cutlass.gemm(a, *form(w), 10**6), "is not an index"),
    ]:
        with pytest.raises((ValueError, TypeError), match=text):
            call()
    torch.cuda.synchronize()


def test_debug_mode_checks_each_launch():
    launcher = library.load()
    launcher.set_option("debug", True)
    try:
        a = torch.randn(4, 256, device=DEVICE).half()
        reference.check(mc.gemm(a, weight(256, 200)), a, dense(torch.float16, 256, 200))
    finally:
        launcher.set_option("debug", False)


def test_programmatic_launch_changes_no_bits():
    launcher, a = library.load(), torch.randn(4, 2048, device=DEVICE).half()
    with_it = mc.gemm(a, weight(2048, 2048))
    launcher.set_option("pdl", False)
    try:
        assert torch.equal(mc.gemm(a, weight(2048, 2048)), with_it)
    finally:
        launcher.set_option("pdl", True)


def test_host_time_against_linear():
    timed = host.calls(256, 256, 1)
    with torch.inference_mode():
        took = {name: bench.host_time_us(call) for name, call in timed.items()}
    text = ", ".join(f"{name} {us:.1f} us" for name, us in took.items())
    print(text)
    linear = took[host.LINEAR]
    assert took["torch.ops.marlin_cutlass.gemm_compact"] <= 0.7 * linear, text
    assert took["torch.ops.marlin_cutlass.gemm"] <= 0.7 * linear, text
    assert took["marlin_cutlass.gemm"] <= 0.8 * linear, text
    assert took["marlin_cutlass.QuantLinear"] <= took["torch.nn.Linear, fp16"], text


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_the_other_device():
    w = weight(1024, 512).to("cuda:1")
    a = torch.randn(16, 1024, device="cuda:1").half()
    torch.cuda.set_device(0)
    for device in ("cuda:1", "cuda:0", "cuda:1"):
        out = mc.gemm(a.to(device), w.to(device))
        assert out.device == torch.device(device)
        reference.check(out, a, mc.dequantize(w))
        assert torch.cuda.current_device() == 0
    with pytest.raises(ValueError, match="is not on cuda:0 like a"):
        mc.gemm(a.to("cuda:0"), w)
