"""Two samples in one: mixup and cutmix as a source around any other.

Shapes: x (C, *input); label shares (K,); valid (T,).

    share λ ~ Beta(a, a)
    mixup    x = λ·x₁ + (1 − λ)·x₂           y = λ·y₁ + (1 − λ)·y₂
    cutmix   a box of x₂ in x₁               y = λ'·y₁ + (1 − λ')·y₂,  1 − λ' the box's true share of the area

The box lies wholly inside the last two axes (the only one of a 1-D signal); its sides are √(1 − λ) of theirs, in whole
steps. A token is real where it is real in either sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from bridle.config.schema import AugmentConfig
from bridle.data.loading.augment import draw_share
from bridle.data.loading.loader import load_checked
from bridle.data.sources import Labels, Sample, Source, Viewed, class_shares
from bridle.errors import DataError, UsageError


@runtime_checkable
class Blending(Protocol):
    """A source that can mix two of its items itself, before it turns them into features."""

    def load_mixed(self, index: int, other: int, share: float, generator: torch.Generator) -> Sample:
        """share·item + (1 − share)·other item, augmented; the labels' shares alike."""
        ...


class Plan(NamedTuple):
    """What is drawn for one mixed sample."""

    partner: int
    share: float  # λ, of the sample itself
    cut: bool


def mixed(source: Source, augment: AugmentConfig) -> Source:
    """The source, its training samples mixed where that is asked for. Partners come from this source and no other."""
    return Mixed(source, augment) if augment.enabled and (augment.mixup or augment.cutmix) else source


class Mixed:
    """A source whose augmented samples are mixed with a random other one; without a generator nothing is mixed.

    A partner that cannot be read leaves the sample unmixed: the partner is reported when its own turn comes.
    """

    def __init__(self, source: Source, augment: AugmentConfig) -> None:
        self.source, self.augment = source, augment

    @property
    def classes(self) -> Sequence[str] | None:
        return self.source.classes

    @property
    def labels(self) -> Labels | None:
        return self.source.labels

    @property
    def views(self) -> int:
        return self.source.views if isinstance(self.source, Viewed) else 1

    def __len__(self) -> int:
        return len(self.source)

    def describe(self, index: int) -> str:
        return self.source.describe(index)

    def load_view(self, index: int, view: int) -> Sample:
        return self.source.load_view(index, view) if isinstance(self.source, Viewed) else self.source.load(index, None)

    def load(self, index: int, generator: torch.Generator | None) -> Sample:
        plan = None if generator is None else self._plan(generator)
        if generator is None or plan is None:
            return self.source.load(index, generator)
        if self.augment.mix_space == "waveform" and not plan.cut and isinstance(self.source, Blending):
            try:
                return self.source.load_mixed(index, plan.partner, plan.share, generator)
            except (DataError, OSError):  # loading this one alone shows which of the two it was
                return self.source.load(index, generator)
        sample = self.source.load(index, generator)
        try:
            partner = load_checked(self.source, plan.partner, generator)
        except DataError:
            return sample
        return self._mix(sample, partner, plan, generator)

    def _plan(self, generator: torch.Generator) -> Plan | None:
        """Whether to mix, how, how much and with whom."""
        augment = self.augment
        if not augment.enabled or augment.mixup == augment.cutmix == 0:
            return None
        mixes, cuts, where = torch.rand(3, generator=generator, dtype=torch.float64).tolist()
        if mixes >= augment.mix_probability:
            return None
        cut = augment.mixup == 0 or (augment.cutmix > 0 and cuts < 0.5)
        concentration = augment.cutmix if cut else augment.mixup
        return Plan(int(where * len(self)), draw_share(concentration, generator), cut)

    def _mix(self, sample: Sample, partner: Sample, plan: Plan, generator: torch.Generator) -> Sample:
        if plan.cut:
            x, share = paste_box(sample.x, partner.x, share=plan.share, generator=generator)
        else:
            x, share = torch.lerp(partner.x, sample.x, plan.share), plan.share
        return Sample(x, self._mix_labels(sample, partner, share), either_valid(sample.valid, partner.valid))

    def _mix_labels(self, sample: Sample, partner: Sample, share: float) -> Tensor | None:
        """(K,) shares of all classes, or None where a sample has no label."""
        if sample.label is None or partner.label is None:
            return None
        own, other = (
            y if isinstance(y, Tensor) else class_shares([y], self._class_count())
            for y in (sample.label, partner.label)
        )
        return share * own + (1 - share) * other

    def _class_count(self) -> int:
        """K."""
        if self.classes is None:
            raise UsageError(
                "mixup and cutmix need the number of classes: give the dataset a list `classes`, "
                "or set mixup and cutmix to 0."
            )
        return len(self.classes)


class Pasted(NamedTuple):
    """The result of a paste."""

    x: Tensor  # (C, *input)
    share: float  # of the area that is still the first sample's


def paste_box(x: Tensor, other: Tensor, *, share: float, generator: torch.Generator) -> Pasted:
    """`x` with a box of `other` that covers about 1 − share of the last two axes (of the only one, if there is one)."""
    sides = x.shape[1:][-2:]
    box = [round(side * (1 - share) ** (1 / len(sides))) for side in sides]
    starts = [int(torch.randint(side - b + 1, (), generator=generator)) for side, b in zip(sides, box, strict=True)]
    inside = [slice(start, start + b) for start, b in zip(starts, box, strict=True)]
    where = tuple([slice(None)] * (x.dim() - len(sides)) + inside)
    pasted = x.clone()
    pasted[where] = other[where]
    return Pasted(pasted, 1 - prod(box) / prod(sides))


def either_valid(own: Tensor | None, other: Tensor | None) -> Tensor | None:
    """(T,) True where a token is real in either sample; None: all are."""
    return None if own is None or other is None else own | other
