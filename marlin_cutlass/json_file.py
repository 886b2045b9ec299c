"""JSON objects from files that nobody vouches for: config.json, indexes, manifests, headers.

What the standard reader lets pass is refused with the file's name: a key that occurs twice (the
last one would win in silence), nesting that exhausts the stack, something other than an object, a
file too large to be one, a pipe that would never end.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

MAX_BYTES = 32 << 20  # the index of a model with 100 000 tensors has 10 MB


def read_object(path: str | Path, max_bytes: int = MAX_BYTES) -> dict[str, Any]:
    """The JSON object in a file.

    Raises FileNotFoundError, or ValueError naming the file and what is wrong with it.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist")
    if not path.is_file():
        raise ValueError(f"{path} is not a regular file")
    with open(path, "rb") as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise ValueError(f"{path} has more than {max_bytes} bytes: too large for what it should be")
    return parse_object(data, str(path))


def parse_object(data: bytes | str, where: str) -> dict[str, Any]:
    """The JSON object in `data`; ValueError starting with `where` if it is not one."""
    try:
        found = json.loads(data, object_pairs_hook=_unique)
    except RecursionError:
        raise ValueError(f"{where} is nested too deeply") from None
    except ValueError as error:  # bad syntax, bad UTF-8, a repeated key
        raise ValueError(f"{where} is not valid JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{where} holds a {type(found).__name__} instead of a JSON object")
    return found


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"the key {name[:80]!r} occurs twice")
        found[name] = value
    return found
