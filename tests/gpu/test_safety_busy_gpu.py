"""Safety on a GPU: calls finish while other kernels hold most SMs, or on a few SMs only."""

from __future__ import annotations

import ctypes
import functools
import time

import pytest
import torch
from safety_cases import DEVICE, KERNELS, names_to_try, one_of_each, plain, weight

import marlin_cutlass as mc

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]
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
    torch.cuda.synchronize()  # these streams do not wait for the one that made the tensors
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
