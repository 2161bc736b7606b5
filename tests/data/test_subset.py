"""Parts of a source: their own numbering, the same samples, and everything the source can do."""

from __future__ import annotations

import torch

from bridle.data.arrays.memory import TensorSource
from bridle.data.sources import Blending, Sample, Viewed, Views
from bridle.data.subset import subset_of

PLAIN = TensorSource(x=torch.arange(6.0).reshape(6, 1, 1), labels=[0, 1, 2, 0, 1, 2], classes=["a", "b", "c"], name="s")


class Rich(TensorSource):
    """Three views an item, and mixing of its own."""

    views = 3

    def load_view(self, index: int, view: int) -> Sample:
        return Sample(self.x[index] + 0.1 * view)

    def load_mixed(self, index: int, other: int, share: float, generator: torch.Generator) -> Sample:
        return Sample(share * self.x[index] + (1 - share) * self.x[other])


def test_a_part_has_its_own_numbers_and_the_samples_of_the_whole() -> None:
    part = subset_of(PLAIN, [4, 1, 3])
    assert len(part) == 3
    assert [float(part.load(i, None).x) for i in range(3)] == [4, 1, 3]
    assert part.labels == [1, 1, 0]
    assert part.classes == ["a", "b", "c"]
    assert part.describe(0) == "s 4"
    assert not isinstance(part, Blending)
    views = Views(part)
    assert [float(views.load(i, None).x) for i in range(len(views))] == [4, 1, 3]


def test_a_part_of_a_source_with_views_and_mixing_has_both() -> None:
    part = subset_of(Rich(x=PLAIN.x, labels=PLAIN.labels), [5, 2])
    assert isinstance(part, Viewed)
    assert isinstance(part, Blending)
    assert part.views == 3
    assert torch.isclose(part.load_view(1, 2).x, torch.tensor(2.2)).all()
    assert float(part.load_mixed(0, 1, 0.5, torch.Generator()).x) == 3.5
