"""Main encoder E: patches -> transformer -> features; also the body of the tokenizer's encoder E_T.

Shapes: x (B, C, *input); z (B, T, D), or (B, V, D) when only V visible tokens go in.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from bridle.geometry import Geometry
from bridle.nn.masking import Mask, gather_tokens
from bridle.nn.patch import PatchEmbed
from bridle.nn.position import sincos_position
from bridle.nn.transformer import NORM_EPS, Transformer


class Encoded(NamedTuple):
    """What the encoder says of a batch."""

    z: Tensor  # (B, T, D) or (B, V, D), after the final norm
    class_token: Tensor | None  # (B, D) when the encoder has one


class Encoder(nn.Module):
    """Pre-norm ViT on a grid of any rank, with fixed sin-cos positions.

    Buffers:
        position (T, D): sin-cos table; derived from the geometry, not saved.
    """

    position: Tensor

    def __init__(
        self,
        *,
        geometry: Geometry,
        width: int,
        depth: int,
        heads: int,
        mlp_ratio: float = 4.0,
        class_token: bool = False,
        checkpoint_activations: bool = False,
    ) -> None:
        super().__init__()
        self.geometry = geometry
        self.width = width
        self.depth = depth
        self.embed = PatchEmbed(geometry=geometry, width=width)
        self.trunk = Transformer(
            width=width, depth=depth, heads=heads, mlp_ratio=mlp_ratio, checkpoint_activations=checkpoint_activations
        )
        self.norm = nn.LayerNorm(width, eps=NORM_EPS)
        self.class_token = nn.Parameter(torch.zeros(width)) if class_token else None
        self.register_buffer("position", sincos_position(geometry.grid, width), persistent=False)

    def forward(
        self, x: Tensor, *, mask: Mask | None = None, valid: Tensor | None = None, drop: Tensor | None = None
    ) -> Encoded:
        """Features of the visible tokens (with `mask`) or of all; `valid` (B, T) marks padding, `drop` is drop-path."""
        z = self.embed(x) + self.position  # (B, C, *input) -> (B, T, D)
        key_valid = valid
        if mask is not None:
            z = gather_tokens(z, mask.visible)  # (B, T, D) -> (B, V, D)
            key_valid = mask.visible_valid
        if self.class_token is not None:
            z = torch.cat([self.class_token.expand(z.shape[0], 1, -1), z], dim=1)
            if key_valid is not None:
                key_valid = nn.functional.pad(key_valid, (1, 0), value=True)
        z = self.norm(self.trunk(z, key_valid=key_valid, drop=drop))
        if self.class_token is None:
            return Encoded(z, None)
        return Encoded(z[:, 1:], z[:, 0])
