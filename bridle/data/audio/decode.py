"""Sound out of files, as mono float32 at one sample rate: whole, in part, or as a stream in constant memory.

Shapes: waveform (N,), ±1 for full scale; all channels averaged.

soundfile decodes wav, flac, ogg, mp3 and their kin; av the sound track of films, and mp3 of unstated length. Parts are
read by seeking. Files are read in blocks, and nothing is allocated because a header says so.

With rates r_in : r_out = p : q in lowest terms, q samples out begin where p samples in begin, so a part that starts at
a multiple of p resamples as in the whole file.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from math import gcd
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bridle.data.loading.watchdog import decoding, renew
from bridle.data.shards.tar_member import Location, TarMemberFile, open_regular
from bridle.errors import DataError, needs, quoted

if TYPE_CHECKING:
    import av

SOUND = (".wav", ".flac", ".ogg", ".oga", ".opus", ".mp3", ".aiff", ".aif", ".aifc", ".au", ".caf", ".w64", ".rf64")
FILM = (".mp4", ".m4a", ".m4v", ".mov", ".aac", ".mkv", ".mka", ".webm", ".avi", ".wma", ".wmv", ".flv", ".ts", ".mpg")
EXTENSIONS = SOUND + FILM
# A closed list keeps away containers that are only lists of other files or addresses.
CONTAINERS = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,aac,asf,flv,mpegts,mpeg,mp3"
RATES = (1_000, 1_536_000)  # Hz that are believed; resampling from less would grow without bound
BLOCK = 1 << 16  # numbers decoded at a time
MARGIN = 4_096  # samples resampled before a part, where the filter has not settled
PREROLL = 0.25  # seconds decoded before a part of a film, where its decoder has not settled
SLACK = 0.25  # seconds that a file may end before the length written in it
SILENT = 2.0**-15  # one step of 16 bits; a sample that is smaller is digital silence

Block = NDArray[np.float32]


class Track(Protocol):
    """Opened sound."""

    rate: int
    length: int  # frames (samples of each channel), as the file says
    exact: bool  # is the length written in the file, or guessed from its size

    def blocks(self, start: int) -> Iterator[Block]:
        """Mono samples from frame `start` to the end, to be asked for once."""
        ...


class Excerpt(NamedTuple):
    """Some of a clip, or all of it."""

    wave: Tensor  # (N,)
    whole: bool


def read_waveform(path: Location, *, rate: int, start: float = 0.0, seconds: float | None = None) -> Tensor:
    """(N,) at `rate`: the whole file, or `seconds` from `start`."""
    return torch.cat(list(stream_waveform(path, rate=rate, start=start, end=seconds and start + seconds)))


def read_part(
    path: Location,
    *,
    rate: int,
    start: float,
    end: float | None,
    size: int,
    whole: int,
    choose: Callable[[int], int],
) -> Excerpt:
    """Of the clip from `start` to `end`: all of it if it has at most `whole` samples, else `size` of them.

    `choose` says for the clip's length (in samples, more than `whole`) where the part begins.
    """
    first, limit = bounds(start, end, rate)
    counted: int | None = None  # samples of the file, where what it says is not to be relied on
    while True:
        with open_track(path) as track:
            total = round(track.length * rate / track.rate) if counted is None else counted
            length = total - first if limit is None else min(total - first, limit)
            part = length > whole
            at, count = (choose(length), size) if part else (0, whole + 1 if limit is None else min(whole + 1, limit))
            blocks = list(sample_blocks(track, path, rate=rate, first=first + at, count=count))
            found = sum(map(len, blocks))
            # A guessed length may be wrong: too long, and the part is not there; too short, and the whole is too much.
            if track.exact or counted is not None or (found == size if part else found <= whole):
                break
        counted = sum(map(len, stream_waveform(path, rate=rate)))
    if found == 0:
        raise no_samples(path, start)
    return Excerpt(torch.from_numpy(np.concatenate(blocks)), whole=not part)


def stream_waveform(
    path: Location, *, rate: int, start: float = 0.0, end: float | None = None, block_seconds: float = 10.0
) -> Iterator[Tensor]:
    """The file, or its part from `start` to `end`, in pieces (N,) of `block_seconds`, the last one shorter."""
    size, waiting, held = max(1, round(block_seconds * rate)), list[Block](), 0
    first, count = bounds(start, end, rate)
    empty = True
    with open_track(path) as track:
        for block in sample_blocks(track, path, rate=rate, first=first, count=count):
            waiting.append(block)
            held += len(block)
            while held >= size:
                joined = np.concatenate(waiting)
                yield torch.from_numpy(joined[:size].copy())
                waiting, held, empty = [joined[size:]], held - size, False
    if held:
        yield torch.from_numpy(np.concatenate(waiting))
    elif empty:
        raise no_samples(path, start)


def bounds(start: float, end: float | None, rate: int) -> tuple[int, int | None]:
    """First sample and number of samples of a part in seconds; None: to the end."""
    first = round(start * rate)
    return first, None if end is None else max(round(end * rate) - first, 1)


def no_samples(path: Location, start: float) -> DataError:
    return DataError(f"{quoted(path)} holds no samples{f' at {start:g} s' if start else ''}.")


def sample_blocks(track: Track, path: Location, *, rate: int, first: int, count: int | None) -> Iterator[Block]:
    """`count` samples at `rate` from sample `first` of an opened track, block by block; fewer where it ends.

    DataError if they are not finite, or if the track ends before the length that its file states.
    """
    common = gcd(track.rate, rate)
    p, q = track.rate // common, rate // common
    resampler = None
    if track.rate != rate:
        with needs("audio"):
            import soxr

        resampler = soxr.ResampleStream(track.rate, rate, 1, dtype="float32", quality="HQ")
    step = max(first - MARGIN, 0) // q if resampler else first  # p frames in, q samples out
    skip, left, at = first - step * q if resampler else 0, count, step * p
    for block in track.blocks(at):
        if not np.isfinite(block).all():
            raise DataError(f"{quoted(path)} holds samples that are not finite (NaN or infinity).")
        at += len(block)
        samples = resampler.resample_chunk(block) if resampler else block
        part = samples[skip:] if left is None else samples[skip : skip + left]
        skip -= min(skip, len(samples))
        left = None if left is None else left - len(part)
        yield part
        if left == 0:
            return
    if track.exact and at < track.length - SLACK * track.rate:
        raise DataError(
            f"{quoted(path)} ends after {at / track.rate:.2f} of {track.length / track.rate:.2f} s; it is truncated."
        )
    if resampler:
        samples = resampler.resample_chunk(np.zeros(0, np.float32), last=True)
        yield samples[skip:] if left is None else samples[skip : skip + left]


@contextmanager
def open_track(path: Location) -> Iterator[Track]:
    """The sound of a file, open for reading inside the block; whatever its decoder dislikes becomes a DataError."""
    with decoding(path, "sound"), open_regular(path) as file, opened(file, path) as track:
        if not RATES[0] <= track.rate <= RATES[1]:
            raise DataError(f"{quoted(path)} says its sample rate is {track.rate} Hz, which is not believable.")
        yield track


@contextmanager
def opened(file: FileIO | TarMemberFile, path: Location) -> Iterator[Track]:
    """The decoder for a file, by its extension."""
    if size_of(file) == 0:
        raise DataError(f"{quoted(path)} is empty (0 bytes).")
    mp3 = read_mp3_head(file)
    if mp3.there < 0.99 * mp3.stated:
        raise DataError(f"{quoted(path)} ends after {mp3.there} of {mp3.stated} bytes; it is truncated.")
    # Of an mp3 that does not state its length soundfile reads no more than it guesses.
    if path.suffix.lower() in FILM or not mp3.exact:
        with needs("audio"):
            import av

        options = {"format_whitelist": CONTAINERS, "protocol_whitelist": "file"}
        with av.open(file, mode="r", options=options) as container:
            if not container.streams.audio:
                raise DataError(f"{quoted(path)} has no sound track.")
            yield FilmTrack(container)
        return
    with needs("audio"):
        import soundfile

    plain = isinstance(file, FileIO)  # libsndfile then reads without asking Python
    with soundfile.SoundFile(file.fileno() if plain else file, closefd=False) as sound:
        check_end(sound, path)
        yield SoundTrack(sound)


def check_end(sound: Any, path: Location) -> None:
    """Is a wav or flac file as long as it says? Checked here, so that it does not depend on the part that is read."""
    if cut := re.search(r"data\s*: (\d+) \(should be (\d+)\)", sound.extra_info):
        stated, there = map(int, cut.groups())
        if there < stated < 0x7FFF_0000:  # larger ones are written by programs that do not know the length yet
            raise DataError(f"{quoted(path)} ends after {there} of {stated} bytes of sound; it is truncated.")
    if sound.format == "FLAC" and sound.frames > 0:
        try:
            sound.seek(sound.frames - 1)
            there = len(sound.read(1))
        except RuntimeError:  # of libsndfile
            there = 0
        if there == 0:
            raise DataError(f"{quoted(path)} cannot be read at its end; it is truncated.")


class SoundTrack:
    """A file that soundfile reads."""

    exact = True

    def __init__(self, sound: Any) -> None:
        self.sound = sound
        self.rate, self.length = int(sound.samplerate), int(sound.frames)

    def blocks(self, start: int) -> Iterator[Block]:
        if start > 0 and start >= self.length:
            return
        self.sound.seek(start)
        size = max(1, BLOCK // self.sound.channels)
        while True:
            frames: Block = self.sound.read(size, dtype="float32", always_2d=True)  # (n, channels)
            if len(frames) == 0:
                return
            renew()
            yield frames[:, 0].copy() if frames.shape[1] == 1 else frames.mean(1)


class FilmTrack:
    """The first sound track of a container that av reads."""

    def __init__(self, container: av.container.InputContainer) -> None:
        self.container, self.stream = container, container.streams.audio[0]
        self.rate = int(self.stream.rate or 0)
        seconds = (container.duration or 0) / 1_000_000
        self.exact = "mp4" in container.format.name and self.stream.duration is not None  # others are guessed
        if self.stream.duration is not None and self.stream.time_base is not None:
            seconds = float(self.stream.duration * self.stream.time_base)
        self.length = round(seconds * self.rate)

    def blocks(self, start: int) -> Iterator[Block]:
        with needs("audio"):
            import av

        base, zero = self.stream.time_base, self.stream.start_time or 0
        assert base is not None
        early = start / self.rate - PREROLL
        if early > 0:
            # Where a container cannot seek, or not so far, all that comes is decoded and skipped by its time stamps.
            with suppress(av.error.FFmpegError):
                self.container.seek(zero + int(early / base), stream=self.stream)
        convert = av.AudioResampler(format="fltp", layout=self.stream.layout, rate=self.rate)
        at: int | None = None  # frame that the next samples begin at
        for packet in self.container.demux(self.stream):
            renew()
            for decoded in packet.decode():
                if at is None:
                    at = 0 if decoded.pts is None else round((decoded.pts - zero) * base * self.rate)
                for frame in convert.resample(decoded):
                    samples = frame.to_ndarray().mean(0, dtype=np.float32)  # (channels, n) -> (n,)
                    skip = min(max(start - at, 0), len(samples))
                    at += len(samples)
                    if skip < len(samples):
                        yield samples[skip:]


class Mp3Head(NamedTuple):
    """What an mp3 says of its length in its first frame; other kinds of files always know theirs."""

    exact: bool = True
    stated: int = 0  # bytes
    there: int = 0  # bytes


def size_of(file: FileIO | TarMemberFile) -> int:
    """Bytes."""
    return file.size if isinstance(file, TarMemberFile) else os.fstat(file.fileno()).st_size


def read_mp3_head(file: FileIO | TarMemberFile) -> Mp3Head:
    """Length of an mp3 by the Xing or Info tag: after its name flags, then (by bits 0 and 1) frames and bytes."""
    head, start = file.read(10), 0
    if head[:3] == b"ID3" and len(head) == 10:
        start = 10 + sum((byte & 0x7F) << shift for byte, shift in zip(head[6:], (21, 14, 7, 0), strict=True))
    file.seek(start)
    frame = file.read(256)
    file.seek(0)
    if frame[:1] != b"\xff" or frame[1:2] < b"\xe0":
        return Mp3Head(exact=start == 0)
    tag = re.search(b"(?:Xing|Info)(....)(........)", frame, re.DOTALL)
    if tag is None:
        return Mp3Head(exact=False)
    flags = int.from_bytes(tag.group(1), "big")
    place = slice(4, 8) if flags & 1 else slice(0, 4)
    stated = int.from_bytes(tag.group(2)[place], "big") if flags & 2 else 0
    return Mp3Head(bool(flags & 1), stated, size_of(file) - start)
