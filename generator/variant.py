"""Variant: everything that is fixed when a kernel is compiled, and what follows from it.

A Variant is a Geometry (tile sizes, warps, pipeline, decomposition) plus a format (activation type,
zero points, group size). Names are bijective: `Variant.parse(v.name) == v`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields

from generator.problem import (
    BLOCK_COLUMNS,
    BLOCK_DEPTH,
    block_bytes,
    ceil_div,
    round_up,
    sparse_block_bytes,
)

# sparse, hopper_sparse: the kernels of ampere and hopper over 2:4-sparse weights
FAMILIES = ("ampere", "hopper", "sparse", "hopper_sparse")
HOPPER_FAMILIES = ("hopper", "hopper_sparse")
SPARSE_FAMILIES = ("sparse", "hopper_sparse")
DECOMPOSITIONS = {
    "data_parallel": "dp",
    "striped": "striped",
    "split_k": "split",
    "stream_k": "streamk",
    "hybrid": "hybrid",
}
HOPPER_ALIGNMENT = 128  # bytes: bulk copies and barriers start on their own line

_NUMBER = r"[1-9]\d*"
# What a name is made of, in order: what a part says, its pattern.
_PARTS = (
    ("w4a16_ and a family", r"w4a16_(?P<family>[a-z]+(?:_[a-z]+)?)_"),
    (
        "a format such as f16_g128",
        r"(?:(?P<dtype>bf16|f16)(?P<zeros>z?)_g(?P<group>col|[1-9]\d*)_)?",
    ),
    ("a format such as f16_g128 or rows such as m16", rf"m(?P<m_tile>{_NUMBER})_"),
    ("columns and depth such as n128k128", rf"n(?P<n_sm>{_NUMBER})k(?P<k_sm>{_NUMBER})_"),
    ("warps such as w2x2", rf"w(?P<warps_n>{_NUMBER})x(?P<warps_k>{_NUMBER})_"),
    ("stages such as p4", rf"p(?P<stages>{_NUMBER})_"),
    (
        "dp, striped, streamk, hybrid or split and a number",
        rf"(?P<decomposition>dp|striped|streamk|hybrid|split(?P<split>{_NUMBER}))_",
    ),
    ("CTAs per SM such as c1", rf"c(?P<ctas>{_NUMBER})"),
    ("nothing more, or _mc and a number", r"(?:_mc(?P<multicast>[2-9]|[1-9]\d+))?$"),
)
_NAME = re.compile("".join(pattern for _, pattern in _PARTS))


def _unread(name: str) -> str:
    """Where a name stops being one."""
    at = 0
    for what, pattern in _PARTS:
        match = re.compile(pattern).match(name, at)
        if match is None:
            return f"at {name[at:]!r} it should go on with {what}"
        at = match.end()
    return "it ends in a line break"  # which $ lets pass and fullmatch does not


def _geometry_suffix(g: Geometry | Variant) -> str:
    tag = DECOMPOSITIONS[g.decomposition]
    if g.decomposition == "split_k":
        tag += str(g.split)
    multicast = f"_mc{g.multicast}" if g.multicast > 1 else ""
    tile = f"m{g.m_tile}_n{g.n_sm}k{g.k_sm}_w{g.warps_n}x{g.warps_k}"
    return f"{tile}_p{g.stages}_{tag}_c{g.ctas_per_sm}{multicast}"


def _parse(name: str, want_format: bool, what: str) -> re.Match:
    match = _NAME.fullmatch(name)
    if match is None:
        why = _unread(name)
    elif match["family"] not in FAMILIES:
        why = f"family {match['family']} is not one of {', '.join(FAMILIES)}"
    elif (match["dtype"] is not None) != want_format:
        why = "it has a format" if match["dtype"] else "it has no format such as f16_g128"
    else:
        return match
    raise ValueError(f"{what} name={name!r} is malformed: {why}; an example is {_EXAMPLE[what]}")


def _geometry_fields(match: re.Match) -> dict:
    tags = {tag: word for word, tag in DECOMPOSITIONS.items()}
    numbers = ("m_tile", "n_sm", "k_sm", "warps_n", "warps_k", "stages")
    return {
        "family": match["family"],
        **{key: int(match[key]) for key in numbers},
        "decomposition": "split_k" if match["split"] else tags[match["decomposition"]],
        "split": int(match["split"] or 1),
        "ctas_per_sm": int(match["ctas"]),
        "multicast": int(match["multicast"] or 1),
    }


_EXAMPLE = {
    "variant": "w4a16_hopper_f16_g128_m16_n128k128_w2x1_p8_dp_c2",
    "geometry": "w4a16_hopper_m16_n128k128_w2x1_p8_dp_c2",
}


@dataclass(frozen=True)
class Geometry:
    """A Variant without its format; dispatch rows name geometries."""

    family: str
    m_tile: int  # activation rows per tile
    n_sm: int  # weight columns per tile
    k_sm: int  # depth per pipeline stage
    warps_n: int  # warps; hopper, hopper_sparse: consumer warpgroups
    warps_k: int
    stages: int
    decomposition: str
    split: int
    ctas_per_sm: int
    multicast: int = 1  # hopper: CTAs of a cluster, side by side in N, that share activations

    @property
    def name(self) -> str:
        return f"w4a16_{self.family}_{_geometry_suffix(self)}"

    @classmethod
    def parse(cls, name: str) -> Geometry:
        """Inverse of `name`; raises ValueError for anything else."""
        return cls(**_geometry_fields(_parse(name, False, "geometry")))

    def with_format(self, dtype: str, zeros: bool, group_size: int) -> Variant:
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return Variant(dtype=dtype, zeros=zeros, group_size=group_size, **values)


@dataclass(frozen=True)
class Variant:
    """One kernel. `generator.legality.why_not` says whether it can exist on an architecture."""

    family: str
    dtype: str  # "f16" or "bf16": activations and output
    zeros: bool
    group_size: int  # 32, 64, 128, or -1: one scale per column
    m_tile: int
    n_sm: int
    k_sm: int
    warps_n: int
    warps_k: int
    stages: int
    decomposition: str
    split: int
    ctas_per_sm: int
    multicast: int = 1  # hopper: CTAs of a cluster, side by side in N, that share activations

    @property
    def name(self) -> str:
        group = "col" if self.group_size == -1 else self.group_size
        z = "z" if self.zeros else ""
        return f"w4a16_{self.family}_{self.dtype}{z}_g{group}_{_geometry_suffix(self)}"

    @property
    def symbol(self) -> str:
        """The extern "C" name of the kernel."""
        return self.name

    @classmethod
    def parse(cls, name: str) -> Variant:
        """Inverse of `name`; raises ValueError for anything else."""
        match = _parse(name, True, "variant")
        group = -1 if match["group"] == "col" else int(match["group"])
        format = {"dtype": match["dtype"], "zeros": match["zeros"] == "z", "group_size": group}
        return cls(**format, **_geometry_fields(match))

    def geometry(self) -> Geometry:
        return Geometry(**{f.name: getattr(self, f.name) for f in fields(Geometry)})

    def with_format(self, dtype: str, zeros: bool, group_size: int) -> Variant:
        return self.geometry().with_format(dtype, zeros, group_size)

    # ---- derived: the C++ Config computes the same numbers and the rendered source asserts that --

    @property
    def hopper(self) -> bool:
        """Whether it is Hopper's pipeline: warpgroups, bulk and tensor copies, clusters."""
        return self.family in HOPPER_FAMILIES

    @property
    def cluster(self) -> int:
        """Blocks per cluster on Hopper: a split over k, which reduces in shared memory, or the
        blocks that share activations.
        """
        if not self.hopper:
            return 1
        return self.split if self.decomposition == "split_k" else self.multicast

    @property
    def moves_registers(self) -> bool:
        """Hopper: a full producer warpgroup hands its registers to the consumers (setmaxnreg)."""
        return self.ctas_per_sm == 1 and self.warps_n * self.warps_k in (2, 4)

    @property
    def sums_activations(self) -> bool:
        """Hopper, few rows: spare producer warps add up the activations of each group, so that
        codes are multiplied as they lie in memory (docs/layout.md)."""
        return (
            self.family == "hopper"
            and (self.m_tile == 8 or (self.m_tile, self.warps_n) == (16, 4))
            and self.group_size in (64, 128)
            and self.k_sm // self.group_size % 2 == 0
            and (self.multicast, self.ctas_per_sm) == (1, 1)
            and self.warps_n * self.warps_k == 4
        )

    @property
    def producers(self) -> int:
        """Hopper: warps that stream weights, and as many that stream activations."""
        two = (
            self.moves_registers
            and not self.sums_activations
            and (self.n_sm, self.k_sm) == (BLOCK_COLUMNS, BLOCK_DEPTH)
            and self.decomposition in ("data_parallel", "split_k")
        )
        return 2 if two else 1

    @property
    def first_in_halves(self) -> bool:
        """Hopper: the first stage of each k group comes in two halves of its depth, with a
        barrier each, so that products begin sooner."""
        square = self.warps_n > 1 and self.warps_k > 1
        zero_batches = self.zeros and self.group_size in (64, 128) and self.m_tile <= 32
        zero_batches = zero_batches and (self.m_tile > 16 or square)
        whole = zero_batches and (self.warps_k == 1 or self.decomposition == "stream_k")
        return (
            self.hopper
            and self.decomposition != "hybrid"
            and self.k_sm // BLOCK_DEPTH % 2 == 0
            and (self.warps_n, self.warps_k) != (2, 1)
            and not (self.sums_activations or whole)
            and self.stages >= 2 * self.warps_k
        )

    @property
    def threads(self) -> int:
        if not self.hopper:
            return 32 * self.warps_n * self.warps_k
        return 128 * self.warps_n * self.warps_k + (128 if self.moves_registers else 64)

    @property
    def sparse(self) -> bool:
        """Whether its weights are 2:4-sparse and packed as such."""
        return self.family in SPARSE_FAMILIES

    @property
    def block_bytes(self) -> int:
        """Bytes of a packed block of its weights."""
        if self.sparse:
            return sparse_block_bytes(self.group_size)
        return block_bytes(self.group_size, self.zeros)

    @property
    def blocks_per_stage(self) -> int:
        """Packed 64 x 128 blocks that one stage holds (ampere, k_sm = 64: half blocks, hence the
        ceiling).
        """
        return (self.n_sm // BLOCK_COLUMNS) * ceil_div(self.k_sm, BLOCK_DEPTH)

    @property
    def stage_bytes(self) -> int:
        activations = self.m_tile * self.k_sm * 2
        weights = self.blocks_per_stage * self.block_bytes
        if self.hopper:
            return activations + round_up(weights, HOPPER_ALIGNMENT)
        return activations + weights

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block, bytes."""
        if not self.hopper:
            return self.stages * self.stage_bytes
        return (
            self.stages * self.stage_bytes
            + self._hopper_reduction_bytes()
            + self._hopper_sum_bytes()
            + self._hopper_barrier_bytes()
        )

    def _hopper_reduction_bytes(self) -> int:
        """Partial sums of the k groups, and what the other CTAs of a cluster send to this one."""
        k_groups = (self.warps_k - 1) * self.n_sm * self.m_tile * 4
        # A chunk is 64 columns x 8 rows of one warpgroup: 2048 bytes of fp32. A CTA of a cluster
        # finishes its share of them.
        chunks = self.n_sm // BLOCK_COLUMNS // self.warps_n * self.m_tile // 8
        return k_groups + (self.split - 1) * self.warps_n * ceil_div(chunks, self.split) * 2048

    def _hopper_sum_bytes(self) -> int:
        """Sums of activations of the groups in the ring, fp32; symmetric: for two kinds of rows."""
        if not self.sums_activations:
            return 0
        group = (1 if self.zeros else 2) * self.m_tile * 4
        return round_up(self.stages * (self.k_sm // self.group_size) * group, HOPPER_ALIGNMENT)

    def _hopper_barrier_bytes(self) -> int:
        each_stage = 3 if self.multicast > 1 or self.sums_activations else 2
        first = self.warps_k if self.first_in_halves else 0
        if self.decomposition != "hybrid" and self.multicast == 1:
            first += self.producers  # all barriers have been made
        return round_up(8 * (each_stage * self.stages + self.warps_n + first), HOPPER_ALIGNMENT)
