"""Arch: limits of a compute architecture; Gpu: the named GPUs the cost model knows."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

KIB = 1024
RESERVED_SHARED_BYTES = 1024  # per block, taken by the system on compute capability 8.0 and later


@dataclass(frozen=True)
class Arch:
    """Limits from the CUDA C++ Programming Guide, table "Technical Specifications per Compute
    Capability".
    """

    name: str  # what nvcc calls it: sm_90a
    compute_capability: tuple[int, int]
    families: tuple[str, ...]  # kernel families that run here, preferred first
    shared_per_block: int  # bytes of dynamic shared memory a block may ask for
    shared_per_sm: int
    threads_per_sm: int
    registers_per_sm: int = 65536
    max_registers: int = 255
    threads_per_block: int = 1024

    @property
    def compute(self) -> str:
        return self.name.replace("sm_", "compute_")


def _arch(name, cc, families, block_kib, sm_kib, threads) -> Arch:
    return Arch(name, cc, families, block_kib * KIB, sm_kib * KIB, threads)


ARCHS: dict[str, Arch] = {
    a.name: a
    for a in (
        _arch("sm_80", (8, 0), ("ampere", "sparse"), 163, 164, 2048),
        _arch("sm_86", (8, 6), ("ampere", "sparse"), 99, 100, 1536),
        _arch("sm_89", (8, 9), ("ampere", "sparse"), 99, 100, 1536),
        _arch("sm_90a", (9, 0), ("hopper", "ampere", "hopper_sparse", "sparse"), 227, 228, 2048),
        _arch("sm_100", (10, 0), ("ampere", "sparse"), 227, 228, 2048),
        _arch("sm_120", (12, 0), ("ampere", "sparse"), 99, 100, 1536),
    )
}
DEFAULT_ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90a")  # what `--arch all` builds


@dataclass(frozen=True)
class Gpu:
    """Data-sheet numbers unless the comment says measured; dense fp16 with fp32 accumulation."""

    name: str
    arch: str
    sms: int
    bandwidth: float  # bytes/s
    l2_bytes: int
    tensor_flops: float  # FLOP/s
    clock: float  # Hz, boost


def _gpu(name, arch, sms, gb_s, l2_mib, tflops, ghz) -> Gpu:
    return Gpu(name, arch, sms, gb_s * 1e9, l2_mib * KIB * KIB, tflops * 1e12, ghz * 1e9)


GPUS: dict[str, Gpu] = {
    g.name: g
    for g in (
        _gpu("A100", "sm_80", 108, 2039, 40, 312, 1.41),
        _gpu("A10", "sm_86", 72, 600, 6, 125, 1.695),
        _gpu("RTX 3090", "sm_86", 82, 936, 6, 71, 1.695),
        _gpu("A6000", "sm_86", 84, 768, 6, 154.8, 1.80),
        _gpu("RTX 4090", "sm_89", 128, 1008, 72, 165, 2.52),
        _gpu("L40S", "sm_89", 142, 864, 96, 362, 2.52),
        _gpu("H100", "sm_90a", 132, 3350, 50, 989, 1.83),
        # Measured on an H200, 2026-11-29: 4.3 TB/s streaming weights, 60 MB of L2, 1.78 GHz inside
        # these kernels, up to 790 TFLOP/s in a large fp16 product.
        _gpu("H200", "sm_90a", 132, 4300, 60, 790, 1.78),
    )
}


def resolve_arch(text: str) -> tuple[Arch, str | None]:
    """Arch named by `text` ("86", "sm_86", "90") and a notice if the name was corrected.

    Raises ValueError naming the known architectures.
    """
    name = text.lower().replace("compute_", "sm_")
    name = name if name.startswith("sm_") else f"sm_{name}"
    notice = None
    if name == "sm_90":
        name, notice = (
            "sm_90a",
            f"{text} means sm_90a here: wgmma and setmaxnreg need the 'a' target",
        )
    if name not in ARCHS:
        raise ValueError(f"arch={text!r} is not one of {', '.join(ARCHS)}, native, all")
    return ARCHS[name], notice


def arch_for_capability(major: int, minor: int) -> Arch:
    """The Arch whose cubins run on compute capability major.minor; raises ValueError if there is
    none.
    """
    for arch in reversed(ARCHS.values()):
        cc = arch.compute_capability
        exact = arch.name.endswith("a")
        if cc == (major, minor) or (not exact and cc[0] == major and cc[1] <= minor):
            return arch
    raise ValueError(f"no kernels for compute capability {major}.{minor}")


def native_arch() -> Arch:
    """Arch of GPU 0, asked through libcuda; raises ValueError if there is no driver or no GPU."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise ValueError("arch=native needs a GPU: libcuda.so.1 was not found") from error
    device, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    if cuda.cuInit(0) or cuda.cuDeviceGet(ctypes.byref(device), 0):
        raise ValueError("arch=native needs a GPU: the driver reports none")
    cuda.cuDeviceGetAttribute(
        ctypes.byref(major), 75, device
    )  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
    cuda.cuDeviceGetAttribute(ctypes.byref(minor), 76, device)
    return arch_for_capability(major.value, minor.value)
