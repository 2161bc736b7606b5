"""Tokenizer estimator TE: from the quantized latent back to the frozen encoder's features (paper §3.2, App. E).

Shapes: q (B, T, Dq), z and z_hat (B, T, D).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from bridle.geometry import Geometry
from bridle.nn.position import sincos_position
from bridle.nn.transformer import NORM_EPS, Transformer


class CodeTransformer(nn.Module):
    """A few plain blocks over a grid of code vectors, between two linear maps: (B, T, Dq) -> (B, T, out_width).

    Buffers:
        position (T, W): sin-cos table; derived, not saved.
    """

    position: Tensor

    def __init__(
        self,
        *,
        geometry: Geometry,
        code_width: int,
        out_width: int,
        width: int,
        depth: int,
        heads: int,
        mlp_ratio: float = 4.0,
        checkpoint_activations: bool = False,
    ) -> None:
        super().__init__()
        self.geometry = geometry
        self.embed = nn.Linear(code_width, width)
        self.trunk = Transformer(
            width=width, depth=depth, heads=heads, mlp_ratio=mlp_ratio, checkpoint_activations=checkpoint_activations
        )
        self.norm = nn.LayerNorm(width, eps=NORM_EPS)
        self.head = nn.Linear(width, out_width)
        self.register_buffer("position", sincos_position(geometry.grid, width), persistent=False)

    def transform(self, q: Tensor, valid: Tensor | None, added: Tensor | None = None) -> Tensor:
        """(B, T, Dq) -> (B, T, out_width); `added` is added to the embedded vectors."""
        hidden = self.embed(q) + self.position  # (B, T, W)
        out: Tensor = self.head(self.norm(self.trunk(hidden if added is None else hidden + added, key_valid=valid)))
        return out


class Estimator(CodeTransformer):
    """From quantized latents to the teacher's features.

    Buffers:
        teacher_mean (T, D): mean of the teacher's features at each position, subtracted from its targets; zero leaves
            them as they are. Changes only by `centre_on`.
    """

    teacher_mean: Tensor

    def __init__(self, *, encoder_width: int, **shape: Any) -> None:
        super().__init__(out_width=encoder_width, **shape)
        self.register_buffer("teacher_mean", torch.zeros(self.geometry.tokens, encoder_width))

    def centre_on(self, mean: Tensor) -> None:
        """Set what `target` subtracts from the teacher's features: one mean (D,), or one per position (T, D)."""
        self.teacher_mean.copy_(mean)

    def target(self, z: Tensor) -> Tensor:
        """What z_hat is compared with: the teacher's features, centred."""
        return z.float() - self.teacher_mean.float()

    def forward(self, q: Tensor, *, valid: Tensor | None = None) -> Tensor:
        """q (B, T, Dq) -> z_hat (B, T, D)."""
        return self.transform(q, valid)
