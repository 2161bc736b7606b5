"""An encoder with a linear head, for learning from labels.

Shapes: x (B, C, *input), z (B, T, D) or (B, V, D) under a mask, logits and targets (B, K).

    logits = W · (pool(z) − centre)/scale + b    pool: mean over real tokens, one mean per band of an axis (both with
                                                 deviations if wanted), or class token

A mask hides tokens in training: they are dropped before the encoder, and pooling goes over what is visible. The loss is
computed in float32 from targets y in shares (B, K), smoothed by s:

    y ← (1 − s)·y + s/K,    CE = −Σ_k y_k log softmax(logits)_k,    BCE = mean_k −y_k log σ_k − (1 − y_k) log(1 − σ_k)
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, one_hot

from bridle.models.encoder import Encoded, Encoder
from bridle.nn.masking import Mask, scatter_tokens
from bridle.nn.pooling import axis_pool, deviation_pool

SMALLEST_SPREAD = 1e-6
HEAD_STD = 2e-5  # near zero, as in MAE: the first steps then teach the head before they disturb the encoder


class Classifier(nn.Module):
    """Encoder, pooling, standardisation of the pooled features, and a linear head.

    Pooled features of different items share most of their length, so that a head on top of them learns slowly. Centre
    and scale, measured once before the first step, take that part away, as a linear probe does.

    Buffers:
        centre, scale (places, D): mean and deviation of the pooled features when training began.
    """

    centre: Tensor
    scale: Tensor

    def __init__(
        self,
        *,
        encoder: Encoder,
        classes: int,
        pool: Literal["mean", "axis", "class"] = "mean",
        axis: int = 0,
        deviation: bool = False,
    ) -> None:
        super().__init__()
        self.encoder, self.classes, self.pool, self.axis = encoder, classes, pool, axis
        self.deviation = deviation and pool != "class"
        places = encoder.geometry.grid[axis] if pool == "axis" else 1
        places *= 2 if self.deviation else 1
        self.register_buffer("centre", torch.zeros(places, encoder.width))
        self.register_buffer("scale", torch.ones(places, encoder.width))
        self.head = nn.Linear(places * encoder.width, classes)

    @torch.no_grad()
    def start_head(self, generator: torch.Generator) -> None:
        """Give the head its starting values; called once by the builder."""
        self.head.weight.copy_(HEAD_STD * torch.randn(self.head.weight.shape, generator=generator))
        self.head.bias.zero_()

    def forward(
        self, x: Tensor, *, valid: Tensor | None = None, mask: Mask | None = None, drop: Tensor | None = None
    ) -> Tensor:
        """(B, C, *input) -> logits (B, K)."""
        pooled = self.pooled(self.encoder(x, valid=valid, mask=mask, drop=drop), valid, mask)  # (B, places, D)
        logits: Tensor = self.head(((pooled - self.centre) / self.scale).flatten(1))
        return logits

    @torch.no_grad()
    def standardise(self, batches: Iterable[tuple[Tensor, Tensor | None]]) -> None:
        """Measure centre and scale on inputs x and their `valid`, un-augmented."""
        pooled = torch.cat([self.pooled(self.encoder(x, valid=valid), valid, None) for x, valid in batches]).double()
        spread = pooled.std(0, correction=0)
        self.centre.copy_(pooled.mean(0))
        self.scale.copy_(torch.where(spread > SMALLEST_SPREAD, spread, 1.0))  # what never changes stays at zero

    def pooled(self, encoded: Encoded, valid: Tensor | None, mask: Mask | None) -> Tensor:
        """(B, T, D) or (B, V, D) -> (B, places, D); deviations follow the means."""
        z, geometry = encoded.z, self.encoder.geometry
        if self.pool == "class":
            assert encoded.class_token is not None  # the config is refused without one
            return encoded.class_token[:, None]
        axis, grid = (self.axis, geometry.grid) if self.pool == "axis" else (None, z.shape[1:2])
        if mask is not None and axis is None:
            valid = mask.visible_valid
        elif mask is not None:  # positions of an axis are only known on the whole grid
            nothing = z.new_zeros(self.encoder.width)
            z = scatter_tokens(z, mask.visible, nothing, tokens=geometry.tokens, slot_valid=mask.visible_valid)
            valid = ~mask.masked if valid is None else valid & ~mask.masked
        found = [axis_pool(z, grid, axis, valid)]
        if self.deviation:
            found.append(deviation_pool(z, grid, axis, valid).to(z.dtype))
        return torch.cat(found, dim=1).reshape(len(z), -1, self.encoder.width)


def classification_loss(
    logits: Tensor, target: Tensor, *, kind: Literal["ce", "bce"], label_smoothing: float = 0.0
) -> Tensor:
    """Mean over samples; `target` is (B,) classes or (B, K) shares."""
    logits = logits.float()
    K = logits.shape[1]
    y = one_hot(target, K).float() if target.dim() == 1 else target.float()
    y = (1 - label_smoothing) * y + label_smoothing / K
    if kind == "ce":
        return -(y * logits.log_softmax(1)).sum(1).mean()
    return binary_cross_entropy_with_logits(logits, y)
