"""Named sets of weight shapes (N x K), and shapes and batch sizes on a command line."""

from __future__ import annotations

# The linear layers of one block: fused qkv, attention output, fused gate and up, down.
SHAPES: dict[str, tuple[tuple[int, int], ...]] = {
    "default": ((4096, 4096), (28672, 4096), (8192, 28672)),
    "llama3-8b": ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)),
    "llama3-70b": ((10240, 8192), (8192, 8192), (57344, 8192), (8192, 28672)),
    "qwen3-32b": ((10240, 5120), (5120, 8192), (51200, 5120), (5120, 25600)),
}
DEFAULT_MS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 4096)


def parse_shapes(text: str) -> list[tuple[int, int]]:
    """Shapes from 'default,llama3-8b,4096x4096': names of SHAPES or NxK, repeats removed.

    Raises ValueError for anything else.
    """
    shapes: list[tuple[int, int]] = []
    for part in filter(None, (p.strip().lower() for p in text.split(","))):
        for shape in SHAPES.get(part) or (_one_shape(part),):
            if shape not in shapes:
                shapes.append(shape)
    if not shapes:
        raise ValueError("shapes: at least one NxK or set name is needed")
    return shapes


def _one_shape(part: str) -> tuple[int, int]:
    sizes = part.split("x")
    if len(sizes) != 2 or not all(s.isdigit() and int(s) > 0 for s in sizes):
        known = ", ".join(SHAPES)
        raise ValueError(f"shape {part!r} is neither NxK with positive sizes nor one of {known}")
    return int(sizes[0]), int(sizes[1])


def parse_ms(text: str) -> list[int]:
    """Batch sizes from '1,8,16'. Raises ValueError unless all are positive integers."""
    parts = [p.strip() for p in text.split(",") if p.strip()]
    if not parts or not all(p.isdigit() and int(p) > 0 for p in parts):
        raise ValueError(f"ms={text!r}: positive integers separated by commas are needed")
    return [int(p) for p in parts]
