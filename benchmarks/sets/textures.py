"""Textures: 12 patterns as colour pictures of 64×64, .png.

Position, scale, orientation, warp, two colours, contrast, shading and noise are drawn. The test part has other scales
and other orientations.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from drawing import Array, clouds, items, to_bytes, two_colours
from PIL import Image
from scipy.ndimage import gaussian_filter
from scipy.spatial import cKDTree

SIZE = 64
COUNTS = {"train": 100, "test": 40}
PERIODS = {"train": ((7, 11),), "test": ((5, 7), (11, 15))}  # pixels
ANGLES = {"train": (0, np.pi / 2), "test": (np.pi / 2, np.pi)}

Draw = Callable[[Array, Array, np.random.Generator], Array]  # coordinates in periods -> field


def cells(u: Array, v: Array, draws: np.random.Generator) -> tuple[Array, Array]:
    """Distances to the nearest and second nearest of random points, one per period²."""
    low, high = (np.array([function(u), function(v)]) for function in (np.min, np.max))
    points = draws.uniform(low - 1, high + 1, (int(np.prod(high - low + 2)), 2))
    near, _ = cKDTree(points).query(np.stack([u, v], -1), k=2)
    return near[..., 0], near[..., 1]


def fibres(u: Array, v: Array, draws: np.random.Generator) -> Array:
    """Waves of nearly one direction with drawn frequencies."""
    return sum(
        np.sin(2 * np.pi * (draws.uniform(0.5, 1.5) * u + draws.normal(0, 0.08) * v) + draws.uniform(0, 7))
        for _ in range(12)
    ) / 12 + np.zeros_like(u)


def grain(u: Array, v: Array, draws: np.random.Generator) -> Array:
    """Waves of one frequency in all directions."""
    angles = draws.uniform(0, np.pi, 24)
    return sum(np.sin(2 * np.pi * (np.cos(a) * u + np.sin(a) * v) + draws.uniform(0, 7)) for a in angles) / 24


def bricks(u: Array, v: Array, draws: np.random.Generator) -> Array:
    row = np.floor(v)
    return ((np.abs((u / 2 + row / 2) % 1 - 0.5) < 0.42) & (np.abs(v % 1 - 0.5) < 0.36)).astype(float)


def weave(u: Array, v: Array, draws: np.random.Generator) -> Array:
    over = (np.floor(u) + np.floor(v)) % 2
    return np.where(over, np.sin(np.pi * (u % 1)), np.sin(np.pi * (v % 1)))


def scales(u: Array, v: Array, draws: np.random.Generator) -> Array:
    row = np.floor(2 * v)
    return np.hypot((u + row / 2) % 1 - 0.5, v % 0.5)


PATTERNS: dict[str, Draw] = {
    "stripes": lambda u, v, draws: np.sin(2 * np.pi * u),
    "checks": lambda u, v, draws: np.tanh(6 * np.sin(np.pi * u) * np.sin(np.pi * v)),
    "grid": lambda u, v, draws: np.maximum(np.abs(u % 1 - 0.5), np.abs(v % 1 - 0.5)) > 0.38,
    "dots": lambda u, v, draws: np.hypot((u + np.floor(v) / 2) % 1 - 0.5, v % 1 - 0.5) < 0.28,
    "bricks": bricks,
    "weave": weave,
    "scales": scales,
    "cells": lambda u, v, draws: cells(u, v, draws)[0],
    "cracks": lambda u, v, draws: np.minimum(0.25, np.subtract(*cells(u, v, draws)[::-1])),
    "fibres": fibres,
    "grain": grain,
    "clouds": lambda u, v, draws: clouds(SIZE, 8 / np.ptp(u) * 4, draws),
}


def texture(kind: int, split: str, draws: np.random.Generator) -> Array:
    """One picture (64, 64, 3)."""
    low, high = PERIODS[split][draws.integers(len(PERIODS[split]))]
    angle, period, at = draws.uniform(*ANGLES[split]), draws.uniform(low, high), draws.uniform(0, 100, 2)
    y, x = np.mgrid[:SIZE, :SIZE] + 2.5 * (np.stack([clouds(SIZE, 10, draws) for _ in range(2)]) - 0.5)
    u = (np.cos(angle) * x + np.sin(angle) * y) / period + at[0]
    v = (np.cos(angle) * y - np.sin(angle) * x) / period + at[1]
    field = gaussian_filter(list(PATTERNS.values())[kind](u, v, draws) * 1.0, draws.uniform(0.3, 0.9))
    field = (field - field.min()) / (np.ptp(field) + 1e-9)
    picture = two_colours(field, draws.uniform(0.25, 0.8), draws)
    shade = 1 + draws.uniform(0, 0.5) * (clouds(SIZE, 16, draws)[..., None] - 0.5)
    return picture * shade + draws.normal(0, draws.uniform(0.02, 0.08), picture.shape)


def write(root: Path, share: float) -> None:
    for split, kind, path, draws in items(root, list(PATTERNS), COUNTS, share):
        Image.fromarray(to_bytes(texture(kind, split, draws))).save(path.with_suffix(".png"))
