"""Runs generated kernels on the CPU: the kernel sources compiled by g++ against an emulation of the
device primitives.

`gemm(a, weight, variant)` multiplies; `EmulationError` says what a GPU would have hidden. See
docs/emulation.md.
"""

from emulator.errors import EmulationError
from emulator.gemm import Result, gemm

__all__ = ["EmulationError", "Result", "gemm"]
