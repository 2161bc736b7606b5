"""Small models that read signals or a fixed grid, for tests of what is done with files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from bridle.config import Config, load_config
from bridle.data.arrays.source import SignalFormat, SignalReader
from bridle.data.sources import Window
from bridle.infer.model import Model
from bridle.models.build import build_nets
from bridle.seeding import generator

SIZES = (
    *("encoder.width=8", "encoder.depth=3", "encoder.heads=2", "decoder.width=8", "decoder.depth=1", "decoder.heads=2"),
    *("estimator.width=8", "estimator.depth=1", "estimator.heads=2", "quantizer.width=4", "quantizer.codebooks=2"),
    *("data.mean=[0.5]", "data.std=[2.0]"),
)


def build_model(config: Config, *, trained: bool = True) -> Model:
    nets = build_nets(config, iteration=2, later_tokenizer=trained)
    latents = torch.randn(600, 4, generator=generator("latents"))
    nets.tokenizer.quantizer.start_codebooks(latents, generator=generator("start"))
    return Model(nets, config, device=torch.device("cpu"))


def signal_model(*overrides: str, trained: bool = True) -> Model:
    """2 channels, windows of 12 frames, patches of 3: 4 tokens; 2 books of 16."""
    shape = ("geometry.channels=2", "geometry.input=[12]", "geometry.patch=[3]", "quantizer.codes=16")
    model = build_model(load_config("signal", [*SIZES, *shape, *overrides]), trained=trained)
    model.reader = SignalReader(format=SignalFormat(model.geometry))
    return model


def write_signal(path: Path, frames: int) -> torch.Tensor:
    x = torch.randn(2, frames, generator=generator(path.name, frames))
    np.save(path, x.numpy())
    return x


class Plane:
    """A reader of a (time, frequency) grid that has the whole content in hand: windows of (1, 4, 6), patches (2, 3)."""

    extensions = (".wav",)
    timed = True

    def __init__(self, windows: list[Window], frame_seconds: float | None = 0.5) -> None:
        self.list, self.frame_seconds = windows, frame_seconds

    def windows(self, path: Path) -> Iterator[Window]:
        yield from self.list


def plane_model(reader: Plane, *overrides: str) -> Model:
    shape = ("geometry.channels=1", "geometry.input=[4, 6]", "geometry.patch=[2, 3]", "quantizer.codes=16")
    model = build_model(load_config("image", [*SIZES, *shape, "decoder.kind=plain", *overrides]))
    model.reader = reader
    return model
