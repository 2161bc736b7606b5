"""Fixed sine-cosine positions for grids of any rank.

Shapes: grid (n_1, ..., n_r), table (T, D) in the token order of `patchify`.

The width is split over the axes in even parts of P = 2·⌊D/(2r)⌋ columns; what remains at the end is zero. An axis'
part holds, for its coordinate p and k = 0 ... P/2 − 1,

    sin(p·ω_k) in column k,   cos(p·ω_k) in column P/2 + k,   ω_k = 10000^(−k/(P/2)).

The last axis has the first part, as in the table that MAE made usual for pictures (columns first, then rows), so that
weights trained with that table fit. ω_0 = 1 keeps all rows distinct: whole numbers never differ by a multiple of 2π.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import interpolate, pad

from bridle.errors import ConfigError


def sincos_position(grid: tuple[int, ...], width: int) -> Tensor:
    """The table (T, D), float32, computed in float64."""
    half = width // (2 * len(grid))
    if half < 1:
        raise ConfigError(
            f"width {width} is too small for positions on grid {list(grid)}; expected at least {2 * len(grid)} "
            "(a sine and a cosine per axis)."
        )
    omega = 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)  # (P/2,)
    coordinates = torch.meshgrid(*(torch.arange(n, dtype=torch.float64) for n in grid), indexing="ij")
    parts: list[Tensor] = []
    for coordinate in reversed(coordinates):
        angle = coordinate.reshape(-1, 1) * omega  # (T, P/2)
        parts += [angle.sin(), angle.cos()]
    table = torch.cat(parts, dim=1)  # (T, r·P)
    return pad(table, (0, width - table.shape[1])).float()


def resized_position(table: Tensor, grid: tuple[int, ...], wanted: tuple[int, ...]) -> Tensor:
    """A table (T, D) of one grid interpolated to another of the same rank: linear, of planes bicubic."""
    if grid == wanted:
        return table
    volume = table.t().reshape(1, table.shape[1], *grid)  # (T, D) -> (1, D, *grid)
    mode = {1: "linear", 2: "bicubic", 3: "trilinear"}[len(grid)]
    return interpolate(volume, size=wanted, mode=mode).flatten(2)[0].t().contiguous()
