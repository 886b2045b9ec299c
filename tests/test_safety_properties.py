"""Random weights, activations, shapes and tables against oracles that share no code with them.

pack and dequantize against tests/reference.py, converters against the formula of their format,
gemm against the product of its dequantised weight, schedules and the choice of a kernel against
the launcher's own. SAFETY_SCALE=50 tries fifty times as many.
"""

from __future__ import annotations

import os

import fake_cuda
import numpy as np
import reference
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import marlin_cutlass as mc
from generator.problem import ProblemShape
from generator.schedule import make_schedule
from generator.variant import Variant
from marlin_cutlass import dispatch
from marlin_cutlass.formats.bits import AWQ_ORDER, pack_nibbles
from marlin_cutlass.manifest import MANIFEST_FORMAT

DTYPES = (torch.float16, torch.bfloat16)
NAMES = {torch.float16: "float16", torch.bfloat16: "bfloat16"}


def settings_of(examples: int):
    return settings(
        max_examples=examples * int(os.environ.get("SAFETY_SCALE", "1")),
        deadline=None,
        phases=(Phase.explicit, Phase.generate),
        suppress_health_check=list(HealthCheck),
    )


@st.composite
def forms(draw):
    """(k, n, group_size): any sizes that pack takes, small ones and odd ones most often."""
    group = draw(st.sampled_from([32, 64, 128, 256, -1]))
    unit = 1 if group < 0 else group
    k = draw(st.integers(1, max(1, 400 // unit))) * unit
    return k, draw(st.integers(1, 150)), group


# How scales of a column look: everything that fp16 and bf16 files hold.
SCALES = {
    "plain": lambda shape, rng: rng.uniform(0.001, 0.1, shape),
    "negative": lambda shape, rng: rng.uniform(-0.1, 0.1, shape),
    "zero columns": lambda shape, rng: rng.uniform(0.01, 0.1, shape) * rng.integers(0, 2, shape[1]),
    "some zero": lambda shape, rng: rng.uniform(0.01, 0.1, shape) * rng.integers(0, 2, shape),
    "subnormal": lambda shape, rng: rng.integers(-1023, 1024, shape) * 2.0**-24,
    "many binades": lambda shape, rng: 2.0 ** rng.uniform(-14, 4, shape),
    "near a power of two": lambda shape, rng: (
        2.0 ** rng.integers(-10, 3, shape) * (1 + rng.choice([0, 1e-3, -5e-4, -1e-5], shape))
    ),
    "large": lambda shape, rng: rng.uniform(1e3, 6e4, shape),
}


def make(form, zeros, act_order, scales_name, scale_dtype, seed):
    """Arguments of pack."""
    (k, n, group), rng = form, np.random.default_rng(seed)
    rows = 1 if group < 0 else k // group
    q = torch.from_numpy(rng.integers(0, 16, (k, n), dtype=np.uint8))
    scales = torch.from_numpy(SCALES[scales_name]((rows, n), rng)).to(scale_dtype)
    z = torch.from_numpy(rng.integers(0, 17, (rows, n))) if zeros else None
    g_idx = None
    if act_order and group > 0:
        g_idx = torch.from_numpy(rng.permutation(np.arange(k) // group))
    return q, scales, z, g_idx


weights = given(
    form=forms(),
    zeros=st.booleans(),
    act_order=st.booleans(),
    scales_name=st.sampled_from(sorted(SCALES)),
    scale_dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**32),
)


@settings_of(150)
@weights
def test_dequantize_is_the_documented_arithmetic(
    form, zeros, act_order, scales_name, scale_dtype, dtype, seed
):
    """Bit for bit, for every kind of scale; the CPU's gemm with identity activations likewise."""
    q, scales, z, g_idx = make(form, zeros, act_order, scales_name, scale_dtype, seed)
    w = mc.pack(q, scales, z, group_size=form[2], g_idx=g_idx)
    w.check()
    got = mc.dequantize(w, dtype)
    want = reference.kernel_weights(
        q.numpy(),
        reference.to_numpy(scales),
        None if z is None else z.numpy(),
        group_size=form[2],
        dtype=NAMES[dtype],
        g_idx=None if g_idx is None else g_idx.numpy(),
    )
    np.testing.assert_array_equal(reference.to_numpy(got), want)
    assert torch.equal(mc.gemm(torch.eye(form[0], dtype=dtype), w), got)


@settings_of(100)
@weights
def test_packing_loses_nothing_but_roundings(
    form, zeros, act_order, scales_name, scale_dtype, dtype, seed
):
    """float32 values of the stored weight against (q - z) * s, whatever the scales."""
    q, scales, z, g_idx = make(form, zeros, act_order, scales_name, scale_dtype, seed)
    w = mc.pack(q, scales, z, group_size=form[2], g_idx=g_idx)
    exact = reference.weights(
        q.numpy(), reference.to_numpy(scales), z, group_size=form[2], g_idx=g_idx
    )
    got = reference.to_numpy(mc.dequantize(w, torch.float32)).astype(np.float64)
    # fp16 keeps 2^-11 of a scale down to 2^-14 / 2^-7 of its column's largest, then 2^-25 absolute.
    largest = np.abs(reference.to_numpy(scales)).max(axis=0).astype(np.float64)
    bound = 2.0**-11 * np.abs(exact) + 17 * 2.0**-18 * largest + 1e-44
    assert (np.abs(got - exact) <= bound).all()
    assert mc.PackedWeight.from_state(w.state()) == w
    assert got.shape == w.shape == form[:2]


@settings_of(60)
@given(
    form=forms(),
    zeros=st.booleans(),
    act_order=st.booleans(),
    dtype=st.sampled_from(DTYPES),
    leading=st.lists(st.integers(0, 3), max_size=3),
    bias=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_gemm_on_the_cpu(form, zeros, act_order, dtype, leading, bias, seed):
    """Any leading shape, no rows included, with and without bias and out."""
    q, scales, z, g_idx = make(form, zeros, act_order, "negative", torch.float16, seed)
    w = mc.pack(q, scales, z, group_size=form[2], g_idx=g_idx)
    torch.manual_seed(seed)
    a = torch.randn(*leading, form[0]).to(dtype)
    b = torch.randn(form[1]) if bias else None
    out = torch.full((*leading, form[1]), float("nan"), dtype=dtype)
    assert mc.gemm(a, w, b, out=out) is out
    assert torch.equal(out, mc.gemm(a, w, b))
    if a.numel():
        reference.check(out, a, mc.dequantize(w, dtype), None if b is None else b.to(dtype))


@settings_of(100)
@given(
    groups=st.integers(1, 4),
    words=st.integers(1, 6),
    group=st.sampled_from([32, 64, 128]),
    kind=st.sampled_from(["gptq", "gptq_v2", "awq", "compressed-tensors"]),
    act_order=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_converters_against_the_formula_of_their_format(
    groups, words, group, kind, act_order, seed
):
    rng = np.random.default_rng(seed)
    k, n = groups * group, words * 8
    q = torch.from_numpy(rng.integers(0, 16, (k, n), dtype=np.uint8))
    z = torch.from_numpy(rng.integers(1, 16, (groups, n), dtype=np.uint8))
    scales = torch.from_numpy(rng.uniform(-0.1, 0.1, (groups, n))).half()
    g_idx = torch.arange(k) // group
    if act_order and kind != "awq":
        g_idx = g_idx[torch.from_numpy(rng.permutation(k))]
    exact = (q.double() - z.double()[g_idx]) * scales.double()[g_idx]
    if kind == "awq":
        packed, zeros = pack_nibbles(q, 1, AWQ_ORDER), pack_nibbles(z, 1, AWQ_ORDER)
        w = mc.from_awq(packed, zeros, scales, group_size=group)
    elif kind == "compressed-tensors":
        shape = torch.tensor([n, k])
        parts = (pack_nibbles(q.t().contiguous(), 1), scales.t().contiguous())
        zeros = pack_nibbles(z.t().contiguous(), 0)
        w = mc.from_compressed_tensors(
            *parts, zeros, shape, g_idx.int(), group_size=group, actorder="group", symmetric=False
        )
    else:
        zeros = pack_nibbles(z if kind == "gptq_v2" else z - 1, 1)
        form = {"group_size": group, "checkpoint_format": kind}
        w = mc.from_gptq(pack_nibbles(q, 0), zeros, scales, g_idx.int(), **form)
    got = mc.dequantize(w, torch.float32).double()
    assert got.shape == (k, n)
    # Scales of one column whose sizes differ by more than 2^8 are rounded as subnormals.
    bound = 2.0**-11 * exact.abs() + 17 * 2.0**-18 * scales.double().abs().amax(0)
    assert bool(((got - exact).abs() <= bound).all())


# ---- schedules and the choice of a kernel ----


def variants():
    """Names of real kernels, one a decomposition and family, with other tiles drawn."""
    return st.sampled_from(
        [
            "w4a16_ampere_f16_g128_m16_n128k128_w2x2_p4_striped_c1",
            "w4a16_ampere_f16_g128_m64_n256k128_w4x2_p4_dp_c1",
            "w4a16_ampere_f16_g128_m16_n256k64_w4x2_p4_split2_c1",
            "w4a16_hopper_f16_g128_m16_n64k256_w1x4_p8_split4_c1",
            "w4a16_hopper_f16_g128_m256_n128k128_w2x1_p3_streamk_c1",
            "w4a16_hopper_f16_g128_m8_n256k256_w4x1_p5_hybrid_c1",
            "w4a16_hopper_f16_g128_m64_n128k256_w2x1_p4_hybrid_c1_mc2",
            "w4a16_hopper_f16_g128_m192_n128k128_w2x1_p3_dp_c1_mc2",
        ]
    )


def kernel_of(variant: Variant) -> dispatch.Kernel:
    names = ("threads", "shared_bytes", "cluster")
    fields = {name: getattr(variant, name) for name in (*variant.__dataclass_fields__, *names)}
    return dispatch.Kernel(**fields, name=variant.name, file="x.cubin", sha256="0" * 64)


SIZES = st.one_of(st.integers(1, 300), st.integers(1, 2**20), st.sampled_from([4096, 11008, 28672]))


@settings_of(400)
@given(
    name=variants(),
    m=st.one_of(st.integers(1, 600), st.integers(1, 2**31 - 1)),
    n=SIZES,
    k=SIZES,
    sms=st.integers(1, 264),
)
def test_three_schedules_agree(fake, name, m, n, k, sms):
    """Generator, Python dispatch and launcher: the same numbers, or all three refuse."""
    variant = Variant.parse(name)
    kernel = kernel_of(variant)
    try:
        theirs = fake.launcher.schedule(kernel, m, n, k, sms)
    except RuntimeError as error:
        assert "exceed" in str(error)
        theirs = None
    problem = ProblemShape(m, n, -(-k // 128) * 128, 128, "f16", False)
    try:
        generated = make_schedule(problem, variant, sms)
    except ValueError:
        generated = None
    if theirs is None or generated is None:
        assert theirs is None and generated is None
        return
    assert dispatch.schedule(kernel, m, n, k, sms) == theirs
    for field in dispatch.Schedule.__dataclass_fields__:
        assert getattr(generated, field) == getattr(theirs, field), field
    assert theirs.grid > 0 and min(theirs.partials, theirs.flags) >= 0


@st.composite
def ranges(draw):
    low = draw(st.none() | st.integers(0, 5000))
    return [low, draw(st.none() | st.integers(low or 0, 10_000))]


@st.composite
def tables(draw):
    """A manifest's kernels and rows with random ranges and conditions."""
    shapes = [
        ("ampere", {"decomposition": "striped", "m_tile": 16}),
        ("ampere", {"m_tile": 64}),
        ("hopper", {"decomposition": "split_k", "split": 2, "m_tile": 16}),
        ("hopper", {"decomposition": "stream_k", "m_tile": 128}),
    ]
    entries, rows = {}, []
    for family, fields in draw(st.lists(st.sampled_from(shapes), min_size=1, max_size=4)):
        for form in draw(st.lists(st.sampled_from(fake_cuda.formats()), min_size=1, max_size=6)):
            entry = fake_cuda.kernel(family, **form, **fields)
            entries[entry["name"]] = entry
    for entry in draw(st.lists(st.sampled_from(list(entries.values())), max_size=8)):
        conditions = {
            "group_size": draw(st.sampled_from([None, *dispatch.GROUPS])),
            "dtype": draw(st.sampled_from([None, *dispatch.DTYPES])),
            "zeros": draw(st.sampled_from([None, False, True])),
            "sms": draw(st.sampled_from([None, 108, 132])),
        }
        axes = {axis: draw(ranges()) for axis in "mnk"}
        rows.append(fake_cuda.row(entry, **axes, **conditions))
    return list(entries.values()), rows


@settings_of(120)
@given(table=tables(), data=st.data())
def test_the_launcher_chooses_what_python_chooses(fake, tmp_path_factory, table, data):
    """Over random tables: the same kernel, or neither has one."""
    entries, rows = table
    content = {"format": MANIFEST_FORMAT, "arch": "sm_90a", "layout_version": 1}
    parsed = dispatch.parse_table({**content, "variants": entries, "dispatch": rows}, "folder", "")
    fake.launcher.add_table(parsed, 9, 0)
    for _ in range(10):
        m, n, k = (data.draw(st.integers(1, 6000)) for _ in range(3))
        form = data.draw(st.sampled_from(fake_cuda.formats()))
        group, dtype, zeros = form["group_size"], form["dtype"], form["zeros"]
        sms = data.draw(st.sampled_from([108, 132, 144]))
        try:
            ours = parsed.index(parsed.select(m, n, k, group, dtype, zeros, sms)[0].name)
        except LookupError:
            ours = None
        try:
            theirs = fake.launcher.select((9, 0), (m, n, k, group), dtype, zeros, sms)
        except RuntimeError as error:
            assert "no kernel of the sm_90a table serves" in str(error)
            theirs = None
        assert ours == theirs
