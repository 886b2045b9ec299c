"""Engines that people use, on top of `QuantLinear` and `gemm`: Transformers, vLLM, several GPUs.

The rest of the package imports nothing from here, and each module imports its engine at first use.
"""
