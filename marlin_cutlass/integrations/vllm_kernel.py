"""Our gemm as one of vLLM's mixed-precision linear kernels.

NOTE: the class' name must hold neither "marlin" nor "humming": on capability 9.0 vLLM moves Humming
ahead of the first kernel with "marlin" in its name.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from vllm import envs
from vllm.model_executor.kernels.linear import MPLinearKernel, MPLinearLayerConfig
from vllm.model_executor.utils import replace_parameter
from vllm.platforms import current_platform
from vllm.scalar_type import scalar_types

from .. import dispatch, ops
from ..errors import UnsupportedArchError
from ..formats.bits import unpack_nibbles
from ..pack import pack

MIN_CAPABILITY = 80  # mma.sync m16n8k16 and cp.async
ACTIVATIONS = (torch.float16, torch.bfloat16)


def why_not_device() -> str | None:
    """Why this process' device cannot run the kernels; None if it can. Initialises no device.

    The CPU can (the reference path): that is how vLLM's own layers are tested without a GPU.
    """
    if current_platform.is_cpu():
        return None
    if not current_platform.is_cuda():
        return "marlin_cutlass needs CUDA"
    capability = current_platform.get_device_capability()
    try:
        dispatch.arch_for(capability.major, capability.minor)
    except UnsupportedArchError as error:
        return str(error)
    return None


def why_not_format(group_size: int, k: int, full_k: int) -> str | None:
    """Why a layer with `k` of `full_k` rows on this rank cannot be packed; None if it can."""
    if group_size not in (-1, 32, 64) and (group_size <= 0 or group_size % 128):
        return f"group_size={group_size}: it must be 32, 64, a multiple of 128, or -1"
    if group_size > 0 and k % group_size:
        where = "" if k == full_k else f" (of {full_k} on all ranks)"
        return f"in_features={k}{where} is not a multiple of group_size={group_size}"
    return None


class McW4A16LinearKernel(MPLinearKernel):
    """W4A16 under the checkpoint loaders of vLLM: symmetric (uint4b8) and zero points (uint4)."""

    @classmethod
    def get_min_capability(cls) -> int:
        return MIN_CAPABILITY

    @classmethod
    def can_implement(cls, c: MPLinearLayerConfig) -> tuple[bool, str | None]:
        wanted = scalar_types.uint4 if c.zero_points else scalar_types.uint4b8
        if c.weight_type != wanted:
            kind = "with" if c.zero_points else "without"
            return False, f"weight type {c.weight_type} {kind} zero points: {wanted} is needed"
        if c.act_type not in ACTIVATIONS or c.out_type not in (None, c.act_type):
            return False, f"activations {c.act_type} -> {c.out_type}: float16 or bfloat16 is needed"
        k, full_k = c.partition_weight_shape[0], c.full_weight_shape[0]
        reason = why_not_format(c.group_size, k, full_k) or why_not_device()
        return reason is None, reason

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Repack codes, scales and zero points, whatever order the checkpoint's method has them in.

        The packed bytes take the place of the codes and the column factors that of the scales, so
        that vLLM moves and reloads them like any parameter.
        """
        c = self.config
        k, n = c.partition_weight_shape
        w_q, w_s, w_zp = self._get_weight_params(layer)
        zeros = unpack_nibbles(_rows_of_k(w_zp), 1)[:, :n] if c.zero_points else None
        codes = unpack_nibbles(_rows_of_k(w_q), 0)[:k]
        weight = pack(codes, _rows_of_k(w_s), zeros, group_size=c.group_size)
        replace_parameter(layer, self.w_q_name, _parameter(weight.packed))
        replace_parameter(layer, self.w_s_name, _parameter(weight.col_scale))
        if w_zp is not None:  # a symmetric GPTQ layer has them as well: nothing reads them any more
            replace_parameter(layer, self.w_zp_name, _parameter(weight.packed.new_empty(0)))
        self.variant = ops.BATCH_INVARIANT if envs.VLLM_BATCH_INVARIANT else ops.AUTO

    def apply_weights(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [..., K] -> [..., N] in x's dtype."""
        c = self.config
        k, n = c.partition_weight_shape
        packed, col_scale, _ = self._get_weight_params(layer)
        form = (n, k, c.group_size, c.zero_points)
        return torch.ops.marlin_cutlass.gemm(x, packed, col_scale, bias, None, *form, self.variant)


def _rows_of_k(parameter: nn.Parameter) -> Tensor:
    """The data with inputs (rows, groups) along dimension 0 and outputs along 1, contiguous.

    The parameter stays as it is: vLLM keeps it to load into again.
    """
    data = parameter.data
    return (data.t() if parameter.output_dim == 0 else data).contiguous()


def _parameter(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)
