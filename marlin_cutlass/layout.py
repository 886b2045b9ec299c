"""The packed weight layout, version 1, as executable functions of plain integers.

A weight of K rows and N columns is cut into blocks of 64 columns x 128 rows. Blocks follow one
another with the row block running fastest; behind the last one lie `SLACK_BLOCKS` blocks of zeros
that a kernel may read but never uses. A block is 4096 bytes of codes followed by its scale entries.
`pack.py` is the same layout, vectorised.

A code is four bits of a little-endian 32-bit word, found by a rotation because the last code of a
word wraps around:

>>> layout = Layout(k=64, n=64, group_size=64)
>>> layout.code(0, 0), layout.code(1, 0), layout.code(0, 2), layout.code(9, 2)
(Bits(word=0, bit=2), Bits(word=0, bit=18), Bits(word=0, bit=6), Bits(word=0, bit=30))
>>> layout.code(16, 0), layout.code(0, 1), layout.code(0, 16)
(Bits(word=4, bit=2), Bits(word=64, bit=2), Bits(word=512, bit=2))
>>> layout.scale(0, 0), layout.scale(0, 2), layout.scale(0, 1)
(4096, 4098, 4100)
"""

from __future__ import annotations

from numbers import Integral
from typing import NamedTuple

LAYOUT_VERSION = 1
BLOCK_COLUMNS = 64
BLOCK_DEPTH = 128
CODE_BYTES = 4096
# A 2:4-sparse block (class SparseLayout): codes of the two kept values of four, then their places.
SPARSE_CODE_BYTES = 2048
SPARSE_META_BYTES = 1024
SPARSE_GROUP_SIZES = (64, 128, -1)
# Places 0 and 1 of four: what padding and slack hold, because an instruction must not see the
# invalid value 0.
SPARSE_META_PADDING = 0b0100
SLACK_BLOCKS = 3
MAX_SIZE = 2**31  # kernels count in int32
NATIVE_GROUP_SIZES = (32, 64, 128, -1)
GROUP_SIZES_TEXT = "32, 64, 128, a multiple of 128, or -1 (one group per column)"

# Column of fragment row rho inside an atom of 16 columns: the order in which a thread's
# accumulators form an 8-byte store without exchange through shared memory.
ROW_COLUMNS = (0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15)


class Bits(NamedTuple):
    """Place of a code: it is `rotate_right(word, bit) & 15` of the 32-bit word at byte offset
    `word`."""

    word: int
    bit: int


def ceil_div(value: int, divisor: int) -> int:
    """Smallest integer >= value / divisor."""
    return -(-value // divisor)


def stored_group_size(group_size: int) -> int:
    """Group size that the layout stores: multiples of 128 are stored as 128 with repeated scales.

    Raises ValueError for a group size that is not supported.
    """
    if group_size in NATIVE_GROUP_SIZES:
        return group_size
    if group_size > 0 and group_size % BLOCK_DEPTH == 0:
        return BLOCK_DEPTH
    raise ValueError(f"group_size={group_size} is not supported: use {GROUP_SIZES_TEXT}")


def check_sizes(k: int, n: int, group_size: int) -> None:
    """Raises ValueError unless a K x N weight with this group size can be packed."""
    sizes = f"K={k}, N={n}, group_size={group_size}"
    for value in (k, n, group_size):
        if isinstance(value, bool) or not isinstance(value, Integral):
            raise TypeError(f"{sizes}: {value!r} must be a whole number")
    if k < 1 or n < 1:
        raise ValueError(f"{sizes}: K and N must be at least 1")
    if k >= MAX_SIZE or n >= MAX_SIZE:
        raise ValueError(f"{sizes}: K and N must be below 2^31")
    hint = "; K is one group: use group_size=-1" if group_size == k else ""
    try:
        stored_group_size(group_size)
    except ValueError as error:
        raise ValueError(f"{sizes}: {error}{hint}") from None
    if group_size > 0 and k % group_size:
        raise ValueError(f"{sizes}: K={k} is not a multiple of group_size={group_size}")


def scale_bytes(group_size: int, has_zeros: bool) -> int:
    """Bytes of scales and zero points behind the codes of one block."""
    group = stored_group_size(group_size)
    if group < 0:
        return 128 if has_zeros else 0
    return BLOCK_DEPTH // group * (256 if has_zeros else 128)


def block_bytes(group_size: int, has_zeros: bool) -> int:
    """Bytes of one block of 64 columns x 128 rows."""
    return CODE_BYTES + scale_bytes(group_size, has_zeros)


def sparse_block_bytes(group_size: int) -> int:
    """Bytes of one 2:4-sparse block of 64 columns x 128 rows.

    Raises ValueError for group sizes that the sparse layout does not have.
    """
    group = stored_group_size(group_size)
    if group not in SPARSE_GROUP_SIZES:
        raise ValueError(
            f"group_size={group_size} is not supported with 2:4 sparsity: use 64, 128, a multiple "
            "of 128, or -1"
        )
    return SPARSE_CODE_BYTES + SPARSE_META_BYTES + scale_bytes(group, False)


def packed_bytes(k: int, n: int, group_size: int, has_zeros: bool, sparse: bool = False) -> int:
    """Bytes of a packed K x N weight, the slack included."""
    blocks = ceil_div(n, BLOCK_COLUMNS) * ceil_div(k, BLOCK_DEPTH)
    width = sparse_block_bytes(group_size) if sparse else block_bytes(group_size, has_zeros)
    return (blocks + SLACK_BLOCKS) * width


_FORM_SIZES = 2**30
_FORM_GROUP_SIZES = (128, 64, 32, -1)
_FORM_GROUPS = {size: place << 60 for place, size in enumerate(_FORM_GROUP_SIZES)}


def form_of(k: int, n: int, group_size: int, has_zeros: bool) -> int | None:
    """Sizes of a weight in one integer, where four arguments of an operator cost more: N in bits
    0-29, K in 30-59, place of the stored group size among 128, 64, 32 and -1 in 60-61, zero points
    in 62. None for what has no form: N or K of 2^30 and more, and sizes of no weight, which the
    operators that take them one by one refuse by name.
    """
    if not (0 < n < _FORM_SIZES and 0 < k < _FORM_SIZES):
        return None
    group = _FORM_GROUPS.get(group_size)
    if group is None:
        if group_size < 1 or group_size % BLOCK_DEPTH or k % group_size:
            return None
        group = _FORM_GROUPS[BLOCK_DEPTH]
    return n | k << 30 | group | has_zeros << 62


def sizes_of(form: int) -> tuple[int, int, int, bool]:
    """(K, N, stored group size, zero points) of a form. Raises ValueError for a negative one."""
    if form < 0:
        raise ValueError(f"form={form} must not be negative: see layout.form_of")
    low = _FORM_SIZES - 1
    return form >> 30 & low, form & low, _FORM_GROUP_SIZES[form >> 60 & 3], bool(form >> 62 & 1)


class Layout:
    """Where each code, scale and zero point of one packed weight lies (byte offsets into the
    buffer)."""

    def __init__(self, k: int, n: int, group_size: int, has_zeros: bool = False) -> None:
        check_sizes(k, n, group_size)
        self.k, self.n, self.has_zeros = k, n, has_zeros
        self.group_size = stored_group_size(group_size)
        self.k_blocks = ceil_div(k, BLOCK_DEPTH)
        self.block_bytes = block_bytes(group_size, has_zeros)

    def block(self, k: int, n: int) -> int:
        """Byte offset of the block that holds row k of column n."""
        return (n // BLOCK_COLUMNS * self.k_blocks + k // BLOCK_DEPTH) * self.block_bytes

    def code(self, k: int, n: int) -> Bits:
        """Place of the code of row k (packed order), column n."""
        half, step, deep = k % BLOCK_DEPTH // 64, k % 64 // 16, k % 16
        atom, row = n % BLOCK_COLUMNS // 16, ROW_COLUMNS.index(n % 16)
        lane = row % 8 * 4 + deep % 8 // 2
        pair = row // 8 + 2 * (deep // 8)
        word = self.block(k, n) + half * 2048 + atom * 512 + lane * 16 + step * 4
        return Bits(word, 2 + 4 * pair + 16 * (deep % 2))

    def _entry(self, k: int, n: int, entry_bytes: int) -> int:
        """Byte offset of the entry of row k, column n, and of its place in it."""
        group = 0 if self.group_size < 0 else k % BLOCK_DEPTH // self.group_size
        atom, row = n % BLOCK_COLUMNS // 16, ROW_COLUMNS.index(n % 16)
        entries = CODE_BYTES + ((group * 4 + atom) * 8 + row % 8) * entry_bytes
        return self.block(k, n) + entries + row // 8 * 2

    def scale(self, k: int, n: int) -> int | None:
        """Byte offset of the fp16 scale entry of row k, column n; None where only `col_scale` holds
        the scale.

        The entry is s_n * 2^22 for columns of fragment rows 0..7 and s_n * 2^18 for rows 8..15.
        """
        if self.group_size < 0:
            return None
        return self._entry(k, n, 8 if self.has_zeros else 4)

    def zero(self, k: int, n: int) -> int | None:
        """Byte offset of the fp16 zero point entry (z * 2^-22, or z * 2^-18 for fragment rows
        8..15)."""
        if not self.has_zeros:
            return None
        if self.group_size < 0:
            return self._entry(k, n, 4)
        return self._entry(k, n, 8) + 4


class SparseLayout:
    """Where the kept values of one 2:4-sparse packed weight lie; blocks, scales, padding and slack
    are those of `Layout` with zeros left out.

    Of each chunk of four rows two values are kept. Their codes form a matrix of half the depth,
    placed like a dense weight: [atom][lane][k32 step]. Behind them the metadata of two atoms share
    their 32-bit words: [atom pair][lane][k32 step].
    """

    def __init__(self, k: int, n: int, group_size: int) -> None:
        check_sizes(k, n, group_size)
        self.k, self.n = k, n
        self.group_size = stored_group_size(group_size)
        self.k_blocks = ceil_div(k, BLOCK_DEPTH)
        self.block_bytes = sparse_block_bytes(group_size)

    def block(self, k: int, n: int) -> int:
        """Byte offset of the block that holds row k of column n."""
        return (n // BLOCK_COLUMNS * self.k_blocks + k // BLOCK_DEPTH) * self.block_bytes

    def code(self, chunk: int, which: int, n: int) -> Bits:
        """Place of the code of kept value `which` (0 or 1) of rows 4 * chunk .. 4 * chunk + 3."""
        kept = 2 * (chunk % 32) + which
        step, deep = kept // 16, kept % 16
        atom, row = n % BLOCK_COLUMNS // 16, ROW_COLUMNS.index(n % 16)
        lane = row % 8 * 4 + deep % 8 // 2
        pair = row // 8 + 2 * (deep // 8)
        word = self.block(4 * chunk, n) + atom * 512 + lane * 16 + step * 4
        return Bits(word, 2 + 4 * pair + 16 * (deep % 2))

    def meta(self, chunk: int, n: int) -> Bits:
        """Place of the four metadata bits of a chunk: row of the first kept value in the chunk,
        plus 4 times that of the second, which is larger."""
        step, half, position = chunk % 32 // 8, chunk % 8 // 4, chunk % 4
        atom, row = n % BLOCK_COLUMNS // 16, ROW_COLUMNS.index(n % 16)
        lane = row % 8 * 4 + atom % 2 * 2 + half
        start = self.block(4 * chunk, n) + SPARSE_CODE_BYTES
        word = start + atom // 2 * 512 + lane * 16 + step * 4
        return Bits(word, 16 * (row // 8) + 4 * position)

    def scale(self, k: int, n: int) -> int | None:
        """Byte offset of the fp16 scale entry of row k, column n; None where only `col_scale` holds
        the scale."""
        if self.group_size < 0:
            return None
        group = k % BLOCK_DEPTH // self.group_size
        atom, row = n % BLOCK_COLUMNS // 16, ROW_COLUMNS.index(n % 16)
        start = self.block(k, n) + SPARSE_CODE_BYTES + SPARSE_META_BYTES
        return start + ((group * 4 + atom) * 8 + row % 8) * 4 + row // 8 * 2
