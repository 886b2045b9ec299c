"""Entries of a kernel table: built kernels, dispatch rows, and the names and formats of kernels.

The launcher library numbers families, dtypes, decompositions, group sizes and formats in the order
that stands here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

FAMILIES = ("ampere", "hopper", "sparse", "hopper_sparse")
SPARSE_FAMILIES = ("sparse", "hopper_sparse")  # for 2:4-sparse weights
SPARSE_PREFIXES = tuple(f"w4a16_{family}_m" for family in SPARSE_FAMILIES)  # of geometries
DTYPES = ("f16", "bf16")
DECOMPOSITIONS = ("data_parallel", "striped", "split_k", "stream_k", "hybrid")
GROUPS = (32, 64, 128, -1)
FORMATS = 24  # dense: 2 dtypes x zero points x 4 group sizes; sparse: 2 dtypes x 4 group sizes
_DECOMPOSITION_TAGS = {
    "data_parallel": "dp",
    "striped": "striped",
    "stream_k": "streamk",
    "hybrid": "hybrid",
}


@dataclass(frozen=True)
class Kernel:
    """One built variant: an entry of the manifest."""

    name: str
    family: str
    dtype: str
    zeros: bool
    group_size: int
    m_tile: int
    n_sm: int
    k_sm: int
    warps_n: int
    warps_k: int
    stages: int
    decomposition: str
    split: int
    ctas_per_sm: int
    threads: int
    shared_bytes: int
    cluster: int
    file: str
    sha256: str
    multicast: int = 1

    @property
    def geometry(self) -> str:
        """The name without the format."""
        return re.sub(rf"_{self.dtype}z?_g(col|\d+)_", "_", self.name, count=1)

    @property
    def format(self) -> int:
        """Index of (dtype, zeros, group_size) in a row's list of kernels."""
        return format_index(self.dtype, self.zeros, self.group_size, self.sparse)

    @property
    def sparse(self) -> bool:
        """Whether it is for 2:4-sparse weights."""
        return self.family in SPARSE_FAMILIES

    @property
    def format_text(self) -> str:
        """The format in words, for messages."""
        return format_text(self.dtype, self.zeros, self.group_size, self.sparse)

    def fields(self) -> list[int]:
        """The numbers that the launcher takes, in its order."""
        return [
            FAMILIES.index(self.family),
            DTYPES.index(self.dtype),
            int(self.zeros),
            self.group_size,
            self.m_tile,
            self.n_sm,
            self.k_sm,
            self.warps_n,
            self.warps_k,
            self.stages,
            DECOMPOSITIONS.index(self.decomposition),
            self.split,
            self.ctas_per_sm,
            self.multicast,
            self.threads,
            self.shared_bytes,
            self.cluster,
        ]


@dataclass(frozen=True)
class Row:
    """One dispatch row: ranges of a shape (both ends included), and the geometry that serves it."""

    m: tuple[int, int]
    n: tuple[int, int]
    k: tuple[int, int]
    sms: int | None
    group_size: int | None
    dtype: str | None
    zeros: bool | None
    geometry: str
    source: str
    kernels: tuple[int, ...]  # index of the kernel for each format; -1: not built or excluded

    def matches(self, m: int, n: int, k: int, sms: int) -> bool:
        """Whether the shape lies in the ranges and the device is meant."""
        inside = all(
            low <= value <= high for value, (low, high) in zip((m, n, k), (self.m, self.n, self.k))
        )
        return inside and self.sms in (None, sms)

    def covers(self, dtype: str, zeros: bool, group_size: int, sparse: bool = False) -> bool:
        """Whether the row speaks of this format at all."""
        return (
            self.geometry.startswith(SPARSE_PREFIXES) == sparse
            and self.dtype in (None, dtype)
            and self.zeros in (None, zeros)
            and self.group_size in (None, group_size)
        )


def format_text(dtype: str, zeros: bool, group_size: int, sparse: bool = False) -> str:
    """A format in words, for messages."""
    kind = "2:4 sparse" if sparse else "zero points" if zeros else "symmetric"
    return f"{dtype}, {kind}, group_size={group_size}"


def format_index(dtype: str, zeros: bool, group_size: int, sparse: bool = False) -> int:
    """Place of a format in the launcher's lists: 2 dtypes x zero points x 4 group sizes, then 2:4
    sparsity with 2 dtypes x 4 group sizes."""
    if sparse:
        return 16 + DTYPES.index(dtype) * 4 + GROUPS.index(group_size)
    return DTYPES.index(dtype) * 8 + (4 if zeros else 0) + GROUPS.index(group_size)


def with_format(geometry: str, dtype: str, zeros: bool, group_size: int) -> str:
    """Name of the variant of `geometry` for a format; raises ValueError for a malformed
    geometry."""
    match = re.fullmatch(r"(w4a16_[a-z]+(?:_[a-z]+)?)_(m[1-9]\w*)", geometry)
    if match is None:
        raise ValueError(
            f"kernel={geometry!r} is malformed: give a variant's name or its geometry, such as "
            "w4a16_ampere_m16_n128k128_w2x2_p4_striped_c1"
        )
    group = "col" if group_size < 0 else group_size
    return f"{match[1]}_{dtype}{'z' if zeros else ''}_g{group}_{match[2]}"


def kernel_name(fields: dict[str, Any]) -> str:
    """The name that the fields of a manifest entry spell."""
    tag = _DECOMPOSITION_TAGS.get(fields["decomposition"], f"split{fields['split']}")
    geometry = (
        f"w4a16_{fields['family']}_m{fields['m_tile']}_n{fields['n_sm']}k{fields['k_sm']}"
        f"_w{fields['warps_n']}x{fields['warps_k']}_p{fields['stages']}_{tag}"
        f"_c{fields['ctas_per_sm']}"
    )
    if fields.get("multicast", 1) > 1:
        geometry += f"_mc{fields['multicast']}"
    return with_format(geometry, fields["dtype"], fields["zeros"], fields["group_size"])
