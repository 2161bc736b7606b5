"""The search for the nearest code: in chunks that stay in cache, in buffers that are used again, in true float32.

Shapes: S rows, K codes, D the width one stage sees.

    i* = argmin_i ‖v − c_i‖² = argmax_i  v·c_i − ‖c_i‖²/2
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Arithmetic in true float32 inside: no autocast, no TF32 or bfloat16 passes hidden in matrix products."""
    if torch.compiler.is_exporting():  # a program cannot store the switch, and is called without autocast
        yield
        return
    # The device's own switch: a run may have set TF32 for GPUs alone, which torch's common one cannot express.
    gpu, cpu = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    switch = gpu if device.type == "cuda" else cpu
    before = switch.fp32_precision
    switch.fp32_precision = "ieee"
    try:
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        switch.fp32_precision = before


def chunk_rows(widest: int, device: torch.device) -> int:
    """Rows per pass so that the scores of one chunk stay in cache (CPU) or in a modest workspace (other devices)."""
    elements = 2**18 if device.type == "cpu" else 2**25
    return max(256, elements // widest)


def chunks(length: int, rows: int) -> Iterator[slice]:
    """Slices of at most `rows` that cover `length`; one empty slice if there is nothing to cover."""
    return (slice(start, start + rows) for start in range(0, max(1, length), rows))


class Nearest(NamedTuple):
    """The best code of each row; `score` is v·c − ‖c‖²/2, so ‖v − c‖² = ‖v‖² − 2·score."""

    score: Tensor  # (S,)
    pick: Tensor  # (S,) int64


def half_norms(code: Tensor) -> Tensor:
    """−‖c‖²/2 for each code, the constant part of its score."""
    return code.square().sum(1).mul_(-0.5)  # (K, D) -> (K,)


class Searcher:
    """Finds codes for chunks of at most `rows` rows, one stage after the other, without allocating anything large.

    The buffers are what makes it fast on a CPU: scores that are written to the same memory again are still in cache.
    """

    def __init__(self, codes: Sequence[Tensor], *, rows: int, width: int = 0) -> None:
        most, device = max(len(code) for code in codes), codes[0].device
        self.codes = codes  # M tensors (K_m, D)
        self.turned = [code.t().contiguous() for code in codes]
        self.offsets = [half_norms(code) for code in codes]
        like: dict[str, Any] = {"dtype": torch.float32, "device": device}
        self._scores = torch.empty(rows * most, **like)
        # Hits and vectors share a buffer: the vectors are looked up when the hits have been read.
        self._shared = torch.empty(rows * max(most, *(code.shape[1] for code in codes)), **like)
        self._residual = torch.empty(rows * width, **like)
        self._numbers = torch.arange(most, **like)

    def residual(self, rows: int, width: int) -> Tensor:
        """A place for the residual (S, Dq) of the chunk at hand."""
        return self._residual[: rows * width].view(rows, width)

    def scores(self, v: Tensor, stage: int) -> Tensor:
        """v·c − ‖c‖²/2 for every pair, (S, D) -> (S, K); overwritten by the next call."""
        S, K = len(v), len(self.codes[stage])
        score = self._scores[: S * K].view(S, K)
        return torch.mm(v, self.turned[stage], out=score).add_(self.offsets[stage])

    def nearest(self, v: Tensor, stage: int) -> Nearest:
        """The nearest code of every row (S, D)."""
        return best(self.scores(v, stage), self._shared, self._numbers)

    def vectors(self, pick: Tensor, stage: int) -> Tensor:
        """The codes picked, (S,) -> (S, D); overwritten by the next search."""
        S, D = len(pick), self.codes[stage].shape[1]
        out = self._shared[: S * D].view(S, D)
        return torch.index_select(self.codes[stage], 0, pick, out=out)


def best(score: Tensor, hits: Tensor, numbers: Tensor) -> Nearest:
    """The largest score of each row (S, K) and where it is; `hits` is a buffer of S·K, `numbers` counts from 0."""
    if score.device.type != "cpu":
        return Nearest(*torch.max(score, 1))
    # On CPU a maximum with its index is not vectorised. The maximum alone is, and so is the product that reads off the
    # index of the one entry equal to it: a third of the time. Numbers count from K, so that the product is below 2K for
    # one entry, not for ties, and 0 for NaN: such rows send their chunk the slow way.
    K = score.shape[1]
    top = score.amax(1, keepdim=True)
    hit = torch.eq(score, top, out=hits[: score.numel()].view(score.shape))
    number = torch.mv(hit, numbers[:K] + K)
    least, most = number.aminmax() if len(number) else (K, K)
    if least < K or most >= 2 * K:
        return Nearest(*torch.max(score, 1))
    return Nearest(top.squeeze(1), number.long().sub_(K))


@torch.no_grad()
def nearest(v: Tensor, code: Tensor) -> Nearest:
    """The nearest code of every row (S, D), whatever S: memory does not grow as S·K."""
    rows = chunk_rows(max(code.shape), v.device)
    searcher = Searcher([code], rows=rows)
    found = [searcher.nearest(v[part], 0) for part in chunks(len(v), rows)]
    return Nearest(torch.cat([part.score for part in found]), torch.cat([part.pick for part in found]))
