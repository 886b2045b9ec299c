"""The support matrix: which checkpoint can be read, and if not, why not."""

from __future__ import annotations

from typing import NamedTuple

from .weight import GROUP_SIZES

FORMATS = ("gptq", "gptq_v2", "awq", "compressed-tensors", "marlin", "sparse-marlin", "hqq")
MARLIN_24 = "marlin-24"  # compression format of compressed-tensors: Sparse-Marlin's
CT_VERSIONS = ("pack-quantized", MARLIN_24)


class Support(NamedTuple):
    """Answer of `support`; true in a condition iff the combination is supported."""

    ok: bool
    reason: str

    def __bool__(self) -> bool:
        return self.ok


def _group_size_rule(group_size: int, k: int | None) -> str | None:
    legal = group_size in (-1, 32, 64) or (group_size > 0 and group_size % 128 == 0)
    if not legal:
        return f"group_size={group_size} is not supported: it must be {GROUP_SIZES}"
    if k is not None and group_size != -1 and k % group_size:
        return f"k={k} is not a multiple of group_size={group_size}"
    return None


def _act_order_rule(fmt: str, act_order: bool | str | None) -> str | None:
    known = (None, False, True, "static", "weight", "group", "dynamic")
    if act_order not in known:
        return f"act_order={act_order!r} is unknown"
    if act_order and fmt in ("awq", "marlin", "sparse-marlin", "hqq"):
        return f"{fmt} has no activation order"
    return None


def _sparse_rule(sym: bool, group_size: int, act_order: bool | str | None) -> str | None:
    """Of marlin-24, and of every 2:4-sparse weight."""
    if group_size == 32:
        return "group_size=32 is not supported with 2:4 sparsity: it must be 64, 128, ... or -1"
    if act_order in (True, "group", "dynamic"):
        return "2:4-sparse weights have no activation order: the fours lie along K"
    return None if sym else "2:4-sparse weights have no zero points: sym=False is impossible"


def support(
    fmt: str,
    *,
    sym: bool = True,
    group_size: int = 128,
    act_order: bool | str | None = None,
    bits: int = 4,
    fractional_zeros: bool = False,
    version: str | None = None,
    k: int | None = None,
) -> Support:
    """Can a checkpoint of this format run here? Always an answer, never an exception.

    fmt: one of `FORMATS`. act_order: GPTQ's desc_act or compressed-tensors' actorder. version: the
    kernel layout of AWQ ("gemm") or the compression format of compressed-tensors ("pack-quantized"
    or "marlin-24", which is 2:4-sparse as "sparse-marlin" is).
    """
    if fmt not in FORMATS:
        return Support(False, f"format {fmt!r} is unknown: one of {', '.join(FORMATS)}")
    if bits != 4:
        return Support(False, f"bits={bits} is not supported: weights must have 4 bits")
    for reason in (_group_size_rule(group_size, k), _act_order_rule(fmt, act_order)):
        if reason:
            return Support(False, reason)
    if fractional_zeros:
        return Support(False, "fractional zero points are not supported (never rounded)")
    if fmt == "marlin" and not sym:
        return Support(False, "marlin files have no zero points: sym=False is impossible")
    if fmt == "awq" and version not in (None, "gemm"):
        return Support(False, f"awq version {version!r} is not supported: only 'gemm'")
    if fmt == "compressed-tensors" and version not in (None, *CT_VERSIONS):
        return Support(
            False,
            f"compression format {version!r} is not supported: only {' and '.join(CT_VERSIONS)}",
        )
    if fmt == "sparse-marlin" or version == MARLIN_24:
        reason = _sparse_rule(sym, group_size, act_order)
        return Support(reason is None, reason or "symmetric (zero 8), 2:4-sparse kernels")
    return Support(True, _how(fmt, sym, group_size, act_order))


def _how(fmt: str, sym: bool, group_size: int, act_order: bool | str | None) -> str:
    if fmt == "hqq":
        return "zero points must be whole numbers 0..16; fractional ones are refused by value"
    notes = ["symmetric (zero 8)" if sym else "zero points kept"]
    if act_order in (True, "group", "dynamic"):
        notes.append("order irrelevant" if group_size == -1 else "activations are gathered")
    elif act_order:
        notes.append("natural order at run time")
    return ", ".join(notes)
