"""Frames of video files, decoded by FFmpeg in this process; a damaged file may crash it, see `loading.watchdog`.

Shapes: pictures are (frames, h, w, C) uint8, C 1 or 3. A file that cannot be used raises ValueError or an error of av.

Frames are counted in the order they are shown. Their number and times come from the packets of the file, which are
read but not decoded; what a file says about its length is never believed. A clip is decoded from the last key frame
before it. Where times cannot be trusted (a reordering codec in AVI, times that repeat), frames are counted by decoding.
A file that breaks off is as long as what is whole of it.
"""

from __future__ import annotations

import os
import stat
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bridle.errors import needs

with needs("video"):
    import av
    from av.container import InputContainer
    from av.video.frame import VideoFrame
    from av.video.reformatter import VideoReformatter
    from av.video.stream import VideoStream

Pictures = NDArray[np.uint8]
Span = tuple[float, float | None]  # start and end in seconds; None: to the end

OPTIONS = {
    # By content, whatever the name: playlists and the like would open other files, or connections.
    "format_whitelist": "mov,mp4,m4a,3gp,3g2,mj2,avi,matroska,webm,gif",
    "protocol_whitelist": "file",
}
PART = "subfile,,"  # begins FFmpeg's address of bytes inside a file; paths are absolute and never begin so
INSIDE = {**OPTIONS, "protocol_whitelist": "file,subfile"}
LARGEST_FRAME = 8192 * 8192  # pixels
MOST_FRAMES = 10_000_000  # a day at 100 frames a second
NARROWEST = 32  # long side : short side
MOST_KNOWN = 64  # files whose frame times are remembered
# Older ones know no other.
ONE_THREAD: dict[str, Any] = {"threads": 1} if int(av.__version__.split(".")[0]) >= 17 else {}


class Times(NamedTuple):
    """Which frames a file holds, without their pictures."""

    count: int  # type: ignore[assignment]  # hides tuple.count, which nobody needs here
    shown: list[int] | None  # when each frame is shown, in `unit`; None: frames can only be counted
    keys: list[int]  # of these, the frames that decoding can start at
    unit: float  # seconds

    def seconds(self, frame: int) -> float:
        """Time of a frame since the first one."""
        return (frame if self.shown is None else self.shown[frame] - self.shown[0]) * self.unit

    def between(self, start: float, end: float | None) -> range:
        """The frames shown from `start` to before `end`."""
        numbers = range(self.count)
        first = bisect_left(numbers, start - 1e-6, key=self.seconds)
        return range(first, self.count if end is None else bisect_left(numbers, end - 1e-6, key=self.seconds))


class TimesError(Exception):
    """Frames came at other times than their packets said."""


class Look(NamedTuple):
    """How frames become pictures."""

    channels: int
    short_side: int
    least: tuple[int, int]  # height and width that a picture must cover


known: dict[tuple[str, int, int], Times] = {}


def read_clip(
    path: str, look: Look, *, place: float, length: int | None, stride: int, span: Span, most: int = MOST_FRAMES
) -> tuple[int, Pictures]:
    """How many frames the file or span holds, and up to `length` of them, every `stride`-th, from `place` on.

    Without a length: all frames, but only the first one if there are more than `most`.
    """

    def cut(times: Times) -> tuple[int, Pictures]:
        part = times.between(*span)
        if not part:
            start, end = span
            where = f" from {start:g} s to {'the end' if end is None else f'{end:g} s'}"
            raise ValueError(f"it holds no frames{'' if (start, end) == (0.0, None) else where}")
        count = length or (len(part) if len(part) <= most else 1)
        wanted = list(part[start_of(len(part), place=place, length=count, stride=stride) :: stride][:count])
        frames = frames_by_number(path, wanted) if times.shown is None else frames_by_time(path, times, wanted)
        paint = Paint(look)
        return len(part), np.stack([paint(frame) for frame in frames])

    try:
        return cut(known.get(identity(path)) or remember(path, read_times(path)))
    except TimesError:
        return cut(remember(path, count_frames(path)))


def start_of(frames: int, *, place: float, length: int, stride: int) -> int:
    """First frame of a clip: `place` (0 … 1) along all the starts at which it fits; 0 where it does not."""
    spare = max(frames - (length - 1) * stride - 1, 0)
    return min(int(place * (spare + 1)), spare)


def read_windows(
    path: str, look: Look, *, length: int, stride: int, span: Span
) -> Iterator[tuple[list[float], Pictures]]:
    """Every `stride`-th frame of a span, `length` at a time, and their times in the file in seconds."""
    paint, (start, end) = Paint(look), span
    with opened(path) as (container, stream):
        painted: list[Pictures] = []
        seconds: list[float] = []
        begin, before = 0.0, 0  # time of the first frame, frames before the span
        for number, frame in enumerate(decoded(container, stream)):
            time = frame_seconds(frame, number, stream)
            begin = time if number == 0 else begin
            if time - begin < start - 1e-6:
                before = number + 1
                continue
            if end is not None and time - begin >= end - 1e-6:
                break
            if (number - before) % stride:
                continue
            seconds.append(time - begin)
            painted.append(paint(frame))
            if len(painted) == length:
                yield seconds, np.stack(painted)
                painted, seconds = [], []
        if painted:
            yield seconds, np.stack(painted)
        if paint.size is None:
            raise ValueError("it holds no frames")


def frame_seconds(frame: VideoFrame, number: int, stream: VideoStream) -> float:
    if frame.pts is not None and frame.time_base is not None and has_times(stream):
        return float(frame.pts * frame.time_base)
    return number / float(stream.average_rate or 25)


@contextmanager
def opened(path: str) -> Iterator[tuple[InputContainer, VideoStream]]:
    """The file and its first stream of pictures."""
    if not stat.S_ISREG(os.stat(file_of(path)).st_mode):  # opening a pipe would wait for somebody to write into it
        raise ValueError("it is a folder" if os.path.isdir(path) else "it is not a regular file")
    with open_container(path) as container:
        videos = [stream for stream in container.streams.video if "attached_pic" not in str(stream.disposition)]
        if not videos:
            others = " and ".join(sorted({stream.type for stream in container.streams})) or "nothing"
            raise ValueError(f"it holds no pictures, only {others}" if others != "nothing" else "it holds nothing")
        context = getattr(videos[0], "codec_context", None)  # None where FFmpeg knows no decoder
        if context is None:
            raise ValueError("its codec is not known")
        if context.width * context.height > LARGEST_FRAME:
            raise ValueError(f"its frames of {context.width}×{context.height} are larger than 8192×8192 pixels")
        context.thread_count = 1  # loaders run one decoder per core
        context.options = {"max_pixels": str(LARGEST_FRAME)}  # headers inside the stream may say something else
        yield container, videos[0]


def file_of(path: str) -> str:
    """The file that a path names, or that an address leads into."""
    return path.partition(",,:")[2] if path.startswith(PART) else path


def open_container(path: str) -> InputContainer:
    try:
        return av.open(path, options=INSIDE if path.startswith(PART) else OPTIONS, metadata_errors="replace")
    except (av.error.InvalidDataError, av.error.ArgumentError) as error:
        raise ValueError(
            "it is not an MP4, MOV, AVI, Matroska, WebM or GIF file, or its beginning is damaged"
        ) from error


def has_times(stream: VideoStream) -> bool:
    """AVI stores frames in the order of decoding and no times; codecs that reorder frames lose theirs."""
    return not (stream.container.format.name == "avi" and stream.codec_context.name in ("h264", "hevc"))


def identity(path: str) -> tuple[str, int, int]:
    """Names the state of a file."""
    status = os.stat(file_of(path))
    return path, status.st_mtime_ns, status.st_size


def remember(path: str, times: Times) -> Times:
    """Keep the frame times of a file while it does not change; returns them."""
    if len(known) >= MOST_KNOWN:
        del known[next(iter(known))]
    known[identity(path)] = times
    return times


def read_times(path: str) -> Times:
    """Frame times from packets, without decoding."""
    with opened(path) as (container, stream):
        if not has_times(stream) or stream.time_base is None:
            return count_frames(path)
        shown, keys = [], []
        for packet in packets(container, stream):
            if packet.pts is None:
                return count_frames(path)
            shown.append(packet.pts)
            if packet.is_keyframe:
                keys.append(packet.pts)
        shown.sort()
        if len(set(shown)) < len(shown):
            return count_frames(path)
        return Times(len(shown), shown, sorted(keys), float(stream.time_base))


def count_frames(path: str) -> Times:
    with opened(path) as (container, stream):
        count = sum(1 for _ in decoded(container, stream))
        return Times(count, None, [], 1 / float(stream.average_rate or 25))


def packets(container: InputContainer, stream: VideoStream) -> Iterator[av.Packet[VideoStream]]:
    """Whole packets with content."""
    count = 0
    for packet in container.demux(stream):
        if packet.size == 0 or packet.is_corrupt or packet.is_discard:  # the last: cut away by an edit of the file
            continue
        count += 1
        if count > MOST_FRAMES:
            raise ValueError(f"it holds more than {MOST_FRAMES} frames")
        yield packet


def decoded(container: InputContainer, stream: VideoStream) -> Iterator[VideoFrame]:
    """All frames from where the file stands, in the order they are shown."""
    for packet in container.demux(stream):
        if not packet.is_corrupt:  # the torn end of a file that breaks off
            yield from packet.decode()


def frames_by_number(path: str, wanted: list[int]) -> Iterator[VideoFrame]:
    """The frames with these numbers (growing), by decoding from the start."""
    left = wanted[::-1]
    with opened(path) as (container, stream):
        for number, frame in enumerate(decoded(container, stream)):
            if number == left[-1]:
                yield frame
                left.pop()
                if not left:
                    return
    raise ValueError(f"frame {left[-1]} cannot be decoded")


def frames_by_time(path: str, times: Times, wanted: list[int]) -> Iterator[VideoFrame]:
    """The frames shown when these frames (growing) should be, decoded from the key frame before them."""
    assert times.shown is not None
    left = [times.shown[number] for number in reversed(wanted)]
    before = bisect_right(times.keys, left[-1])
    with opened(path) as (container, stream):
        if before > 1:
            container.seek(times.keys[before - 1], stream=stream)
        current: VideoFrame | None = None  # on the screen until the next one
        for frame in decoded(container, stream):
            if frame.pts is None or (current is not None and current.pts is not None and frame.pts <= current.pts):
                raise TimesError
            while left and frame.pts >= left[-1]:
                shown = (
                    frame if frame.pts == left[-1] else current
                )  # the latter for a packet without a frame of its own
                if shown is None:
                    raise TimesError
                yield shown
                left.pop()
            if not left:
                return
            current = frame
    raise ValueError(f"the frame at {(left[-1] - times.shown[0]) * times.unit:g} s cannot be decoded")


class Paint:
    """Turns frames upright and scales them to one size, chosen by the first frame.

    The short side becomes `short_side`, or more where that would not cover `least`; bilinear, averaging where it
    shrinks. One scaler serves all frames, because setting one up costs as much as scaling a small frame.
    """

    def __init__(self, look: Look) -> None:
        self.look, self.scaler = look, VideoReformatter()
        self.size: tuple[int, int] | None = None  # width and height, before turning
        self.turns = 0  # quarter turns, counter-clockwise

    def start(self, frame: VideoFrame) -> tuple[int, int]:
        """Choose size and turns."""
        look, self.turns = self.look, round(getattr(frame, "rotation", 0) / 90) % 4
        width, height = (frame.height, frame.width) if self.turns % 2 else (frame.width, frame.height)
        if max(width, height) > NARROWEST * min(width, height):
            raise ValueError(f"its frames of {width}×{height} are more than {NARROWEST} times as long as wide")
        scale = max(look.short_side / min(width, height), look.least[0] / height, look.least[1] / width)
        h, w = (max(round(height * scale), look.least[0]), max(round(width * scale), look.least[1]))
        self.size = (w, h) if self.turns % 2 == 0 else (h, w)
        return self.size

    def __call__(self, frame: VideoFrame) -> Pictures:
        width, height = self.size or self.start(frame)
        colours = "gray" if self.look.channels == 1 else "rgb24"
        scaled = self.scaler.reformat(
            frame, width=width, height=height, format=colours, interpolation="BILINEAR", **ONE_THREAD
        )
        picture = np.ascontiguousarray(np.rot90(scaled.to_ndarray(), self.turns), dtype=np.uint8)
        return picture.reshape(*picture.shape[:2], -1)
