"""Build-time half of marlin_cutlass: what variants exist, when they are legal, how they become
cubins.

Pure Python, no torch, no GPU. Read (and import) in this order: problem, arch, variant, legality,
space, schedule, cost, dispatch, rows, cutlass_types, render, toolchain, compile, manifest. No
module imports a later one.
"""
