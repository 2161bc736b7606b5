"""The three losses of the paper (§3.2), and regression of patches; in float32 whatever the networks ran in.

Shapes: B samples, H hidden tokens a sample that are predicted, M codebooks, K codes; logits M tensors (B, H, K_m),
codes (B, H, M); patches (B, H, F).

Patches: L_patches = mean over hidden tokens and their F numbers of (guess − target)², where the target is
(p − mean(p)) / √(var(p) + ε), mean and variance over the F numbers of the patch itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, one_hot

from bridle.quantize import Quantized

PATCH_EPS = 1e-6  # ε: what varies less than this is near enough to nothing not to be blown up


class Hidden(NamedTuple):
    """The positions to predict of a batch as a rectangle, so that heads and loss run there and nowhere else."""

    at: Tensor  # (B, H) int64, which token
    counted: Tensor  # (B, H) bool; False on spare slots of samples with padding

    @classmethod
    def of(cls, marked: Tensor, count: int) -> Hidden:
        """The first `count` positions per sample, marked ones first: no shape depends on the data."""
        index = marked.to(torch.int8).argsort(dim=1, descending=True, stable=True)[:, :count]  # (B, T) -> (B, H)
        return cls(index, marked.gather(1, index))

    def take(self, x: Tensor) -> Tensor:
        """(B, T, ...) -> (B, H, ...)."""
        extra = x.dim() - 2
        index = self.at.reshape(*self.at.shape, *(1,) * extra).expand(*self.at.shape, *x.shape[2:])
        return x.gather(1, index)


class CodeTargets(NamedTuple):
    """What the heads must predict: hard codes, or with `soft` the k nearest codes and their weights.

    Of the hidden tokens (B, H, …), or of all tokens (B, T, …) before `at` chose among them.
    """

    codes: Tensor  # (B, H, M)
    soft_codes: Tensor | None = None  # (B, H, M, k)
    soft_weights: Tensor | None = None  # (B, H, M, k)

    def at(self, hidden: Hidden) -> CodeTargets:
        """(B, T, ...) -> (B, H, ...): the targets of the hidden positions."""
        return CodeTargets(*(None if part is None else hidden.take(part) for part in self))  # type: ignore[arg-type]


def encoder_loss(
    logits: Sequence[Tensor], targets: CodeTargets, counted: Tensor, *, kind: Literal["ce", "bce"] = "ce"
) -> Tensor:
    """L_encoder: per sample the mean over its masked tokens and the M heads, then the mean over samples."""
    by_stage = [_head_loss(head, targets, m, kind) for m, head in enumerate(logits)]  # M x (B, H)
    return mean_over_hidden(torch.stack(by_stage).mean(0), counted)


def mean_over_hidden(per_token: Tensor, counted: Tensor) -> Tensor:
    """(B, H) -> (): per sample the mean over its counted tokens, then the mean over samples."""
    weight = counted.to(per_token.dtype)
    per_sample = (per_token * weight).sum(1) / weight.sum(1).clamp_min(1.0)
    return per_sample.mean()


def patch_target(patches: Tensor) -> Tensor:
    """What must be predicted of patches (…, F): each brought to mean 0 and variance 1."""
    patches = patches.float()
    centred = patches - patches.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + PATCH_EPS).sqrt()


def patch_loss(guess: Tensor, target: Tensor, counted: Tensor) -> Tensor:
    """L_patches: squared error per number, then as `encoder_loss` over hidden tokens and samples."""
    return mean_over_hidden((guess.float() - target.float()).square().mean(-1), counted)


def _head_loss(logits: Tensor, targets: CodeTargets, m: int, kind: str) -> Tensor:
    """(B, H, K) -> (B, H)."""
    logits = logits.float()
    if kind == "ce" and targets.soft_codes is None:
        return cross_entropy(logits.flatten(0, 1), targets.codes[..., m].flatten(), reduction="none").view(
            logits.shape[:2]
        )
    if targets.soft_codes is None or targets.soft_weights is None:
        wanted = one_hot(targets.codes[..., m], logits.shape[-1]).float()
    else:
        wanted = torch.zeros_like(logits).scatter_add_(
            -1, targets.soft_codes[..., m, :], targets.soft_weights[..., m, :].float()
        )
    if kind == "ce":
        return -(wanted * logits.log_softmax(-1)).sum(-1)
    return binary_cross_entropy_with_logits(logits, wanted, reduction="none").mean(-1)


def token_accuracy(logits: Sequence[Tensor], codes: Tensor, counted: Tensor) -> Tensor:
    """Share of masked tokens whose code is the head's first choice, per stage: (M,)."""
    weight = counted.float()
    right = [(head.argmax(-1) == codes[..., m]).float() for m, head in enumerate(logits)]
    return torch.stack([(r * weight).sum() / weight.sum().clamp_min(1.0) for r in right])


def codebook_loss(
    found: Quantized, *, commitment_weight: float, commitment: Literal["stages", "sum"] = "stages"
) -> Tensor:
    """L_cb: β·commitment plus, under the gradient update, the codebook term (absent under EMA)."""
    pull = found.commitment if commitment == "stages" else found.commitment_on_sum
    return commitment_weight * pull + found.codebook_term


def cosine_loss(
    z_hat: Tensor, z: Tensor, *, valid: Tensor | None = None, kind: Literal["mean", "ratio"] = "mean", eps: float = 1e-6
) -> Tensor:
    """L_cos: mean over tokens of 1 - cos(z_hat, z); `ratio` is the paper's ratio of sums over each sample's tokens."""
    z_hat, z = z_hat.float(), z.float()
    dot = (z_hat * z).sum(-1)  # (B, T)
    norms = (z_hat.norm(dim=-1) * z.norm(dim=-1)).clamp_min(eps)
    weight = torch.ones_like(dot) if valid is None else valid.to(dot.dtype)
    if kind == "ratio":
        per_sample: Tensor = 1 - (dot * weight).sum(1) / (norms * weight).sum(1).clamp_min(eps)
        return per_sample.mean()
    total: Tensor = ((1 - dot / norms) * weight).sum()
    return total / weight.sum().clamp_min(1.0)
