"""Classical features without a network: whitened patches, k-means, triangle activations (Coates and Ng, 2011).

Windows p of w values along each axis (all channels) are cut densely, brought to mean 0 and deviation 1, and whitened,
x = W(p − μ) with a ridge of 0.1 mean eigenvalues. With distances z_k = ‖x − c_k‖ to K k-means centroids the activation
is f_k = max(0, mean(z) − z_k), summed over each of the 2^rank regions that halving every axis gives: (B, 2^rank·K).

Shapes: x (B, C, *input), windows (B, N, F), N windows of F = C·w^rank values.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod

import torch
from torch import Tensor

from bridle import distributed
from bridle.data.loading.loader import Batch
from bridle.evaluate.features import real_positions
from bridle.geometry import Geometry
from bridle.models.measure import fit_centres
from bridle.seeding import generator

CENTROIDS = 200
WINDOW = 6  # values along an axis
MOST_WINDOWS = 1024  # of a sample: strides grow until there are no more
MOST_POINTS = 40_000  # for k-means
FITTED_ITEMS = 500  # from which windows are taken
RIDGE = 0.1
CONTRAST_FLOOR = 0.1  # added to the deviation of a window: flat ones do not become noise


class ClassicalFeatures:
    """Learned from unlabelled samples by `fit`, then called on batches: (B, C, *input) -> (B, 2^rank·K)."""

    def __init__(self, geometry: Geometry, *, centroids: int = CENTROIDS) -> None:
        self.grid, self.size, self.centroids = geometry.grid, geometry.input, centroids
        self.window = tuple(min(WINDOW, n) for n in self.size)
        self.stride = strides(self.size, self.window)

    def fit(self, batches: Iterable[tuple[Tensor, Tensor | None]], random: torch.Generator) -> ClassicalFeatures:
        """Learn whitening and centroids from x (B, C, *input) and `valid` (B, T) (collective); returns itself."""
        points = []
        for x, valid in batches:
            windows, whole = self.windows(x, valid)
            points.append(windows[whole])  # (S, F)
        found = distributed.gather_rows(torch.cat(points), patient=True)
        found = found[torch.randperm(len(found), generator=random)[:MOST_POINTS].to(found.device)]
        self.mean, self.whitening, self.codes = fit_centres(found, self.centroids, ridge=RIDGE, random=random)
        return self

    def windows(self, x: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor]:
        """Contrast-normalised windows (B, N, F), and which of them hold no padding, (B, N)."""
        rank, real = len(self.size), None if valid is None else real_positions(x, valid, self.grid)[:, 0]
        for axis, (width, step) in enumerate(zip(self.window, self.stride, strict=True)):
            x = x.unfold(2 + axis, width, step)
            real = None if real is None else real.unfold(1 + axis, width, step)
        grid_first = (0, *range(2, 2 + rank), 1, *range(2 + rank, 2 + 2 * rank))
        cut = x.permute(grid_first).flatten(1 + rank).flatten(1, rank).float()  # (B, N, F)
        cut = cut - cut.mean(-1, keepdim=True)
        cut = cut / (cut.std(-1, keepdim=True, correction=0) + CONTRAST_FLOOR)
        if real is None:
            return cut, torch.ones(cut.shape[:2], dtype=torch.bool, device=x.device)
        return cut, real.flatten(1 + rank).all(-1).flatten(1)

    def __call__(self, x: Tensor, valid: Tensor | None = None) -> Tensor:
        """Pooled activations (B, 2^rank·K); windows with padding in them count nothing."""
        windows, whole = self.windows(x, valid)
        white = (windows - self.mean) @ self.whitening
        distance = torch.cdist(white, self.codes[None])  # (B, N, K)
        active = (distance.mean(-1, keepdim=True) - distance).clamp_min(0.0) * whole[..., None]
        grid = [(n - w) // s + 1 for n, w, s in zip(self.size, self.window, self.stride, strict=True)]
        active = active.reshape(len(x), *grid, -1)
        count = whole.sum(1).clamp_min(1)[:, None].float()
        for axis in range(len(grid)):  # halves of every axis
            half = (active.shape[1 + axis] + 1) // 2
            parts = active.split(half, dim=1 + axis)
            summed = [part.sum(1 + axis, keepdim=True) for part in parts]
            active = torch.cat([*summed, *([torch.zeros_like(summed[0])] * (2 - len(summed)))], dim=1 + axis)
        return active.flatten(1) / count


def strides(size: Sequence[int], window: Sequence[int]) -> tuple[int, ...]:
    """Two along every axis, more along the longest until there are few enough windows."""
    found = [2] * len(size)

    def counts() -> list[int]:
        return [(n - w) // s + 1 for n, w, s in zip(size, window, found, strict=True)]

    while prod(counts()) > MOST_WINDOWS:
        found[max(range(len(size)), key=lambda axis: counts()[axis])] += 1
    return tuple(found)


def fit_classical(batches: Iterable[Batch], geometry: Geometry, seed: int) -> ClassicalFeatures:
    """Classical features learned from these batches (collective)."""
    seen = ((batch.x, batch.valid) for batch in batches)
    return ClassicalFeatures(geometry).fit(seen, generator(seed, "classical"))


def evenly_spaced(count: int, most: int = FITTED_ITEMS) -> list[int]:
    """At most `most` of the numbers 0 to count − 1, evenly spread, so that sorted classes all take part."""
    return [i * count // min(count, most) for i in range(min(count, most))]
