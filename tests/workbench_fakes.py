"""A timer without a GPU, and a manifest whose cubins nobody loads: the workbench's logic runs on
them."""

from __future__ import annotations

import json
import math
import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from generator.arch import ARCHS, GPUS
from generator.compile import Record
from generator.cost import estimate
from generator.legality import why_not
from generator.manifest import variant_row
from generator.rows import build_table
from generator.space import ALL, Entry
from generator.variant import Geometry, Variant
from marlin_cutlass.bench import copies_for
from marlin_cutlass.explore_measure import DeviceInfo, Format
from marlin_cutlass.manifest import MANIFEST_FORMAT

H200 = DeviceInfo("NVIDIA H200", 132, (9, 0), 60 * 2**20, "580.0", "2.11.0")

# A space of its own: tests do not change when the default one does.
GEOMETRIES = (
    "m8_n256k128_w2x1_p6_dp_c2",
    "m16_n256k128_w2x1_p4_dp_c2",
    "m16_n128k128_w2x1_p8_dp_c2",
    "m16_n256k256_w4x1_p5_streamk_c1",
    "m16_n64k256_w1x4_p8_split2_c1",
    "m32_n256k128_w2x1_p4_dp_c2",
    "m32_n128k128_w2x1_p6_dp_c2",
    "m64_n128k128_w2x1_p4_dp_c2",
    "m64_n256k128_w4x1_p6_dp_c1",
    "m128_n256k128_w2x1_p3_dp_c1",
    "m256_n128k128_w2x1_p3_dp_c1",
)
SPARSE_GEOMETRIES = (
    "m16_n256k128_w4x1_p4_striped_c1",
    "m16_n128k128_w2x1_p4_dp_c2",
    "m16_n128k256_w2x2_p4_split4_c1",
    "m64_n256k128_w4x1_p3_striped_c1",
)


def variants() -> list[Variant]:
    geometries = [Geometry.parse(f"w4a16_hopper_{name}") for name in GEOMETRIES]
    geometries += [Geometry.parse(f"w4a16_sparse_{name}") for name in SPARSE_GEOMETRIES]
    every = [g.with_format(*fmt) for g in geometries for fmt in ALL]
    return [v for v in every if why_not(v, ARCHS["sm_90a"]) is None]


def write_manifest(root: Path, tuning: Path | None = None) -> Path:
    """`root`/sm_90a/manifest.json with records of kernels that nothing compiled."""
    arch = "sm_90a"
    entries = [Entry(v, "a test's") for v in variants()]
    folder = root / arch
    folder.mkdir(parents=True, exist_ok=True)
    arguments = (ARCHS[arch], [e.variant for e in entries], tuning or folder)
    rows = [build_table(*arguments, sparse=sparse).to_json() for sparse in (False, True)]
    manifest = {
        "format": MANIFEST_FORMAT,
        "arch": arch,
        "layout_version": 1,
        "variants": [variant_row(e, fake_record(e.variant.name)) for e in entries],
        "dispatch": rows[0] + rows[1],
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


def fake_record(name: str) -> Record:
    digest = f"{zlib.crc32(name.encode()):08x}" * 8
    return Record(name, "key", digest, 1.0, 96, 0, 0)


@dataclass
class FakeTimer:
    """Times are the cost model's times a factor of the kernel, with noise of a few percent."""

    factors: dict[str, float] = field(default_factory=dict)  # by name; others 1
    times: dict[str, float] = field(default_factory=dict)  # instead of the model's
    wrong: frozenset[str] = frozenset()
    wrong_in_chain: frozenset[str] = frozenset()
    broken: frozenset[str] = frozenset()
    noise: float = 0.01
    device: DeviceInfo = H200
    on_burst: Callable[[], None] = lambda: None
    log: list[tuple] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._random = random.Random(0)
        self._rested = True

    def open(self, n: int, k: int, fmt: Format, max_m: int) -> int:
        self.log.append(("open", n, k, max_m))
        self.problem = fmt.problem(max_m, n, k)
        self.copies = copies_for(self.problem.weight_bytes, self.device.l2_bytes)
        return self.copies

    def close(self) -> None:
        self.log.append(("close",))

    def check(self, kernel: str, m: int) -> float:
        assert m <= self.problem.m
        self.log.append(("check", kernel, m))
        if kernel in self.broken:
            raise RuntimeError("launch failed: too many resources\nmore")
        return math.inf if kernel in self.wrong else 3e-4

    def true_us(self, kernel: str, m: int, pdl: bool = False, warm: bool = False) -> float:
        problem = replace(self.problem, m=m)
        us = self.times.get(kernel)
        us = us or estimate(problem, Variant.parse(kernel), GPUS["H200"]).total
        return us * self.factors.get(kernel, 1.0) * (0.9 if pdl else 1.0) * (0.8 if warm else 1.0)

    def capture(self, kernel: str, m: int, pdl: bool, calls: int, warm: bool = False) -> tuple:
        assert calls % self.copies == 0
        self.log.append(("capture", kernel, m, pdl, calls))
        return kernel, m, pdl, calls, warm

    def burst(self, graph: tuple, replays: int) -> list[float]:
        assert self._rested, "a burst followed another without a pause"
        assert replays >= 3
        self._rested = False
        kernel, m, pdl, calls, warm = graph
        self.log.append(("burst", kernel, pdl, calls * replays * self.true_us(kernel, m)))
        self.on_burst()
        us = self.true_us(kernel, m, pdl, warm)
        return [us * (1 + self.noise * self._random.random()) for _ in range(replays - 1)]

    def chain_error(self, graph: tuple) -> float:
        return 0.5 if graph[0] in self.wrong_in_chain else 3e-4

    def rest(self, seconds: float) -> None:
        assert 0.005 <= seconds <= 0.05
        self._rested = True
