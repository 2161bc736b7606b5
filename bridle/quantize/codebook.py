"""One codebook: its vectors, its running statistics, the search for the nearest code, and the EMA step.

Shapes: S rows, K codes, D the width one stage sees (Dq, or Dq/M under the `independent` rule).

    nearest code      i* = argmin_i ‖v − c_i‖² = argmax_i  v·c_i − ‖c_i‖²/2
    EMA 1             n_i = Σ_j δ(q_j, i)                 ℓ_i = Σ_j δ(q_j, i)·v_j
    EMA 2             N_i ← γ N_i + (1−γ) n_i
    EMA 3             N̂_i = (N_i + ε)·ΣN / (ΣN + K ε)
    EMA 4             m_i ← γ m_i + (1−γ) ℓ_i
    EMA 5             c_i ← m_i / N̂_i                     only where n_i > 0 in this step

After every start or reset N = 1 and m = c, so a code's first step is an average of what it was and what it was given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

Update = Literal["ema", "gradient"]


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Arithmetic in true float32 inside: no autocast, no TF32 or bfloat16 passes hidden in matrix products."""
    precision = torch.get_float32_matmul_precision()
    if precision != "highest":
        torch.set_float32_matmul_precision("highest")
    try:
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        if precision != "highest":
            torch.set_float32_matmul_precision(precision)


def chunk_rows(widest: int, device: torch.device) -> int:
    """Rows per pass so that the scores of one chunk stay in cache (CPU) or in a modest workspace (other devices)."""
    elements = 2**17 if device.type == "cpu" else 2**25
    return max(256, elements // widest)


def chunks(length: int, rows: int) -> Iterator[slice]:
    """Slices of at most `rows` that cover `length`; one empty slice if there is nothing to cover."""
    if torch.compiler.is_exporting() or torch.onnx.is_in_onnx_export():
        return iter([slice(None)])  # a graph for any length must not contain a loop over a fixed number of chunks
    return (slice(start, start + rows) for start in range(0, max(1, length), rows))


class Nearest(NamedTuple):
    """The best code of each row; `score` is v·c − ‖c‖²/2, so ‖v − c‖² = ‖v‖² − 2·score."""

    score: Tensor  # (S,)
    pick: Tensor  # (S,) int64


def half_norms(code: Tensor) -> Tensor:
    """−‖c‖²/2 for each code, the constant part of its score."""
    return code.square().sum(1).mul_(-0.5)  # (K, D) -> (K,)


def scores(v: Tensor, code: Tensor, offset: Tensor) -> Tensor:
    """v·c − ‖c‖²/2 for every pair; a larger score is a nearer code."""
    return torch.addmm(offset, v, code.t())  # (S, D) x (K, D) -> (S, K)


def best(score: Tensor) -> Nearest:
    """The largest score of each row (S, K) and where it is."""
    if score.device.type != "cpu" or torch.compiler.is_compiling() or torch.onnx.is_in_onnx_export():
        return Nearest(*torch.max(score, 1))
    # On CPU a maximum with its index is not vectorised. The maximum alone is, and so is the product that reads off the
    # index of the one entry equal to it: a third of the time. Rows with ties or NaN send their chunk the slow way.
    top = score.amax(1, keepdim=True)
    hit = torch.eq(score, top, out=torch.empty_like(score))
    if float(hit.sum()) != len(score) or bool(top.isnan().any()):
        return Nearest(*torch.max(score, 1))
    return Nearest(top.squeeze(1), (hit @ torch.arange(score.shape[1], dtype=score.dtype)).long())


def nearest(v: Tensor, code: Tensor) -> Nearest:
    """The nearest code of every row, in chunks, so that memory does not grow as S·K."""
    offset, rows = half_norms(code), chunk_rows(max(code.shape), v.device)
    found = [best(scores(v[part], code, offset)) for part in chunks(len(v), rows)]
    return Nearest(torch.cat([part.score for part in found]), torch.cat([part.pick for part in found]))


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
