"""Second moments of a layer's inputs: what GPTQ needs of the calibration data."""

from __future__ import annotations

import torch


class Hessian:
    """Running mean of 2 x x^T over tokens, float32 [K, K].

    Sequences may have any length; every token counts the same, so padding must be left out (`mask`)
    rather than fed in. Memory is K * K * 4 bytes whatever the amount of data.
    """

    def __init__(self, k: int, device: torch.device | str = "cpu") -> None:
        self.matrix = torch.zeros((k, k), dtype=torch.float32, device=device)
        self.tokens = 0

    def add(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> None:
        """Add inputs [..., K]; `mask` bool [...] keeps the tokens that are not padding."""
        k = self.matrix.shape[0]
        if x.shape[-1] != k:
            raise ValueError(f"calibration input has {x.shape[-1]} features; k={k} is required")
        x = x.detach().reshape(-1, k)
        if mask is not None and mask.numel() == x.shape[0]:
            x = x[mask.reshape(-1).to(x.device, torch.bool)]
        if not x.shape[0]:
            return
        x = x.to(self.matrix.device, torch.float32)
        if not bool(torch.isfinite(x).all()):
            raise ValueError("calibration input holds NaN or infinity")
        total = self.tokens + x.shape[0]
        # A running mean keeps fp32 accurate for millions of tokens, where a sum would lose bits.
        self.matrix.mul_(self.tokens / total).addmm_(x.t(), x, alpha=2.0 / total)
        self.tokens = total


def inverse_factor(hessian: torch.Tensor, percdamp: float) -> torch.Tensor:
    """Upper Cholesky factor U of the damped inverse: (H + damp I)^-1 = U^T U, float32 [K, K].

    damp is percdamp * mean(diag H). A matrix that is still singular gets ten times the damping,
    up to five times, rather than falling back to plain rounding in silence.
    """
    diagonal = torch.diagonal(hessian)
    mean = float(diagonal.mean())
    if not mean > 0 or percdamp < 0:
        raise ValueError(
            f"the Hessian is empty (mean diagonal {mean:g}) or percdamp={percdamp} < 0"
        )
    damp = max(percdamp, 1e-8) * mean
    for _ in range(6):
        damped = hessian.clone()
        torch.diagonal(damped).add_(damp)
        lower, info = torch.linalg.cholesky_ex(damped)
        if int(info) == 0:
            inverse = torch.cholesky_inverse(lower)
            upper, info = torch.linalg.cholesky_ex(inverse, upper=True)
            if int(info) == 0 and bool(torch.isfinite(upper).all()):
                return upper
        damp *= 10
    raise ValueError("the Hessian is not positive definite even with 10^5 times the damping")
