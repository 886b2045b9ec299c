"""Exceptions of the package, all subclasses of built-in ones so that callers need not import
them."""

from __future__ import annotations

import torch


class UnsupportedArchError(RuntimeError):
    """The device has no kernel table: says what is built and how to build the rest."""


class LibraryError(RuntimeError):
    """The launcher library could not be compiled or loaded: carries the original error text."""


class TableError(RuntimeError):
    """A kernel table (manifest.json or a cubin) is damaged or of another version."""


def short_dtype(dtype: torch.dtype) -> str:
    """`torch.float16` -> `float16`."""
    return str(dtype).removeprefix("torch.")


def sizes(k: int, n: int, group_size: int, m: int | None = None) -> str:
    """The sizes of a problem as every message prints them: `M=4, K=256, N=64, group_size=32`."""
    head = "" if m is None else f"M={m}, "
    return f"{head}K={k}, N={n}, group_size={group_size}"
