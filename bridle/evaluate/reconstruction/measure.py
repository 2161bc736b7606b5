"""Errors of a detokenizer on held-out items, for every number of stages."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from math import log2, log10
from typing import NamedTuple

import numpy as np
import torch

from bridle.config import Config
from bridle.data.loading.loader import load_samples, moments_tensors, normalise, stack_valid
from bridle.data.modality import modality_of
from bridle.data.sources import Sample, Source, Splits
from bridle.data.subset import subset_of
from bridle.errors import DataError
from bridle.evaluate.reconstruction.distortion import DECIBEL
from bridle.models.detokenizer import Detokenizer, decode_prefix
from bridle.models.tokenizer import Tokenizer
from bridle.nn.patch import patchify
from bridle.runs.reconstruction import Reconstruction, StageError

HELD_OUT = 10  # of so many training items one is kept for measuring where there is no test split


class Held(NamedTuple):
    """Items for training a detokenizer and for measuring it."""

    train: Source
    source: Source  # holds the items for measuring
    test: list[int]  # their indices in it
    name: str

    def spread(self, count: int) -> list[int]:
        """At most `count` indices for measuring, evenly spread: files are often listed class by class."""
        places = np.linspace(0, len(self.test) - 1, min(count, len(self.test))).round().astype(int)
        return [self.test[place] for place in places]


def is_spectrogram(config: Config) -> bool:
    """Are the inputs log-mel features?"""
    return modality_of(config).drawing_of(config.geometry.build()) == "spectrogram"


def split_for_measuring(splits: Splits) -> Held:
    """The test split for measuring, or every tenth training item."""
    if splits.test is not None:
        return Held(splits.train, splits.test, list(range(len(splits.test))), "test")
    count = len(splits.train)
    test = list(range(0, count, HELD_OUT))
    train = [i for i in range(count) if i % HELD_OUT] or test
    return Held(subset_of(splits.train, train), splits.train, test, "held-out train items")


@torch.no_grad()
def measure_errors(
    detokenizer: Detokenizer, tokenizer: Tokenizer, held: Held, config: Config, *, iteration: int, device: torch.device
) -> Reconstruction:
    """Errors on `detokenizer.items` held-out items, for every number of stages; unreadable items are left out."""
    sizes, patch = config.quantizer.sizes, config.geometry.build().patch
    stds = torch.tensor(config.data.std, device=device)
    std = stds.repeat_interleave(detokenizer.geometry.patch_features // len(stds))  # (F,), features are (C, *patch)
    errors, scaled = (torch.zeros(len(sizes), dtype=torch.float64) for _ in range(2))
    spread = count = 0.0
    items = 0
    mean, scale = moments_tensors(*config.data.statistics)
    for samples in readable_batches(held, config):
        items += len(samples)
        x = normalise(torch.stack([one.x for one in samples]), mean=mean, std=scale).to(device)
        stacked = stack_valid(samples)
        valid = None if stacked is None else stacked.to(device)
        patches = patchify(x, patch)  # (B, T, F)
        real = torch.ones(patches.shape[:2], dtype=torch.bool, device=device) if valid is None else valid
        codes = tokenizer.tokenize(x, valid=valid)
        spread += float(patches[real].double().square().sum())
        count += patches[real].numel()
        for m in range(1, len(sizes) + 1):
            guess = decode_prefix(detokenizer, tokenizer.quantizer, codes, m, valid=valid)
            difference = (patchify(guess, patch) - patches)[real].double()
            errors[m - 1] += float(difference.square().sum())
            scaled[m - 1] += float((difference * std).square().sum())
    if not items:
        raise DataError("none of the held-out items can be read; `bridle data check` lists what is wrong.")
    rows = []
    for m in range(1, len(sizes) + 1):
        squared = float(scaled[m - 1]) / count  # mean squared error in the input's own units
        row = StageError(
            stages=m,
            bits_per_token=sum(log2(size) for size in sizes[:m]),
            explained=1 - float(errors[m - 1]) / spread,
            psnr=-10 * log10(max(squared, 1e-12)) if modality_of(config).is_unit_range else None,
            log_spectral_distance=DECIBEL * squared**0.5 if is_spectrogram(config) else None,
        )
        rows.append(row)
    return Reconstruction(iteration=iteration, items=items, held_out=held.name, by_stages=tuple(rows))


def readable_batches(held: Held, config: Config) -> Iterator[list[Sample]]:
    """The held-out items that can be read, `detokenizer.batch` at a time."""
    loaded = load_samples(held.source, held.spread(config.detokenizer.items), workers=config.data.workers)
    readable = (sample for sample in loaded if isinstance(sample, Sample))
    while samples := list(islice(readable, config.detokenizer.batch)):
        yield samples
