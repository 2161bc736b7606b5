"""From a grid of tokens to one vector: means, and deviations, over all real tokens or over all grid axes but one.

Shapes: tokens (B, T, D) on a grid, valid (B, T).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def mean_pool(tokens: Tensor, valid: Tensor | None = None) -> Tensor:
    """(B, T, D) -> (B, D): mean over the real tokens; a sample without any gives zeros."""
    return axis_pool(tokens, tokens.shape[1:2], axis=None, valid=valid)


def axis_pool(tokens: Tensor, grid: Sequence[int], axis: int | None, valid: Tensor | None = None) -> Tensor:
    """Mean over all grid axes but one, the rest concatenated: (B, T, D) -> (B, grid[axis]·D).

    For a (time, frequency) grid, axis 1 keeps one mean per frequency band. A place without a real token gives zeros.
    """
    B, T, D = tokens.shape
    kept = 1 if axis is None else grid[axis]
    real = tokens.new_ones(B, T, dtype=torch.bool) if valid is None else valid
    # Zero the padding before summing: a NaN there must not leak through a multiplication by zero.
    filled = torch.where(real[..., None], tokens, tokens.new_zeros(()))
    total = _sum_but_one(filled.reshape(B, *grid, D), axis)
    count = _sum_but_one(real.to(tokens.dtype).reshape(B, *grid, 1), axis)
    return (total / count.clamp(min=1)).reshape(B, kept * D)


def deviation_pool(tokens: Tensor, grid: Sequence[int], axis: int | None, valid: Tensor | None = None) -> Tensor:
    """The standard deviation where `axis_pool` takes the mean: what few tokens say does not drown in many.

    From the mean of squared distances to the mean, not from a difference of large squares; all in float32 or wider.
    """
    B, T, D = tokens.shape
    wide = tokens.float() if tokens.dtype in (torch.float16, torch.bfloat16) else tokens
    mean = axis_pool(wide, grid, axis, valid).reshape(B, -1, D)  # (B, kept, D)
    places = torch.arange(T, device=tokens.device)
    if axis is not None:
        inner = math.prod(grid[axis % len(grid) + 1 :])
        places = places // inner % grid[axis]
    else:
        places = torch.zeros_like(places)
    away = wide - mean[:, places]  # (B, T, D)
    variance = axis_pool(away.square(), grid, axis, valid)
    # The square root has no slope at zero, where a place has one token or none: it would make gradients NaN.
    spreads = variance > 0
    return torch.where(spreads, variance, 1.0).sqrt() * spreads


def pool_tokens(
    tokens: Tensor, grid: Sequence[int], axis: int | None, valid: Tensor | None = None, *, deviation: bool = False
) -> Tensor:
    """Means, then deviations if wanted: (B, T, D) -> (B, P·D) or (B, 2·P·D), P = grid[axis], or 1 without an axis."""
    mean = axis_pool(tokens, grid, axis, valid)
    return torch.cat([mean, deviation_pool(tokens, grid, axis, valid)], dim=1) if deviation else mean


def _sum_but_one(x: Tensor, axis: int | None) -> Tensor:
    """Sum (B, *grid, D) over all grid axes but `axis`."""
    rank = x.dim() - 2
    kept = None if axis is None else axis % rank
    summed = [1 + a for a in range(rank) if a != kept]
    return x.sum(dim=summed) if summed else x  # torch takes no axes for all axes
