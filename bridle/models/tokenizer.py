"""Tokenizers: x -> z̃ -> codes. The cold start is a fixed random projection; later ones have an encoder of their own.

Both offer `encode` (z̃) and a `quantizer`, so the phases need not know which they hold.
Shapes: x (B, C, *input), z_tilde (B, T, Dq), codes (B, T, M).
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from bridle.geometry import Geometry
from bridle.models.encoder import Encoder
from bridle.nn.patch import patchify
from bridle.nn.position import sincos_position
from bridle.quantize import ResidualQuantizer
from bridle.quantize.nearest import full_precision


class ColdStartTokenizer(nn.Module):
    """Patch content through a fixed random linear map (paper §4.1): no bias, no training, no position unless asked for.

    Buffers:
        projection (F, Dq): random map, drawn once with unit-variance output for standardised patches.
        place (T, F): sin-cos positions added to the patches, or absent; derived, not saved.
    """

    projection: Tensor
    place: Tensor | None

    def __init__(
        self,
        *,
        geometry: Geometry,
        quantizer: ResidualQuantizer,
        standardise: Literal["dataset", "patch"] = "dataset",
        position: bool = False,
    ) -> None:
        super().__init__()
        self.geometry = geometry
        self.standardise = standardise
        self.quantizer = quantizer
        self.register_buffer("projection", torch.zeros(geometry.patch_features, quantizer.width))
        place = sincos_position(geometry.grid, geometry.patch_features) if position else None
        self.register_buffer("place", place, persistent=False)

    def draw_projection(self, generator: torch.Generator) -> None:
        """Draw the random map; called once by the builder."""
        drawn = torch.randn(self.projection.shape, generator=generator) / self.projection.shape[0] ** 0.5
        self.projection.copy_(drawn)

    def encode(self, x: Tensor, *, valid: Tensor | None = None) -> Tensor:
        """(B, C, *input) -> z̃ (B, T, Dq). Inputs arrive standardised over the data set."""
        patches = patchify(x, self.geometry.patch).float()  # (B, C, *input) -> (B, T, F)
        if self.standardise == "patch":
            patches = patches - patches.mean(-1, keepdim=True)
            patches = patches / patches.std(-1, keepdim=True, correction=0).clamp_min(1e-6)
        if self.place is not None:
            patches = patches + self.place
        # Targets must not depend on autocast: the same input always gets the same codes.
        with full_precision(x.device):
            return patches @ self.projection

    def tokenize(self, x: Tensor, *, valid: Tensor | None = None, stages: int | None = None) -> Tensor:
        """(B, C, *input) -> codes (B, T, M), or of the first `stages` only."""
        return self.quantizer.assign(self.encode(x, valid=valid), stages=stages)


class VitTokenizer(nn.Module):
    """E_T, an encoder of the same architecture as E, projected to the code width (paper §3, App. E)."""

    def __init__(self, *, encoder: Encoder, quantizer: ResidualQuantizer) -> None:
        super().__init__()
        self.encoder = encoder
        self.projection = nn.Linear(encoder.width, quantizer.width)
        self.quantizer = quantizer

    def encode(self, x: Tensor, *, valid: Tensor | None = None) -> Tensor:
        """(B, C, *input) -> z̃ (B, T, Dq), always float32."""
        z_tilde: Tensor = self.projection(self.encoder(x, valid=valid).z)
        return z_tilde.float()

    def tokenize(self, x: Tensor, *, valid: Tensor | None = None, stages: int | None = None) -> Tensor:
        """(B, C, *input) -> codes (B, T, M), or of the first `stages` only."""
        return self.quantizer.assign(self.encode(x, valid=valid), stages=stages)


Tokenizer = ColdStartTokenizer | VitTokenizer
