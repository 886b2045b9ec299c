"""The sparse families: kernels executed on the CPU, their instructions, and how calls find them."""

from __future__ import annotations

import re
from collections import Counter

import fake_cuda
import numpy as np
import pytest
import test_ampere_sass
import torch
from emulator_cases import DTYPES, TOLERANCE, unit_rows
from test_sparse import scales_for, sparse_codes

import build
import marlin_cutlass as mc
from emulator import gemm
from emulator.errors import EmulationError
from generator import legality, rows, space
from generator.arch import ARCHS
from generator.problem import ProblemShape
from generator.variant import Geometry, Variant
from marlin_cutlass import dispatch, layout
from marlin_cutlass.sparse import pack_sparse
from tools.wgmma_registers import overwritten

SMS = 132
CONFLICT_KINDS = ("shared_load", "shared_store", "ldmatrix_access", "cp_async_access")


def declared() -> list[str]:
    entries = []
    for arch in ARCHS.values():
        entries += space.default_space(arch, tuple(f for f in arch.families if "sparse" in f))
    return list(dict.fromkeys(e.variant.name for e in entries))


def weight(k: int, n: int, group_size: int, seed: int = 0):
    codes = sparse_codes(k, n, seed)
    return pack_sparse(codes, scales_for(k, n, group_size), group_size=group_size)


# ---- on the emulator -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", declared())
def test_ragged_shapes(name: str) -> None:
    """The plain schedule and a random one; no shared memory instruction takes more passes than its
    bytes need."""
    variant = Variant.parse(name)
    k = 392 if variant.group_size == -1 else 384
    if variant.hopper:  # more stages than the ring has, and a last one that is not full
        k += (variant.stages + 1) * variant.k_sm
    shapes = [(variant.m_tile + 3, variant.n_sm + 72, k), (max(1, variant.m_tile - 5), 50, 128)]
    for i, (m, n, k) in enumerate(shapes):
        w = weight(k, n, variant.group_size, i)
        g = torch.Generator().manual_seed(i)
        a = torch.randn(m, k, generator=g).to(DTYPES[variant.dtype])
        bias = torch.randn(n, generator=g).to(a.dtype)
        result = gemm(a, w, variant, bias, sms=3 + i, seed=7 * i)
        exact = a.double() @ mc.dequantize(w, a.dtype).double() + bias.double()
        # dequantize rounds what the kernel multiplies by the column scale, a power of two, exactly;
        # per-column scales are not powers of two, hence the second rounding in the bound.
        error = float((result.c.double() - exact).norm() / exact.norm())
        assert error < 2 * TOLERANCE[variant.dtype]
        for kind in CONFLICT_KINDS:
            statistics = result.statistics
            assert statistics[f"{kind}_waves"] == statistics[f"{kind}_ideal"], kind


@pytest.mark.parametrize("name", declared())
def test_unit_activations_give_the_dequantised_weight_bit_for_bit(name: str) -> None:
    variant = Variant.parse(name)
    m, n, k = 9, variant.n_sm + 20, 256
    w = weight(k, n, variant.group_size, 5)
    a, depth = unit_rows(m, k, DTYPES[variant.dtype], seed=6)
    result = gemm(a, w, variant, sms=2, seed=3)
    assert torch.equal(result.c, mc.dequantize(w, a.dtype)[depth])


MORE = [
    "w4a16_sparse_f16_g64_m16_n128k256_w2x2_p3_split2_c1",
    "w4a16_sparse_bf16_g128_m32_n64k512_w1x4_p2_split4_c1",
    "w4a16_sparse_f16_gcol_m48_n256k128_w4x1_p2_dp_c2",
    "w4a16_sparse_f16_g128_m8_n64k512_w1x4_p2_striped_c1",
    "w4a16_hopper_sparse_bf16_g64_m24_n128k256_w2x2_p4_split4_c1",
    "w4a16_hopper_sparse_f16_gcol_m64_n128k128_w2x1_p3_streamk_c2",
    "w4a16_hopper_sparse_f16_g64_m16_n64k512_w1x2_p4_dp_c1",
    "w4a16_hopper_sparse_bf16_g128_m8_n128k128_w2x1_p4_hybrid_c2",
    "w4a16_hopper_sparse_f16_g128_m16_n256k256_w4x1_p3_hybrid_c1_mc4",
    "w4a16_hopper_sparse_f16_gcol_m192_n128k128_w2x1_p3_dp_c1_mc2",
]


@pytest.mark.parametrize("name", MORE)
def test_variants_outside_the_tables(name: str) -> None:
    variant = Variant.parse(name)
    assert legality.why_not(variant, ARCHS["sm_90a"]) is None
    m, n, k = 2 * variant.m_tile + 1, 2 * variant.n_sm + 8, 1152
    w = weight(k, n, variant.group_size)
    a = torch.randn(m, k, generator=torch.Generator().manual_seed(0)).to(DTYPES[variant.dtype])
    exact = a.double() @ mc.dequantize(w, a.dtype).double()
    for seed in range(2):
        c = gemm(a, w, variant, sms=5, seed=seed).c.double()
        assert float((c - exact).norm() / exact.norm()) < 2 * TOLERANCE[variant.dtype]


ANY = "w4a16_sparse_f16_g128_m16_n128k256_w2x2_p3_striped_c3"
ANY_HOPPER = "w4a16_hopper_sparse_f16_g128_m16_n64k256_w1x4_p12_split2_c1"


@pytest.mark.parametrize("name", [ANY, ANY_HOPPER])
@pytest.mark.parametrize("atom", range(4))
def test_places_out_of_order_are_found(name: str, atom: int) -> None:
    """The hardware's result is undefined there, so the emulator refuses them."""
    w = weight(128, 64, 128)
    # The first word of lane 0, or of lane 2, whose words are those of the second atom of a pair.
    w.packed[layout.SPARSE_CODE_BYTES + atom // 2 * 512 + atom % 2 * 2 * 16] = 0
    with pytest.raises(EmulationError, match="rising order"):
        gemm(torch.randn(3, 128).half(), w, name)


def test_kinds_of_weights_are_not_mixed() -> None:
    dense = mc.pack(sparse_codes(128, 64), scales_for(128, 64, 128), group_size=128)
    with pytest.raises(ValueError, match="sparse=False: not for"):
        gemm(torch.randn(3, 128).half(), dense, Variant.parse(declared()[0]))


# ---- generator -----------------------------------------------------------------------------------


def test_the_generator_knows_the_blocks() -> None:
    for group in layout.SPARSE_GROUP_SIZES:
        shape = ProblemShape(1, 128, 256, group, sparse=True)
        assert shape.weight_bytes == 4 * layout.sparse_block_bytes(group)
    with pytest.raises(ValueError, match="zeros=False"):
        ProblemShape(1, 128, 256, 128, zeros=True, sparse=True)


@pytest.mark.parametrize(
    "name, text",
    [
        ("w4a16_sparse_f16z_g128_m16_n128k256_w2x2_p3_striped_c1", "symmetric"),
        ("w4a16_sparse_f16_g32_m16_n128k256_w2x2_p3_striped_c1", "groups of 64"),
        ("w4a16_sparse_f16_g128_m16_n128k128_w2x2_p3_striped_c1", "not a multiple of 128"),
    ],
)
def test_illegal_variants(name: str, text: str) -> None:
    assert text in legality.why_not(Variant.parse(name), ARCHS["sm_90a"])


def test_tables_of_the_two_kinds_are_apart() -> None:
    arch = ARCHS["sm_80"]
    variants = [e.variant for e in space.default_space(arch, arch.families)]
    dense, sparse = (rows.build_table(arch, variants, sparse=kind) for kind in (False, True))
    assert not dense.gaps() and not sparse.gaps() and not sparse.unreachable()
    assert {Geometry.parse(r.geometry).family for r in dense.rows} == {"ampere"}
    assert {Geometry.parse(r.geometry).family for r in sparse.rows} == {"sparse"}
    assert "2:4-sparse" in legality.why_not_for(
        Variant.parse(declared()[0]), ProblemShape(1, 64, 128)
    )


def test_hopper_prefers_its_own_sparse_kernels() -> None:
    """And falls back to the others for formats that only they are built for."""
    arch = ARCHS["sm_90a"]
    both = [e.variant for e in space.default_space(arch, ("sparse", "hopper_sparse"))]
    table = rows.build_table(arch, both, sparse=True)
    assert not table.gaps() and not table.unreachable()
    model = [r for r in table.rows if r.source == rows.MODEL]
    assert {Geometry.parse(r.geometry).family for r in model} == {"hopper_sparse"}
    some = [v for v in both if not (v.hopper and v.group_size == -1)]
    chosen = {
        group: rows.build_table(arch, some, sparse=True)
        .select(ProblemShape(16, 4096, 4096, group, sparse=True), SMS)[0]
        .family
        for group in (128, -1)
    }
    assert chosen == {128: "hopper_sparse", -1: "sparse"}


def test_build_sparse_means_every_sparse_family() -> None:
    names = {
        arch: {e.variant.family for e in build.select(ARCHS[arch], build.Request(("sparse",)))}
        for arch in ("sm_80", "sm_90a")
    }
    assert names == {"sm_80": {"sparse"}, "sm_90a": {"sparse", "hopper_sparse"}}


# ---- launcher ------------------------------------------------------------------------------------


KINDS = {"sparse": "striped", "hopper_sparse": "hybrid"}


@pytest.fixture(params=KINDS)
def table(request, fake, tmp_path):
    """One dense and one sparse geometry, both for everything."""
    dense = [fake_cuda.kernel("hopper", **form) for form in fake_cuda.formats()]
    forms = [f for f in fake_cuda.formats() if not f["zeros"] and f["group_size"] != 32]
    more = {"decomposition": KINDS[request.param]}
    sparse = [fake_cuda.kernel(request.param, **more, **form) for form in forms]
    found = [fake_cuda.row(dense[0]), fake_cuda.row(sparse[0])]
    table = dispatch.load_table(fake_cuda.write_table(tmp_path, dense + sparse, found))
    fake.launcher.add_table(table, 9, 0)
    return table


def host_gemm(a, w, bias=None, variant=-1):
    form = (a, w.packed, w.col_scale, bias, w.perm, w.n, w.k, w.group_size, w.has_zeros)
    return torch.ops.marlin_cutlass_host.gemm(*form, variant)


@pytest.mark.parametrize("group_size", [64, 128, 256, -1])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_sparse_weight_finds_its_kernel(fake, table, group_size: int, dtype) -> None:
    w = weight(512, 96, group_size)
    a = torch.randn(5, 512, generator=torch.Generator().manual_seed(1)).to(dtype)
    exact = a.double() @ mc.dequantize(w, dtype).double()
    error = np.linalg.norm(host_gemm(a, w).double() - exact) / np.linalg.norm(exact)
    assert error < (2e-3 if dtype == torch.float16 else 1e-2)
    dense = mc.pack(sparse_codes(512, 96), scales_for(512, 96, group_size), group_size=group_size)
    assert torch.equal(host_gemm(a, dense), host_gemm(a, w))


def test_python_and_the_launcher_choose_alike(fake, table) -> None:
    for sparse in (False, True):
        kernel, _ = table.select(3, 96, 512, 128, "f16", False, SMS, sparse)
        assert kernel.sparse == sparse
        shape = (3, 96, 512, 128)
        index = fake.launcher.select((9, 0), shape, "f16", False, SMS, sparse=sparse)
        assert table.kernels[index] == kernel
    with pytest.raises(RuntimeError, match="2:4 sparse"):
        fake.launcher.select((9, 0), (3, 96, 512, 32), "f16", False, SMS, sparse=True)
    with pytest.raises(LookupError):
        table.select(3, 96, 512, 32, "f16", False, SMS, True)


def test_a_kernel_of_the_other_kind_is_refused(fake, table) -> None:
    w = weight(512, 96, 128)
    a = torch.randn(2, 512).half()
    dense = table.select(2, 96, 512, 128, "f16", False, SMS)[0]
    with pytest.raises(ValueError, match=r"it cannot serve .*2:4 sparse"):
        host_gemm(a, w, variant=table.index(dense.name))
    with pytest.raises(ValueError, match=r"this call has f16, 2:4 sparse"):
        table.find(dense.name, "f16", False, 128, True)
    sparse = table.select(2, 96, 512, 128, "f16", False, SMS, True)[0]
    assert table.find(sparse.geometry, "f16", False, 128, True) == table.index(sparse.name)


def test_schedules_agree(fake, table) -> None:
    kernel, _ = table.select(3, 96, 512, 128, "f16", False, SMS, True)
    here = dispatch.schedule(kernel, 300, 4096, 4096, SMS)
    assert fake.launcher.schedule(kernel, 300, 4096, 4096, SMS) == here


# ---- what the compiler makes of it ---------------------------------------------------------------


@pytest.fixture(
    scope="module",
    params=[
        ("f16_g128_m8_n128k256_w2x2_p4_striped_c2", "sm_80"),
        ("bf16_g64_m64_n256k128_w4x1_p3_striped_c1", "sm_86"),
        ("f16_gcol_m128_n128k128_w4x1_p2_striped_c2", "sm_90a"),
    ],
    ids=lambda case: f"{case[0]}-{case[1]}",
)
def sass(request, tmp_path_factory) -> test_ampere_sass.Sass:
    spec, arch = request.param
    return test_ampere_sass.disassembled(
        Variant.parse(f"w4a16_sparse_{spec}"), arch, tmp_path_factory.mktemp("sass")
    )


def test_every_product_is_one_sparse_instruction(sass) -> None:
    v = sass.variant
    kinds = Counter(i.split()[0] for i in sass.select("HMMA"))
    wanted = "HMMA.SP.16832.F32" + (".BF16" if v.dtype == "bf16" else "")
    fragments = (v.n_sm // v.warps_n // 16) * (v.m_tile // 8)
    assert dict(kinds) == {wanted: fragments * (v.k_sm // 32 // v.warps_k)}
    # Two atoms share their metadata: half of the instructions take it from lanes 2 and 3 of four.
    selectors = Counter(i.rstrip().split()[-1] for i in sass.select("HMMA"))
    assert selectors["0x0"] == selectors["0x1"]


def test_loads_are_wide_and_one_of_metadata_serves_eight_products_of_a_row_group(sass) -> None:
    v = sass.variant
    atoms = v.n_sm // v.warps_n // 16
    units = v.k_sm // 128 // v.warps_k
    wide = [i for i in sass.select("LDS") if i.startswith("LDS.128")]
    # Codes: one load per atom and 128 deep; metadata: one per two atoms. The first unit of a tile
    # is loaded before the loop, and reductions between warps read with LDS.128 too.
    assert len(wide) >= (atoms + atoms // 2) * (units + 1)
    if v.warps_k == 1:
        assert len(wide) == (atoms + atoms // 2) * (units + 1)


def test_no_local_memory_in_the_main_loop(sass) -> None:
    """A few words that only the loop over tiles needs may be spilled."""
    assert not any(i.startswith(("LDL", "STL")) for i in sass.main_loop)


LISTING = """
        /*0100*/                   HGMMA.SP.64x16x32.F32 R24, R36, gdesc[UR16], R24, {metadata}, 0x0, gsb0 ;
        /*0110*/               @P0 BRA 0x140 ;
        /*0120*/                   LDS.128 R32, [R3+0x800] ;
        /*0130*/                   BRA 0x150 ;
        /*0140*/                   STS.128 [R36], R52 ;
        /*0150*/                   WARPGROUP.DEPBAR.LE gsb0, {pending} ;
        /*0160*/                   HFMA2 R36, R21, R50.reuse, R8.reuse ;
        /*0170*/                   HGMMA.64x16x16.F32 R24, R36, gdesc[UR16], R24, gsb0 ;
        /*0180*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*0190*/                   HFMA2 R39, R21, R50.reuse, R8.reuse ;
        /*01a0*/                   EXIT ;
"""  # noqa: E501


@pytest.mark.parametrize(
    "metadata, pending, found",
    [("R70", "0x0", []), ("R34", "0x0", ["LDS"]), ("R70", "0x1", ["HFMA2"])],
)
def test_registers_written_before_the_wait_are_found(metadata, pending, found) -> None:
    faults = overwritten(LISTING.format(metadata=metadata, pending=pending))
    assert [fault.split(": 0x")[1].split()[1].split(".")[0] for fault in faults] == found


# Most instructions between the first and the last product, for each 64 x 128 piece of weights.
HOPPER_SASS = [
    ("f16_g128_m16_n256k256_w4x1_p6_dp_c1", 90),
    ("bf16_g64_m64_n128k128_w2x2_p6_split2_c1", 150),
    ("f16_gcol_m128_n256k128_w2x1_p4_dp_c1", 90),
    ("f16_g128_m64_n256k256_w4x1_p3_hybrid_c1", 90),
]


@pytest.mark.parametrize("spec, most", HOPPER_SASS, ids=[spec for spec, _ in HOPPER_SASS])
def test_what_the_compiler_makes_of_hopper_kernels(spec: str, most: int, tmp_path) -> None:
    v = Variant.parse(f"w4a16_hopper_sparse_{spec}")
    sass = test_ampere_sass.disassembled(v, "sm_90a", tmp_path)
    pieces = (v.n_sm // v.warps_n // 64) * (v.k_sm // 128)
    products = sass.select("HGMMA")
    wanted = f"HGMMA.SP.64x{v.m_tile}x32.F32" + (".BF16" if v.dtype == "bf16" else "")
    assert Counter(i.split()[0] for i in products) == {wanted: 4 * pieces}
    assert all(re.search(r", R\d+, 0x0(, gsb0)?$", i) for i in products), "selector 0"
    assert overwritten(sass.text) == []
    addresses = [a for a, i in sass.lines if i.startswith("HGMMA")]
    loop = [i for a, i in sass.lines if addresses[0] <= a <= addresses[-1]]
    assert len(loop) <= most * pieces
    assert not any(i.startswith(("LDL", "STL")) for i in loop)
    # Codes and places of a piece are a 16-byte load each; the first of a run comes before the loop.
    # Reductions between warpgroups and CTAs read with LDS.128 too.
    wide = [i for i in sass.select("LDS") if i.startswith("LDS.128")]
    assert len(wide) >= 2 * (pieces + 1)
    if v.warps_k == 1 and v.split == 1:
        assert len(wide) == 2 * (pieces + 1)
