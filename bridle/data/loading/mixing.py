"""Two samples in one: mixup and cutmix as a source around any other.

Shapes: x (C, *input); label shares (K,); valid (T,).

    share λ ~ Beta(a, a)
    mixup    x = λ·x₁ + (1 − λ)·x₂           y = λ·y₁ + (1 − λ)·y₂
    cutmix   a box of x₂ in x₁               y = λ'·y₁ + (1 − λ')·y₂,  1 − λ' the box's true share of the area

The box lies wholly inside the last two axes (the only one of a 1-D signal); its sides are √(1 − λ) of theirs, in whole
steps.
"""

from __future__ import annotations

from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from bridle.config.data_schema import AugmentConfig
from bridle.data.loading.augment import draw_share
from bridle.data.loading.loader import load_checked
from bridle.data.sources import Blending, Sample, Source, SourceView, class_shares
from bridle.errors import DataError, UsageError


class Plan(NamedTuple):
    """What is drawn for one mixed sample."""

    partner: int
    share: float  # λ, of the sample itself
    cut: bool


def mixed(source: Source, augment: AugmentConfig) -> Source:
    """The source, its training samples mixed where that is asked for. Partners come from this source and no other."""
    return Mixed(source, augment) if augment.enabled and (augment.mixup or augment.cutmix) else source


class Mixed(SourceView):
    """A source whose augmented samples are mixed with a random other one; without a generator nothing is mixed.

    A partner that cannot be read leaves the sample unmixed: the partner is reported when its own turn comes.
    """

    def __init__(self, source: Source, augment: AugmentConfig) -> None:
        super().__init__(source)
        self.augment = augment

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
        valid = None if sample.valid is None or partner.valid is None else sample.valid | partner.valid
        if sample.label is None or partner.label is None:
            return Sample(x, None, valid)
        own, other = map(self._shares, (sample.label, partner.label))
        return Sample(x, share * own + (1 - share) * other, valid)

    def _shares(self, label: int | Tensor) -> Tensor:
        """(K,) shares of all classes."""
        if isinstance(label, Tensor):
            return label
        if self.classes is None:
            raise UsageError(
                "mixup and cutmix need the number of classes: give the dataset a list `classes`, "
                "or set mixup and cutmix to 0."
            )
        return class_shares([label], len(self.classes))


def paste_box(x: Tensor, other: Tensor, *, share: float, generator: torch.Generator) -> tuple[Tensor, float]:
    """`x` with a box of `other` that covers about 1 − share of the last two axes (of the only one, if there is one).

    Returns it, and the share of the area that is still the first sample's.
    """
    sides = x.shape[1:][-2:]
    box = [round(side * (1 - share) ** (1 / len(sides))) for side in sides]
    starts = [int(torch.randint(side - b + 1, (), generator=generator)) for side, b in zip(sides, box, strict=True)]
    inside = [slice(start, start + b) for start, b in zip(starts, box, strict=True)]
    where = tuple([slice(None)] * (x.dim() - len(sides)) + inside)
    pasted = x.clone()
    pasted[where] = other[where]
    return pasted, 1 - prod(box) / prod(sides)
