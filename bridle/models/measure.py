"""Fit what an encoder's embedding takes from data before training: the whitening of patches, and the stem's centres."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from bridle import distributed
from bridle.nn.patch import PatchEmbed, patchify
from bridle.nn.stem import Stem
from bridle.nn.whiten import PatchMoments
from bridle.quantize.kmeans import kmeans

PATCHES = 16_384  # from which a stem is fitted
POINTS = 40_000  # for k-means
ITERATIONS = 10
RIDGE = 0.3  # of the stem's windows


@torch.no_grad()
def measure_inputs(embed: PatchEmbed, batches: Iterable[tuple[Tensor, Tensor | None]], random: torch.Generator) -> None:
    """Whiten by, and fit the stem to, the patches of x (B, C, *input) where `valid` (B, T) says real (collective)."""
    stem = embed.stem if embed.stem is not None and not embed.stem.is_measured else None  # weights may bring one
    if embed.ridge is None and stem is None:
        return
    device = embed.proj.weight.device
    moments = PatchMoments(embed.geometry.patch_features, device)
    kept = [torch.zeros(0, embed.geometry.patch_features, device=device)]  # a rank may have no batch
    for x, valid in batches:
        patches = patchify(x, embed.geometry.patch)
        moments.add(patches, valid)
        if stem is not None:
            real = patches.flatten(0, 1).float() if valid is None else patches[valid].float()
            kept.append(real[evenly(len(real), PATCHES // 8, device)])
    if embed.ridge is not None:
        embed.whiten_by(moments.spectrum())
    if stem is not None:
        fit_stem(stem, distributed.gather_rows(torch.cat(kept), patient=True), random)


def fit_stem(stem: Stem, patches: Tensor, random: torch.Generator) -> None:
    """Centres, whitening and scale from patches (P, F), the same on every rank (collective)."""
    patches = patches[torch.randperm(len(patches), generator=random)[:PATCHES].to(patches.device)]
    places = torch.randint(len(patches) * len(stem.index), (POINTS,), generator=random)
    rows, window = (part.to(patches.device) for part in (places // len(stem.index), places % len(stem.index)))
    points = patches[rows[:, None], stem.index[window]]  # (POINTS, S)
    mean, whitening, centres = fit_centres(points, len(stem.centres), ridge=RIDGE, random=random, name="stem")
    for own, value in ((stem.mean, mean), (stem.whitening, whitening), (stem.centres, centres)):
        own.copy_(distributed.from_first_rank(value))
    found = stem.activations(patches[None])[0]  # (P, K)
    deviation = found.std(0, correction=0)
    stem.offset.copy_(distributed.from_first_rank(found.mean(0)))
    stem.scale.copy_(distributed.from_first_rank(torch.where(deviation > 0, 1 / (deviation + 1e-6), 0.0)))


def fit_centres(
    points: Tensor, centres: int, *, ridge: float, random: torch.Generator, name: str = "k-means"
) -> tuple[Tensor, Tensor, Tensor]:
    """Mean (S,) and whitening (S, S) of points (P, S), and k-means centres (K, S) of the whitened ones.

    `name` says in a warning what has too few points.
    """
    moments = PatchMoments(points.shape[1], points.device)
    moments.add(points[None], None)
    spectrum = moments.spectrum()
    mean, whitening = spectrum.mean.float(), spectrum.whitening(ridge).float()
    found = kmeans((points - mean) @ whitening, centres, iterations=ITERATIONS, generator=random, name=name)
    return mean, whitening, found.centres


def evenly(count: int, most: int, device: torch.device) -> Tensor:
    """At most `most` of the numbers 0 to count − 1, evenly spread."""
    return torch.arange(min(count, most), device=device) * count // max(1, min(count, most))
