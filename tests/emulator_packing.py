"""Layout version 1 and its arithmetic once more, in numpy from docs/layout.md alone: the
independent side of emulator tests.

Nothing here imports the library, so that an error in `pack` or `dequantize` cannot cancel out.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

PERM = [0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15]  # column of each fragment row
SLACK_BLOCKS = 3


@dataclass(frozen=True)
class Weight:
    """A random weight: codes [k, n], scales and zeros [groups, n] (zeros None: symmetric), packed
    form and exact values."""

    codes: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray | None
    packed: np.ndarray
    col_scale: np.ndarray
    normalised: np.ndarray  # s_n per weight, float32 [k, n]

    def dense(self, dtype: str, rounded: bool = True) -> np.ndarray:
        """Weights as a kernel of activation type `dtype` multiplies them, times the column scale:
        float64 [k, n]. Not rounded: without their rounding to that type."""
        zeros = 8 if self.zeros is None else self._per_weight(self.zeros)
        values = (self.codes.astype(np.float64) - zeros) * round_to(self.normalised, dtype).astype(
            np.float64
        )
        if rounded:
            values = round_to(values, dtype).astype(np.float64)
        return values * self.col_scale[: self.codes.shape[1]]

    def _per_weight(self, groups: np.ndarray) -> np.ndarray:
        return np.repeat(groups, -(-self.codes.shape[0] // groups.shape[0]), axis=0)[
            : self.codes.shape[0]
        ]


def round_to(x: np.ndarray, dtype: str) -> np.ndarray:
    """Nearest-even to fp16 or bf16, as float32."""
    x = np.asarray(x, np.float32)
    if dtype == "f16":
        return x.astype(np.float16).astype(np.float32)
    bits = x.view(np.uint32)
    rounded = (bits.astype(np.uint64) + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return rounded.astype(np.uint32).view(np.float32)


def make_weight(k: int, n: int, group_size: int, zeros: bool, seed: int) -> Weight:
    """Random codes, positive and negative scales over several powers of two, integer zero points
    0..16."""
    rng = np.random.default_rng(seed)
    groups = 1 if group_size < 0 else k // group_size
    codes = rng.integers(0, 16, (k, n), dtype=np.uint8)
    sign = rng.choice([-1.0, 1.0], (groups, n))
    scales = (sign * np.exp2(rng.uniform(-9, -5, (groups, n)))).astype(np.float16)
    zero_points = rng.integers(0, 17, (groups, n)).astype(np.float64) if zeros else None
    normalised, col_scale = _normalise(scales.astype(np.float64), group_size)
    copies = max(
        1, group_size // 128
    )  # larger groups are stored as groups of 128 with the same values
    stored_zeros = None if zero_points is None else np.repeat(zero_points, copies, axis=0)
    packed = _pack(codes, np.repeat(normalised, copies, axis=0), stored_zeros, min(group_size, 128))
    per_weight = np.repeat(normalised, -(-k // groups), axis=0)[:k].astype(np.float32)
    padded = np.zeros(_ceil(n, 64) * 64, np.float32)
    padded[:n] = col_scale
    return Weight(codes, scales, zero_points, packed, padded, per_weight)


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


def _normalise(scales: np.ndarray, group_size: int) -> tuple[np.ndarray, np.ndarray]:
    """(s_n [groups, n], column scale [n]): each column's largest |s_n| lies in [2^-7, 2^-6)."""
    if group_size < 0:
        return np.full_like(scales, 2.0**-7), scales[0] * 2.0**7
    exponent = np.floor(np.log2(np.abs(scales).max(axis=0))) + 7
    rounded = (scales * np.exp2(-exponent)).astype(np.float16)
    exponent += np.abs(rounded).max(axis=0) >= 2.0**-6
    return (scales * np.exp2(-exponent)).astype(np.float16).astype(np.float64), np.exp2(exponent)


def _pack(codes: np.ndarray, s: np.ndarray, z: np.ndarray | None, group_size: int) -> np.ndarray:
    k, n = codes.shape
    n_blocks, k_blocks = _ceil(n, 64), _ceil(k, 128)
    full = np.full((k_blocks * 128, n_blocks * 64), 8 if z is None else 0, np.uint32)
    full[:k, :n] = codes
    blocks = []
    for nb in range(n_blocks):
        for kb in range(k_blocks):
            tile = full[kb * 128 : kb * 128 + 128, nb * 64 : nb * 64 + 64]
            blocks.append(_code_words(tile).tobytes() + _entries(s, z, group_size, nb, kb))
    blocks.append(bytes(SLACK_BLOCKS * len(blocks[0])))
    return np.frombuffer(b"".join(blocks), np.uint8)


def _code_words(tile: np.ndarray) -> np.ndarray:
    """uint32 [half][atom][lane][k16 step] of one 128 x 64 block."""
    half, atom, lane, step = np.meshgrid(*(np.arange(x) for x in (2, 4, 32, 4)), indexing="ij")
    words = np.zeros(half.shape, np.uint32)
    for pair in range(4):
        row = lane // 4 + 8 * (pair & 1)
        column = atom * 16 + np.array(PERM)[row]
        for odd in range(2):
            depth = half * 64 + step * 16 + 2 * (lane % 4) + odd + 8 * (pair >> 1)
            code, bit = tile[depth, column], 2 + 4 * pair + 16 * odd
            words |= (
                code << np.uint32(bit)
                if bit < 30
                else (code << np.uint32(30)) | (code >> np.uint32(2))
            )
    return words


def _entries(s: np.ndarray, z: np.ndarray | None, group_size: int, nb: int, kb: int) -> bytes:
    """fp16 entries (sA, sB, zA, zB) of fragment rows r and r + 8; absent parts left out."""
    if group_size < 0 and z is None:
        return b""
    groups = 1 if group_size < 0 else 128 // group_size
    out = []
    for g in range(groups):
        row = 0 if group_size < 0 else kb * groups + g
        for atom in range(4):
            for r in range(8):
                columns = [nb * 64 + atom * 16 + PERM[r], nb * 64 + atom * 16 + PERM[r + 8]]
                for values, wanted, powers in (
                    (s, group_size > 0, (22, 18)),
                    (z, z is not None, (-22, -18)),
                ):
                    if wanted:
                        out += [_value(values, row, c) * 2.0**p for c, p in zip(columns, powers)]
    return np.array(out, np.float16).tobytes()


def _value(values: np.ndarray, row: int, column: int) -> float:
    inside = row < values.shape[0] and column < values.shape[1]
    return float(values[row, column]) if inside else 0.0
