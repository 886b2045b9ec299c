"""Readers: ambiguous, partial and wrong input (field reports group E), and the support matrix."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import marlin_cutlass as mc
from marlin_cutlass import formats
from marlin_cutlass.formats.bits import AWQ_ORDER, pack_nibbles, unpack_nibbles
from marlin_cutlass.formats.gptq import decode_zeros_v1


def random_codes(k, n, seed=0):
    gen = torch.Generator().manual_seed(seed)
    return torch.randint(0, 16, (k, n), generator=gen, dtype=torch.uint8)


def gptq(k=256, n=64, g=64, seed=0, zero=8):
    q = random_codes(k, n, seed)
    groups = 1 if g == -1 else k // g
    s = torch.linspace(0.01, 0.05, groups * n).view(groups, n).half()
    zeros = torch.full((groups, n), zero - 1, dtype=torch.uint8)
    return q, s, pack_nibbles(q, 0), pack_nibbles(zeros, 1)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 4), st.integers(1, 4), st.sampled_from([0, 1]), st.integers(0, 2**31))
def test_nibbles_match_integer_arithmetic(rows, columns, dim, seed):
    codes = random_codes(8 * rows, 8 * columns, seed)
    for order in (tuple(range(8)), AWQ_ORDER):
        words = pack_nibbles(codes, dim, order)
        assert torch.equal(unpack_nibbles(words, dim, order), codes)
        first = [int(codes[i, 0] if dim == 0 else codes[0, i]) for i in range(8)]
        value = sum(first[neighbour] << (4 * i) for i, neighbour in enumerate(order))
        assert int(words[0, 0]) & 0xFFFFFFFF == value


def test_awq_zero_points_per_column():
    # 74: constant zero points would not show a missing interleave.
    q = random_codes(128, 16)
    z = torch.arange(16, dtype=torch.uint8).view(1, 16)
    s = torch.linspace(0.01, 0.02, 16).half().view(1, 16)
    packed = mc.from_awq(
        pack_nibbles(q, 1, AWQ_ORDER), pack_nibbles(z, 1, AWQ_ORDER), s, group_size=128
    )
    expected = (q.numpy().astype(np.float64) - z.numpy()) * s.numpy().astype(np.float64)
    assert np.allclose(mc.dequantize(packed, torch.float32).numpy(), expected, rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_group_index_types_give_the_same_bytes(dtype):
    _, s, qweight, qzeros = gptq()
    order = torch.randperm(256, generator=torch.Generator().manual_seed(1)) % 4
    packed = mc.from_gptq(qweight, qzeros, s, order.to(dtype), group_size=64)
    again = mc.from_gptq(qweight, qzeros, s, order.int(), group_size=64)
    assert packed == again and packed.perm is not None
    with pytest.raises(TypeError, match="g_idx has dtype"):
        mc.from_gptq(qweight, qzeros, s, order.float(), group_size=64)


def test_group_index_that_orders_nothing_is_dropped():
    # 78: all -1 is absent, k // g is no permutation.
    q, s, qweight, qzeros = gptq()
    natural = mc.from_gptq(qweight, qzeros, s, group_size=64)
    for index in (
        torch.full((256,), -1),
        torch.arange(256) // 64,
        torch.empty(0, dtype=torch.int32),
    ):
        assert mc.from_gptq(qweight, qzeros, s, index, group_size=64) == natural
    index = (torch.arange(256) // 64)[torch.randperm(256)]
    random = mc.from_gptq(qweight, qzeros, s, index, group_size=64)
    expected = (q.float() - 8) * s.float()[index]
    assert torch.allclose(mc.dequantize(random, torch.float32), expected, rtol=1e-6)
    a = torch.eye(256, dtype=torch.float16)
    assert torch.equal(mc.gemm(a, random), mc.dequantize(random))
    with pytest.raises(ValueError, match=r"0\.\.3 is required"):
        mc.from_gptq(qweight, qzeros, s, index + 1, group_size=64)


def test_padded_file_keeps_its_logical_depth(tmp_path):
    # 7: stored as 256 rows, 200 of them real; the logical K survives save and load.
    q, s, qweight, qzeros = gptq(g=-1)
    packed = mc.from_gptq(qweight, qzeros, s, group_size=-1, k=200)
    assert packed.shape == (200, 64)
    mc.save(packed, tmp_path / "w.safetensors")
    loaded = mc.load(tmp_path / "w.safetensors")
    expected = ((q.float() - 8) * s.float())[:200]
    assert torch.allclose(mc.dequantize(loaded, torch.float32), expected, rtol=1e-6)
    assert mc.gemm(torch.zeros(2, 200).half(), loaded).shape == (2, 64)
    with pytest.raises(ValueError, match="K=200"):
        mc.gemm(torch.zeros(2, 256).half(), loaded)
    with pytest.raises(ValueError, match="k=300"):
        mc.from_gptq(qweight, qzeros, s, group_size=-1, k=300)


def test_version_1_zero_rules():
    z = torch.tensor([[3, 0, 5, 0, 0, 15, 1, 2]], dtype=torch.uint8)
    plain = torch.tensor([[3, 1, 5, 2, 9, 15, 1, 2]], dtype=torch.uint8)
    word = pack_nibbles(z, 1) - 0x11111111
    nibble = pack_nibbles((z - 1) & 15, 1)
    with pytest.warns(formats.AmbiguousZeroWarning, match=r"\d of 8 zero points"):
        assert torch.equal(decode_zeros_v1(word, "word"), z)
    with pytest.warns(formats.AmbiguousZeroWarning):
        assert torch.equal(decode_zeros_v1(nibble, "nibble"), z)
    with pytest.warns(formats.AmbiguousZeroWarning):
        assert decode_zeros_v1(nibble, "sixteen").tolist() == [[3, 16, 5, 16, 16, 15, 1, 2]]
    for rule in ("word", "nibble", "sixteen"):  # no warning where writers agree
        assert torch.equal(decode_zeros_v1(pack_nibbles(plain - 1, 1), rule), plain)
    with pytest.raises(ValueError, match="zero_rule='byte'"):
        decode_zeros_v1(word, "byte")


def test_a_false_claim_of_symmetry_is_refused():
    _, s, qweight, qzeros = gptq()
    with pytest.raises(ValueError, match=r"sym=True.*\[7\].*checkpoint_format"):
        mc.from_gptq(qweight, qzeros, s, group_size=64, sym=True, checkpoint_format="gptq_v2")
    _, s, qweight, qzeros = gptq(zero=9)
    with pytest.raises(ValueError, match=r"sym=True.*\[9\]"):
        mc.from_gptq(qweight, qzeros, s, group_size=64, sym=True)
    assert mc.from_gptq(qweight, qzeros, s, group_size=64).has_zeros
    assert not mc.from_gptq(qweight, None, s, group_size=64).has_zeros


def test_wrong_shapes_and_sizes_are_named():
    _, s, qweight, qzeros = gptq()
    cases = [
        ({"group_size": 16}, ValueError, "group_size=16"),
        ({"group_size": 96}, ValueError, "group_size=96"),
        ({"group_size": 128}, ValueError, r"scales has shape \(4, 64\); \[2, 64\]"),
        ({"group_size": True}, TypeError, "group_size=True"),
        ({"group_size": 64, "checkpoint_format": "gptq_v3"}, ValueError, "gptq_v3"),
    ]
    for options, error, message in cases:
        with pytest.raises(error, match=message):
            mc.from_gptq(qweight, qzeros, s, **options)
    with pytest.raises(TypeError, match="scales has dtype"):
        mc.from_gptq(qweight, qzeros, s.int(), group_size=64)
    with pytest.raises(ValueError, match=r"qzeros has shape \(3, 8\)"):
        mc.from_gptq(qweight, qzeros[:3], s, group_size=64)
    with pytest.raises(TypeError, match="int32"):
        mc.from_gptq(qweight.long(), qzeros, s, group_size=64)
    # 8: 134.5 groups of 32.
    with pytest.raises(ValueError, match=r"k=4304 is not a multiple of group_size=32"):
        mc.from_gptq(torch.zeros(538, 64, dtype=torch.int32), None, s, group_size=32)


def test_compressed_tensors_wants_its_shapes():
    q = random_codes(256, 64)
    packed, scale = pack_nibbles(q.t(), 1), torch.full((64, 4), 0.01)
    with pytest.raises(ValueError, match=r"weight_shape=\(64, 300\)"):
        mc.from_compressed_tensors(packed, scale, weight_shape=(64, 300), group_size=64)
    with pytest.raises(ValueError, match="fractional"):
        mc.from_compressed_tensors(packed, scale, torch.full((64, 4), 7.37), group_size=64)
    with pytest.raises(ValueError, match="actorder='sideways'"):
        mc.from_compressed_tensors(packed, scale, group_size=64, actorder="sideways")
    unpacked = torch.randint(-8, 8, (64, 4), dtype=torch.int8)  # how older releases stored zeros
    weight = formats.read_compressed_tensors(packed, scale, unpacked, group_size=64)
    assert torch.equal(weight.zeros.int(), unpacked.t().int() + 8)


@pytest.mark.parametrize("scale_dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_scale_dtypes(scale_dtype):
    q, s, qweight, qzeros = gptq()
    packed = mc.from_gptq(qweight, qzeros, s.to(scale_dtype), group_size=64)
    expected = (q.float() - 8) * s.to(scale_dtype).float().repeat_interleave(64, 0)
    assert torch.allclose(mc.dequantize(packed, torch.float32), expected, rtol=1e-3)


def test_support_matrix_answers_every_combination():
    # 86: yes or no and a reason, never an exception.
    axes = itertools.product(
        ("gptq", "gptq_v2", "awq", "compressed-tensors", "marlin", "sparse-marlin", "hqq", "gguf"),
        (True, False),
        (16, 32, 64, 128, 256, 1024, -1, 0, 96),
        (None, False, True, "static", "group", "odd"),
    )
    for fmt, sym, g, order in axes:
        answer = formats.support(fmt, sym=sym, group_size=g, act_order=order)
        assert isinstance(answer.ok, bool) and answer.reason
        expected = fmt != "gguf" and g in (32, 64, 128, 256, 1024, -1) and order != "odd"
        if order in (True, "static", "group") and fmt in ("awq", "marlin", "sparse-marlin", "hqq"):
            expected = False
        if fmt in ("marlin", "sparse-marlin") and not sym:
            expected = False
        if fmt == "sparse-marlin" and g == 32:
            expected = False
        assert bool(answer) == expected, (fmt, sym, g, order, answer)


def test_support_gives_the_reason():
    assert "group_size=16" in formats.support("gptq", group_size=16).reason
    assert "bits=8" in formats.support("gptq", bits=8).reason
    assert "gemv" in formats.support("awq", version="gemv").reason
    assert "bitmask" in formats.support("compressed-tensors", version="sparse-bitmask").reason
    for form in ({"sym": False}, {"group_size": 32}, {"act_order": "group"}):
        answer = formats.support("compressed-tensors", version="marlin-24", **form)
        assert not answer and "2:4" in answer.reason
    assert "2:4" in formats.support("compressed-tensors", version="marlin-24").reason
    assert "never rounded" in formats.support("hqq", fractional_zeros=True).reason
    assert "k=4304" in formats.support("gptq", group_size=32, k=4304).reason
    assert not formats.support("gptq", act_order=True, sym=False, group_size=96)


def test_what_is_supported_can_be_read():
    """The matrix and the reader agree for gptq: sizes it promises load, others are refused."""
    for g in (16, 32, 64, 128, 256, 512, -1):
        answer = formats.support("gptq", group_size=g, k=512)
        try:
            _, s, qweight, qzeros = gptq(k=512, g=g)
            mc.from_gptq(qweight, qzeros, s, group_size=g)
        except ValueError:
            assert not answer
        else:
            assert answer
