"""Attention inside windows, shifted by half a window in every other block, on any grid of any rank.

Shapes: x (B, T, D) on a grid of T tokens; W windows of N tokens each; windowed (B·W, N, D).

An axis of n positions is padded at its end to n' = w·⌈n/w⌉, rolled back by the shift s and cut into windows of w. With
p the position before the roll, two tokens may attend to each other where on every axis

    ⌊(p − s)/w⌋ = ⌊(p' − s)/w⌋,

so tokens that only the roll brought together do not mix, and padding is nobody's key. Every token may attend to
itself, which changes nothing for real tokens and leaves no softmax row empty.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from math import prod
from typing import Literal, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from bridle.errors import ConfigError, UsageError
from bridle.nn.transformer import Block, BlockStack


def auto_window(grid: tuple[int, ...]) -> tuple[int, ...]:
    """Per axis the largest divisor up to 8 if that is at least 4, else 7; never more than the axis itself."""

    def axis_window(n: int) -> int:
        divisor = max(d for d in range(1, 9) if n % d == 0)
        return divisor if divisor >= 4 else min(7, n)

    return tuple(axis_window(n) for n in grid)


class Windows(nn.Module):
    """How a grid falls into windows of one size and shift.

    Buffers: `pairs` (W, N, N) bool, query by key, which tokens of a window may attend to each other; a function of the
    grid alone and therefore not saved.
    """

    pairs: Tensor

    def __init__(self, *, grid: tuple[int, ...], window: tuple[int, ...], shifted: bool) -> None:
        super().__init__()
        if len(window) != len(grid) or min(window) < 1:
            raise ConfigError(
                f"window {list(window)} needs one positive size per axis of grid {list(grid)}; use 'auto'."
            )
        if any(w > n for w, n in zip(window, grid, strict=True)):
            raise ConfigError(f"window {list(window)} is larger than grid {list(grid)}; use 'auto'.")
        self.grid = grid
        self.window = window
        self.shift = tuple(w // 2 if shifted and w < n else 0 for w, n in zip(window, grid, strict=True))
        self.counts = tuple(-(-n // w) for w, n in zip(window, grid, strict=True))
        self.padded = tuple(c * w for c, w in zip(self.counts, window, strict=True))
        self.restricted = self.padded != grid or any(self.shift)  # does `pairs` forbid anything?
        self.register_buffer("pairs", self._allowed_pairs(), persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move the buffer; on leaving the meta device compute it, because `to_empty` would leave it undefined."""
        was_meta = self.pairs.is_meta
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # torch has no annotation here
        if was_meta and not self.pairs.is_meta:
            self.pairs = self._allowed_pairs().to(self.pairs.device)
        return self

    def _allowed_pairs(self) -> Tensor:
        group = torch.zeros(self.padded, dtype=torch.int64)
        real = torch.ones(self.padded, dtype=torch.bool)
        for axis, n in enumerate(self.grid):
            position = torch.arange(self.padded[axis])
            along = (position - self.shift[axis] + self.window[axis]) // self.window[axis]  # 0 ... count
            shape = [-1 if k == axis else 1 for k in range(len(self.grid))]
            group = group * (self.counts[axis] + 1) + along.reshape(shape)
            real = real & (position < n).reshape(shape)
        group = self._cut(group[None, ..., None]).squeeze(-1)  # (W, N)
        real = self._cut(real[None, ..., None]).squeeze(-1)
        itself = torch.eye(prod(self.window), dtype=torch.bool)
        return ((group[:, :, None] == group[:, None, :]) & real[:, None, :]) | itself

    def _cut(self, x: Tensor) -> Tensor:
        """(B, *padded, D) -> (B·W, N, D)."""
        rank = len(self.grid)
        if any(self.shift):
            x = x.roll([-s for s in self.shift], dims=list(range(1, 1 + rank)))
        B, D = x.shape[0], x.shape[-1]
        x = x.reshape(B, *chain(*zip(self.counts, self.window, strict=True)), D)  # (B, c1, w1, c2, w2, ..., D)
        x = x.permute(0, *range(1, 1 + 2 * rank, 2), *range(2, 2 + 2 * rank, 2), 1 + 2 * rank)
        return x.reshape(B * prod(self.counts), prod(self.window), D)

    def split(self, x: Tensor) -> Tensor:
        """(B, T, D) -> (B·W, N, D); padding is zero (False)."""
        x = x.reshape(x.shape[0], *self.grid, x.shape[-1])
        if self.padded != self.grid:
            ends = [p - n for p, n in zip(self.padded, self.grid, strict=True)]
            x = pad(x, [0, 0, *chain(*((0, end) for end in reversed(ends)))])
        return self._cut(x)

    def join(self, x: Tensor) -> Tensor:
        """(B·W, N, D) -> (B, T, D), the inverse of `split`."""
        rank = len(self.grid)
        B, D = x.shape[0] // prod(self.counts), x.shape[-1]
        x = x.reshape(B, *self.counts, *self.window, D)
        x = x.permute(0, *chain(*((1 + k, 1 + rank + k) for k in range(rank))), 1 + 2 * rank)
        x = x.reshape(B, *self.padded, D)
        if any(self.shift):
            x = x.roll(self.shift, dims=list(range(1, 1 + rank)))
        for axis, n in enumerate(self.grid):
            x = x.narrow(1 + axis, 0, n)
        return x.reshape(B, prod(self.grid), D)

    def allowed(self, batch: int, key_valid: Tensor | None) -> Tensor | None:
        """(B·W, 1, N, N) bool, query by key; None where every token of a window may attend to every other."""
        if key_valid is None and not self.restricted:
            return None
        pairs = self.pairs.expand(batch, *self.pairs.shape)  # (B, W, N, N)
        if key_valid is not None:
            W, N, _ = self.pairs.shape
            keys = self.split(key_valid[..., None]).reshape(batch, W, 1, N)
            pairs = (pairs & keys) | torch.eye(N, dtype=torch.bool, device=pairs.device)
        return pairs.reshape(-1, 1, *self.pairs.shape[1:])


class WindowBlock(Block):
    """A transformer block whose attention stays inside windows."""

    def __init__(self, *, width: int, heads: int, windows: Windows, mlp_ratio: float = 4.0) -> None:
        super().__init__(width=width, heads=heads, mlp_ratio=mlp_ratio)
        self.windows = windows

    def attend(self, x: Tensor, key_valid: Tensor | None) -> Tensor:
        allowed = self.windows.allowed(x.shape[0], key_valid)
        return self.windows.join(self.attn(self.windows.split(x), allowed=allowed))


class WindowTransformer(BlockStack):
    """`depth` window blocks, every second one shifted: (B, T, D) -> (B, T, D), without a final norm."""

    def __init__(
        self,
        *,
        width: int,
        depth: int,
        heads: int,
        grid: tuple[int, ...],
        window: tuple[int, ...] | Literal["auto"] = "auto",
        mlp_ratio: float = 4.0,
        checkpoint_activations: bool = False,
    ) -> None:
        size = auto_window(grid) if window == "auto" else window
        # Two layouts serve all blocks: even ones plain, odd ones shifted.
        layouts = [Windows(grid=grid, window=size, shifted=shifted) for shifted in (False, True)]
        blocks = [
            WindowBlock(width=width, heads=heads, windows=layouts[i % 2], mlp_ratio=mlp_ratio) for i in range(depth)
        ]
        super().__init__(blocks, checkpoint_activations=checkpoint_activations)
        self.grid = grid
        self.window = size

    def forward(
        self, x: Tensor, *, key_valid: Tensor | None = None, drop: Tensor | None = None, only: Tensor | None = None
    ) -> Tensor:
        if x.shape[1] != prod(self.grid):
            raise UsageError(f"got {x.shape[1]} tokens; expected {prod(self.grid)} for grid {list(self.grid)}.")
        return super().forward(x, key_valid=key_valid, drop=drop, only=only)
