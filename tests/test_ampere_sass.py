"""What the compiler made of the Ampere kernels: instructions, registers, memory (no GPU needed)."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest

from generator.arch import Arch, resolve_arch
from generator.compile import parse_ptxas
from generator.render import render
from generator.toolchain import BuildError, find_nvcc, flags
from generator.variant import Variant

REGISTERS_PER_SM = 65536  # sm_80 to sm_90
INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,5})\*/\s+(.+?)\s*;")

# Small and large tiles, every way warps share a stage, every kind of scale; one arch each, so that
# the suite stays short. The last number: most instructions of the main loop per mma.
CASES = [
    ("f16_g128_m8_n128k256_w2x4_p4_striped_c1", "sm_80", 16.7),
    ("f16_g128_m16_n256k128_w4x2_p4_striped_c1", "sm_80", 8.6),
    ("f16_g128_m16_n256k256_w4x2_p4_dp_c2", "sm_90a", 7.8),
    ("bf16_g64_m32_n128k128_w2x2_p4_striped_c1", "sm_86", 5.9),
    ("f16_gcol_m48_n64k512_w1x8_p2_split2_c1", "sm_89", 4.1),
    ("f16z_g32_m64_n128k128_w2x2_p3_striped_c1", "sm_80", 4.0),
    ("bf16z_g32_m64_n256k128_w4x2_p3_striped_c1", "sm_86", 4.6),
    ("f16_g128_m128_n128k128_w4x2_p2_striped_c1", "sm_90a", 2.8),
    ("bf16z_gcol_m128_n256k128_w8x1_p2_dp_c1", "sm_80", 2.8),
]


def _tool(name: str) -> Path:
    spec = importlib.util.find_spec("nvidia.cu13")
    for folder in spec.submodule_search_locations if spec else ():
        if (path := Path(folder) / "bin" / name).is_file():
            return path
    pytest.skip(f"{name} is not installed (pip install nvidia-cuda-{name})")


def _nvcc() -> Path:
    try:
        return find_nvcc()
    except BuildError as error:
        pytest.skip(str(error).splitlines()[0])


@dataclass(frozen=True)
class Sass:
    """One compiled kernel."""

    variant: Variant
    ptxas: str
    text: str

    @cached_property
    def lines(self) -> list[tuple[int, str]]:
        """(address, instruction without its predicate)."""
        found = INSTRUCTION.findall(self.text)
        return [(int(a, 16), re.sub(r"^@!?U?P\w+\s+", "", i)) for a, i in found]

    def select(self, prefix: str) -> list[str]:
        return [i for _, i in self.lines if i.startswith(prefix)]

    @cached_property
    def main_loop(self) -> list[str]:
        """Instructions of the shortest loop that holds every mma, without the start of a segment.

        That start is a block skipped by a forward branch in all but one stage of a segment.
        """
        branch = re.compile(r"BRA(?:\.\S+)?\s+(?:`\(\S+\)|0x([0-9a-f]+))")
        jumps = [(a, int(m[1], 16)) for a, i in self.lines if (m := branch.match(i)) and m[1]]
        mma = [a for a, i in self.lines if i.startswith("HMMA")]
        loops = [(end, start) for end, start in jumps if start <= mma[0] and mma[-1] <= end]
        assert loops, "no loop holds the mma instructions"
        end, start = min(loops, key=lambda loop: loop[0] - loop[1])
        copies = [a for a, i in self.lines if i.startswith("LDGSTS") and start <= a <= end]
        skips = [
            (a, t)
            for a, t in jumps
            if copies[-1] < a < t <= end and not any(a < x < t for x in mma)
        ]
        skip_from, skip_to = max(skips, key=lambda s: s[1] - s[0], default=(end, end))
        return [i for a, i in self.lines if start <= a <= end and not skip_from < a < skip_to]


def _compile(variant: Variant, arch: Arch, folder: Path, *extra: str) -> str:
    source = folder / f"{variant.name}.cu"
    source.write_text(render(variant))
    command = [_nvcc(), *flags(arch), *extra, source, "-o", folder / f"{variant.name}.out"]
    run = subprocess.run([str(c) for c in command], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, f"{variant.name} for {arch.name}:\n{run.stdout}{run.stderr}"
    return run.stdout + run.stderr


def disassembled(variant: Variant, arch_name: str, folder: Path) -> Sass:
    """A variant compiled in `folder`; skips without nvcc and the disassembler."""
    cuobjdump, nvdisasm = _tool("cuobjdump"), _tool("nvdisasm")
    report = _compile(variant, resolve_arch(arch_name)[0], folder)
    env = {**os.environ, "PATH": f"{nvdisasm.parent}:{os.environ['PATH']}"}
    dump = [str(cuobjdump), "-sass", str(folder / f"{variant.name}.out")]
    text = subprocess.run(dump, capture_output=True, text=True, env=env, check=True).stdout
    return Sass(variant, report, text)


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0]}-{case[1]}")
def case(request, tmp_path_factory) -> tuple[Sass, str, float]:
    spec, arch_name, per_mma = request.param
    variant = Variant.parse(f"w4a16_ampere_{spec}")
    return disassembled(variant, arch_name, tmp_path_factory.mktemp("sass")), arch_name, per_mma


def _fragments(v: Variant) -> int:
    """m16n8 accumulators of a warp."""
    return (v.n_sm // v.warps_n // 16) * (v.m_tile // 8)


def _steps(v: Variant) -> int:
    """k16 steps a warp takes from a stage."""
    return v.k_sm // 16 // v.warps_k


def test_every_product_is_one_tensor_instruction(case):
    sass = case[0]
    kinds = Counter(i.split()[0] for i in sass.select("HMMA"))
    wanted = "HMMA.16816.F32" + (".BF16" if sass.variant.dtype == "bf16" else "")
    assert dict(kinds) == {wanted: _fragments(sass.variant) * _steps(sass.variant)}


def test_activations_come_by_ldmatrix_of_four_matrices(case):
    sass = case[0]
    v = sass.variant
    kinds = {i.split()[0] for i in sass.select("LDSM")}
    assert kinds == {"LDSM.16.M88.4"}
    # Two 8 x 8 matrices per mma column operand; the first batch of a tile comes before the loop.
    matrices = 2 * (v.m_tile // 8) * _steps(v)
    batch = max(4, 2 * (v.m_tile // 8))
    assert 4 * len(sass.select("LDSM")) == matrices + batch


def test_global_to_shared_copies_are_asynchronous_and_16_bytes(case):
    sass = case[0]
    v = sass.variant
    copies = sass.select("LDGSTS")
    assert copies and all(re.match(r"LDGSTS\.E\.BYPASS(\.LTC128B)?\.128\b", c) for c in copies)
    run_chunks = (v.stage_bytes - v.m_tile * v.k_sm * 2) // (v.n_sm // 64) // 16
    weights = -(-run_chunks // (v.threads // (v.n_sm // 64)))
    activations = -(-(v.m_tile * v.k_sm // 8) // v.threads)
    # Filling the ring, the main loop, and the refill after a tile.
    assert len(copies) == 3 * (weights + activations)


def test_no_local_memory_and_no_spills(case):
    sass = case[0]
    assert not sass.select("LDL") and not sass.select("STL")
    report = parse_ptxas(sass.ptxas)
    limit = min(255, REGISTERS_PER_SM // (sass.variant.threads * sass.variant.ctas_per_sm))
    assert 0 < report.registers <= limit
    assert "0 bytes spill stores, 0 bytes spill loads" in sass.ptxas


def test_one_barrier_per_stage(case):
    assert sum(i.startswith("BAR.") for i in case[0].main_loop) == 1


def test_main_loop_is_short(case):
    """Dequantisation is 9 instructions per 8 weights (12 with zero points or bf16): little else may
    stand beside the mma."""
    sass, _, per_mma = case
    loop = sass.main_loop
    mma = sum(i.startswith("HMMA") for i in loop)
    assert len(loop) / mma <= per_mma, Counter(i.split()[0].split(".")[0] for i in loop)


@pytest.mark.parametrize(("arch", "hint"), [("sm_80", True), ("sm_89", True), ("sm_90a", False)])
def test_evict_first_hint_only_where_the_instruction_is_legal(arch, hint, tmp_path):
    """cp.async with a cache hint raises 'illegal instruction' on sm_90 and sm_120."""
    variant = Variant.parse("w4a16_ampere_f16_g128_m8_n128k128_w2x2_p4_striped_c1")
    _compile(variant, resolve_arch(arch)[0], tmp_path, "-keep", f"--keep-dir={tmp_path}")
    ptx = (tmp_path / f"{variant.name}.ptx").read_text()
    hinted = [line for line in ptx.splitlines() if "cp.async" in line and "cache_hint" in line]
    assert bool(hinted) == hint
    assert ("createpolicy.fractional.L2::evict_first" in ptx) == hint


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("F16, 128, false, 16, 128, 64, 2, 2, 4", "k_sm must be 128, 256 or 512"),
        ("F16, 128, false, 24, 128, 128, 2, 2, 4", "unsupported m_tile"),
        ("F16, 128, false, 16, 128, 128, 1, 4, 4", "a warp covers 64 columns"),
        ("F16, 128, false, 16, 64, 128, 1, 4, 4", "k_sm >= 64 * warps_k"),
        ("F16, 128, false, 16, 128, 128, 2, 2, 1", "the pipeline needs two stages"),
    ],
)
def test_illegal_geometry_is_a_named_error(arguments, message, tmp_path):
    source = tmp_path / "illegal.cu"
    source.write_text(
        '#include "marlin_cutlass/ampere_config.cuh"\nusing namespace marlin_cutlass;\n'
        f"constexpr int x = AmpereConfig<{arguments}, Decomposition::kStriped, 1, 1>::kThreads;\n"
    )
    arch = resolve_arch("sm_80")[0]
    command = [_nvcc(), *flags(arch), source, "-o", tmp_path / "illegal.out"]
    run = subprocess.run([str(c) for c in command], capture_output=True, text=True, timeout=300)
    assert run.returncode != 0 and message in run.stdout + run.stderr
