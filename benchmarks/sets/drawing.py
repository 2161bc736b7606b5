"""What the drawn sets share: backgrounds, colours and the split into train and test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.ndimage import gaussian_filter

Array = NDArray[np.float64]


def items(
    root: Path, names: list[str], counts: dict[str, int], share: float
) -> Iterator[tuple[str, int, Path, np.random.Generator]]:
    """Split, class, file name without ending, and the draws of every item."""
    for part, (split, count) in enumerate(counts.items()):
        for kind, name in enumerate(names):
            (root / split / name).mkdir(parents=True, exist_ok=True)
            for i in range(round(count * share)):
                yield split, kind, root / split / name / f"{i:03}", np.random.default_rng([part, kind, i])


def clouds(size: int, coarse: float, draws: np.random.Generator) -> Array:
    """Smooth noise (size, size) between 0 and 1; `coarse` is the width of its spots."""
    field = gaussian_filter(draws.normal(size=(size, size)), coarse, mode="wrap")
    return (field - field.min()) / (np.ptp(field) + 1e-9)


def boxes(size: int, draws: np.random.Generator) -> Array:
    """Overlapping rectangles (size, size) between 0 and 1."""
    field = np.full((size, size), draws.uniform())
    for _ in range(6):
        (top, left), (height, width) = draws.integers(0, size, 2), draws.integers(size // 6, size // 2, 2)
        field[top : top + height, left : left + width] = draws.uniform()
    return field


def two_colours(field: Array, contrast: float, draws: np.random.Generator) -> Array:
    """Colour (…, 3) of a field between 0 and 1: from one drawn colour to another, `contrast` lighter or darker."""
    dark = draws.uniform(0, 1 - contrast)
    low, high = (np.clip(level + draws.normal(0, 0.12, 3), 0, 1) for level in (dark, dark + contrast))
    ends = (low, high) if draws.uniform() < 0.5 else (high, low)
    return ends[0] + field[..., None] * (ends[1] - ends[0])


def to_bytes(picture: Array) -> NDArray[np.uint8]:
    return (255 * np.clip(picture, 0, 1)).round().astype(np.uint8)
