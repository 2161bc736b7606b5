"""Some of a source's samples as a source of their own: folds, splits, a limit on their number."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bridle.data.sources import Blending, Sample, Source, SourceView


class Subset(SourceView):
    """The samples of a source at `indices`, in that order."""

    def __init__(self, source: Source, indices: Sequence[int]) -> None:
        super().__init__(source)
        self.indices = indices
        self.labels = None if source.labels is None else [source.labels[i] for i in indices]

    def __len__(self) -> int:
        return len(self.indices)

    def load(self, index: int, generator: torch.Generator | None) -> Sample:
        return super().load(self.indices[index], generator)

    def load_view(self, index: int, view: int) -> Sample:
        return super().load_view(self.indices[index], view)

    def describe(self, index: int) -> str:
        return super().describe(self.indices[index])


class BlendingSubset(Subset):
    """A subset of a source that mixes its items itself."""

    def load_mixed(self, index: int, other: int, share: float, generator: torch.Generator) -> Sample:
        assert isinstance(self.source, Blending)  # `subset_of` makes no other
        return self.source.load_mixed(self.indices[index], self.indices[other], share, generator)


def subset_of(source: Source, indices: Sequence[int]) -> Source:
    """The samples of a source at `indices`; it mixes items itself where the source does."""
    return BlendingSubset(source, indices) if isinstance(source, Blending) else Subset(source, indices)
