"""Euclidean k-means for starting a codebook: distinct seeds, Lloyd iterations, no empty cluster while points allow it.

Shapes: N points, K clusters, D width. Points are float32, sums of points float64; memory beyond them is O(N + K·D).

Too few distinct points for K centres: the points themselves, then jittered copies of them, and a warning.
"""

from __future__ import annotations

import warnings
from typing import NamedTuple

import torch
from torch import Tensor

from bridle.quantize.nearest import chunk_rows, chunks, full_precision, nearest
from bridle.quantize.rules import norms

JITTER = 1e-3  # of the points' root mean square: apart from its twin, but far from any other point


class CodebookWarning(UserWarning):
    """The data did not allow the codebook that was asked for."""


class KMeans(NamedTuple):
    """A solved clustering; `distinct` counts different seeds found, less than K where the points did not suffice."""

    centres: Tensor  # (K, D) float32
    distinct: int
    iterations: int  # Lloyd steps made; fewer than asked for once nothing moves any more


class Seeds(NamedTuple):
    centres: Tensor  # (K, D)
    distinct: int


def kmeans(points: Tensor, codes: int, *, iterations: int, generator: torch.Generator, name: str = "k-means") -> KMeans:
    """Cluster points (N, D) into `codes` centres; `name` says in a warning which codebook is meant."""
    seeds = choose_seeds(points, codes, generator=generator)
    if seeds.distinct < codes:
        warnings.warn(
            f"{name}: only {seeds.distinct} distinct points for {codes} codes; the other codes are jittered copies. "
            "Start from more tokens, or use fewer codes.",
            CodebookWarning,
            stacklevel=2,
        )
        return KMeans(seeds.centres, seeds.distinct, 0)
    centres, made = lloyd(points, seeds.centres, iterations=iterations)
    return KMeans(centres, seeds.distinct, made)


def choose_seeds(points: Tensor, codes: int, *, generator: torch.Generator) -> Seeds:
    """`codes` different points in random order, made up with jittered copies if there are not that many."""
    order = torch.randperm(len(points), generator=generator, device=generator.device).to(points.device)
    chosen = first_distinct(points, order, codes)
    seeds = points[chosen]
    missing = codes - len(chosen)
    if missing:
        again = torch.arange(missing, device=points.device) % len(chosen)
        noise = torch.randn(missing, points.shape[1], generator=generator, device=generator.device).to(points)
        scale = points.double().square().mean().sqrt().float()
        seeds = torch.cat([seeds, seeds[again] + JITTER * torch.where(scale > 0, scale, 1.0) * noise])
    return Seeds(seeds, len(chosen))


def first_distinct(points: Tensor, order: Tensor, most: int) -> Tensor:
    """The first `most` entries of `order` that name different points, in that order."""
    window = 2 * most  # duplicates are rare as a rule: look further only if these do not suffice
    while True:
        head = order[:window]
        keys = row_keys(points[head])
        _, groups = torch.unique(keys, return_inverse=True)
        first = torch.full((int(groups.max()) + 1,), len(head), device=head.device)
        first.scatter_reduce_(0, groups, torch.arange(len(head), device=head.device), "amin")
        if len(first) >= most or window >= len(order):
            return head[first.sort().values[:most]]
        window *= 4


def row_keys(points: Tensor) -> Tensor:
    """A 64-bit key per row: equal rows have equal keys, different rows practically never."""
    rows = chunk_rows(points.shape[1], points.device)  # in pieces: int64 copies of all points would be large
    return torch.cat([_row_keys(points[part]) for part in chunks(len(points), rows)])


def _row_keys(points: Tensor) -> Tensor:
    bits = (points + 0.0).view(torch.int32).long()  # + 0.0 turns −0 into 0
    odd = torch.arange(1, 2 * points.shape[1], 2, device=points.device) * 0x2545F4914F6CDD1D
    keys = (bits * odd).sum(1)
    keys = (keys ^ (keys >> 29)) * 0x1B873593CC9E2D51  # the plain sum is linear; a second, mixed one is not
    mixed = ((bits ^ (bits >> 15)) * (odd ^ 0x5851F42D4C957F2D)).sum(1)
    return keys ^ (mixed * 0x27D4EB2F165667C5)


def lloyd(points: Tensor, centres: Tensor, *, iterations: int) -> tuple[Tensor, int]:
    """Lloyd's iterations from given centres; returns the centres (K, D) and the number of steps made."""
    with full_precision(points.device):
        clusters, labels = Clusters.empty(centres), None
        for step in range(iterations):
            best = nearest(points, centres)
            if labels is not None and torch.equal(labels, best.pick):
                return centres, step
            labels = clusters.relabel(points, labels, best.pick)
            if bool((clusters.n == 0).any()):
                labels = clusters.fill_empty(points, labels, best.score)
            means = (clusters.sums / clusters.n.clamp_min(1)[:, None]).float()
            centres = torch.where(clusters.n[:, None] > 0, means, centres)
    return centres, iterations


class Clusters(NamedTuple):
    """Running sums of the points of each cluster, changed only by the points that change cluster."""

    n: Tensor  # (K,) float64
    sums: Tensor  # (K, D) float64

    @classmethod
    def empty(cls, centres: Tensor) -> Clusters:
        n = torch.zeros(len(centres), dtype=torch.float64, device=centres.device)
        return cls(n, torch.zeros(centres.shape, dtype=torch.float64, device=centres.device))

    def relabel(self, points: Tensor, old: Tensor | None, new: Tensor) -> Tensor:
        """Move points from their old clusters to the new ones; float64 sums may be added to and subtracted from."""
        moved = None if old is None else (old != new).nonzero().squeeze(1)
        if old is None or moved is None or 2 * len(moved) > len(new):  # cheaper from scratch
            self.n.zero_()
            self.sums.zero_()
            self._add(points, new, 1.0)
        else:
            self._add(points, old[moved], -1.0, moved)
            self._add(points, new[moved], 1.0, moved)
        return new

    def _add(self, points: Tensor, labels: Tensor, sign: float, rows: Tensor | None = None) -> None:
        """Add all points, or those at `rows`, to the clusters `labels` (one for each of them)."""
        self.n.add_(torch.bincount(labels, minlength=len(self.n)), alpha=sign)
        for part in chunks(len(labels), chunk_rows(points.shape[1], points.device)):
            few = points[part] if rows is None else points[rows[part]]
            self.sums.index_add_(0, labels[part], few.double(), alpha=sign)

    def fill_empty(self, points: Tensor, labels: Tensor, score: Tensor) -> Tensor:
        """Give each empty cluster one of the points that lie farthest from their centres."""
        empty = (self.n == 0).nonzero().squeeze(1)
        distance = norms(points).squeeze(1).square() - 2 * score  # (N,) squared distance to the centre that won
        far = torch.argsort(distance, descending=True)[: 64 * len(empty)]
        far = far[distance[far] > 0]
        if not len(far):
            return labels
        far = first_distinct(points, far, len(empty))
        empty, labels = empty[: len(far)], labels.clone()
        self._add(points, labels[far], -1.0, far)
        self._add(points, empty, 1.0, far)
        labels[far] = empty
        return labels
