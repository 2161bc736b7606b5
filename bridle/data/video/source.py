"""Videos in files as a source, and single files as windows.

Shapes: one sample is (C, T, H, W), values in [0, 1], C = 1 (grey) or 3 (RGB), T frames of H×W; decoded frames are
(n, h, w, C) uint8.

A clip is every `stride`-th frame, counted in the order frames are shown, whatever their times (so a variable frame rate
is no hindrance, and the rate itself does not matter). Frames past the end of the file repeat the last one, and `valid`
is False for tubelets of which less than half the frames are real. Frames are scaled so that the short side is
`short_side` (bilinear, in the decoder) or more where the sample would not fit in.

Training: a clip that starts anywhere it fits; a random part of the picture, the same in all frames (its area
`crop_scale` of the whole, its sides stretched by 3/4 to 4/3), scaled to H×W; mirrored half of the time; played
backwards half of the time where asked for; then RandAugment and erasing. Evaluation: clips spread evenly from the first
to the last start, pictures of H×W spread along the long side; a single one is taken from the middle.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from bridle.config.data_schema import AugmentConfig
from bridle.data.file_source import FileSource
from bridle.data.image.source import random_box
from bridle.data.listing.columns import WHOLE, Span
from bridle.data.listing.table import Listing
from bridle.data.loading.augment import change_picture
from bridle.data.loading.watchdog import decoding, renew
from bridle.data.shards.tar_member import Location, TarMember
from bridle.data.sources import Sample, Window, fewest_frames, fill_input, require_axes
from bridle.errors import DataError
from bridle.geometry import Geometry

if TYPE_CHECKING:
    from bridle.data.video.decode import Look

EXTENSIONS = (".mp4", ".m4v", ".mov", ".avi", ".mkv", ".webm", ".gif")
MOST_CACHED = 512  # frames of a video that may be cached whole; clips of longer ones are decoded when needed
MIDDLE = 0.5


class Decoding(NamedTuple):
    """How the clips of a data set are decoded."""

    geometry: Geometry
    stride: int
    short_side: int | None  # None: the larger side of the sample's picture
    timeout: float  # seconds for a clip, or for a window of a file that is read whole

    def check(self) -> None:
        """ConfigError for a geometry that videos cannot have."""
        require_axes(self.geometry, "videos", "frames", "height", "width", channels=[1, 3])

    def clip(self, path: Location, *, place: float, span: Span) -> Tensor:
        """(n, h, w, C), n ≤ T: the clip at `place` (0 … 1) of the starts where it fits; shorter where the file ends."""
        return self._read(path, place=place, span=span, length=self.geometry.input[0], stride=self.stride)[1]

    def whole(self, path: Location, *, span: Span) -> Tensor:
        """(n, h, w, C): all frames; none if they are too many for the cache, or cannot all be decoded."""
        try:
            count, frames = self._read(path, place=0.0, span=span, length=None, stride=1, most=MOST_CACHED)
        except DataError:  # a clip of it may still be read: what can be used must not depend on what is cached
            return torch.zeros(0, 1, 1, self.geometry.channels, dtype=torch.uint8)
        return frames if count == len(frames) else frames[:0].clone()

    def windows(self, path: Location, *, span: Span) -> Iterator[tuple[tuple[float, ...], Tensor]]:
        """Times in seconds and frames (n ≤ T, h, w, C) of one window after the other."""
        from bridle.data.video.decode import read_windows

        wanted = {"length": self.geometry.input[0], "stride": self.stride}
        with decoding(path, "a video", timeout=self.timeout):
            for seconds, pictures in read_windows(address_of(path), self._look(), span=span, **wanted):
                renew()
                yield tuple(seconds), torch.from_numpy(pictures)

    def _read(self, path: Location, **wanted: Any) -> tuple[int, Tensor]:
        from bridle.data.video.decode import read_clip

        with decoding(path, "a video", timeout=self.timeout):
            count, pictures = read_clip(address_of(path), self._look(), **wanted)
        return count, torch.from_numpy(pictures)

    def _look(self) -> Look:
        from bridle.data.video.decode import Look

        height, width = self.geometry.input[1:]
        return Look(self.geometry.channels, self.short_side or max(height, width), (height, width))

    def padded(self, x: Tensor, path: Location) -> tuple[Tensor, Tensor | None]:
        """x (C, n, H, W) with n ≤ T, continued with its last frame to (C, T, H, W), and which tokens are real."""
        return fill_input(x, self.geometry, path, hint=f" at stride {self.stride}; lower video.stride or remove it")


class Videos(FileSource):
    """Video files, or spans of them, as samples (C, T, H, W)."""

    def __init__(
        self,
        listing: Listing,
        classes: Sequence[str] | None,
        *,
        decoding: Decoding,
        augment: AugmentConfig,
        clips: int = 1,
        crops: int = 1,
        cache_mb: int = 0,
    ) -> None:
        super().__init__(listing, classes, cache_mb=cache_mb)
        decoding.check()
        self.decoding, self.augment = decoding, augment
        self.clips, self.crops, self.views = clips, crops, clips * crops
        self.cache_full = False
        self.latest: tuple[tuple[int, int], Tensor] | None = None  # pictures of one clip are asked for in a row

    def load(self, index: int, generator: torch.Generator | None) -> Sample:
        if generator is None:
            return self._sample(index, middle_part(self._clip(index, MIDDLE), place=MIDDLE, size=self._size()))
        frames = self._clip(index, float(torch.rand((), generator=generator, dtype=torch.float64)))
        return self._augmented(index, frames, generator)

    def load_view(self, index: int, view: int) -> Sample:
        """Views run over the pictures of the first clip, then of the second."""
        clip, crop = divmod(view, self.crops)
        if self.latest is None or self.latest[0] != (index, clip):
            self.latest = (index, clip), self._clip(index, spread(clip, self.clips))
        return self._sample(index, middle_part(self.latest[1], place=spread(crop, self.crops), size=self._size()))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "latest": None}

    def _size(self) -> tuple[int, int]:
        return self.decoding.geometry.input[1], self.decoding.geometry.input[2]

    def _clip(self, index: int, place: float) -> Tensor:
        """(n, h, w, C) with n ≤ T, from the cached video or from its file."""
        path, span = self.paths[index], self.span(index)
        if self.cache.limit and (index in self.cache or not self.cache_full):
            whole = self.cache.get(index, lambda: self.decoding.whole(path, span=span))
            self.cache_full = self.cache_full or index not in self.cache
            if len(whole):
                from bridle.data.video.decode import start_of

                length, stride = self.decoding.geometry.input[0], self.decoding.stride
                return whole[start_of(len(whole), place=place, length=length, stride=stride) :: stride][:length]
        return self.decoding.clip(path, place=place, span=span)

    def _augmented(self, index: int, frames: Tensor, generator: torch.Generator) -> Sample:
        wanted, (h, w) = self.augment, frames.shape[1:3]
        left, top, right, bottom = random_box((w, h), size=self._size(), scale=wanted.crop_scale, generator=generator)
        x, y = round(left), round(top)
        part = frames[:, y : max(round(bottom), y + 1), x : max(round(right), x + 1)]
        pictures = interpolate(part.permute(0, 3, 1, 2), size=self._size(), mode="bilinear", antialias=True)
        if wanted.flip and torch.rand((), generator=generator) < 0.5:
            pictures = pictures.flip(-1)
        if wanted.time_flip and torch.rand((), generator=generator) < 0.5:
            pictures = pictures.flip(0)
        sample = self._sample(index, pictures)
        return sample._replace(x=change_picture(sample.x, wanted, generator))

    def _sample(self, index: int, pictures: Tensor) -> Sample:
        """A sample of pictures (n, C, H, W) uint8."""
        x, valid = self.decoding.padded(unit_range(pictures), self.paths[index])
        return Sample(x, self.label(index), valid)


class VideoReader:
    """Videos of any length as windows (C, T, H, W) that follow one another, T·stride frames each, middle cut out."""

    extensions = EXTENSIONS
    frame_seconds = None  # every file has a rate of its own, perhaps none; windows carry the times of their frames
    timed = True

    def __init__(self, decoding: Decoding) -> None:
        decoding.check()
        self.decoding = decoding

    def windows(self, path: Location, span: Span = WHOLE) -> Iterator[Window]:
        """All windows of a file, decoded one at a time; an end that fills less than half a tubelet is left out."""
        decoding = self.decoding
        length, height, width = decoding.geometry.input
        for number, (seconds, frames) in enumerate(decoding.windows(path, span=span)):
            if number > 0 and len(frames) < fewest_frames(decoding.geometry):
                return
            x = unit_range(middle_part(frames, place=MIDDLE, size=(height, width)))
            yield Window(*decoding.padded(x, path), number * length, seconds)


def address_of(path: Location) -> str:
    """What the decoder opens."""
    return path.address() if isinstance(path, TarMember) else os.path.abspath(path)


def spread(number: int, count: int) -> float:
    """The place of one of `count`, from 0 to 1; the middle for a single one."""
    return MIDDLE if count == 1 else number / (count - 1)


def middle_part(frames: Tensor, *, place: float, size: tuple[int, int]) -> Tensor:
    """(n, h, w, C) -> (n, C, H, W): cut out at `place` of the long side and in the middle of the short one."""
    (h, w), (height, width) = frames.shape[1:3], size
    down, across = (MIDDLE, place) if w >= h else (place, MIDDLE)
    top, left = round(down * (h - height)), round(across * (w - width))
    return frames[:, top : top + height, left : left + width].permute(0, 3, 1, 2)


def unit_range(pictures: Tensor) -> Tensor:
    """(n, C, H, W) uint8 -> (C, n, H, W) in [0, 1]"""
    return pictures.transpose(0, 1).to(torch.float32, memory_format=torch.contiguous_format).div_(255)
