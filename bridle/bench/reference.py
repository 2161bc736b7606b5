"""A plain encoder-phase step of the same architecture, to measure ours against.

What a straightforward implementation does: the tokenizer's full forward at every step, logits and loss at all T
positions with the visible ones weighted zero, clipping where the recipe clips, torch's AdamW as it comes.

Shapes: x (B, C, *input), mask V of T tokens visible, codes (B, T, M).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from bridle.config import Config
from bridle.models.build import Nets
from bridle.nn.masking import draw_mask


class PlainStep:
    """Trains encoder, decoder and heads of `nets` on one batch after the other."""

    def __init__(self, nets: Nets, config: Config, *, generator: torch.Generator) -> None:
        self.nets, self.config, self.generator = nets, config, generator
        modules = (nets.encoder, nets.decoder, nets.heads)
        self.parameters = [p for module in modules for p in module.parameters()]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=1e-6)

    def __call__(self, x: Tensor) -> float:
        """One step; its loss."""
        nets = self.nets
        with torch.no_grad():
            codes = nets.tokenizer.quantizer(nets.tokenizer.encode(x)).codes  # (B, T, M)
        mask = draw_mask(
            self.config.mask.kind, grid=self.config.geometry.build().grid, ratio=self.config.mask.ratio,
            batch=len(x), generator=self.generator, device=x.device,
        )  # fmt: skip
        z = nets.encoder(x, mask=mask).z  # (B, V, D)
        logits = nets.heads(nets.decoder(z, mask=mask), codes)  # M x (B, T, K_m)
        weight = mask.masked.float()  # (B, T)
        losses = [cross_entropy(head.transpose(1, 2), codes[..., m], reduction="none") for m, head in enumerate(logits)]
        loss = (torch.stack(losses).mean(0) * weight).sum() / weight.sum()
        loss.backward()
        if self.config.encoder_phase.clip is not None:
            torch.nn.utils.clip_grad_norm_(self.parameters, self.config.encoder_phase.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()  # at the end, so that whoever steps next on the same networks starts clean
        return loss.item()
