"""From a Variant to its CUDA source: names and numbers only, every algorithm is in
templates/include.
"""

from __future__ import annotations

import functools
import os
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import jinja2

from generator import cutlass_types
from generator.collective import is_collective
from generator.variant import Variant

TEMPLATES = Path(__file__).resolve().parent.parent / "templates"
INCLUDE = TEMPLATES / "include"

MAX_WGMMA_ROWS = 256  # of activations
DECOMPOSITION_TAG = {
    "data_parallel": "kDataParallel",
    "striped": "kStriped",
    "split_k": "kSplitK",
    "stream_k": "kStreamK",
    "hybrid": "kHybrid",
}


@dataclass(frozen=True)
class FamilySource:
    """How the source of a family spells its one instantiation."""

    header: str
    config: str
    entry: str
    parameters: str
    arguments: str
    min_blocks: str  # second argument of __launch_bounds__


_PARAMS = "const __grid_constant__ marlin_cutlass::GemmParams params"
FAMILY_SOURCE = {
    "ampere": FamilySource(
        "ampere_kernel.cuh", "AmpereConfig", "ampere_gemm", _PARAMS, "params", "Config::kCtasPerSm"
    ),
    "sparse": FamilySource(
        "sparse_kernel.cuh", "SparseConfig", "sparse_gemm", _PARAMS, "params", "Config::kCtasPerSm"
    ),
    "hopper": FamilySource(
        "hopper_kernel.cuh",
        "HopperConfig",
        "hopper_gemm",
        f"const __grid_constant__ marlin_cutlass::TensorMap map_a, {_PARAMS}",
        "map_a, params",
        "Config::kMinBlocks",
    ),
}
FAMILY_SOURCE["hopper_sparse"] = replace(
    FAMILY_SOURCE["hopper"], header="hopper_sparse_kernel.cuh", config="HopperSparseConfig"
)


def _template() -> jinja2.Template:
    return template("kernel.cu.jinja")


@functools.lru_cache(maxsize=4)
def template(name: str) -> jinja2.Template:
    """A file of templates/ in which a name that is not given is an error."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
    )
    return environment.get_template(name)


def render(variant: Variant) -> str:
    """Source of one kernel; the same text for the same variant, always."""
    if is_collective(variant.name):
        from generator.collective_source import render_collective

        return render_collective(variant)
    return _template().render(
        variant=variant,
        family=FAMILY_SOURCE[variant.family],
        element=cutlass_types.element_tag(variant),
        decomposition=DECOMPOSITION_TAG[variant.decomposition],
        more_arguments=_more_arguments(variant),
        cutlass_name=cutlass_types.procedural_name(variant),
        instructions=_instructions(variant),
    )


def _instructions(variant: Variant) -> str:
    """The wgmma instructions that a Hopper kernel may use, as inline PTX."""
    if not variant.hopper:
        return ""
    # With a running scale two instructions share a tile.
    halves = (variant.m_tile // 2,) if variant.m_tile == MAX_WGMMA_ROWS else ()
    return template("wgmma.jinja").render(
        variant=variant,
        element=cutlass_types.element_tag(variant),
        widths=(variant.m_tile, *halves),
    )


def _more_arguments(variant: Variant) -> str:
    """Template arguments that only the configuration of some families has."""
    return f",\n    /*kMulticast=*/{variant.multicast}" if variant.hopper else ""


def _holds(path: Path, data: bytes) -> bool:
    """Whether the file has these bytes; one that cannot be read has not."""
    try:
        return path.is_file() and path.read_bytes() == data
    except OSError:
        return False


def write_if_changed(path: Path, text: str) -> bool:
    """Writes `text` aside and renames it, unless `path` already holds it. Returns whether it
    wrote.
    """
    if _holds(path, text.encode()):
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text)
        os.chmod(temporary, 0o644)  # mkstemp makes private files
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return True
