"""ProblemShape: what one call of gemm asks for."""

from __future__ import annotations

from dataclasses import dataclass

DTYPES = ("f16", "bf16")
KERNEL_GROUP_SIZES = (32, 64, 128, -1)  # what kernels handle natively; -1 is one scale per column
BLOCK_COLUMNS = 64  # a packed block covers 64 columns x 128 deep (layout version 1)
BLOCK_DEPTH = 128


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def round_up(a: int, b: int) -> int:
    return ceil_div(a, b) * b


def kernel_group_size(group_size: int) -> int:
    """The group size a kernel sees: multiples of 128 are stored as 128 with replicated scales.

    Raises ValueError for a group size that no kernel can serve.
    """
    if group_size in KERNEL_GROUP_SIZES:
        return group_size
    if group_size > 0 and group_size % 128 == 0:
        return 128
    raise ValueError(
        f"group_size={group_size} is not 32, 64, a multiple of 128, or -1 (per column)"
    )


def block_bytes(group_size: int, zeros: bool) -> int:
    """Bytes of one packed block: 4096 of codes, then scale and zero-point entries."""
    if group_size == -1:
        return 4096 + (128 if zeros else 0)
    return 4096 + (BLOCK_DEPTH // group_size) * (256 if zeros else 128)


def sparse_block_bytes(group_size: int) -> int:
    """Bytes of one packed block of a 2:4-sparse weight: 2048 of codes, 1024 of places, scales."""
    return 3072 + block_bytes(group_size, False) - 4096


@dataclass(frozen=True)
class ProblemShape:
    """C[m, n] = A[m, k] @ W[k, n] with INT4 groups of `group_size` along k; `dtype` is A's type.
    sparse: W has 2:4 sparsity along k and the layout for it.
    """

    m: int
    n: int
    k: int
    group_size: int = 128
    dtype: str = "f16"
    zeros: bool = False
    sparse: bool = False

    def __post_init__(self) -> None:
        if self.m < 0:
            raise ValueError(f"m={self.m} is negative")
        for name in ("n", "k"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} is not positive")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype={self.dtype!r} is not one of {', '.join(DTYPES)}")
        kernel_group_size(self.group_size)
        if self.sparse and (self.zeros or self.group_size == 32):
            raise ValueError("sparse needs zeros=False and group_size 64, multiples of 128, or -1")
        if self.group_size > 0 and self.k % self.group_size:
            raise ValueError(f"k={self.k} is not a multiple of group_size={self.group_size}")

    @property
    def kernel_group_size(self) -> int:
        return kernel_group_size(self.group_size)

    @property
    def n_blocks(self) -> int:
        return ceil_div(self.n, BLOCK_COLUMNS)

    @property
    def k_blocks(self) -> int:
        return ceil_div(self.k, BLOCK_DEPTH)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the packed weight that one pass over it reads."""
        group = self.kernel_group_size
        block = sparse_block_bytes(group) if self.sparse else block_bytes(group, self.zeros)
        return self.n_blocks * self.k_blocks * block
