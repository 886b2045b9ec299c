"""Engines that people use, on top of `QuantLinear` and `gemm`: Transformers, vLLM, tensor parallelism.

Nothing here is imported by the rest of the package, and each module imports its engine at first use.
"""
