"""A model of clips uses motion: it tells directions apart that a model of single frames cannot."""

from __future__ import annotations

from pathlib import Path

import torch
from conftest import SMALL
from torch import Tensor
from torch.utils.data import Dataset

import bridle
from bridle.data.embedded.sets import moving_digits
from bridle.data.sources import Source


class Clips(Dataset[tuple[Tensor, int]]):
    """The embedded clips, as they are or standing still."""

    def __init__(self, source: Source, count: int, *, moving: bool) -> None:
        self.source, self.count, self.moving = source, count, moving

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        x, label, _ = self.source.load(index, None)
        assert isinstance(label, int)
        return (x if self.moving else x[:, :1].expand_as(x).contiguous()), label


def direction_accuracy(folder: Path, *, moving: bool) -> float:
    splits = moving_digits()
    assert splits.test is not None
    train, test = Clips(splits.train, 800, moving=moving), Clips(splits.test, 400, moving=moving)
    settings = [*SMALL, "encoder.width=32", "encoder_phase.steps=30", "schedule.iterations=1", "probe.items=800"]
    run = bridle.pretrain("moving-digits-tiny", dataset=train, test_dataset=test, out=folder, overrides=settings)
    return float(run.results.evaluations[0].probe.accuracy)


def test_directions_are_told_from_motion_and_not_from_a_single_frame(tmp_path: Path) -> None:
    torch.manual_seed(0)
    moving = direction_accuracy(tmp_path / "moving", moving=True)
    still = direction_accuracy(tmp_path / "still", moving=False)
    assert still < 0.25  # eight directions: chance is 0.125
    assert moving > 0.5
    assert moving > 2 * still
