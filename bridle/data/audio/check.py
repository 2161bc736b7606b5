"""One sound file decoded from end to end, in blocks, so that its length does not matter.

A sound is called
    silent    if every |sample| < 1e-4, or all are the same (per channel)
    clipped   if at least 0.1 % of its samples are |sample| ≥ 0.999 right after another such sample
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from bridle.data.audio.decode import SILENT, SLACK, SoundTrack, Track, open_track
from bridle.data.inspect.findings import CheckOptions, Facts
from bridle.data.loading.watchdog import renew
from bridle.data.shards.tar_member import Location, byte_count, open_regular

BLOCK = 1 << 16  # samples of each channel read at a time
SILENCE = 1e-4
FULL_SCALE = 0.999
CLIPPED_SHARE = 0.001


class SoundMeter:
    """Extremes, clipping and non-finite samples of a sound that comes in blocks (n, channels)."""

    def __init__(self) -> None:
        self.frames, self.samples, self.broken, self.clipped = 0, 0, 0, 0
        self.low: NDArray[np.float32] | None = None  # (channels,)
        self.high: NDArray[np.float32] | None = None
        self.was_full: NDArray[np.bool_] | None = None  # (1, channels), of the last sample seen
        self.first, self.last = 0, 0  # samples before the sound begins and until it ends

    def add(self, block: NDArray[np.float32]) -> None:
        if len(block) == 0:
            return
        heard = np.flatnonzero(np.abs(block).max(1) >= SILENT)
        if len(heard):
            self.first = self.frames + int(heard[0]) if self.last == 0 else self.first
            self.last = self.frames + int(heard[-1]) + 1
        self.frames += len(block)
        self.samples += block.size
        self.broken += block.size - int(np.isfinite(block).sum())
        low, high = block.min(0), block.max(0)
        self.low = low if self.low is None else np.minimum(self.low, low)
        self.high = high if self.high is None else np.maximum(self.high, high)
        full = np.abs(block) >= FULL_SCALE
        before = np.zeros_like(full[:1]) if self.was_full is None else self.was_full
        self.clipped += int((full & np.concatenate([before, full[:-1]])).sum())
        self.was_full = full[-1:]

    def judge(self, facts: Facts) -> Facts:
        """The findings about the sound as a whole."""
        if self.low is None or self.high is None:
            return facts.found("empty", "no samples")
        if self.broken:
            facts = facts.found("not finite", f"{self.broken} of {self.samples} samples are NaN or infinite")
        elif float(max(-self.low.min(), self.high.max())) < SILENCE:
            facts = facts.found("silent", f"no sample above {SILENCE:g}")
        elif self.frames > 1 and bool((self.low == self.high).all()):
            facts = facts.found("silent", f"all samples are {float(self.low[0]):.4g}")
        if self.clipped >= CLIPPED_SHARE * self.samples:
            facts = facts.found("clipped", f"{100 * self.clipped / self.samples:.2f} % of samples at full scale")
        return facts


def check_sound(path: Location, options: CheckOptions) -> Facts:
    """A sound file, or the sound track of a video, as pretraining would open it."""
    meter = SoundMeter()
    with open_track(path) as track:
        for block in channel_blocks(track):
            meter.add(block)
        seconds, promised = meter.frames / track.rate, track.length / track.rate if track.exact else 0.0
    channels, sounding = 0 if meter.low is None else len(meter.low), (meter.last - meter.first) / track.rate
    facts = Facts(
        "audio", seconds=seconds, rate=track.rate, shape=(channels, meter.frames), sounding=round(sounding, 6)
    )
    facts = meter.judge(facts)
    if seconds < promised - SLACK:
        return facts.found("truncated", f"{seconds:.2f} of {promised:.2f} s are there")
    return facts.found("cut short", "the stream has no end mark") if lacks_end(path) else facts


def channel_blocks(track: Track) -> Iterator[NDArray[np.float32]]:
    """(n, channels) where the channels can be had, which clipping shows in; else their mean (n, 1)."""
    if not isinstance(track, SoundTrack):
        yield from (block[:, None] for block in track.blocks(0))
        return
    track.sound.seek(0)  # opening it may have looked at the end
    while len(block := track.sound.read(BLOCK, dtype="float32", always_2d=True)):
        renew()
        yield block


def lacks_end(path: Location) -> bool:
    """Is this an Ogg file whose last page does not say that it is the last? Its decoder would not notice."""
    with open_regular(path) as file:
        if file.read(4) != b"OggS":
            return False
        file.seek(max(0, byte_count(path) - (1 << 16)))  # a page is at most this long
        tail = file.read()
    last = tail.rfind(b"OggS")
    return last < 0 or not tail[last + 5 : last + 6] or not tail[last + 5] & 4
