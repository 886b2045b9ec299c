"""Settings from the environment: switches that must be clear, and the user's cache folder."""

from __future__ import annotations

import os
from pathlib import Path

_ON, _OFF = ("1", "true", "on", "yes"), ("", "0", "false", "off", "no")


def switch(name: str, default: bool) -> bool:
    """The on/off variable `name`. Raises ValueError for a value that says neither."""
    value = os.environ.get(name)
    if value is None:
        return default
    word = value.strip().lower()
    if word not in (*_ON, *_OFF):
        raise ValueError(f"{name}={value!r} says neither on nor off: use 1 or 0")
    return word in _ON


def cache_folders() -> list[Path]:
    """$XDG_CACHE_HOME/marlin_cutlass or ~/.cache/marlin_cutlass; none for a user without a home.

    Libraries are loaded from there, so a folder that others can make, such as one in /tmp, never
    takes its place. A relative $XDG_CACHE_HOME is ignored, as its specification asks.
    """
    given = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(given):
        return [Path(given) / "marlin_cutlass"]
    try:
        return [Path.home() / ".cache" / "marlin_cutlass"]
    except RuntimeError:  # a container run under a number that has no account
        return []
