"""Cut an input into patches and embed them, on grids of any rank.

Shapes: x (B, C, *input), tokens (B, T, F) with F = C·prod(patch), embedded (B, T, D).

Tokens are in row-major order over the grid (the last axis runs fastest); the features of one token are in the order
(C, *patch). So a convolution whose kernel and stride are the patch is `patchify` followed by a linear map with the
kernel flattened: W_linear = W_conv.reshape(D, F).
"""

from __future__ import annotations

from math import prod

from torch import Tensor, nn

from bridle.errors import UsageError
from bridle.geometry import Geometry


def patchify(x: Tensor, patch: tuple[int, ...]) -> Tensor:
    """(B, C, *input) -> (B, T, F)."""
    rank = len(patch)
    if x.ndim != rank + 2 or any(n % p for n, p in zip(x.shape[2:], patch, strict=True)):
        raise UsageError(
            f"cannot cut an input of shape {list(x.shape)} into patches of {list(patch)}; "
            f"expected (B, C, {rank} axes), each a multiple of its patch."
        )
    B, C, *size = x.shape
    grid = [n // p for n, p in zip(size, patch, strict=True)]
    split = [part for pair in zip(grid, patch, strict=True) for part in pair]
    x = x.reshape(B, C, *split)  # (B, C, g1, p1, g2, p2, ...)
    grid_axes = range(2, 2 + 2 * rank, 2)
    patch_axes = range(3, 3 + 2 * rank, 2)
    x = x.permute(0, *grid_axes, 1, *patch_axes)  # -> (B, g1, g2, ..., C, p1, p2, ...)
    return x.reshape(B, prod(grid), C * prod(patch))


def unpatchify(tokens: Tensor, *, channels: int, grid: tuple[int, ...], patch: tuple[int, ...]) -> Tensor:
    """(B, T, F) -> (B, C, *input), the inverse of `patchify`."""
    rank = len(grid)
    expected = (prod(grid), channels * prod(patch))
    if len(patch) != rank or tokens.ndim != 3 or tuple(tokens.shape[1:]) != expected:
        raise UsageError(
            f"cannot put tokens of shape {list(tokens.shape)} together on grid {list(grid)} with patch {list(patch)} "
            f"and {channels} channels; expected (B, {expected[0]}, {expected[1]})."
        )
    B = tokens.shape[0]
    x = tokens.reshape(B, *grid, channels, *patch)  # (B, g1, g2, ..., C, p1, p2, ...)
    pairs = [axis for k in range(rank) for axis in (1 + k, 2 + rank + k)]
    x = x.permute(0, 1 + rank, *pairs)  # -> (B, C, g1, p1, g2, p2, ...)
    return x.reshape(B, channels, *(g * p for g, p in zip(grid, patch, strict=True)))


class PatchEmbed(nn.Module):
    """One linear map of each patch: (B, C, *input) -> (B, T, D)."""

    def __init__(self, *, geometry: Geometry, width: int) -> None:
        super().__init__()
        self.geometry = geometry
        self.proj = nn.Linear(geometry.patch_features, width)

    def forward(self, x: Tensor) -> Tensor:
        if tuple(x.shape[1:]) != self.geometry.shape:
            raise UsageError(
                f"the model expects inputs of shape (B, {', '.join(map(str, self.geometry.shape))}), "
                f"got {tuple(x.shape)}; resize or crop the input, or build the model for this size."
            )
        out: Tensor = self.proj(patchify(x, self.geometry.patch))  # (B, T, F) -> (B, T, D)
        return out
