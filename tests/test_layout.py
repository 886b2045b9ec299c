"""The layout: an executable function of integers, and equal to what `pack` writes."""

from __future__ import annotations

import doctest
import itertools

import numpy as np
import pytest
import torch

from marlin_cutlass import layout, pack
from marlin_cutlass.layout import Layout, form_of, sizes_of

FORMATS = list(itertools.product((32, 64, 128, 256, -1), (False, True)))


def test_the_examples_in_the_documentation_run():
    result = doctest.testmod(layout)
    assert result.attempted >= 4 and result.failed == 0


@pytest.mark.parametrize(
    ("group_size", "plain", "with_zeros"),
    [(128, 4224, 4352), (64, 4352, 4608), (32, 4608, 5120), (-1, 4096, 4224), (512, 4224, 4352)],
)
def test_block_bytes(group_size, plain, with_zeros):
    assert layout.block_bytes(group_size, False) == plain
    assert layout.block_bytes(group_size, True) == with_zeros


def test_every_code_of_a_block_has_its_own_four_bits():
    where = Layout(128, 64, 128)
    taken = set()
    for k, n in itertools.product(range(128), range(64)):
        word, bit = where.code(k, n)
        bits = {word * 8 + (bit + i) % 32 for i in range(4)}
        assert not bits & taken
        taken |= bits
    assert taken == set(range(4096 * 8))


def test_blocks_follow_each_other_with_rows_fastest():
    where = Layout(300, 200, -1)
    assert where.block(0, 0) == 0
    assert where.block(128, 0) == 4096
    assert where.block(0, 64) == 3 * 4096
    assert layout.packed_bytes(300, 200, -1, False) == (4 * 3 + 3) * 4096


def test_the_permutation_gives_each_thread_four_neighbouring_columns():
    # Rows r and r + 8 of accumulator pairs (2i, 2i + 1) are columns 4i .. 4i + 3: one 8-byte store.
    columns = layout.ROW_COLUMNS
    for i in range(4):
        four = [columns[2 * i], columns[2 * i + 1], columns[8 + 2 * i], columns[9 + 2 * i]]
        assert four == [4 * i, 4 * i + 1, 4 * i + 2, 4 * i + 3]


def problem(k, n, group_size, zeros):
    rows = 1 if group_size < 0 else k // group_size
    q = torch.randint(0, 16, (k, n), dtype=torch.uint8)
    scales = (torch.rand(rows, n) * 2 - 1).half()
    z = torch.randint(0, 17, (rows, n)) if zeros else None
    return q, scales, z, pack(q, scales, z, group_size=group_size)


def read_code(buffer: bytes, where: layout.Bits) -> int:
    word = int.from_bytes(buffer[where.word : where.word + 4], "little")
    return (word >> where.bit | word << (32 - where.bit)) & 15


@pytest.mark.parametrize(("group_size", "zeros"), FORMATS)
@pytest.mark.parametrize(("k", "n"), [(256, 64), (512, 200)])
def test_pack_writes_codes_where_the_layout_says(k, n, group_size, zeros):
    q, _, _, w = problem(k, n, group_size, zeros)
    where, buffer = Layout(k, n, group_size, zeros), w.packed.numpy().tobytes()
    assert len(buffer) == layout.packed_bytes(k, n, group_size, zeros)
    for i in np.random.default_rng(0).integers(0, k * n, 400):
        row, column = divmod(int(i), n)
        assert read_code(buffer, where.code(row, column)) == int(q[row, column])


@pytest.mark.parametrize(("group_size", "zeros"), FORMATS)
def test_pack_writes_scales_and_zeros_where_the_layout_says(group_size, zeros):
    k, n = 512, 80
    _, scales, z, w = problem(k, n, group_size, zeros)
    where, buffer = Layout(k, n, group_size, zeros), w.packed.numpy()

    def entry(at):
        return float(buffer[at : at + 2].copy().view(np.float16)[0])

    for row, column in itertools.product(range(0, k, 31), range(n)):
        group = 0 if group_size < 0 else row // group_size
        low = layout.ROW_COLUMNS.index(column % 16) < 8
        shift = 2.0 ** (22 if low else 18)
        at = where.scale(row, column)
        if group_size < 0:
            assert at is None
            assert float(w.col_scale[column]) == float(scales[0, column]) * 2**7
        else:
            factor = float(w.col_scale[column])
            # Far below the largest of its column a normalised scale is an fp16 subnormal.
            near = pytest.approx(float(scales[group, column]), rel=2**-11, abs=2**-25 * factor)
            assert entry(at) / shift * factor == near
        if zeros:
            assert entry(where.zero(row, column)) * shift == int(z[group, column])
        else:
            assert where.zero(row, column) is None


@pytest.mark.parametrize("zeros", [False, True])
def test_padding_is_neutral_and_the_slack_is_zero(zeros):
    k, n = 200, 70
    _, _, _, w = problem(k, n, -1, zeros)
    padded = Layout(256, 128, -1, zeros)
    buffer = w.packed.numpy().tobytes()
    neutral = 0 if zeros else 8
    for row, column in [(200, 0), (255, 69), (0, 70), (199, 127), (255, 127)]:
        assert read_code(buffer, padded.code(row, column)) == neutral
    assert not any(buffer[-3 * padded.block_bytes :])
    assert not w.col_scale[70:].any()


def test_sizes_are_checked_by_name():
    for bad in (0, -128):
        with pytest.raises(ValueError, match="K and N must be at least 1"):
            layout.check_sizes(bad, 64, -1)
    with pytest.raises(ValueError, match=r"group_size=16 is not supported: use 32, 64, 128"):
        layout.check_sizes(256, 64, 16)
    with pytest.raises(ValueError, match="use group_size=-1"):
        layout.check_sizes(192, 64, 192)


@pytest.mark.parametrize("group_size", [32, 64, 128, 384, -1])
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("k, n", [(384, 1), (2**30 - 256, 2**30 - 1)])
def test_a_form_holds_every_size(k, n, group_size, zeros):
    code = form_of(k, n, group_size, zeros)
    assert 0 <= code < 1 << 63
    assert sizes_of(code) == (k, n, 128 if group_size == 384 else group_size, zeros)


@pytest.mark.parametrize("k, n", [(128, 2**30), (2**30, 64)])
def test_sizes_too_large_have_no_form(k, n):
    assert form_of(k, n, 128, False) is None


def test_a_negative_form_is_refused():
    with pytest.raises(ValueError, match="form=-1 must not be negative"):
        sizes_of(-1)


@pytest.mark.parametrize("k, n, group_size", [(96, 64, 48), (512, 64, 384), (0, 64, 128)])
def test_sizes_of_no_weight_have_no_form(k, n, group_size):
    assert form_of(k, n, group_size, False) is None
    assert form_of(n, k, group_size, False) is None
