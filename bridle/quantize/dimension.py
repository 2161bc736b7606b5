"""How many directions latents and codes fill.

Shapes: N vectors of width D. With C their (weighted) covariance and λ_1 ≥ λ_2 ≥ … its eigenvalues,

    dimension = (Σλ)² / Σλ² = (tr C)² / tr C²     participation ratio: D if all directions vary alike, 1 if one does
    first     = λ_1 / Σλ                          share of the first principal component

A book may use all its codes and still be poor: where all of them lie along a few directions, its codes are steps of a
few numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from bridle import distributed

NARROW = 0.1  # of the directions there could be; a book whose codes fill fewer counts as narrow
RECOVERED = 1.2  # so much wider before it can be said to be narrow again


class Spread(NamedTuple):
    """How vectors are spread over directions."""

    dimension: float
    first: float


@dataclass(frozen=True)
class SpreadSums:
    """Σw, Σw·v and Σw·v vᵀ of some vectors, in float64; they add up over batches and ranks."""

    weight: Tensor  # ()
    total: Tensor  # (D,)
    outer: Tensor  # (D, D)

    @classmethod
    def of(cls, vectors: Tensor, weights: Tensor | None = None) -> SpreadSums:
        """Of vectors (N, D), each counted once or by its weight (N,)."""
        v = vectors.detach().double()
        w = torch.ones(len(v), dtype=torch.float64, device=v.device) if weights is None else weights.double().to(v)
        weighted = v * w[:, None]
        return cls(w.sum(), weighted.sum(0), weighted.t() @ v)

    def __add__(self, other: SpreadSums) -> SpreadSums:
        return SpreadSums(self.weight + other.weight, self.total + other.total, self.outer + other.outer)

    def over_ranks(self) -> SpreadSums:
        return SpreadSums(*(distributed.sum_over_ranks(part) for part in (self.weight, self.total, self.outer)))

    def spread(self) -> Spread | None:
        """None where nothing varies."""
        mean = self.total / self.weight.clamp_min(1e-300)
        covariance = self.outer / self.weight.clamp_min(1e-300) - torch.outer(mean, mean)
        variance = covariance.diagonal().sum()
        if not bool(variance > 1e-12 * mean.square().sum().clamp_min(1e-300)):
            return None
        largest = torch.linalg.eigvalsh(covariance.cpu())[-1]
        return Spread(float(variance.square() / covariance.square().sum()), float(largest / variance.cpu()))


def code_spreads(counts: Sequence[Tensor], codebooks: Sequence[Tensor]) -> list[Spread | None]:
    """For each stage how its codes (K_m, D) are spread, each weighed by how often it was used (K_m,)."""
    return [SpreadSums.of(code, count).spread() for count, code in zip(counts, codebooks, strict=True)]


def is_narrow(dimension: float, *, directions: int) -> bool:
    """Do the codes fill too few of the directions that there could be? One or two cannot be filled better."""
    return dimension < max(1.5, NARROW * directions)


class NarrowWatch:
    """Says so, once, when the codes of a stage come to lie along a few directions; again only after a recovery."""

    def __init__(self, directions: int | None, *, from_step: int) -> None:
        self.directions, self.from_step = directions, from_step
        self.told = set[int]()

    def look(self, *, step: int, dimensions: Sequence[float]) -> list[str]:
        """Warnings after `step` steps, from the effective dimension of each stage's codes in use."""
        found: list[str] = []
        if self.directions is None or step < self.from_step:
            return found
        for m, dimension in enumerate(dimensions):
            if is_narrow(dimension, directions=self.directions) and m not in self.told:
                self.told.add(m)
                found.append(
                    f"stage {m + 1} is narrow: its codes fill {dimension:.1f} of {self.directions} directions; after "
                    "the run `bridle codebooks` says what to try."
                )
            elif not is_narrow(dimension / RECOVERED, directions=self.directions):
                self.told.discard(m)
        return found
