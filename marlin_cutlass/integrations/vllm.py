"""vLLM plugin: entry point `vllm.general_plugins`, name `marlin_cutlass`.

`register` adds two things to vLLM. A *kernel* serves the INT4 linear layers of checkpoints which
vLLM loads itself (GPTQ, AWQ, compressed-tensors): with MARLIN_CUTLASS_VLLM=1 it is asked first,
else only when no other kernel will do. A *quantization method*, `marlin_cutlass`, loads converted
folders, and with `--quantization marlin_cutlass` takes over GPTQ (also asymmetric and act-order),
AWQ and compressed-tensors ones.

vLLM calls `register` in every process, perhaps more than once.
"""

from __future__ import annotations

import os

ENVIRONMENT = "MARLIN_CUTLASS_VLLM"  # "1": before vLLM's kernels; "0": not at all; else: after them


def register() -> None:
    """Registers kernel and method with vLLM; calling it again changes nothing."""
    choice = os.environ.get(ENVIRONMENT, "")
    if choice == "0":
        return
    register_kernel(first=choice == "1")
    register_method()


def register_kernel(first: bool, platform: object | None = None) -> type:
    """Put the kernel into vLLM's list for `platform` (PlatformEnum, default CUDA); returns it.

    first: before every other kernel; else at the end. Also makes it a choice of
    `--linear-backend cutlass`, which would otherwise drop it.
    """
    from vllm.model_executor.kernels import linear
    from vllm.platforms import PlatformEnum

    from .vllm_kernel import McW4A16LinearKernel

    platform = PlatformEnum.CUDA if platform is None else platform
    # NOTE: private names of vLLM 0.33; the public `register_linear_kernel` can only append.
    known = linear._POSSIBLE_KERNELS.setdefault(platform, [])
    if McW4A16LinearKernel in known:
        known.remove(McW4A16LinearKernel)
    if first:
        known.insert(0, McW4A16LinearKernel)
    else:
        linear.register_linear_kernel(McW4A16LinearKernel, platform, "mp")
    backends = getattr(linear, "_LINEAR_BACKEND_KERNEL_MAP", {})
    if "cutlass" in backends:
        backends["cutlass"].add(McW4A16LinearKernel)
    return McW4A16LinearKernel


def register_method() -> type:
    """Register the quantization method `marlin_cutlass`; returns its configuration class."""
    from vllm.model_executor.layers.quantization import register_quantization_config

    from .vllm_method import METHOD, MarlinCutlassConfig

    register_quantization_config(METHOD)(MarlinCutlassConfig)
    return MarlinCutlassConfig
