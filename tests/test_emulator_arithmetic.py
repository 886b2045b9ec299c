"""fp16 and bf16 on the host against exact rational arithmetic, and warp instructions against
numpy."""

from __future__ import annotations

import ctypes
import re
from fractions import Fraction

import numpy as np
import pytest
from emulator_kernels import run_kernel
from emulator_packing import round_to

from emulator.build import INCLUDE, build_runtime

FORMATS = {False: (10, 5), True: (7, 8)}  # bf16? -> stored mantissa bits, exponent bits
SPECIAL = [
    0x0000,
    0x8000,
    0x0001,
    0x8001,
    0x03FF,
    0x0400,
    0x3C00,
    0x7BFF,
    0xFBFF,
    0x0080,
    0x007F,
    0x7F7F,
    0x3F80,
    0xBF80,
    0x2C3C,
]


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    library = ctypes.CDLL(str(build_runtime()), mode=ctypes.RTLD_GLOBAL)
    library.emu_fma2.argtypes = (ctypes.c_bool, *[ctypes.c_uint32] * 3)
    library.emu_fma2.restype = library.emu_sub2_f16.restype = library.emu_pack2.restype = (
        ctypes.c_uint32
    )
    library.emu_sub2_f16.argtypes = [ctypes.c_uint32] * 2
    library.emu_pack2.argtypes = (ctypes.c_bool, ctypes.c_float, ctypes.c_float)
    return library


def exact(bits: int, bf16: bool) -> Fraction | None:
    """Value of an element, None for infinities and NaN."""
    mantissa_bits, exponent_bits = FORMATS[bf16]
    mantissa, field = (
        bits & ((1 << mantissa_bits) - 1),
        bits >> mantissa_bits & ((1 << exponent_bits) - 1),
    )
    if field == (1 << exponent_bits) - 1:
        return None
    bias = (1 << (exponent_bits - 1)) - 1
    significand, exponent = (mantissa, 1) if field == 0 else (mantissa | 1 << mantissa_bits, field)
    value = Fraction(significand) * Fraction(2) ** (exponent - bias - mantissa_bits)
    return -value if bits >> 15 else value


def round_exact(value: Fraction, bf16: bool) -> int:
    """Magnitude bits of the nearest element, ties to even: found by search over the ordered
    encodings."""
    mantissa_bits, exponent_bits = FORMATS[bf16]
    infinity = ((1 << exponent_bits) - 1) << mantissa_bits
    low, high = 0, infinity
    magnitude = abs(value)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if exact(middle, bf16) <= magnitude else (low, middle)
    below = exact(low, bf16)
    above = exact(high, bf16)
    if above is None:  # one step beyond the largest finite element
        above = below + (below - exact(low - 1, bf16))
    nearer_low = magnitude - below < above - magnitude or (
        magnitude - below == above - magnitude and low % 2 == 0
    )
    return low if nearer_low else high


def elements(bf16: bool, count: int, seed: int) -> np.ndarray:
    """Random finite elements, near each other in exponent often enough that sums cancel, and
    special ones."""
    rng = np.random.default_rng(seed)
    mantissa_bits, exponent_bits = FORMATS[bf16]
    bits = rng.integers(0, 1 << 16, count).astype(np.uint32)
    near = rng.random(count) < 0.5
    centre = np.uint32(((1 << (exponent_bits - 1)) - 1) << mantissa_bits)
    bits[near] = centre + (bits[near] & 0x03FF) | bits[near] & 0x8000
    bits[: len(SPECIAL)] = rng.permutation(SPECIAL)
    infinity = ((1 << exponent_bits) - 1) << mantissa_bits
    bits[bits & 0x7FFF >= infinity] = 0x3C01
    return bits


@pytest.mark.parametrize("bf16", [False, True])
def test_fma_rounds_once(library: ctypes.CDLL, bf16: bool) -> None:
    a, b, c = (elements(bf16, 3000, seed) for seed in range(3))
    for x, y, z in zip(a.tolist(), b.tolist(), c.tolist()):
        value = exact(x, bf16) * exact(y, bf16) + exact(z, bf16)
        got = library.emu_fma2(bf16, x | y << 16, y | x << 16, z | z << 16)
        assert got & 0xFFFF == got >> 16
        assert got & 0x7FFF == round_exact(value, bf16), (hex(x), hex(y), hex(z))
        if value:
            assert bool(got & 0x8000) == (value < 0)


def test_dequantisation_constants_are_exact(library: ctypes.CDLL) -> None:
    """A code masked in place, times s * 2^22, minus 8 s, is fp16((q - 8) * s): what the kernels
    rely on."""
    rng = np.random.default_rng(0)
    scales = np.exp2(rng.uniform(-14, -6, 200)).astype(np.float16)
    for s in scales[scales < 2.0**-6]:
        stored = int(np.float16(np.float64(s) * 2**22).view(np.uint16))
        bias = int(np.float16(-8 * np.float64(s)).view(np.uint16))
        for q in range(16):
            got = library.emu_fma2(False, q << 2, stored, bias) & 0xFFFF
            assert np.uint16(got).view(np.float16) == np.float16((q - 8) * np.float64(s))


def test_subtraction_and_packing(library: ctypes.CDLL) -> None:
    a, b = elements(False, 3000, 7), elements(False, 3000, 8)
    for x, y in zip(a.tolist(), b.tolist()):
        value = exact(x, False) - exact(y, False)
        assert library.emu_sub2_f16(x, y) & 0x7FFF == round_exact(value, False)
    values = np.random.default_rng(9).standard_normal(2000).astype(np.float32) * np.float32(1e-4)
    for low, high in values.reshape(-1, 2):
        half = np.array([low, high]).astype(np.float16).view(np.uint16).astype(np.uint32)
        assert library.emu_pack2(False, low, high) == half[0] | half[1] << 16
        brain = round_to(np.array([low, high]), "bf16").view(np.uint32) >> 16
        assert library.emu_pack2(True, low, high) == brain[0] | brain[1] << 16


MMA = """
  for (int i = lane; i < 128 + 64; i += 32) st_shared_u32(base + 4 * i, load(p.a, i));
  warp_sync();
  uint32_t a[4], b[2];
  // A: 16 x 16 row-major; matrices: rows 0-7 | 8-15 of k 0-7, then of k 8-15. B: 8 columns of 16.
  ldmatrix_x4(a, base + (lane % 16) * 32 + lane / 16 * 16);
  ldmatrix_x2(b, base + 512 + (lane % 8) * 32 + lane / 8 % 2 * 16);
  float d[4];
  for (int i = 0; i < 4; ++i) d[i] = i + 4 * lane;
  mma_m16n8k16<ELEMENT>(d, a, b);
  for (int i = 0; i < 4; ++i) store(p, (lane / 4 + 8 * (i / 2)) * 8 + lane % 4 * 2 + i % 2, d[i]);
"""


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_ldmatrix_and_mma(dtype: str) -> None:
    rng = np.random.default_rng(1)
    a, b = (
        round_to(rng.standard_normal((16, 16)), dtype),
        round_to(rng.standard_normal((8, 16)), dtype),
    )
    both = np.concatenate([a, b])
    bits = (
        both.astype(np.float16).view(np.uint16)
        if dtype == "f16"
        else (both.view(np.uint32) >> 16).astype(np.uint16)
    )
    c, _ = run_kernel(MMA.replace("ELEMENT", dtype.upper()), bits, out_words=128)
    lane, i = np.meshgrid(np.arange(32), np.arange(4), indexing="ij")
    start = np.zeros((16, 8))
    start[lane // 4 + 8 * (i // 2), lane % 4 * 2 + i % 2] = i + 4 * lane
    np.testing.assert_allclose(
        c.view(np.float32).reshape(16, 8), start + a @ b.T, rtol=1e-6, atol=1e-6
    )


def test_movmatrix_transposes() -> None:
    matrix = np.arange(64, dtype=np.uint16).reshape(8, 8)
    c, _ = run_kernel("  store(p, lane, movmatrix_trans(load(p.a, lane)));", matrix)
    assert np.array_equal(c.view(np.uint16).reshape(8, 8), matrix.T)


def test_shuffles() -> None:
    c, _ = run_kernel(
        "  store(p, lane, shuffle_xor(1.f * lane, 5) + static_cast<float>(uniform(lane + 7)));"
    )
    assert np.array_equal(c.view(np.float32), (np.arange(32) ^ 5) + 7)


def parameter_counts(header: str) -> dict[str, int]:
    """Primitives of a header and how many parameters each has."""
    text = (INCLUDE / "marlin_cutlass" / header).read_text()
    pattern = r"MC_DEVICE [\w ]+?(\w+)(?:<\w+>)?\(((?:[^()]|\(&\w+\))*)\)"
    found = re.findall(pattern, text)
    return {name: len([p for p in arguments.split(",") if p]) for name, arguments in found}


@pytest.mark.parametrize(
    "device, host",
    [
        ("prims_device.cuh", "prims_host.h"),
        ("prims_hopper.cuh", "prims_hopper_host.h"),
        ("prims_sparse.cuh", "prims_sparse_host.h"),
    ],
)
def test_host_offers_every_device_primitive(device: str, host: str) -> None:
    on_device, on_host = parameter_counts(device), parameter_counts(host)
    assert len(on_device) == 1 if "sparse" in device else len(on_device) > 20
    assert {name: on_host.get(name) for name in on_device} == on_device
