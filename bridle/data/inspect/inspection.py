"""One media file looked at from end to end: what is in it, and what is wrong with it.

A file is decoded in blocks and frames, never as a whole, so that its length does not matter. A sound is called
    silent    if every |sample| < 1e-4, or all are the same (per channel)
    clipped   if at least 0.1 % of its samples are |sample| ≥ 0.999 right after another such sample
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bridle.data.audio.decode import EXTENSIONS as SOUND_EXTENSIONS
from bridle.data.audio.decode import SLACK, SoundTrack, Track, open_track
from bridle.data.image.source import EXTENSIONS as IMAGE_EXTENSIONS
from bridle.data.image.source import FORMATS as IMAGE_FORMATS
from bridle.data.loading.watchdog import renew
from bridle.data.video.source import EXTENSIONS as VIDEO_EXTENSIONS
from bridle.errors import DataError, quoted

KINDS: dict[str, tuple[str, ...]] = {
    "video": VIDEO_EXTENSIONS,
    "image": IMAGE_EXTENSIONS,
    "audio": tuple(ending for ending in SOUND_EXTENSIONS if ending not in VIDEO_EXTENSIONS),
}
UNUSABLE = ("missing", "undecodable", "empty", "truncated", "not finite")  # pretraining would leave such a file out
DOUBTFUL = ("decoder warning", "cut short", "silent", "clipped", "blank", "too short", "wrong rate")

BLOCK = 1 << 16  # samples of each channel read at a time
SILENCE = 1e-4
FULL_SCALE = 0.999
CLIPPED_SHARE = 0.001
SHORTFALL = 0.97  # headers of videos are often a little wrong; less than this share of the frames is a cut file
MESSAGES = 4096  # characters of a decoder's complaints that are kept


class Finding(NamedTuple):
    """Something wrong with a file."""

    name: str  # one of UNUSABLE or DOUBTFUL
    detail: str


class Facts(NamedTuple):
    """What one file holds."""

    kind: str
    findings: tuple[Finding, ...] = ()
    seconds: float | None = None
    rate: int | None = None  # samples per second and channel
    size: tuple[int, int] | None = None  # width, height

    def found(self, name: str, detail: str) -> Facts:
        return self._replace(findings=(*self.findings, Finding(name, detail)))


def kind_of(path: Path, wanted: str = "auto") -> str | None:
    """audio, image or video by the name's ending; a video may be `wanted` for its sound only."""
    ending = path.suffix.lower()
    own = next((kind for kind, endings in KINDS.items() if ending in endings), None)
    if wanted in ("auto", own):
        return own
    return "audio" if wanted == "audio" and own == "video" else None


def inspect_file(path: Path, *, kind: str, shortest: float, frames: int) -> Facts:
    """Decode a file (of a video up to `frames` frames) and say what was found; nothing is raised."""
    facts = Facts(kind)
    try:
        if path.stat().st_size == 0:
            return facts.found("empty", "0 bytes")
    except OSError as error:
        return facts.found("missing" if isinstance(error, FileNotFoundError) else "undecodable", reason(error))
    with decoder_messages() as messages:
        try:
            if kind == "image":
                facts = inspect_image(path)
            elif kind == "video":
                facts = inspect_video(path, frames=frames, shortest=shortest)
            else:
                facts = inspect_sound(path, shortest=shortest)
        except DataError as error:
            why = str(error).removeprefix(f"{quoted(path)} ").rstrip(".")
            facts = facts.found("truncated" if why.endswith("is truncated") else "undecodable", why)
        except Exception as error:  # decoders meet damaged files with errors of every type
            facts = facts.found("undecodable", reason(error))
    if messages and not any(finding.name in (*UNUSABLE, "cut short") for finding in facts.findings):
        facts = facts.found("decoder warning", messages[0])
    return facts


class SoundMeter:
    """Extremes, clipping and non-finite samples of a sound that comes in blocks (n, channels)."""

    def __init__(self) -> None:
        self.frames, self.samples, self.broken, self.clipped = 0, 0, 0, 0
        self.low: NDArray[np.float32] | None = None  # (channels,)
        self.high: NDArray[np.float32] | None = None
        self.was_full: NDArray[np.bool_] | None = None  # (1, channels), of the last sample seen

    def add(self, block: NDArray[np.float32]) -> None:
        if len(block) == 0:
            return
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

    def judge(self, facts: Facts, *, shortest: float) -> Facts:
        """The findings about the sound as a whole."""
        if self.low is None or self.high is None:
            return facts.found("empty", "no samples")
        seconds = facts.seconds or 0.0
        if self.broken:
            facts = facts.found("not finite", f"{self.broken} of {self.samples} samples are NaN or infinite")
        elif float(max(-self.low.min(), self.high.max())) < SILENCE:
            facts = facts.found("silent", f"no sample above {SILENCE:g}")
        elif self.frames > 1 and bool((self.low == self.high).all()):
            facts = facts.found("silent", f"all samples are {float(self.low[0]):.4g}")
        if self.clipped >= CLIPPED_SHARE * self.samples:
            facts = facts.found("clipped", f"{100 * self.clipped / self.samples:.2f} % of samples at full scale")
        if seconds < shortest:
            facts = facts.found("too short", f"{seconds:.3g} s")
        return facts


def inspect_sound(path: Path, *, shortest: float) -> Facts:
    """A sound file, or the sound track of a video, as pretraining would open it."""
    meter = SoundMeter()
    with open_track(path) as track:
        for block in channel_blocks(track):
            meter.add(block)
        seconds, promised = meter.frames / track.rate, track.length / track.rate if track.exact else 0.0
    facts = meter.judge(Facts("audio", seconds=seconds, rate=track.rate), shortest=shortest)
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


def lacks_end(path: Path) -> bool:
    """Is this an Ogg file whose last page does not say that it is the last? Its decoder would not notice."""
    with path.open("rb") as file:
        if file.read(4) != b"OggS":
            return False
        file.seek(max(0, path.stat().st_size - (1 << 16)))  # a page is at most this long
        tail = file.read()
    last = tail.rfind(b"OggS")
    return last < 0 or not tail[last + 5 : last + 6] or not tail[last + 5] & 4


def inspect_image(path: Path) -> Facts:
    """A picture, decoded whole."""
    from PIL import Image

    with warnings.catch_warnings(record=True) as complaints:
        warnings.simplefilter("always")
        with Image.open(path, formats=IMAGE_FORMATS) as image:
            image.load()
            facts, extrema = Facts("image", size=image.size), image.getextrema()
    if complaints:
        facts = facts.found("decoder warning", quoted(complaints[0].message))
    pairs = extrema if isinstance(extrema[0], tuple) else [extrema]
    if all(low == high for low, high in pairs):
        facts = facts.found("blank", "all pixels are the same")
    return facts


def inspect_video(path: Path, *, frames: int, shortest: float) -> Facts:
    """The first video track, its first `frames` frames decoded."""
    import av

    from bridle.data.video.decode import opened

    count, size, trouble = 0, None, ""
    with opened(str(path)) as (container, stream):
        try:
            for frame in container.decode(stream):
                renew()
                count, size = count + 1, (frame.width, frame.height)
                if count == frames:
                    break
        except av.FFmpegError as error:
            trouble = f": {reason(error)}"
        rate, promised = float(stream.average_rate or 0), stream.frames
    if count == 0:
        return Facts("video").found("empty", f"no frame can be decoded{trouble}")
    whole = max(count, promised) if count == frames else count  # frames that are not decoded are taken on trust
    facts = Facts("video", seconds=whole / rate if rate else None, size=size)
    if trouble:
        facts = facts.found("cut short", f"decoding stops after {count} frames{trouble}")
    elif count < min(frames, SHORTFALL * promised):
        facts = facts.found("cut short", f"{count} of {promised} frames are there")
    if facts.seconds is not None and facts.seconds < shortest:
        facts = facts.found("too short", f"{facts.seconds:.3g} s")
    return facts


def reason(error: Exception) -> str:
    """One line for a decoder's error, without the path, which is told beside it."""
    if type(error).__name__ == "UnidentifiedImageError":
        return "not a JPEG, PNG, WebP or BMP file"
    text = getattr(error, "error_string", None) or getattr(error, "strerror", None) or str(error)
    return quoted(text).strip("'\"").rstrip(".") or type(error).__name__


@contextmanager
def decoder_messages() -> Iterator[list[str]]:
    """Lines that decoders print to the error stream inside the block: C libraries have no other way to complain.

    The whole process writes there, so that nothing else may print meanwhile.
    """
    import av

    lines: list[str] = []
    sys.stderr.flush()
    av.logging.restore_default_callback()
    av.logging.set_libav_level(av.logging.ERROR)
    stream = os.dup(2)
    with tempfile.TemporaryFile() as kept:
        os.dup2(kept.fileno(), 2)
        try:
            yield lines
        finally:
            sys.stderr.flush()
            os.dup2(stream, 2)
            os.close(stream)
            av.logging.set_level(None)
            kept.seek(0)
            for line in kept.read(MESSAGES).decode("utf-8", "replace").splitlines():
                lines.append(quoted(re.sub(r" @ 0x[0-9a-f]+", "", line)).strip("'\""))
