"""Safety on a GPU: random cases, foreign rows, odd scales, threads, graphs, occupied SMs, 64 bits.

SAFETY_SECONDS (default 15) is the time of the random cases; everything else takes about 15 s on an
H200. `python -m pytest tests/gpu/test_safety_gpu.py`; a failing random case prints its seed, and
SAFETY_SEED=<seed> SAFETY_SECONDS=1 starts with it.
"""

from __future__ import annotations

import ctypes
import functools
import os
import random
import threading
import time
from dataclasses import dataclass

import pytest
import torch

import marlin_cutlass as mc
from marlin_cutlass import dispatch, library
from marlin_cutlass.errors import UnsupportedArchError
from marlin_cutlass.layout import block_bytes

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]
DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
SECONDS = float(os.environ.get("SAFETY_SECONDS", "15"))
SEED = int(os.environ.get("SAFETY_SEED", "0"))
DTYPES = {"f16": torch.float16, "bf16": torch.bfloat16}
UNIT = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
FROBENIUS = {torch.float16: 1e-3, torch.bfloat16: 8e-3}
GUARD = 2048  # elements around an output


def built_kernels() -> list[dispatch.Kernel]:
    """Kernels for dense weights of this device's table."""
    if not torch.cuda.is_available():
        return []
    try:
        kernels = library.table_for_capability(*torch.cuda.get_device_capability()).kernels
    except UnsupportedArchError:
        return []
    return [kernel for kernel in kernels if not kernel.sparse]


KERNELS = built_kernels()


def plain(kernel: dispatch.Kernel) -> bool:
    return (kernel.dtype, kernel.zeros, kernel.group_size) == ("f16", False, 128)


def one_of_each() -> list[dispatch.Kernel]:
    """One kernel of each family, decomposition and multicast: float16, symmetric, groups of 128."""
    found: dict[tuple, dispatch.Kernel] = {}
    for kernel in filter(plain, KERNELS):
        found.setdefault((kernel.family, kernel.decomposition, kernel.multicast > 1), kernel)
    return list(found.values())


@dataclass
class Weight:
    """A packed weight and what it means, in float64, for both activation types."""

    packed: mc.PackedWeight
    dense: dict[torch.dtype, torch.Tensor]


def make_weight(k, n, group, zeros=False, act_order=False, scales=None, seed=0) -> Weight:
    generator = torch.Generator().manual_seed(seed)
    rows = 1 if group < 0 else k // group
    q = torch.randint(0, 16, (k, n), dtype=torch.uint8, generator=generator)
    z = torch.randint(0, 17, (rows, n), generator=generator) if zeros else None
    if scales is None:
        scales = (torch.rand(rows, n, generator=generator) * 0.1 + 0.005).half()
        scales *= torch.randint(0, 2, (rows, n), generator=generator) * 2 - 1
    g_idx = None
    if act_order and group > 0:
        g_idx = (torch.arange(k) // group)[torch.randperm(k, generator=generator)]
    z = None if z is None else z.to(DEVICE)
    packed = mc.pack(q.to(DEVICE), scales.to(DEVICE), z, group_size=group, g_idx=g_idx)
    return Weight(packed, {d: mc.dequantize(packed, d).double() for d in UNIT})


def is_right(out: torch.Tensor, a: torch.Tensor, w: torch.Tensor, bias=None) -> torch.Tensor:
    """The criterion of tests/reference.py on the device, without waiting: a boolean tensor.

    a: [..., K] and out: [..., N] of one type; w: float64 [K, N]; bias: float64 [N] or None.
    """
    kind = out.dtype
    rows, got = a.reshape(-1, a.shape[-1]).double(), out.reshape(-1, out.shape[-1]).double()
    want = rows @ w
    magnitude = rows.abs() @ w.abs()
    if bias is not None:
        want, magnitude = want + bias, magnitude + bias.abs()
    # What overflows the type may be infinite, nothing else.
    representable = want.to(kind).isfinite()
    finite = got.isfinite() | ~representable
    error = torch.where(representable, got - want, 0.0).nan_to_num(nan=1e30, posinf=1e30)
    close = (error.abs() <= 4 * UNIT[kind] * magnitude).all()
    small = error.norm() <= FROBENIUS[kind] * torch.where(representable, want, 0.0).norm()
    return finite.all() & (close | small)


# ---- random cases ----

INPUTS = ("plain", "plain", "columns", "odd", "transposed", "skipped", "repeated", "3-D", "1-D")
OUTPUTS = ("new", "guarded", "strided", "strided odd")
BIASES = (None, None, "float32", "same", "strided")


def activations(rng: random.Random, kind: str, m: int, k: int, dtype) -> torch.Tensor:
    """[m, k] (or [2, m, k], [k]) random numbers in memory of the given kind."""
    options = {"dtype": dtype, "device": DEVICE}
    if kind == "columns":
        start, width = rng.randrange(9), k + rng.randrange(17)
        return torch.randn(m, start + width, **options)[:, start : start + k]
    if kind == "odd":
        return torch.randn(m * k + 1, **options)[1:].view(m, k)
    if kind == "transposed":
        return torch.randn(k, m, **options).t()
    if kind == "skipped":
        return torch.randn(2 * m, k, **options)[::2]
    if kind == "repeated":
        return torch.randn(1, k, **options).expand(m, k)
    if kind == "3-D":
        return torch.randn(m, 2, k, **options).transpose(0, 1)
    if kind == "1-D":
        return torch.randn(k, **options)
    return torch.randn(m, k, **options)


def output(rng: random.Random, kind: str, a: torch.Tensor, n: int):
    """(out or None, a function that says whether everything around it is untouched)."""
    shape = (*a.shape[:-1], n)
    if kind == "new" or a.dim() == 3:
        return None, lambda: torch.ones((), dtype=torch.bool, device=DEVICE)
    options = {"dtype": a.dtype, "device": DEVICE}
    if kind == "guarded" or a.dim() == 1:
        count = a.numel() // a.shape[-1] * n
        region = torch.full((count + 2 * GUARD,), float("nan"), **options)
        around = (region[:GUARD], region[GUARD + count :])
        return region[GUARD : GUARD + count].view(shape), lambda: torch.stack(
            [part.isnan().all() for part in around]
        ).all()
    start = rng.choice((0, 4, 8)) if kind == "strided" else rng.choice((1, 2, 3))
    big = torch.full((shape[0] + 2, start + n + rng.randrange(1, 9)), float("nan"), **options)
    out = big[1:-1, start : start + n]

    def untouched() -> torch.Tensor:
        inside = torch.zeros_like(big, dtype=torch.bool)
        inside[1:-1, start : start + n] = True
        return (big.isnan() | inside).all()

    return out, untouched


def rows_of(rng: random.Random) -> int:
    """Few rows, edges of row tiles, and now and then many."""
    edge = rng.choice((8, 16, 24, 32, 48, 64, 96, 128, 192, 256))
    return rng.choice((0, 1, 1, 2, rng.randrange(1, 70), edge - 1, edge, edge + 1, 2 * edge + 3))


def random_case(seed: int, w: Weight) -> tuple[torch.Tensor, str]:
    """(whether the case is right, as a tensor on the device; what it is)."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    p = w.packed
    name = rng.choice(("f16", "bf16"))
    dtype, m = DTYPES[name], rows_of(rng)
    form = (name, p.has_zeros, p.stored_group_size)
    fits = [x.name for x in KERNELS if (x.dtype, x.zeros, x.group_size) == form]
    kernel = rng.choice(fits) if fits and rng.random() < 0.5 else None
    invariant = kernel is None and rng.random() < 0.1
    kinds = rng.choice(INPUTS), rng.choice(OUTPUTS), rng.choice(BIASES)
    a = activations(rng, kinds[0], m, p.k, dtype)
    bias = None
    if kinds[2] is not None:
        bias = torch.randn(2 * p.n, device=DEVICE, dtype=dtype if kinds[2] == "same" else None)
        bias = bias[::2] if kinds[2] == "strided" else bias[: p.n]
    out, untouched = output(rng, kinds[1], a, p.n)
    got = mc.gemm(a, p, bias, out=out, kernel=kernel, batch_invariant=invariant)
    added = None if bias is None else bias.to(dtype).double()
    right = is_right(got, a, w.dense[dtype], added) & untouched()
    text = f"{p}, M={m}, {name}, a {kinds[0]}, out {kinds[1]}, bias {kinds[2]}, kernel {kernel}"
    return right, text + (", batch-invariant" if invariant else "")


def random_weight(rng: random.Random) -> Weight:
    group = rng.choice((32, 64, 128, 256, 384, -1))
    unit = 1 if group < 0 else group
    k = rng.choice((unit, unit * rng.randint(1, max(1, 3000 // unit))))
    n = rng.choice((1, 8, 63, 64, 65, 200, rng.randint(1, 1200), 64 * rng.randint(1, 20)))
    return make_weight(
        k, n, group, rng.random() < 0.5, rng.random() < 0.25, seed=rng.randrange(2**31)
    )


def test_random_cases():
    """As many as SAFETY_SECONDS allows; the number is printed."""
    end, count, seed = time.monotonic() + SECONDS, 0, SEED
    while time.monotonic() < end:
        w = random_weight(random.Random(seed))
        seeds = range(seed, seed + 100)
        results = [random_case(s, w) for s in seeds]
        verdicts = torch.stack([right for right, _ in results]).tolist()
        wrong = [
            f"seed {seed}, case {s}: {t}"
            for s, (_, t), ok in zip(seeds, results, verdicts)
            if not ok
        ]
        assert not wrong, f"{len(wrong)} of {count + 100} cases are wrong:\n" + "\n".join(wrong[:8])
        count, seed = count + 100, seed + 100
    print(f"{count} random cases, none wrong")


# ---- numbers ----


@functools.cache
def weight(k: int, n: int, group: int = 128, zeros: bool = False) -> Weight:
    return make_weight(k, n, group, zeros)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")], ids=str)
def test_a_row_that_is_not_finite_stays_alone(value):
    """Every kernel: the other rows keep their bits, and the row itself is not finite."""
    for kernel in KERNELS:
        dtype, m = DTYPES[kernel.dtype], kernel.m_tile + 5
        w = weight(512, 200, kernel.group_size, kernel.zeros).packed
        a = torch.randn(m, 512, dtype=dtype, device=DEVICE)
        clean = mc.gemm(a, w, kernel=kernel.name)
        for row in (0, m // 2, m - 1):
            spoiled = a.clone()
            spoiled[row, 77] = value
            out = mc.gemm(spoiled, w, kernel=kernel.name)
            others = torch.arange(m, device=DEVICE) != row
            same = (out == clean)[others].all() & ~out[row].isfinite().any()
            assert bool(same), f"{kernel.name}, row {row}"


@pytest.mark.parametrize("what", ["zero", "subnormal", "negative", "large", "spread"])
def test_odd_scales(what):
    """Identity activations give the dequantised weight, bit for bit, in every decomposition."""
    k, n = 384, 136
    signs = torch.randint(0, 2, (3, n)) * 2.0 - 1
    scales = {
        "zero": torch.zeros(3, n),
        "subnormal": torch.randint(-1023, 1024, (3, n)) * 2.0**-24,
        "negative": -torch.rand(3, n) * 0.1,
        "large": signs * 4000.0,
        "spread": signs * 2.0 ** torch.randint(-14, 5, (3, n)).float(),
    }[what]
    w = make_weight(k, n, 128, scales=scales.half())
    names = [None, *(kernel.name for kernel in one_of_each())]
    for dtype in DTYPES.values():
        eye = torch.eye(k, device=DEVICE, dtype=dtype)
        want = mc.dequantize(w.packed, dtype)
        assert torch.equal(mc.gemm(eye, w.packed), want)
        for name in names if dtype == torch.float16 else ():
            assert torch.equal(mc.gemm(eye, w.packed, kernel=name), want), name


def test_partial_sums_beyond_float16_stay_finite():
    """64 * 0.125 * (7, then -7) summed over k passes 65 504 and returns to 0, in every kernel."""
    for kernel in KERNELS:
        k, group, zeros = 4096, kernel.group_size, kernel.zeros
        q = torch.full((k, 72), 1, dtype=torch.uint8, device=DEVICE)
        q[: k // 2] = 15
        rows = 1 if group < 0 else k // group
        scales = torch.full((rows, 72), 0.125, device=DEVICE).half()
        z = torch.full((rows, 72), 8, device=DEVICE) if zeros else None
        w = mc.pack(q, scales, z, group_size=group)
        a = torch.full((3, k), 64.0, device=DEVICE, dtype=DTYPES[kernel.dtype])
        assert not mc.gemm(a, w, kernel=kernel.name).any(), kernel.name


# ---- threads, streams, graphs ----


def in_threads(count: int, work) -> None:
    """Runs work(i) in `count` threads; raises the first error."""
    errors: list[BaseException] = []

    def guarded(i: int) -> None:
        try:
            torch.cuda.set_device(DEVICE)
            work(i)
        except BaseException as error:  # raised below
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(i,), daemon=True) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not any(thread.is_alive() for thread in threads), "a thread did not come back"
    if errors:
        raise errors[0]


def names_to_try() -> list[str | None]:
    """The table's choice, and one kernel of each decomposition."""
    return [None, *(kernel.name for kernel in one_of_each())]


def test_four_streams_and_eight_threads_share_a_weight():
    """The streams are the same ones in all threads, so that launches of threads interleave."""
    w = weight(4096, 1024).packed
    streams = [torch.cuda.Stream() for _ in range(4)]
    for name in names_to_try():
        inputs = [
            torch.randn(m, 4096, device=DEVICE).half() for m in (1, 5, 16, 17, 33, 64, 70, 130)
        ]
        want = [mc.gemm(a, w, kernel=name) for a in inputs]
        torch.cuda.synchronize()

        def work(i: int, name=name, inputs=inputs, want=want) -> None:
            bad = torch.zeros(4, dtype=torch.bool, device=DEVICE)
            torch.cuda.synchronize()
            for round_ in range(8):
                a, right = inputs[(i + round_) % 8], want[(i + round_) % 8]
                for s, stream in enumerate(streams):
                    with torch.cuda.stream(stream):
                        bad[s] |= (mc.gemm(a, w, kernel=name) != right).any()
            torch.cuda.synchronize()
            assert not bad.any(), name or "the table's choice"

        in_threads(8, work)


def test_graphs_captured_in_parallel_and_replayed_a_thousand_times():
    """Four threads capture at the same time; the replays interleave, with other activations each
    time, next to calls outside of graphs."""
    w = weight(4096, 1024).packed
    pool = [torch.randn(16, 4096, device=DEVICE).half() for _ in range(8)]
    for name in names_to_try():
        want = [mc.gemm(a, w, kernel=name) for a in pool]
        inputs = [pool[0].clone() for _ in range(4)]
        outs = [torch.empty_like(want[0]) for _ in range(4)]
        graphs = [torch.cuda.CUDAGraph() for _ in range(4)]
        streams = [torch.cuda.Stream() for _ in range(4)]
        barrier = threading.Barrier(4)
        torch.cuda.synchronize()

        def capture(
            i: int,
            name=name,
            inputs=inputs,
            outs=outs,
            graphs=graphs,
            streams=streams,
            barrier=barrier,
        ) -> None:
            with torch.cuda.stream(streams[i]):
                barrier.wait(30)
                graphs[i].capture_begin(capture_error_mode="thread_local")
                mc.gemm(inputs[i], w, out=outs[i], kernel=name)
                mc.gemm(inputs[i], w, out=outs[i], kernel=name)
                graphs[i].capture_end()

        in_threads(4, capture)
        bad = torch.zeros(5, dtype=torch.bool, device=DEVICE)
        torch.cuda.synchronize()
        for turn in range(1000):
            for i, stream in enumerate(streams):
                at = (turn + i) % 8
                with torch.cuda.stream(stream):
                    inputs[i].copy_(pool[at])
                    graphs[i].replay()
                    bad[i] |= (outs[i] != want[at]).any()
            bad[4] |= (mc.gemm(pool[turn % 8], w, kernel=name) != want[turn % 8]).any()
        torch.cuda.synchronize()
        assert not bad.any(), f"{name or 'the choice of the table'}: {bad.tolist()}"


# ---- SMs that others hold ----

HOLDER = r"""
#if CLUSTER > 1
#define IN_CLUSTERS __cluster_dims__(CLUSTER, 1, 1)
#else
#define IN_CLUSTERS
#endif
extern "C" __global__ void IN_CLUSTERS
hold(volatile int* stop, int* started, long long nanoseconds) {
  unsigned long long begin, now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin));
  if (threadIdx.x == 0) atomicAdd_system(started, 1);
  do {
    __nanosleep(2000);
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  } while (!*stop && now - begin < nanoseconds);
}
"""
HOLD_SECONDS = 10  # the holder gives up by itself then


def ok(result):
    """The value of a call of cuda.bindings; AssertionError with its status."""
    status, *values = result
    assert int(status) == 0, status
    return values[0] if values else None


@functools.cache
def hold_kernel(cluster: int):
    """The kernel above, compiled and allowed all of an SM's shared memory; (kernel, bytes)."""
    driver = pytest.importorskip("cuda.bindings.driver")
    nvrtc = pytest.importorskip("cuda.bindings.nvrtc")
    torch.cuda.synchronize()
    major, minor = torch.cuda.get_device_capability()
    flags = [f"--gpu-architecture=sm_{major}{minor}", f"-DCLUSTER={cluster}"]
    program = ok(nvrtc.nvrtcCreateProgram(HOLDER.encode(), b"hold.cu", 0, [], []))
    ok(nvrtc.nvrtcCompileProgram(program, len(flags), [flag.encode() for flag in flags]))
    image = b" " * ok(nvrtc.nvrtcGetCUBINSize(program))
    ok(nvrtc.nvrtcGetCUBIN(program, image))
    module = ok(driver.cuModuleLoadData(ctypes.cast(image, ctypes.c_void_p).value))
    kernel = ok(driver.cuModuleGetFunction(module, b"hold"))
    properties = torch.cuda.get_device_properties(DEVICE)
    shared = getattr(properties, "shared_memory_per_block_optin", 99 * 1024)
    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    ok(driver.cuFuncSetAttribute(kernel, attribute, shared))
    return kernel, shared


class Holder:
    """While it is entered, a persistent kernel fills `share` of the SMs: all their shared memory.

    It comes in clusters, so that what it leaves free is whole places for clusters of that size.
    """

    def __init__(self, share: float, cluster: int = 1) -> None:
        self.kernel, self.shared = hold_kernel(cluster)
        sms = torch.cuda.get_device_properties(DEVICE).multi_processor_count
        # Not every SM can belong to a large cluster: two fewer than fit arithmetically.
        places = sms if cluster == 1 else sms // cluster - 2
        self.blocks = int(places * share) * cluster
        self.flags = torch.zeros(2, dtype=torch.int32).pin_memory()
        self.stream = torch.cuda.Stream()

    def __enter__(self) -> Holder:
        driver = pytest.importorskip("cuda.bindings.driver")
        self.flags.zero_()
        stop = self.flags.data_ptr()
        values = (ctypes.c_uint64(stop), ctypes.c_uint64(stop + 4))
        values += (ctypes.c_int64(HOLD_SECONDS * 10**9),)
        pointers = (ctypes.c_void_p * 3)(*(ctypes.addressof(value) for value in values))
        sizes = (self.blocks, 1, 1, 32, 1, 1, self.shared)
        where = (self.stream.cuda_stream, ctypes.addressof(pointers), 0)
        ok(driver.cuLaunchKernel(self.kernel, *sizes, *where))
        end = time.monotonic() + 5
        while int(self.flags[1]) < self.blocks and time.monotonic() < end:
            time.sleep(0.001)
        if int(self.flags[1]) < self.blocks:
            self.__exit__()
            pytest.fail(f"{int(self.flags[1])} of {self.blocks} blocks of the holder started")
        return self

    def __exit__(self, *_exc) -> None:
        self.flags[0] = 1
        self.stream.synchronize()


def finishes(event: torch.cuda.Event, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not event.query():
        if time.monotonic() > end:
            return False
        time.sleep(0.001)
    return True


@pytest.mark.parametrize("cluster", sorted({kernel.cluster for kernel in KERNELS}) or [1])
def test_calls_finish_while_another_kernel_holds_nine_of_ten_sms(cluster):
    """Every kernel of one format, with many row tiles and with one: right, and before the other
    kernel ends. A cluster starts only where that many SMs of a group are free; there are such."""
    w, stream = weight(2048, 1536).packed, torch.cuda.Stream()
    names = [kernel.name for kernel in KERNELS if plain(kernel) and kernel.cluster == cluster]
    calls = [(name, torch.randn(m, 2048, device=DEVICE).half()) for name in names for m in (3, 700)]
    outs = [torch.empty(a.shape[0], 1536, device=DEVICE).half() for _, a in calls]
    with torch.cuda.stream(stream):  # loads kernels and allocates workspaces beforehand
        want = [mc.gemm(a, w, kernel=name) for name, a in calls]
    torch.cuda.synchronize()
    with Holder(0.9, cluster):
        for (name, a), out in zip(calls, outs):
            with torch.cuda.stream(stream):
                mc.gemm(a, w, out=out, kernel=name)
                event = torch.cuda.Event()
                event.record(stream)
            assert finishes(event, 3), f"{name}, M={a.shape[0]} did not finish in 3 s"
    torch.cuda.synchronize()
    for (name, _), out, right in zip(calls, outs, want):
        assert torch.equal(out, right), name


def test_two_calls_that_cross_blocks_share_a_busy_device():
    """Streams of different priority, both with grids that cannot be resident beside the holder."""
    w = weight(2048, 1536).packed
    names = [kernel.name for kernel in one_of_each() if kernel.cluster <= 2]
    a = torch.randn(700, 2048, device=DEVICE).half()
    streams = [torch.cuda.Stream(priority=0), torch.cuda.Stream(priority=-1)]
    for stream in streams:
        with torch.cuda.stream(stream):
            want = {name: mc.gemm(a, w, kernel=name) for name in names}
    outs = [{name: torch.empty_like(want[name]) for name in names} for _ in streams]
    torch.cuda.synchronize()
    events = []
    with Holder(0.8, 2):
        for _ in range(5):
            for stream, out in zip(streams, outs):
                with torch.cuda.stream(stream):
                    for name in names:
                        mc.gemm(a, w, out=out[name], kernel=name)
        for stream in streams:
            events.append(torch.cuda.Event())
            events[-1].record(stream)
        assert all(finishes(event, 4) for event in events), "two streams wait for each other"
    torch.cuda.synchronize()
    for out in outs:
        for name in names:
            assert torch.equal(out[name], want[name]), name


def green_stream(sms: int) -> int:
    """A stream that may use `sms` SMs; skips where the driver has no green contexts."""
    driver = pytest.importorskip("cuda.bindings.driver")
    try:
        device = ok(driver.cuDeviceGet(DEVICE.index))
        kind = driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
        status, parts, *_ = driver.cuDevSmResourceSplitByCount(
            1, ok(driver.cuDeviceGetDevResource(device, kind)), 0, sms
        )
        assert int(status) == 0, status
        description = ok(driver.cuDevResourceGenerateDesc(parts[:1], 1))
        flag = driver.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM
        green = ok(driver.cuGreenCtxCreate(description, device, flag))
        non_blocking = driver.CUstream_flags.CU_STREAM_NON_BLOCKING
        return int(ok(driver.cuGreenCtxStreamCreate(green, non_blocking, 0)))
    except (AssertionError, AttributeError, TypeError) as error:
        pytest.skip(f"no green contexts here: {error!r}")


def test_a_green_context_of_few_sms():
    """A stream of 16 SMs: right in time, or refused by an error that names the kernel."""
    torch.cuda.synchronize()
    handle = green_stream(16)
    driver = pytest.importorskip("cuda.bindings.driver")
    stream, w = torch.cuda.ExternalStream(handle, device=DEVICE), weight(2048, 1536).packed
    refused = 0
    for name in names_to_try():
        for m in (3, 700):
            a = torch.randn(m, 2048, device=DEVICE).half()
            want, out = mc.gemm(a, w, kernel=name), torch.empty(m, 1536, device=DEVICE).half()
            torch.cuda.synchronize()
            try:
                with torch.cuda.stream(stream):
                    mc.gemm(a, w, out=out, kernel=name)
            except RuntimeError as error:
                assert "w4a16_" in str(error), error
                refused += 1
                continue
            end = time.monotonic() + 5
            while int(driver.cuStreamQuery(driver.CUstream(handle))[0]):
                assert time.monotonic() < end, f"{name}, M={m} did not finish in 5 s on 16 SMs"
                time.sleep(0.001)
            assert torch.equal(out, want), f"{name}, M={m}"
    print(f"16 SMs: {refused} of {2 * len(names_to_try())} calls refused, the others right")


# ---- sizes beyond 32 bits ----


@pytest.fixture
def room():
    """Skips where less than 40 GB are free; gives the memory back afterwards."""
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < 40 << 30:
        pytest.skip("needs 40 GB of GPU memory")
    yield
    torch.cuda.empty_cache()


def sampled(m: int, limit_row: int) -> torch.Tensor:
    """Rows at both ends, around the row that crosses the limit, and some between."""
    rows = [*range(5), *range(limit_row - 3, limit_row + 4), *range(m - 5, m)]
    rows += random.Random(0).sample(range(m), 200)
    return torch.tensor(sorted(set(rows)), device=DEVICE)


def test_more_than_500000_rows_and_2_to_the_31_activations(room):
    m, k, n = 600_001, 4096, 64
    w = weight(k, n)
    a = torch.randn(m, k, device=DEVICE, dtype=torch.float16)
    for name in names_to_try():
        out = torch.full((m, n), float("nan"), device=DEVICE, dtype=torch.float16)
        mc.gemm(a, w.packed, out=out, kernel=name)
        rows = sampled(m, 2**31 // k)
        assert bool(out.isfinite().all()), name
        assert bool(is_right(out[rows], a[rows], w.dense[torch.float16])), name


def test_2_to_the_31_outputs(room):
    m, k, n = 600_001, 128, 4096
    w = weight(k, n)
    a = torch.randn(m, k, device=DEVICE, dtype=torch.float16)
    for name in names_to_try():
        out = torch.full((m, n), float("nan"), device=DEVICE, dtype=torch.float16)
        mc.gemm(a, w.packed, out=out, kernel=name)
        rows = sampled(m, 2**31 // n)
        assert bool(out.isfinite().all()), name
        assert bool(is_right(out[rows], a[rows], w.dense[torch.float16])), name
        del out


def test_2_to_the_32_weights(room):
    """K * N = 4.6e9: the packed bytes pass 2^31. Columns repeat, so that the product is known."""
    k, n, copies = 32768, 2048, 68
    base = weight(k, n)
    p = base.packed
    blocks = n // 64 * (k // 128) * block_bytes(128, False)
    body, slack = p.packed[:blocks], p.packed[blocks:]
    packed = torch.cat([body.repeat(copies), slack])
    assert packed.numel() > 2**31
    large = mc.PackedWeight(packed, p.col_scale.repeat(copies), None, n * copies, k, 128, False)
    large.check()
    for name in names_to_try():
        for m in (1, 70):
            a = torch.randn(m, k, device=DEVICE).half()
            out = torch.full((m, n * copies), float("nan"), device=DEVICE, dtype=torch.float16)
            mc.gemm(a, large, out=out, kernel=name)
            want = a.double() @ base.dense[torch.float16]
            error = (out.view(m, copies, n).double() - want[:, None]).norm(dim=(0, 2))
            assert bool((error <= FROBENIUS[torch.float16] * want.norm()).all()), f"{name}, M={m}"


def test_rows_and_outputs_far_apart(room):
    """Row strides of 2^30 elements: the third row starts behind 2^31."""
    stride, k, n = 2**30, 512, 200
    w = weight(k, n)
    memory = torch.zeros(2 * stride + 4096, device=DEVICE, dtype=torch.float16)
    a, out = memory.as_strided((3, k), (stride, 1)), memory.as_strided((3, n), (stride, 1), 1024)
    values = torch.randn(3, k, device=DEVICE).half()
    a.copy_(values)
    for name in names_to_try():
        out.fill_(float("nan"))
        mc.gemm(a, w.packed, out=out, kernel=name)
        assert bool(is_right(out.clone(), values, w.dense[torch.float16])), name
    assert torch.equal(a, values)


# ---- what is refused on a device ----


def test_refusals_leave_the_device_usable():
    """After every refusal the next call is right: nothing reached a launch."""
    w = weight(512, 200)
    p, a = w.packed, torch.randn(4, 512, device=DEVICE).half()
    op = torch.ops.marlin_cutlass.gemm.default
    form = [a, p.packed, p.col_scale, None, None, p.n, p.k, p.group_size, p.has_zeros, -1]
    for index, value in [
        (0, a.cpu()),
        (0, a.to_sparse()),
        (0, a[0, 0]),
        (0, a.float()),
        (1, p.packed.cpu()),
        (1, p.packed[:-1]),
        (1, p.packed.view(torch.int8)),
        (1, torch.cat([p.packed[:3], p.packed])[3:]),
        (2, p.col_scale.half()),
        (3, torch.zeros(200)),
        (3, torch.zeros(199, device=DEVICE)),
        (4, torch.arange(512, device=DEVICE)),
        (5, 2**31),
        (5, 264),
        (6, 640),
        (7, 64),
        (8, True),
        (9, 10**9),
        (9, -3),
    ]:
        with pytest.raises((ValueError, TypeError, RuntimeError)):
            op(*form[:index], value, *form[index + 1 :])
        torch.cuda.synchronize()
    assert bool(is_right(op(*form), a, w.dense[torch.float16]))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_threads_on_two_devices_share_nothing():
    """Each thread alternates between devices; the current device stays what it was."""
    per_device = [weight(4096, 1024).packed.to(f"cuda:{i}") for i in range(2)]
    names = names_to_try()

    def work(i: int) -> None:
        torch.cuda.set_device(i % 2)
        for turn in range(6 * len(names)):
            device = (i + turn) % 2
            a = torch.randn(16, 4096, device=f"cuda:{device}").half()
            out = mc.gemm(a, per_device[device], kernel=names[turn % len(names)])
            assert out.device.index == device and torch.cuda.current_device() == i % 2
            dense = mc.dequantize(per_device[device], torch.float16).double()
            assert bool(is_right(out, a, dense))

    in_threads(4, work)
