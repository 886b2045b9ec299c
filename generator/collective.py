"""The opt-in family `collective`: CUTLASS's SM90 mixed-input GEMM as cutlass_library emits it.

It is the baseline: what the CUTLASS Python interface gives unaided. CUTLASS brings the main loop,
the pipeline depth, the tile scheduler and the launch, so a unit of this family is a shared library
with host code, not a cubin, and none of Variant's knobs for rings, warps or CTAs per SM exists
here. The group size is an argument of the launch. Nothing chooses such a kernel but its name.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass, fields

from generator.arch import Arch
from generator.problem import DTYPES

FAMILY = "collective"
PREFIX = f"w4a16_{FAMILY}_"
ARCHS = ("sm_90a",)
SCHEDULES = {"cooperative": "coop", "pingpong": "pingpong"}
DECOMPOSITIONS = {"data_parallel": "dp", "stream_k": "streamk"}
M_TILES = (16, 32, 64, 128, 256)
N_SMS = (64, 128, 256)
K_SMS = (64,)  # 128 bytes of activations: one row of the widest TMA swizzle
MULTICASTS = (1, 2)
THREADS = 384  # a producer and two consumer warpgroups, in both schedules
SHARED_BYTES = 227 * 1024  # at most: CUTLASS takes as many stages as a block has room for
# fp32 sums of a consumer thread beyond which nothing is left of its 240 registers.
MAX_ACCUMULATORS = 128

_NUMBER = r"[1-9]\d*"
_NAME = re.compile(
    rf"{PREFIX}(?:(?P<dtype>bf16|f16)_)?m(?P<m_tile>{_NUMBER})_n(?P<n_sm>{_NUMBER})"
    rf"k(?P<k_sm>{_NUMBER})_(?P<schedule>{'|'.join(SCHEDULES.values())})_"
    rf"(?P<decomposition>{'|'.join(DECOMPOSITIONS.values())})(?:_mc(?P<multicast>[2-9]))?"
)
_EXAMPLE = f"{PREFIX}f16_m64_n128k64_coop_streamk"


@dataclass(frozen=True)
class CollectiveVariant:
    """One unit. `why_not` says whether CUTLASS can instantiate it."""

    dtype: str  # "f16" or "bf16": activations, scales and output
    m_tile: int  # activation rows of a tile: n of CUTLASS, which gets the transposed product
    n_sm: int  # weight columns of a tile: m of CUTLASS
    k_sm: int
    schedule: str  # cooperative: two warpgroups share a tile; pingpong: each has its own
    decomposition: str  # persistent tiles, or CUTLASS's stream-K
    multicast: int = 1  # CTAs of a cluster, side by side in N, that share activations

    # What build.py asks of every variant.
    family = FAMILY
    threads = THREADS
    ctas_per_sm = 1
    shared_bytes = SHARED_BYTES

    @property
    def name(self) -> str:
        return self.geometry.replace(PREFIX, f"{PREFIX}{self.dtype}_")

    @property
    def geometry(self) -> str:
        """The name without the activation type."""
        ways = f"{SCHEDULES[self.schedule]}_{DECOMPOSITIONS[self.decomposition]}"
        multicast = f"_mc{self.multicast}" if self.multicast > 1 else ""
        return f"{PREFIX}m{self.m_tile}_n{self.n_sm}k{self.k_sm}_{ways}{multicast}"

    @property
    def accumulators(self) -> int:
        """fp32 sums that a consumer thread holds."""
        sharing = 2 if self.schedule == "cooperative" else 1
        return self.m_tile * self.n_sm // (128 * sharing)

    @classmethod
    def parse(cls, name: str) -> CollectiveVariant:
        """Inverse of `name`; raises ValueError for anything else."""
        match = _NAME.fullmatch(name)
        if match is None or match["dtype"] is None:
            raise ValueError(f"variant name={name!r} is malformed; an example is {_EXAMPLE}")
        words = {tag: word for word, tag in {**SCHEDULES, **DECOMPOSITIONS}.items()}
        values = {key: value for key, value in match.groupdict().items() if value is not None}
        return cls(**{key: int(v) if v.isdigit() else words.get(v, v) for key, v in values.items()})


def families(arch: Arch) -> tuple[str, ...]:
    """(FAMILY,) where it runs."""
    return (FAMILY,) if arch.name in ARCHS else ()


def is_collective(name: str) -> bool:
    """Whether a variant's or geometry's name is of this family."""
    return name.startswith(PREFIX)


def why_not(variant: CollectiveVariant, arch: Arch) -> str | None:
    """Why `variant` cannot exist on `arch`, or None if it can."""
    return next(_reasons(variant, arch), None)


def _reasons(v: CollectiveVariant, arch: Arch) -> Iterator[str]:
    if arch.name not in ARCHS:
        yield f"family={FAMILY} does not run on {arch.name} (only on {', '.join(ARCHS)})"
    allowed = {
        "dtype": DTYPES,
        "m_tile": M_TILES,
        "n_sm": N_SMS,
        "k_sm": K_SMS,
        "schedule": tuple(SCHEDULES),
        "decomposition": tuple(DECOMPOSITIONS),
        "multicast": MULTICASTS,
    }
    assert allowed.keys() == {f.name for f in fields(v)}
    for field, values in allowed.items():
        if getattr(v, field) not in values:
            yield f"{field}={getattr(v, field)} is not one of {', '.join(map(str, values))}"
    if v.schedule == "cooperative" and v.n_sm % 128:
        yield f"n_sm={v.n_sm}: two cooperating warpgroups need 64 columns each, a multiple of 128"
    if v.schedule == "pingpong" and v.decomposition == "stream_k":
        yield "decomposition=stream_k needs schedule=cooperative: CUTLASS has no other"
    if v.accumulators > MAX_ACCUMULATORS:
        yield (
            f"m_tile={v.m_tile} x n_sm={v.n_sm} are {v.accumulators} sums a thread "
            f"({v.schedule}); at most {MAX_ACCUMULATORS}"
        )


# ---- what is built -------------------------------------------------------------------------------
# One unit is two minutes of compiler and 4.7 GB of memory (nvcc 13.0), hence a handful.

BOTH = ("f16", "bf16")
ROWS = (  # geometry without the prefix, activation types, why it is in
    ("m16_n128k64_coop_dp", ("f16",), "1-16 rows, whole tiles"),
    ("m16_n128k64_coop_streamk", BOTH, "1-16 rows, equal shares of K"),
    ("m64_n128k64_coop_dp", BOTH, "17-64 rows, whole tiles"),
    ("m64_n128k64_coop_streamk", ("f16",), "17-64 rows, equal shares of K"),
    ("m128_n64k64_pingpong_dp", ("f16",), "65-128 rows, a tile for each warpgroup"),
    ("m128_n128k64_coop_dp", BOTH, "65 rows and more"),
    ("m256_n128k64_coop_dp_mc2", ("f16",), "prefill, two CTAs share activations"),
)


def every(arch: Arch) -> Iterator[CollectiveVariant]:
    """Every legal unit of `arch` in a fixed order."""
    axes = (DTYPES, M_TILES, N_SMS, K_SMS, SCHEDULES, DECOMPOSITIONS, MULTICASTS)
    for values in itertools.product(*axes):
        variant = CollectiveVariant(*values)
        if why_not(variant, arch) is None:
            yield variant


def declared(arch: Arch) -> list[tuple[CollectiveVariant, str]]:
    """(variant, why it is in) of the default table of `arch`.

    Raises ValueError where the family does not run, or if a declared row is illegal.
    """
    found = []
    for geometry, dtypes, reason in ROWS:
        for dtype in dtypes:
            variant = CollectiveVariant.parse(f"{PREFIX}{dtype}_{geometry}")
            refused = why_not(variant, arch)
            if refused is not None:
                raise ValueError(f"{variant.name} is illegal on {arch.name}: {refused}")
            found.append((variant, reason))
    return found
