"""Second moments of patches, and the linear maps that even them out.

Shapes: p (B, T, F) patches. With mean μ and covariance V Λ Vᵀ over all real tokens, λ̄ the mean eigenvalue:

    whitening W = V (Λ + r·λ̄)^(−1/2) Vᵀ             (F, F)   r the ridge: components far below r·λ̄ stay small
    partial whitening A = V_n (Λ_n + δ·λ̄)^(−w/2)     (F, n)   n leading components; w = 0 PCA, ½ half, 1 full whitening
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from bridle import distributed

FLOOR = 1e-6  # δ: components without variance are not blown up


class Spectrum(NamedTuple):
    """Mean and eigenvectors of patches, float64; eigenvalues fall."""

    mean: Tensor  # (F,), or (T, F) where every position has its own
    values: Tensor  # (F,)
    vectors: Tensor  # (F, F), one component per column

    def whitening(self, ridge: float) -> Tensor:
        """W (F, F); the identity where patches do not vary at all."""
        average = self.values.mean()
        if not bool(average > 0):
            return torch.eye(len(self.values), dtype=self.values.dtype, device=self.values.device)
        return (self.vectors * (self.values + ridge * average).rsqrt()) @ self.vectors.t()

    def partial_whitening(self, *, share: float, components: int) -> Tensor:
        """A (F, n); components without variance come out as zero."""
        kept, average = self.values[:components], self.values.mean()
        scale = torch.where(kept > 0, (kept + FLOOR * average).pow(-share / 2), 0.0)
        return self.vectors[:, :components] * scale


class PositionMeans:
    """Running sums over real tokens in float64: of all together, or with `positions` T of every position."""

    def __init__(self, features: int, device: torch.device, *, positions: int = 1) -> None:
        self.count = torch.zeros(positions, 1, dtype=torch.float64, device=device)
        self.total = torch.zeros(positions, features, dtype=torch.float64, device=device)

    def add(self, tokens: Tensor, valid: Tensor | None) -> Tensor:
        """Count tokens (B, T, F), those that `valid` (B, T) calls padding as nothing; returns what was counted."""
        real = torch.ones_like(tokens[..., 0], dtype=torch.bool) if valid is None else valid
        kept = torch.where(real[..., None], tokens, 0.0).double()  # (B, T, F)
        total, count = kept.sum(0), real.sum(0, dtype=torch.float64)[:, None]
        one = len(self.total) == 1
        self.total += total.sum(0, keepdim=True) if one else total
        self.count += count.sum(0, keepdim=True) if one else count
        return kept

    def mean(self, *, overall: bool = False) -> Tensor:
        """(T, F) over all ranks (collective): the mean of each position, or of all tokens at every position.

        The latter also where only padding was seen.
        """
        count, total = (distributed.sum_over_ranks(part) for part in (self.count, self.total))
        mean = total.sum(0) / count.sum().clamp_min(1.0)
        return mean.expand_as(total) if overall else torch.where(count > 0, total / count.clamp_min(1.0), mean)


class PatchMoments(PositionMeans):
    """The same with second moments, of what the means leave; equal on all ranks once `spectrum` has joined them."""

    def __init__(self, features: int, device: torch.device, *, positions: int = 1) -> None:
        super().__init__(features, device, positions=positions)
        self.outer = torch.zeros(features, features, dtype=torch.float64, device=device)

    def add(self, tokens: Tensor, valid: Tensor | None) -> Tensor:
        """Count the patches (B, T, F) of a batch without padding."""
        kept = super().add(tokens, valid)
        flat = kept.flatten(0, 1)
        self.outer += flat.t() @ flat
        return kept

    def spectrum(self) -> Spectrum:
        """Mean and principal components over all ranks (collective); rank 0 solves."""
        mean = self.mean()
        count, outer = (distributed.sum_over_ranks(part) for part in (self.count, self.outer))
        covariance = (outer - (mean * count).t() @ mean) / count.sum().clamp_min(1.0)
        values, vectors = torch.linalg.eigh(covariance.cpu())  # rising
        found = torch.cat([values.flip(0)[None], vectors.flip(1)]).to(outer.device)
        found = distributed.from_first_rank(found)
        # What the subtraction above leaves of nothing is rounding, not variance.
        rounding = 1e-12 * float(outer.diagonal().mean() / count.sum().clamp_min(1.0))
        values = torch.where(found[0] > rounding, found[0], 0.0)
        return Spectrum(mean[0] if len(mean) == 1 else mean, values, found[1:])


def whitened_projection(
    spectrum: Spectrum, share: float, components: int, generator: torch.Generator, like: Tensor
) -> Tensor:
    """A R in the shape (F, Dq) and dtype of `like`, with R random of orthonormal rows or columns."""
    basis = spectrum.partial_whitening(share=share, components=components).cpu()  # (F, n)
    return (basis @ random_orthonormal(components, like.shape[1], generator)).to(like)


def random_orthonormal(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    """A random (rows, columns) float64 matrix whose rows, or columns if those are fewer, are orthonormal."""
    drawn = torch.randn(max(rows, columns), min(rows, columns), generator=generator, dtype=torch.float64)
    q: Tensor = torch.linalg.qr(drawn).Q
    return q if rows >= columns else q.t()
