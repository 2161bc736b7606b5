"""Recordings of any length as log-mel samples: a source for training and evaluation, and a reader for single files.

Shapes: one sample is (1, frames, mels), the geometry's input; a clip's waveform (N,), its features (n, mels).

Training cuts `frames` frames out of a longer clip at a random place, evaluation at the centre, or at `views` places
from its beginning to its end; with `trim`, of what lies between the digital silence at its ends. A shorter clip is
continued with the feature floor ln 1.19e-7 (digital silence), and `valid` (T,) is False for patches of which less than
half of the frames are real.

In training, in this order: roll the whole clip, cut, mix with another clip, gain, noise; then features, then stripes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import log
from pathlib import Path

import torch
from torch import Tensor

from bridle.config.data_schema import AugmentConfig
from bridle.data.audio.decode import EXTENSIONS, SILENT, Excerpt, open_track, read_part, stream_waveform
from bridle.data.audio.logmel import FLOOR, LogMel
from bridle.data.file_source import ChooseStart, FileSource, start_of_view
from bridle.data.listing.columns import WHOLE, Span
from bridle.data.listing.table import Listing, as_tuple
from bridle.data.loading.augment import change_wave, mask_stripes, roll
from bridle.data.shards.tar_member import Location
from bridle.data.sources import Sample, Sound, Window, class_shares, fewest_frames, fill_input, require_axes
from bridle.errors import ConfigError, DataError, needs
from bridle.geometry import Geometry

# Seconds; of a longer recording only the part that is shown is decoded, and it is neither rolled nor cached.
LONG = 60.0

CENTRE = start_of_view(0, 1)


class Recordings(FileSource):
    """Sound files, or parts of them, as samples (1, frames, mels)."""

    def __init__(
        self,
        listing: Listing,
        classes: Sequence[str] | None,
        *,
        geometry: Geometry,
        front: LogMel,
        augment: AugmentConfig,
        views: int = 1,
        trim: bool = False,
        cache_mb: int = 0,
    ) -> None:
        super().__init__(listing, classes, cache_mb=cache_mb)
        self.augment, self.views, self.trim = augment, views, trim
        self.shape = Shape(geometry, front)
        self.front = front
        self.changes_wave = augment.roll or augment.gain_db > 0 or augment.gain_beta > 0 or augment.noise_db is not None
        # The cache holds features of whole clips, or their waveforms where those are what training changes.
        self.keeps_wave = augment.enabled and (
            self.changes_wave or (augment.mix_space == "waveform" and augment.mixup > 0)
        )
        # Samples up to which a clip is decoded whole: to be cached, or because only all of it tells where its sound is.
        wants_whole = trim or cache_mb > 0 or self.keeps_wave
        self.whole = max(round(LONG * front.sample_rate), self.shape.samples) if wants_whole else self.shape.samples

    def load(self, index: int, generator: torch.Generator | None) -> Sample:
        if generator is None or not self.augment.enabled:
            return self._sample(index, self._features(index, CENTRE))
        start_at = random_start(generator)
        if self.changes_wave:
            features = self.front(change_wave(self._wave(index, start_at, generator), self.augment, generator))
        else:
            features = self._features(index, start_at)
        return self._sample(index, self._striped(features, generator))

    def load_view(self, index: int, view: int) -> Sample:
        return self._sample(index, self._features(index, start_of_view(view, self.views)))

    def load_mixed(self, index: int, other: int, share: float, generator: torch.Generator) -> Sample:
        """share·item + (1 − share)·other as waveforms, augmented; a shorter one ends in silence."""
        own, partner = (self._wave(i, random_start(generator), generator) for i in (index, other))
        mixed = own.new_zeros(max(len(own), len(partner)))
        mixed[: len(own)] += share * own
        mixed[: len(partner)] += (1 - share) * partner
        features = self.front(change_wave(mixed, self.augment, generator))
        sample = self._sample(index, self._striped(features, generator))
        return sample._replace(label=self._mixed_label(index, other, share))

    def listen(self, index: int) -> Sound:
        """The waveform that un-augmented sample `index` shows."""
        wave = self._trimmed(self._reader(index, CENTRE)())
        return Sound(self.shape.cut_wave(wave, CENTRE), self.front.sample_rate)

    def seconds(self, index: int) -> float | None:
        """Length of a clip by its file's header; None if it cannot be opened."""
        try:
            with open_track(self.paths[index]) as track:
                length = track.length / track.rate
        except DataError:
            return None
        start, end = self.span(index)
        return max(0.0, min(length, length if end is None else end) - start)

    def _sample(self, index: int, features: Tensor) -> Sample:
        window = self.shape.window(features, 0, self.paths[index])
        return Sample(window.x, self.label(index), window.valid)

    def _features(self, index: int, start_at: ChooseStart) -> Tensor:
        """(n ≤ frames, mels) un-augmented."""
        if self.keeps_wave:
            shown: Tensor = self.front(self._wave(index, start_at, None))
            return shown
        features = self.cache.find(index)
        if features is None:
            part = self._reader(index, start_at)()
            features = self.front(self._trimmed(part))
            if part.whole:
                self.cache.add(index, features)
        return features.narrow(0, *self.shape.cut(len(features), start_at))

    def _wave(self, index: int, start_at: ChooseStart, generator: torch.Generator | None) -> Tensor:
        """(N ≤ samples of a sample,) with a generator rolled where that is asked for."""
        wave = self.cache.find(index)
        if wave is None:
            part = self._reader(index, start_at)()
            if not part.whole:
                return part.wave
            wave = self.cache.add(index, self._trimmed(part))
        if generator is not None and self.augment.roll:
            wave = roll(wave, generator)
        return self.shape.cut_wave(wave, start_at)

    def _reader(self, index: int, start_at: ChooseStart) -> Callable[[], Excerpt]:
        """A call that decodes a clip: all of it where that is needed and it is not long, else what is shown of it."""
        start, end = self.span(index)
        return partial(
            read_part,
            self.paths[index],
            rate=self.front.sample_rate,
            start=start,
            end=end,
            size=self.shape.samples,
            whole=self.whole,
            choose=lambda samples: start_at(self.front.frames(samples) - self.shape.frames) * self.front.shift,
        )

    def _trimmed(self, part: Excerpt) -> Tensor:
        return trimmed(part.wave, least=self.shape.least) if self.trim and part.whole else part.wave

    def _striped(self, features: Tensor, generator: torch.Generator) -> Tensor:
        """SpecAugment with the clip's own mean."""
        frames, bands = self.augment.time_mask, self.augment.band_mask
        if (frames == 0 and bands == 0) or len(features) == 0:
            return features
        fill = float(features.mean())
        return mask_stripes(features, frames=frames, bands=bands, fill=fill, generator=generator)

    def _mixed_label(self, index: int, other: int, share: float) -> Tensor | None:
        if self.labels is None:
            return None
        count = len(self.classes or ())
        own, partner = (class_shares(as_tuple(label), count) for label in (self.labels[index], self.labels[other]))
        return share * own + (1 - share) * partner


def wave_sample(wave: Tensor, rate: int, shape: Shape, start_at: ChooseStart) -> tuple[Tensor, Tensor | None]:
    """A waveform (N,) or (channels, N) of any rate and length as (1, frames, mels) and its real tokens."""
    mono = wave.float().mean(0) if wave.dim() == 2 else wave.float()
    if rate != shape.front.sample_rate:
        with needs("audio"):
            import soxr

        mono = torch.from_numpy(soxr.resample(mono.numpy(), rate, shape.front.sample_rate, quality="HQ"))
    found = shape.window(shape.front(shape.cut_wave(mono, start_at)), 0, Path("waveform"))
    return found.x, found.valid


class RecordingReader:
    """Single files as windows (1, frames, mels) that follow one another, in constant memory."""

    extensions = EXTENSIONS
    timed = True

    def __init__(self, *, geometry: Geometry, front: LogMel) -> None:
        self.shape, self.front = Shape(geometry, front), front
        self.frame_seconds: float | None = front.shift / front.sample_rate

    def windows(self, path: Location, span: Span = WHOLE) -> Iterator[Window]:
        waiting = torch.zeros(0, self.front.mels)
        first = 0
        for features in self._features(path, span):
            waiting = torch.cat([waiting, features])
            while len(waiting) >= self.shape.frames:
                yield self.shape.window(waiting[: self.shape.frames], first, path)
                waiting, first = waiting[self.shape.frames :], first + self.shape.frames
        if first == 0 or len(waiting) >= self.shape.fewest:
            yield self.shape.window(waiting, first, path)

    def _features(self, path: Location, span: Span) -> Iterator[Tensor]:
        """(n, mels) piece by piece, together the features of the whole part."""
        carried = torch.zeros(0)  # samples that later frames still need
        for block in stream_waveform(path, rate=self.front.sample_rate, start=span[0], end=span[1]):
            wave = torch.cat([carried, block])
            carried = wave[self.front.frames(len(wave)) * self.front.shift :]
            yield self.front(wave)


class Shape:
    """How much of a recording makes a sample, and which of its tokens are real."""

    def __init__(self, geometry: Geometry, front: LogMel) -> None:
        require_axes(geometry, "recordings", "frames", "mel bands", channels=[1])
        if geometry.input[1] != front.mels:
            raise ConfigError(f"geometry.input: {geometry.input[1]} mel bands, but the front end makes {front.mels}.")
        self.geometry, self.front = geometry, front
        self.frames = geometry.input[0]
        self.samples = front.window + (self.frames - 1) * front.shift
        self.fewest = fewest_frames(geometry)
        self.least = front.window + (self.fewest - 1) * front.shift  # samples that they need

    def cut(self, frames: int, start_at: ChooseStart) -> tuple[int, int]:
        """First frame and number of frames shown of a clip of `frames`."""
        return (start_at(frames - self.frames), self.frames) if frames > self.frames else (0, frames)

    def cut_wave(self, wave: Tensor, start_at: ChooseStart) -> Tensor:
        """The samples of the frames shown."""
        start, _ = self.cut(self.front.frames(len(wave)), start_at)
        return wave[start * self.front.shift :][: self.samples]

    def window(self, features: Tensor, start: int, path: Location) -> Window:
        """(n ≤ frames, mels) as a sample, padded with the floor where it is short."""
        hint = f" ({self.least / self.front.sample_rate:.3f} s of sound)"
        x, valid = fill_input(features[None], self.geometry, path, fill=log(FLOOR), hint=hint)
        return Window(x, valid, start)


def trimmed(wave: Tensor, *, least: int) -> Tensor:
    """(N,) without the digital silence at both ends, but at least `least` samples; silence alone stays whole."""
    sound = torch.nonzero(wave.abs() >= SILENT)
    if len(sound) == 0:
        return wave
    first, end = int(sound[0]), int(sound[-1]) + 1
    end = min(max(end, first + least), len(wave))
    return wave[max(0, min(first, end - least)) : end]


def random_start(generator: torch.Generator) -> ChooseStart:
    """Every place equally likely; one draw, whatever the clip's length turns out to be."""
    share = float(torch.rand((), generator=generator, dtype=torch.float64))
    return lambda spare: min(int(share * (spare + 1)), spare)
