"""Small kernels written for one test each, run on the emulator."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np

from emulator import runtime
from emulator.build import build_kernel

_SOURCE = """#include "marlin_cutlass/params.h"
#include "marlin_cutlass/prims_hopper.cuh"
using namespace marlin_cutlass;
namespace {{
inline const uint32_t* words(const void* p) {{ return static_cast<const uint32_t*>(p); }}
inline uint32_t load(const void* p, int i) {{  // word i of a read-only buffer
  return __builtin_bit_cast(uint32_t, ld_global_f32(static_cast<const float*>(p) + i));
}}
inline void store(const GemmParams& p, int i, uint32_t v) {{
  st_global_u32(static_cast<uint32_t*>(p.c) + i, v);
}}
inline void store(const GemmParams& p, int i, float v) {{
  store(p, i, __builtin_bit_cast(uint32_t, v));
}}
{helpers}
}}
extern "C" __global__ void kernel({parameters}const __grid_constant__ GemmParams p) {{
  const int thread = thread_index(), lane = lane_index();
  const int warp = warp_index(), block = block_index();
  const smem_addr_t base = smem_base();
  (void)thread, (void)lane, (void)warp, (void)block, (void)base;
{body}
}}
"""


@dataclass(frozen=True)
class Shape:
    """Launch geometry of a test kernel."""

    grid: int = 1
    threads: int = 32
    shared_bytes: int = 4096
    cluster: int = 1
    resident: int = 0
    seed: int = 0
    programmatic: bool = False


def aligned(array: np.ndarray, alignment: int = 256) -> np.ndarray:
    """A copy of `array` at an aligned address."""
    raw = np.empty(array.nbytes + alignment, np.uint8)
    start = -raw.ctypes.data % alignment
    view = raw[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    view[...] = array
    return view


def run_kernel(
    body: str,
    a: np.ndarray | None = None,
    out_words: int = 32,
    helpers: str = "",
    box: tuple[int, int, int] | None = None,
    **shape: int,
) -> tuple[np.ndarray, dict[str, int]]:
    """Runs `body` with p.a = a (read-only), p.c (uint32[out_words], stored once), p.partials (64
    KiB), p.flags (16 words).

    box: pass a tensor map of `a`, a [z, y, x] array of 2-byte elements, as `map_a`. Returns (c,
    statistics).
    """
    launch_shape = Shape(**shape)
    a = aligned(np.zeros(4, np.uint32) if a is None else a)
    c = aligned(np.full(out_words, 0xFFFFFFFF, np.uint32))
    partials, flags = (
        aligned(np.full(1 << 14, np.nan, np.float32)),
        aligned(np.zeros(16, np.uint32)),
    )
    params = runtime.GemmParams()
    params.a, params.c, params.partials, params.flags = (
        x.ctypes.data for x in (a, c, partials, flags)
    )
    params.n = out_words
    r = runtime
    buffers = [
        r.Buffer("a", a.ctypes.data, a.nbytes, r.READ | r.PREVIOUS),
        r.Buffer("c", c.ctypes.data, c.nbytes, r.WRITE | r.WRITE_ONCE | r.PREVIOUS, 4),
        r.Buffer(
            "partials", partials.ctypes.data, partials.nbytes, r.READ | r.WRITE | r.ORDERED, 4
        ),
        r.Buffer("flags", flags.ctypes.data, flags.nbytes, r.SYNC, 4),
    ]
    parameters = "const __grid_constant__ TensorMap map_a, " if box else ""
    source = _SOURCE.format(body=body, helpers=helpers, parameters=parameters)
    launch = runtime.Launch(
        params=params,
        buffers=buffers,
        tensor_map=_tensor_map(a, box) if box else None,
        **launch_shape.__dict__,
    )
    statistics = runtime.run(build_kernel(source, "test_kernel"), "kernel", launch)
    return c, statistics


def _tensor_map(a: np.ndarray, box: tuple[int, int, int]) -> runtime.TensorMap:
    return runtime.TensorMap(
        a.ctypes.data,
        (ctypes.c_int64 * 3)(*a.shape[::-1]),
        (ctypes.c_int64 * 2)(a.strides[1], a.strides[0]),
        (ctypes.c_int32 * 3)(*box),
        runtime.TensorMap.MAGIC,
    )
