"""One codebook: its vectors, its running statistics, and the EMA step.

Shapes: S rows, K codes, D the width one stage sees (Dq, or Dq/M under the `independent` rule).

    EMA 1             n_i = Σ_j δ(q_j, i)                 ℓ_i = Σ_j δ(q_j, i)·v_j
    EMA 2             N_i ← γ N_i + (1−γ) n_i
    EMA 3             N̂_i = (N_i + ε)·ΣN / (ΣN + K ε)
    EMA 4             m_i ← γ m_i + (1−γ) ℓ_i
    EMA 5             c_i ← m_i / N̂_i                     only where n_i > 0 in this step

After every start or reset N = 1 and m = c, so a code's first step is an average of what it was and what it was given.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn

Update = Literal["ema", "gradient"]


class Codebook(nn.Module):
    """The codes of one stage.

    Buffers:
        code (K, D) float32: the vectors c. A parameter under `update="gradient"`.
        usage (K,) float64: N, the running count. Only under `update="ema"`.
        code_sum (K, D) float64: m, the running sum. Only under `update="ema"`.

    All keep their dtype when a parent module is cast with `.half()`, `.bfloat16()` or `.to(dtype)`.
    """

    code: Tensor
    usage: Tensor
    code_sum: Tensor

    def __init__(self, *, codes: int, width: int, update: Update = "ema") -> None:
        super().__init__()
        vectors = torch.zeros(codes, width, dtype=torch.float32)
        if update == "gradient":
            self.code = nn.Parameter(vectors)
            return
        self.register_buffer("code", vectors)
        self.register_buffer("usage", torch.ones(codes, dtype=torch.float64))
        self.register_buffer("code_sum", torch.zeros(codes, width, dtype=torch.float64))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Codebook:
        def move_only(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            # Follow the device but not the dtype: a codebook rounded to 16 bits would give other codes for good.
            return moved if moved.dtype == tensor.dtype else tensor.to(moved.device)

        super()._apply(move_only, recurse)  # type: ignore[no-untyped-call]
        return self

    @torch.no_grad()
    def restart(self, vectors: Tensor, which: Tensor | None = None) -> None:
        """Put `vectors` (K, D) in place, all of them or those where `which` (K,) is true, with N = 1 and m = c."""
        which = torch.ones(len(self.code), dtype=torch.bool, device=self.code.device) if which is None else which
        rows = which[:, None]
        self.code.copy_(torch.where(rows, vectors, self.code))
        if "usage" in self._buffers:
            self.usage.copy_(torch.where(which, 1.0, self.usage))
            self.code_sum.copy_(torch.where(rows, vectors.double(), self.code_sum))

    @torch.no_grad()
    def ema_step(self, n: Tensor, l_sum: Tensor, *, decay: float, eps: float) -> None:
        """One step of EMA 2–5 with this step's counts (K,) and sums (K, D), both float64."""
        self.usage.mul_(decay).add_(n, alpha=1 - decay)  # EMA 2
        total = self.usage.sum()
        usage_hat = (self.usage + eps) * (total / (total + len(n) * eps))  # EMA 3
        self.code_sum.mul_(decay).add_(l_sum, alpha=1 - decay)  # EMA 4
        moved = (self.code_sum / usage_hat[:, None]).float()  # EMA 5
        # Only codes used in this step move: for the others ε would slowly pull a decaying m/N̂ towards zero.
        self.code.copy_(torch.where(n[:, None] > 0, moved, self.code))
