"""Decoder D and its heads: from visible features to a guess at every masked position.

Shapes: z (B, V, D), features (B, T, Dd), or (B, H, Dd) of the predicted tokens alone; for the N predicted tokens M
logits (N, K_m), or patches (N, F).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from bridle.geometry import Geometry
from bridle.nn.cross import CrossTransformer
from bridle.nn.masking import Mask, scatter_tokens
from bridle.nn.position import sincos_position
from bridle.nn.transformer import NORM_EPS, Transformer
from bridle.nn.window import WindowTransformer


class Decoder(nn.Module):
    """Mask tokens at hidden positions, then plain or shifted-window blocks over the whole grid.

    `cross` has mask tokens at the predicted positions alone, which attend to the visible tokens (CrossMAE).

    Buffers:
        position (T, Dd): sin-cos table; derived, not saved.
    """

    position: Tensor

    def __init__(
        self,
        *,
        geometry: Geometry,
        encoder_width: int,
        width: int,
        depth: int,
        heads: int,
        mlp_ratio: float = 4.0,
        kind: Literal["window", "plain", "cross"] = "window",
        window: Literal["auto"] | tuple[int, ...] = "auto",
        checkpoint_activations: bool = False,
    ) -> None:
        super().__init__()
        self.tokens = geometry.tokens
        self.embed = nn.Linear(encoder_width, width)
        self.mask_token = nn.Parameter(torch.zeros(width))
        shape: dict[str, Any] = {"width": width, "depth": depth, "heads": heads, "mlp_ratio": mlp_ratio}
        shape |= {"checkpoint_activations": checkpoint_activations}
        self.trunk: nn.Module
        if kind == "window":
            self.trunk = WindowTransformer(**shape, grid=geometry.grid, window=window)
        else:
            self.trunk = CrossTransformer(**shape) if kind == "cross" else Transformer(**shape)
        self.norm = nn.LayerNorm(width, eps=NORM_EPS)
        self.register_buffer("position", sincos_position(geometry.grid, width), persistent=False)

    def forward(self, z: Tensor, *, mask: Mask, valid: Tensor | None = None, only: Tensor | None = None) -> Tensor:
        """(B, V, D) -> (B, T, Dd), or (B, H, Dd) of the tokens `only` (B, H), which costs less."""
        shown = self.embed(z)
        if isinstance(self.trunk, CrossTransformer):
            return self._ask(self.trunk, shown, mask, only)
        full = scatter_tokens(
            shown, mask.visible, self.mask_token.to(shown.dtype), tokens=self.tokens, slot_valid=mask.visible_valid
        )
        features: Tensor = self.norm(self.trunk(full + self.position, key_valid=valid, only=only))
        return features

    def _ask(self, trunk: CrossTransformer, shown: Tensor, mask: Mask, only: Tensor | None) -> Tensor:
        """Features (B, H, Dd) of queries at the positions `only`, or (B, T, Dd) at all; shown (B, V, Dd) is asked."""
        at = torch.arange(self.tokens, device=shown.device).expand(len(shown), -1) if only is None else only
        queries = self.mask_token.to(shown.dtype) + self.position[at]  # (B, H, Dd)
        features: Tensor = self.norm(trunk(queries, shown + self.position[mask.visible], key_valid=mask.visible_valid))
        return features


class CodeHeads(nn.Module):
    """One linear classifier per codebook, stored as a single matrix."""

    def __init__(self, *, width: int, sizes: Sequence[int]) -> None:
        super().__init__()
        self.sizes = tuple(sizes)
        self.linear = nn.Linear(width, sum(self.sizes))

    def forward(self, features: Tensor) -> tuple[Tensor, ...]:
        """(…, Dd) -> M logits (…, K_m)."""
        logits: tuple[Tensor, ...] = self.linear(features).split(self.sizes, dim=-1)
        return logits


class PatchHead(nn.Module):
    """One linear map to the numbers of a patch, where patches themselves are the target."""

    def __init__(self, *, width: int, patch_features: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, patch_features)

    def forward(self, features: Tensor) -> Tensor:
        """(N, Dd) -> (N, F)."""
        guess: Tensor = self.linear(features)
        return guess
