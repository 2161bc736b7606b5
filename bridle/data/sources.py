"""What the rest of bridle sees of any data set: an indexed source of samples, and its splits.

A source knows how to load sample i, with or without augmentation, and nothing about batches, order or ranks.
Shapes: one sample is (C, *input), float32, not yet normalised.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class Sample(NamedTuple):
    """One loaded sample."""

    x: Tensor  # (C, *input) float32, before normalisation
    label: int | None = None
    valid: Tensor | None = None  # (T,) bool; False where a token is padding; None means all tokens are real


class Source(Protocol):
    """An indexed collection of samples. `load` raises DataError for a sample that cannot be used."""

    classes: Sequence[str] | None  # names of the labels, or None for unlabelled data
    labels: Sequence[int] | None  # label of each sample, or None

    def __len__(self) -> int: ...

    def load(self, index: int, generator: torch.Generator | None) -> Sample:
        """Sample `index`; with a generator it is augmented as for pretraining, without one it is not."""
        ...

    def describe(self, index: int) -> str:
        """A path or name of sample `index` for messages and the quarantine list."""
        ...


class Splits(NamedTuple):
    """A data set: `train` for pretraining and probes; `test` only for final scores (None: probes split train)."""

    train: Source
    test: Source | None
