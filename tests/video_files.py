"""Small videos for tests: frame i is a picture of one shade, STEP·i, so that a decoded frame tells its number."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import torch
from numpy.typing import NDArray

STEP = 6
RATE = 10  # frames per second


def write_pictures(
    path: Path,
    pictures: Sequence[NDArray[np.uint8]],
    *,
    codec: str = "ffv1",
    pixels: str = "bgr0",
    times: Sequence[int] | None = None,
    gop: int = 12,
    muxer: dict[str, str] | None = None,
) -> Path:
    """A video of pictures (h, w, 3), shown at `times` (in 1 / RATE seconds); without loss by default."""
    with av.open(str(path), "w", options=muxer or {}) as container:
        stream = container.add_stream(codec, rate=RATE)
        stream.height, stream.width = pictures[0].shape[:2]
        stream.pix_fmt, stream.gop_size = pixels, gop
        if codec == "mpeg4":
            stream.options = {"qmin": "1", "qmax": "1"}  # or it keeps a picture that changes little
        for number, picture in enumerate(pictures):
            frame = av.VideoFrame.from_ndarray(picture, format="rgb24")
            frame.pts, frame.time_base = (number if times is None else times[number]), Fraction(1, RATE)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


def write_numbered(path: Path, frames: int, *, size: tuple[int, int] = (32, 48), **options: object) -> Path:
    """A video of `frames` frames of (height, width) that tell their number."""
    pictures = [np.full((*size, 3), STEP * number, dtype=np.uint8) for number in range(frames)]
    return write_pictures(path, pictures, **options)  # type: ignore[arg-type]


def numbers(x: torch.Tensor) -> list[int]:
    """The numbers of frames (C, n, H, W) in [0, 1]."""
    return [round(float(frame.mean()) * 255 / STEP) for frame in x.transpose(0, 1)]


def write_sound(path: Path) -> Path:
    """A file with sound and no pictures."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream("aac", rate=16_000)
        sound = av.AudioFrame.from_ndarray(np.zeros((1, 4096), dtype=np.float32), format="fltp", layout="mono")
        sound.sample_rate = 16_000
        container.mux(stream.encode(sound))
        container.mux(stream.encode())
    return path
