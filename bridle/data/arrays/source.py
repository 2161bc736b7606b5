"""Multi-channel signals in arrays as a source, and single files as windows.

Shapes: a file holds (C, length); one sample is (C, L), L the geometry's input size.

Pretraining cuts L frames out at a random place, evaluation at the centre, or at `views` places from the beginning to
the end. A shorter signal is continued with its last values, and `valid` (T,) is False for patches of which less than
half is real. In training, in this order: cut, roll, gain, noise, a change of the modality's own, then a stripe of time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bridle.config.data_schema import AugmentConfig
from bridle.data.arrays.decode import EXTENSIONS, ReadSignal, as_channels, read_array
from bridle.data.file_source import ChooseStart, FileSource, start_of_view
from bridle.data.listing.columns import WHOLE, Span
from bridle.data.listing.table import Listing
from bridle.data.loading.augment import change_wave, mask_stripes, roll
from bridle.data.shards.tar_member import Location
from bridle.data.sources import Sample, Window, fewest_frames, fill_input, require_axes
from bridle.errors import ConfigError, DataError, UsageError, quoted
from bridle.geometry import Geometry

Change = Callable[[Tensor, torch.Generator], Tensor]  # (C, L) -> (C, L), a pure function of its arguments


class SignalFormat(NamedTuple):
    """How the files of a data set become arrays."""

    geometry: Geometry
    read: ReadSignal = read_array
    sample_rate: float | None = None  # Hz; None: not known, so that nothing can be said in seconds

    def check(self) -> None:
        """ConfigError for a geometry that signals cannot have."""
        require_axes(self.geometry, "arrays", "length")

    def open(self, path: Location, span: Span = WHOLE) -> NDArray[np.generic]:
        """(C, length) of a file, or of the part of it from `span[0]` to `span[1]` seconds."""
        values, rate = self.read(path)
        signal = as_channels(values, path, channels=self.geometry.channels)
        if rate is not None and self.sample_rate is not None and rate != self.sample_rate:
            raise DataError(
                f"{quoted(path)} has {rate:g} samples per second; expected {self.sample_rate:g}. Resample it, or "
                "correct sample_rate in the config."
            )
        if span == WHOLE:
            return signal
        if self.sample_rate is None:
            raise UsageError(
                f"{quoted(path)}: a part is given in seconds, but the sample rate is not known; "
                "set sample_rate in the config section of these signals."
            )
        first, end = round(span[0] * self.sample_rate), span[1]
        part = signal[:, first : None if end is None else max(round(end * self.sample_rate), first + 1)]
        if part.shape[1] == 0:
            raise DataError(f"{quoted(path)} ends before {span[0]:g} s.")
        return part


class Signals(FileSource):
    """Arrays in files, or parts of them, as samples (C, L)."""

    def __init__(
        self,
        listing: Listing,
        classes: Sequence[str] | None,
        *,
        format: SignalFormat,
        augment: AugmentConfig | None = None,
        change: Change | None = None,
        views: int = 1,
        cache_mb: int = 0,
    ) -> None:
        super().__init__(listing, classes, cache_mb=cache_mb)
        format.check()
        if self.spans is not None and format.sample_rate is None:
            raise ConfigError(
                "the list gives parts of files in seconds, but the sample rate of the signals is not known; "
                "set signals.sample_rate (or that of your modality's own section)."
            )
        self.format, self.views = format, views
        self.augment, self.change = augment or AugmentConfig(), change

    def load(self, index: int, generator: torch.Generator | None) -> Sample:
        if generator is None:
            return self._sample(index, start_of_view(0, 1), None)
        return self._sample(index, lambda spare: int(torch.randint(spare + 1, (), generator=generator)), generator)

    def load_view(self, index: int, view: int) -> Sample:
        return self._sample(index, start_of_view(view, self.views), None)

    def seconds(self, index: int) -> float | None:
        """Length of a signal; None where the sample rate is not known or the file cannot be read."""
        if self.format.sample_rate is None:
            return None
        try:
            return int(self._open(index).shape[1]) / self.format.sample_rate
        except DataError:
            return None

    def _open(self, index: int) -> NDArray[np.generic]:
        return self.format.open(self.paths[index], self.span(index))

    def _sample(self, index: int, place: ChooseStart, generator: torch.Generator | None) -> Sample:
        """The part that begins where `place` says for the frames to spare; with a generator augmented."""
        path, wanted = self.paths[index], self.format.geometry.input[0]
        signal: NDArray[np.generic]
        if not self.cache.limit:
            signal = self._open(index)  # (C, length), perhaps still on disk
        else:
            signal = self.cache.get(index, lambda: torch.from_numpy(as_float32(self._open(index)))).numpy()
        start = place(max(signal.shape[1] - wanted, 0))
        x = read_frames(signal, start=start, count=wanted, path=path)
        if generator is not None:
            x = self._changed(x, generator)
        padded, valid = fill_input(x, self.format.geometry, path)
        return Sample(padded, self.label(index), valid)

    def _changed(self, x: Tensor, generator: torch.Generator) -> Tensor:
        wanted = self.augment
        x = change_wave(roll(x, generator) if wanted.roll else x, wanted, generator)
        if self.change is not None:
            x = self.change(x, generator)
        if wanted.time_mask:
            fill = float(x.mean())
            x = mask_stripes(x.T, frames=wanted.time_mask, bands=0, fill=fill, generator=generator).T.contiguous()
        return x


class SignalReader:
    """Arrays of any length as windows (C, L) that follow one another; the last one is continued and marked."""

    def __init__(self, *, format: SignalFormat, extensions: tuple[str, ...] = EXTENSIONS) -> None:
        format.check()
        self.format, self.extensions = format, extensions
        self.timed = format.sample_rate is not None
        self.frame_seconds = None if format.sample_rate is None else 1.0 / format.sample_rate

    def windows(self, path: Location, span: Span = WHOLE) -> Iterator[Window]:
        """All windows of a file, read one at a time; an end that fills less than half a patch is left out."""
        signal = self.format.open(path, span)  # (C, length), perhaps still on disk
        wanted, least = self.format.geometry.input[0], fewest_frames(self.format.geometry)
        for first in range(0, signal.shape[1], wanted):
            if first > 0 and signal.shape[1] - first < least:
                return
            x = read_frames(signal, start=first, count=wanted, path=path)
            yield Window(*fill_input(x, self.format.geometry, path), first)


def read_frames(signal: NDArray[np.generic], *, start: int, count: int, path: Location) -> Tensor:
    """Up to `count` frames of a mapped signal as (C, n) float32; reads only this part of the file."""
    x = torch.from_numpy(as_float32(signal[:, start : start + count]))
    if not torch.isfinite(x).all():
        raise DataError(f"{quoted(path)} holds numbers that are not finite (NaN or infinity) as float32.")
    return x


def as_float32(signal: NDArray[np.generic]) -> NDArray[np.float32]:
    """A copy; what float32 cannot hold becomes infinite."""
    with np.errstate(over="ignore"):
        return np.array(signal, dtype=np.float32)
