"""The one oracle: what a packed weight and a multiply must give, in plain numpy, independent of the
package.

`weights` is the definition W = (q - z) * s. `kernel_weights` follows the documented arithmetic of
the kernels bit for bit. `check` is the criterion of "right"; tests show that it fails when it must.
"""

from __future__ import annotations

import numpy as np

FROBENIUS = {"float16": 1e-3, "bfloat16": 8e-3}  # relative error of a whole product
UNIT = {"float16": 2.0**-11, "bfloat16": 2.0**-8}  # half the distance of neighbours, relative
MIN_ROWS_FOR_NORMS = 16


def groups(k: int, group_size: int, g_idx=None) -> np.ndarray:
    """Group of each row, [K]."""
    if g_idx is not None:
        return np.asarray(g_idx, dtype=np.int64)
    return np.zeros(k, np.int64) if group_size < 0 else np.arange(k) // group_size


def weights(q, scales, zeros=None, *, group_size: int, g_idx=None) -> np.ndarray:
    """(q - z) * s as float64 [K, N]; z defaults to 8."""
    q, scales = np.asarray(q, np.float64), np.asarray(scales, np.float64)
    index = groups(q.shape[0], group_size, g_idx)
    z = 8.0 if zeros is None else np.asarray(zeros, np.float64)[index]
    return (q - z) * scales[index]


def round_to(values, dtype: str) -> np.ndarray:
    """Rounds float values to float16 or bfloat16 (nearest, ties to even); returns float32."""
    values = np.asarray(values, np.float32)
    if dtype == "float16":
        with np.errstate(over="ignore"):
            return values.astype(np.float16).astype(np.float32)
    bits = values.view(np.uint32).astype(np.uint64)
    kept = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16 << 16
    rounded = (kept & 0xFFFFFFFF).astype(np.uint32).view(np.float32)
    return np.where(np.isfinite(values), rounded, values)


def normalised(scales, group_size: int) -> tuple[np.ndarray, np.ndarray]:
    """(s_n [groups, N], column factor [N]), float32: the largest |s_n| of a column in [2^-7,
    2^-6)."""
    scales = np.asarray(scales, np.float32)
    if group_size < 0:
        return np.full_like(scales, 2.0**-7), scales[0] * np.float32(2.0**7)
    stored = np.empty_like(scales)
    factor = np.ones(scales.shape[1], np.float32)
    for column in range(scales.shape[1]):
        values = scales[:, column]
        largest = float(np.abs(values).max())
        exponent = 0
        if largest > 0:
            exponent = int(np.floor(np.log2(largest))) + 7
            while float(np.float16(largest * 2.0**-exponent)) >= 2.0**-6:
                exponent += 1
            while float(np.float16(largest * 2.0**-exponent)) < 2.0**-7:
                exponent -= 1
        stored[:, column] = (values.astype(np.float64) * 2.0**-exponent).astype(np.float16)
        factor[column] = np.float32(2.0**exponent)
    return stored, factor


def stored_products(
    q, scales, zeros=None, *, group_size: int, dtype: str, g_idx=None
) -> tuple[np.ndarray, np.ndarray]:
    """(q - z) * s_n float64 [K, N], with s_n as `dtype` holds it, and the column factor [N]."""
    q = np.asarray(q, np.float64)
    index = groups(q.shape[0], group_size, g_idx)
    stored, factor = normalised(scales, group_size)
    z = 8.0 if zeros is None else np.asarray(zeros, np.float64)[index]
    return (q - z) * round_to(stored[index], dtype), factor


def kernel_weights(q, scales, zeros=None, *, group_size: int, dtype: str, g_idx=None) -> np.ndarray:
    """The weight as kernels see it, float32 values of `dtype` [K, N]: two roundings, as
    documented."""
    products, factor = stored_products(
        q, scales, zeros, group_size=group_size, dtype=dtype, g_idx=g_idx
    )
    return round_to(round_to(products, dtype) * factor, dtype)


def unrounded_weights(q, scales, zeros=None, *, group_size: int, dtype: str) -> np.ndarray:
    """As kernel_weights, but for the rounding of the products: float64 [K, N]."""
    products, factor = stored_products(q, scales, zeros, group_size=group_size, dtype=dtype)
    return products * factor


def has_running_scale(kernel) -> bool:
    """Whether a kernel (or Variant) keeps its sums in units of a group's scale (docs/layout.md): a
    weight is not rounded before the product, and ratios of scales are, to some 2^-22 each."""
    tile = (kernel.family, kernel.decomposition, kernel.m_tile, kernel.warps_k)
    plain = tile == ("hopper", "data_parallel", 256, 1)
    return plain and (kernel.dtype, kernel.group_size) == ("f16", 128)


def nearest(out, exact, slack: float = 2.0**-19) -> np.ndarray:
    """Where `out` is the float16 number nearest to `exact` (float64), or either of two that are
    about as near: to `slack` of its size."""
    out, exact = np.asarray(out, np.float64), np.asarray(exact, np.float64)
    exponent = np.floor(np.log2(np.maximum(np.abs(exact), 2.0**-14)))
    return np.abs(out - exact) <= 2.0 ** (exponent - 10) / 2 + slack * np.abs(exact)


def product(a, w, bias=None) -> np.ndarray:
    """a @ w + bias in float64 over the last dimension of a."""
    result = np.asarray(a, np.float64) @ np.asarray(w, np.float64)
    return result if bias is None else result + np.asarray(bias, np.float64)


def to_numpy(tensor) -> np.ndarray:
    """A torch tensor of any floating type as float32."""
    return tensor.detach().float().cpu().numpy()


def complaints(out, a, w, bias=None, *, dtype: str) -> list[str]:
    """Why `out` is not a @ w + bias in `dtype`; empty if it is right.

    The error of the whole product is small, or where it cancels every element is within rounding of
    its own sum of magnitudes; for 16 rows and more each column has the right norm; nothing is
    infinite or NaN that should not be.
    """
    a, w = np.asarray(a, np.float64), np.asarray(w, np.float64)
    expected = (*a.shape[:-1], w.shape[1])
    if np.shape(out) != expected:
        return [f"shape {np.shape(out)} instead of {expected}"]
    a2, out2 = a.reshape(-1, a.shape[-1]), np.asarray(out, np.float64).reshape(-1, w.shape[1])
    want = product(a2, w, bias)
    found = []
    finite = np.isfinite(round_to(want, dtype))
    if not np.isfinite(out2[finite]).all():
        return [f"{int((~np.isfinite(out2[finite])).sum())} elements are not finite"]
    difference = np.where(finite, out2 - want, 0.0)
    norm = np.linalg.norm(np.where(finite, want, 0.0))
    relative = np.linalg.norm(difference) / norm if norm else np.inf
    bound = 4 * UNIT[dtype] * (np.abs(a2) @ np.abs(w) + (0 if bias is None else np.abs(bias)))
    if relative > FROBENIUS[dtype] and (np.abs(difference) > bound).any():
        found.append(f"relative error {relative:.2e} exceeds {FROBENIUS[dtype]:.0e}")
    if want.shape[0] >= MIN_ROWS_FOR_NORMS and finite.all():
        norms = np.linalg.norm(want, axis=0)
        significant = norms > np.linalg.norm(bound, axis=0)
        ratio = np.linalg.norm(out2, axis=0)[significant] / norms[significant]
        if ratio.size and (ratio.min() < 0.99 or ratio.max() > 1.01):
            found.append(f"column norms are off by {ratio.min():.3f}..{ratio.max():.3f}")
    return found


def check(out, a, w, bias=None, *, dtype: str | None = None) -> None:
    """Asserts that a torch tensor `out` is a @ w + bias; a and w are tensors or arrays."""
    dtype = dtype or str(out.dtype).removeprefix("torch.")
    arrays = [x if isinstance(x, np.ndarray) else to_numpy(x) for x in (out, a, w)]
    bias = bias if bias is None or isinstance(bias, np.ndarray) else to_numpy(bias)
    found = complaints(*arrays, bias, dtype=dtype)
    assert not found, "; ".join(found)


def check_swiglu(out, expected) -> None:
    """silu(gate) * up of a kernel against the two steps in torch, two roundings apart at most: silu
    comes from an approximate exponential."""
    unit = 2.0**-10 if str(expected.dtype) == "torch.float16" else 2.0**-7
    assert out.shape == expected.shape and out.dtype == expected.dtype
    # Below 2^-14 fp16 numbers are 2^-24 apart.
    limits = {"rtol": 2 * unit, "atol": 2.0**-23, "equal_nan": False}
    np.testing.assert_allclose(to_numpy(out), to_numpy(expected), **limits)
