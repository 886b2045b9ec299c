"""GPTQ checkpoints: AutoGPTQ / GPTQModel files, versions 1 ("gptq") and 2 ("gptq_v2").

qweight int32 [K/8, N], packed along K; qzeros int32 [G, N/8], packed along N; scales [G, N]; g_idx
int [K]. Version 1 stores zero points minus one, version 2 stores them as they are.
"""

from __future__ import annotations

import warnings

import torch

from .bits import unpack_nibbles
from .weight import QuantizedWeight, check_group_size, check_scales, clean_g_idx, drop_symmetric

CHECKPOINT_FORMATS = ("gptq", "gptq_v2")
ZERO_RULES = ("word", "nibble", "sixteen")


class AmbiguousZeroWarning(UserWarning):
    """A version 1 file holds zero points whose meaning depends on the program that wrote it."""


def decode_zeros_v1(qzeros: torch.Tensor, rule: str = "word", source: str = "qzeros"):
    """Zero points of a version 1 file: uint8 [G, N].

    "Minus one" of a zero point 0 wraps, and writers wrap differently; a stored 15 is ambiguous:

    - "word" (default): GPTQModel subtracts 0x11111111 from the whole word, the wrap borrows from
      the neighbour; adding it back is exact. The only writer in use that emits such files.
    - "nibble": each field was reduced by itself modulo 16: (n + 1) & 15.
    - "sixteen": n + 1 without a wrap (15 means 16), as AutoGPTQ's kernels read it.

    All three agree where no 15 is stored; otherwise an `AmbiguousZeroWarning` says how many fields
    it concerns and which rule was applied.
    """
    if rule not in ZERO_RULES:
        raise ValueError(f"zero_rule={rule!r} is unknown: one of {', '.join(ZERO_RULES)}")
    stored = unpack_nibbles(qzeros, 1)
    doubtful = int((stored == 15).sum())
    if not doubtful:
        return stored + 1
    warnings.warn(
        f"{source}: {doubtful} of {stored.numel()} zero points are stored as 15 in a version 1 GPTQ"
        f" file, which writers wrap differently; read by zero_rule={rule!r}",
        AmbiguousZeroWarning,
        stacklevel=3,
    )
    if rule == "sixteen":
        return stored + 1
    if rule == "nibble":
        return (stored + 1) & 15
    return unpack_nibbles(qzeros + 0x11111111, 1)  # int32 addition wraps modulo 2^32


def read_gptq(
    qweight: torch.Tensor,
    qzeros: torch.Tensor | None,
    scales: torch.Tensor,
    g_idx: torch.Tensor | None = None,
    *,
    group_size: int,
    checkpoint_format: str = "gptq",
    sym: bool | None = None,
    zero_rule: str = "word",
    k: int | None = None,
    name: str = "gptq weight",
) -> QuantizedWeight:
    """Decode one GPTQ layer. `k` is the logical depth of a file whose rows were padded to a tile.

    sym=None looks at the zero points (all 8 = symmetric); sym=True with other ones is refused.
    qzeros=None is the symmetric case of files without zero points. Errors: ValueError / TypeError.
    """
    if checkpoint_format not in CHECKPOINT_FORMATS:
        raise ValueError(
            f"{name}: checkpoint_format={checkpoint_format!r}: 'gptq' or 'gptq_v2' is required"
        )
    if qweight.dim() != 2:
        raise ValueError(f"{name}: qweight has shape {tuple(qweight.shape)}; [K/8, N] is required")
    q = unpack_nibbles(qweight, 0)
    stored_k, n = q.shape
    k = stored_k if k is None else k
    if not 0 < k <= stored_k:
        raise ValueError(f"{name}: k={k} does not fit the {stored_k} stored rows")
    groups = check_group_size(group_size, k)
    scales = scales[:groups] if k < stored_k else scales
    check_scales(scales, groups, n, f"{name}: scales")
    zeros = None
    if qzeros is not None:
        zeros = _zeros(qzeros, groups, n, checkpoint_format, zero_rule, name, k < stored_k)
    zeros = drop_symmetric(zeros, sym, name)
    order = clean_g_idx(None if g_idx is None else g_idx[:k], k, group_size)
    return QuantizedWeight(q[:k], scales, zeros, group_size, order)


def _zeros(qzeros, groups, n, checkpoint_format, zero_rule, name, padded) -> torch.Tensor:
    qzeros = qzeros[:groups] if padded else qzeros
    if qzeros.dim() != 2 or qzeros.shape[0] != groups or qzeros.shape[1] * 8 < n:
        raise ValueError(
            f"{name}: qzeros has shape {tuple(qzeros.shape)}; [{groups}, {-(-n // 8)}] is required"
        )
    if checkpoint_format == "gptq_v2":
        return unpack_nibbles(qzeros, 1)[:, :n]
    return decode_zeros_v1(qzeros, zero_rule, name)[:, :n]


def from_gptq(
    qweight: torch.Tensor,
    qzeros: torch.Tensor | None,
    scales: torch.Tensor,
    g_idx: torch.Tensor | None = None,
    *,
    group_size: int,
    checkpoint_format: str = "gptq",
    sym: bool | None = None,
    zero_rule: str = "word",
    k: int | None = None,
):
    """One GPTQ layer -> `PackedWeight`; arguments and errors as in `read_gptq`."""
    return read_gptq(
        qweight,
        qzeros,
        scales,
        g_idx,
        group_size=group_size,
        checkpoint_format=checkpoint_format,
        sym=sym,
        zero_rule=zero_rule,
        k=k,
    ).to_packed()
