"""What a manifest (build/<arch>/manifest.json) says, checked entry by entry."""

from __future__ import annotations

import fnmatch
import itertools
import os
import re
from typing import Any

from .kernel import (
    DECOMPOSITIONS,
    DTYPES,
    FAMILIES,
    FORMATS,
    GROUPS,
    Kernel,
    Row,
    format_index,
    kernel_name,
    with_format,
)
from .layout import BLOCK_COLUMNS, LAYOUT_VERSION

MANIFEST_FORMAT = 4  # of generator/manifest.py: kernels of another want another launch
OPEN = 2**31 - 1  # upper bound of a range that the manifest leaves open
# Beyond these no GPU runs a kernel, and the launcher's arithmetic is checked up to here.
LARGEST = {
    "m_tile": 1024,
    "n_sm": 1024,
    "k_sm": 4096,
    "warps_n": 32,
    "warps_k": 32,
    "stages": 64,
    "split": 64,
    "ctas_per_sm": 32,
    "threads": 1024,
    "shared_bytes": 1 << 18,
    "cluster": 16,
    "multicast": 16,
}
_TEXT_FIELDS = ("name", "family", "dtype", "decomposition", "file", "sha256")
_NUMBER_FIELDS = (
    "group_size",
    "m_tile",
    "n_sm",
    "k_sm",
    "warps_n",
    "warps_k",
    "stages",
    "split",
    "ctas_per_sm",
    "threads",
    "shared_bytes",
    "cluster",
)


def read_entries(
    manifest: dict[str, Any], exclude: str | None = None
) -> tuple[tuple[Kernel, ...], tuple[Row, ...]]:
    """Kernels and rows of a parsed manifest; KeyError, TypeError or ValueError for what it lacks.

    exclude: as for `dispatch.load_table`.
    """
    for key, want in (("format", MANIFEST_FORMAT), ("layout_version", LAYOUT_VERSION)):
        if manifest[key] != want:
            raise ValueError(f"{key}={manifest[key]!r}, this release reads {want}")
    if re.fullmatch(r"sm_\d{2,3}[a-z]?", manifest["arch"]) is None:
        raise ValueError(f"arch={manifest['arch']!r} is malformed")
    kernels = tuple(_kernel(entry) for entry in manifest["variants"])
    names = {kernel.name: index for index, kernel in enumerate(kernels)}
    if len(names) != len(kernels):
        raise ValueError("a variant is listed twice")
    patterns = os.environ.get("MARLIN_CUTLASS_EXCLUDE", "") if exclude is None else exclude
    excluded = [pattern.strip() for pattern in patterns.split(",") if pattern.strip()]
    for name in list(names):
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in excluded):
            del names[name]
    return kernels, tuple(_row(entry, names) for entry in manifest["dispatch"])


def _kernel(entry: dict[str, Any]) -> Kernel:
    fields: dict[str, Any] = {name: _typed(entry, name, str) for name in _TEXT_FIELDS}
    fields |= {name: _typed(entry, name, int) for name in _NUMBER_FIELDS}
    fields["zeros"] = _typed(entry, "zeros", bool)
    fields["multicast"] = _typed({"multicast": 1, **entry}, "multicast", int)
    for name, allowed in (
        ("family", FAMILIES),
        ("dtype", DTYPES),
        ("group_size", GROUPS),
        ("decomposition", DECOMPOSITIONS),
    ):
        if fields[name] not in allowed:
            raise ValueError(f"{fields['name']}: {name}={fields[name]!r} is not one of {allowed}")
    if kernel_name(fields) != fields["name"]:
        raise ValueError(f"{fields['name']}: its fields spell {kernel_name(fields)}")
    positive = (*_NUMBER_FIELDS[1:], "multicast")
    if min(fields[name] for name in positive) < 1 or fields["n_sm"] % BLOCK_COLUMNS:
        raise ValueError(f"{fields['name']}: a size is not positive or not whole blocks")
    for name, largest in LARGEST.items():
        if fields[name] > largest:
            raise ValueError(f"{fields['name']}: {name}={fields[name]} is larger than {largest}")
    if re.fullmatch(r"[0-9a-f]{64}", fields["sha256"]) is None:
        raise ValueError(f"{fields['name']}: sha256={fields['sha256'][:80]!r} is malformed")
    if re.fullmatch(r"\w[\w.-]*", fields["file"], re.ASCII) is None:
        raise ValueError(f"{fields['name']}: file={fields['file']!r} is not a plain file name")
    return Kernel(**fields)


def _typed(entry: dict[str, Any], name: str, kind: type) -> Any:
    value = entry[name]
    if type(value) is not kind:
        owner = entry.get("name", "a variant")
        raise ValueError(f"{owner}: {name}={value!r} is not {kind.__name__}")
    return value


def _row(entry: dict[str, Any], names: dict[str, int]) -> Row:
    ranges = {axis: _range(entry, axis) for axis in "mnk"}
    _check_conditions(entry)
    row = Row(
        **ranges,
        sms=entry.get("sms"),
        group_size=entry.get("group_size"),
        dtype=entry.get("dtype"),
        zeros=entry.get("zeros"),
        geometry=entry["geometry"],
        source=str(entry.get("source", "")),
        kernels=(),
    )
    kernels = [-1] * FORMATS
    kinds = ((False, False), (True, False), (False, True))  # zeros, sparse
    for dtype, (zeros, sparse), group in itertools.product(DTYPES, kinds, GROUPS):
        if row.covers(dtype, zeros, group, sparse):
            name = with_format(row.geometry, dtype, zeros, group)
            kernels[format_index(dtype, zeros, group, sparse)] = names.get(name, -1)
    return Row(**{**vars(row), "kernels": tuple(kernels)})


def _check_conditions(entry: dict[str, Any]) -> None:
    sms = entry.get("sms")
    if sms is not None and (type(sms) is not int or not 0 < sms < 1 << 16):
        raise ValueError(f"a dispatch row has sms={sms!r}")
    for name, allowed in (("group_size", GROUPS), ("dtype", DTYPES), ("zeros", (False, True))):
        value = entry.get(name)
        if value is not None and not (value in allowed and type(value) is type(allowed[0])):
            raise ValueError(f"a dispatch row has {name}={value!r}: null or one of {allowed}")


def _range(entry: dict[str, Any], axis: str) -> tuple[int, int]:
    low, high = entry[axis]
    low, high = 0 if low is None else low, OPEN if high is None else high
    if type(low) is not int or type(high) is not int or not 0 <= low <= high:
        raise ValueError(f"a dispatch row has {axis}={entry[axis]}")
    return min(low, OPEN), min(high, OPEN)
