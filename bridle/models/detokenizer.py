"""Detokenizer: from code vectors back to the input, and the loss it is trained with.

Shapes: q (B, T, Dq), the sum of the first m ≤ M code vectors of every token; x and its reconstruction (B, C, *input),
normalised; valid (B, T).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool1d

from bridle.geometry import Geometry
from bridle.models.estimator import CodeTransformer
from bridle.nn.patch import unpatchify
from bridle.quantize import ResidualQuantizer


class Detokenizer(CodeTransformer):
    """From sums of code vectors to the numbers of each patch; it knows how many stages were summed."""

    def __init__(self, *, geometry: Geometry, codebooks: int, width: int, **shape: Any) -> None:
        super().__init__(geometry=geometry, width=width, out_width=geometry.patch_features, **shape)
        self.codebooks = codebooks
        self.stage_embed = nn.Parameter(torch.zeros(codebooks, width))  # row m − 1: the sum has m stages

    def forward(self, q: Tensor, *, stages: Tensor, valid: Tensor | None = None) -> Tensor:
        """q (B, T, Dq), where sample b has the first stages[b] stages -> (B, C, *input)."""
        patches = self.transform(q, valid, self.stage_embed[stages - 1][:, None])  # (B, T, Dq) -> (B, T, F)
        geometry = self.geometry
        return unpatchify(patches.float(), channels=geometry.channels, grid=geometry.grid, patch=geometry.patch)


def prefix_vectors(quantizer: ResidualQuantizer, codes: Tensor, stages: Tensor) -> Tensor:
    """codes (B, T, M) -> q (B, T, Dq): for sample b the sum of its first stages[b] code vectors."""
    q = torch.empty(*codes.shape[:-1], quantizer.width, device=codes.device)
    for m in stages.unique().tolist():
        rows = stages == m
        q[rows] = quantizer.decode(codes[rows], stages=m)
    return q


def decode_prefix(
    detokenizer: Detokenizer, quantizer: ResidualQuantizer, codes: Tensor, m: int, *, valid: Tensor | None = None
) -> Tensor:
    """codes (B, T, M) -> (B, C, *input): the input rebuilt from the first m stages, normalised."""
    stages = torch.full((len(codes),), m, device=codes.device)
    rebuilt: Tensor = detokenizer(quantizer.decode(codes, stages=m), stages=stages, valid=valid)
    return rebuilt


def reconstruction_loss(
    guess: Tensor, x: Tensor, *, geometry: Geometry, valid: Tensor | None = None, scales: int = 1
) -> Tensor:
    """Mean |d| + d² over the real part of the input, d = guess − x, plus |d| of its averages over 2, 4, … neighbours.

    `scales` counts the resolutions; 1 compares single values only.
    """
    difference = guess - x
    share = 1.0
    if valid is not None:
        real = valid[..., None].expand(-1, -1, geometry.patch_features).to(difference.dtype)  # (B, T) -> (B, T, F)
        real = unpatchify(real, channels=geometry.channels, grid=geometry.grid, patch=geometry.patch)
        difference = difference * real
        share = float(valid.float().mean().clamp_min(1e-6))
    loss = (difference.abs() + difference.square()).mean()
    for _ in range(scales - 1):
        difference = halve(difference)
        loss = loss + difference.abs().mean()
    return loss / share


def halve(x: Tensor) -> Tensor:
    """(B, C, *input) averaged over pairs along every axis that is longer than one; an odd end is left out."""
    for axis in range(2, x.ndim):
        if x.shape[axis] > 1:
            last = x.movedim(axis, -1)
            shape = last.shape
            last = avg_pool1d(last.reshape(-1, 1, shape[-1]), kernel_size=2)
            x = last.reshape(*shape[:-1], shape[-1] // 2).movedim(-1, axis)
    return x
