"""Some of a source's samples as a source of their own: folds, splits, a limit on their number."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bridle.data.loading.mixing import Blending
from bridle.data.sources import Labels, Sample, Source, Viewed


class Part:
    """The samples `kept` of a source, in that order."""

    def __init__(self, source: Source, kept: Sequence[int]) -> None:
        self.source, self.kept = source, kept
        self.classes = source.classes
        self.labels: Labels | None = None if source.labels is None else [source.labels[i] for i in kept]
        self.views = source.views if isinstance(source, Viewed) else 1

    def __len__(self) -> int:
        return len(self.kept)

    def load(self, index: int, generator: torch.Generator | None) -> Sample:
        return self.source.load(self.kept[index], generator)

    def load_view(self, index: int, view: int) -> Sample:
        if isinstance(self.source, Viewed):
            return self.source.load_view(self.kept[index], view)
        return self.source.load(self.kept[index], None)

    def describe(self, index: int) -> str:
        return self.source.describe(self.kept[index])


class BlendingPart(Part):
    """A part of a source that mixes its items itself."""

    def load_mixed(self, index: int, other: int, share: float, generator: torch.Generator) -> Sample:
        assert isinstance(self.source, Blending)  # `part_of` makes no other
        return self.source.load_mixed(self.kept[index], self.kept[other], share, generator)


def part_of(source: Source, kept: Sequence[int]) -> Source:
    """The samples `kept` of a source; what the source can do, its part can."""
    return BlendingPart(source, kept) if isinstance(source, Blending) else Part(source, kept)
