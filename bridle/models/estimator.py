"""Tokenizer estimator TE: from the quantized latent back to the frozen encoder's features (paper §3.2, App. E).

Shapes: q (B, T, Dq), z and z_hat (B, T, D).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bridle.geometry import Geometry
from bridle.nn.position import sincos_position
from bridle.nn.transformer import NORM_EPS, Transformer


class Estimator(nn.Module):
    """A few plain blocks between two linear maps.

    Buffers:
        position (T, W): sin-cos table; derived, not saved.
        teacher_mean (T, D): mean of the teacher's features at each position, subtracted from its targets; zero leaves
            them as they are. Changes only by `centre_on`.
    """

    position: Tensor
    teacher_mean: Tensor

    def __init__(
        self,
        *,
        geometry: Geometry,
        code_width: int,
        encoder_width: int,
        width: int,
        depth: int,
        heads: int,
        mlp_ratio: float = 4.0,
        checkpoint_activations: bool = False,
    ) -> None:
        super().__init__()
        self.embed = nn.Linear(code_width, width)
        self.trunk = Transformer(
            width=width, depth=depth, heads=heads, mlp_ratio=mlp_ratio, checkpoint_activations=checkpoint_activations
        )
        self.norm = nn.LayerNorm(width, eps=NORM_EPS)
        self.head = nn.Linear(width, encoder_width)
        self.register_buffer("position", sincos_position(geometry.grid, width), persistent=False)
        self.register_buffer("teacher_mean", torch.zeros(geometry.tokens, encoder_width))

    def centre_on(self, mean: Tensor) -> None:
        """Set what `target` subtracts from the teacher's features: one mean (D,), or one per position (T, D)."""
        self.teacher_mean.copy_(mean)

    def target(self, z: Tensor) -> Tensor:
        """What z_hat is compared with: the teacher's features, centred."""
        return z.float() - self.teacher_mean.float()

    def forward(self, q: Tensor, *, valid: Tensor | None = None) -> Tensor:
        """q (B, T, Dq) -> z_hat (B, T, D)."""
        hidden = self.trunk(self.embed(q) + self.position, key_valid=valid)
        z_hat: Tensor = self.head(self.norm(hidden))
        return z_hat
