"""Decoded pieces as media files: PNG, WAV, MP4 or GIF, and .npy, written as the pieces come.

Shapes: a piece is (C, n, *rest) in the input's own units, n along the first axis; together they are the whole file.
A picture is held whole (models of pictures have one window); everything else takes memory for a few pieces only.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from bridle.config import Config
from bridle.data.audio.inversion import invert_logmel
from bridle.data.audio.logmel import LogMel
from bridle.data.audio.modality import front_end
from bridle.data.image.pixels import as_bytes
from bridle.data.modality import modality_of
from bridle.errors import needs
from bridle.evaluate.reconstruction.anchors import has_codec
from bridle.evaluate.reconstruction.measure import is_spectrogram

SOUND_FRAMES, SOUND_OVERLAP = 1024, 64  # frames whose phases are found together, and of which two neighbours share
FRAME_RATE = 8.0  # pictures a second of a clip whose file did not say

ClipFormat = Literal["mp4", "gif"]


class Media(NamedTuple):
    """What is known of a file before it is written."""

    length: int  # values along the first axis
    frame_rate: float = FRAME_RATE  # of clips


Write = Callable[[Iterator[Tensor], Path, Media], None]


def media_writer(config: Config, *, clips: ClipFormat = "mp4") -> tuple[str, Write]:
    """File ending and writer for a model's inputs."""
    if is_spectrogram(config):
        return ".wav", partial(write_sound, front=front_end(config))
    if not modality_of(config).is_unit_range:
        return ".npy", write_array
    if config.geometry.build().rank == 2:
        return ".png", write_picture
    return (".mp4", write_video) if clips == "mp4" else (".gif", write_gif)


def write_picture(pieces: Iterator[Tensor], path: Path, media: Media) -> None:
    """(C, H, W) in 0 … 1 as PNG."""
    with needs("image"):
        from PIL import Image

    Image.fromarray(as_bytes(torch.cat(list(pieces), dim=1))).save(path, format="PNG")


def write_gif(pieces: Iterator[Tensor], path: Path, media: Media) -> None:
    """(C, frames, H, W) in 0 … 1 as an animated GIF that repeats; every frame has its own colours."""
    with needs("image"):
        from PIL import GifImagePlugin, Image

    duration = round(1000 / media.frame_rate)  # Pillow's own writer would hold all frames, and join equal ones
    with path.open("wb") as file:
        for number, frame in enumerate(frames_of(pieces)):
            picture = Image.fromarray(as_bytes(frame)).convert("P", palette=Image.Palette.ADAPTIVE)
            if number == 0:
                file.writelines(GifImagePlugin.getheader(picture.copy(), info={"loop": 0})[0])
            file.writelines(GifImagePlugin.getdata(picture, duration=duration, include_color_table=True))
        file.write(b";")


def write_video(pieces: Iterator[Tensor], path: Path, media: Media) -> None:
    """(C, frames, H, W) in 0 … 1 as MP4: H.264 or, where PyAV has none, MPEG-4; odd sides are made even."""
    with needs("video"):
        import av

    codec = "libx264" if has_codec("libx264") else "mpeg4"
    options = {"crf": "12"} if codec == "libx264" else {"qscale": "2"}
    container: Any  # PyAV's types do not tell streams apart
    with av.open(str(path), "w", format="mp4") as container:
        stream: Any = None
        for frame in frames_of(pieces):
            height, width = frame.shape[1:]
            even = torch.nn.functional.pad(frame[None], (0, width % 2, 0, height % 2), mode="replicate")[0]
            if stream is None:
                rate = Fraction(media.frame_rate).limit_denominator(500)  # MPEG-4 takes no finer ones
                stream = container.add_stream(codec, rate=rate or 1, options=options)
                stream.height, stream.width, stream.pix_fmt = even.shape[1], even.shape[2], "yuv420p"
            pixels = as_bytes(even.expand(3, -1, -1))
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode(None))


def frames_of(pieces: Iterator[Tensor]) -> Iterator[Tensor]:
    """The frames (C, H, W) of pieces (C, n, H, W)."""
    return itertools.chain.from_iterable(piece.unbind(1) for piece in pieces)


def write_array(pieces: Iterator[Tensor], path: Path, media: Media) -> None:
    """(C, *input) as .npy, mapped and filled piece by piece."""
    array: Any = None
    begin = 0
    for piece in pieces:
        if array is None:
            shape = (piece.shape[0], media.length, *piece.shape[2:])
            array = np.lib.format.open_memmap(path, mode="w+", dtype=np.float32, shape=shape)
        array[:, begin : begin + piece.shape[1]] = piece.cpu().numpy()
        begin += piece.shape[1]
    array.flush()


def write_sound(pieces: Iterator[Tensor], path: Path, media: Media, *, front: LogMel) -> None:
    """(1, frames, mels) log-mel features as 16-bit WAV, some seconds at a time."""
    with needs("audio"):
        import soundfile

    with soundfile.SoundFile(path, "w", samplerate=front.sample_rate, channels=1, format="WAV") as file:
        for wave in sound_pieces(pieces, front):
            file.write(wave.clamp(-1, 1).cpu().numpy())


def sound_pieces(pieces: Iterator[Tensor], front: LogMel) -> Iterator[Tensor]:
    """Waveform pieces of feature pieces (1, n, mels); blocks share SOUND_OVERLAP frames, which are cross-faded."""
    shared = SOUND_OVERLAP * front.shift
    fade = torch.linspace(0, 1, shared)
    waiting: Tensor | None = None
    for features, is_last in blocks(pieces):
        wave = invert_logmel(features, front)
        if waiting is not None:
            both = min(shared, len(wave))
            head = waiting[:both] * (1 - fade[:both]) + wave[:both] * fade[:both]
            wave = torch.cat([head, wave[both:]])
        keep = len(wave) if is_last else (len(features) - SOUND_OVERLAP) * front.shift
        yield wave[:keep]
        waiting = wave[keep : keep + shared]


def blocks(pieces: Iterator[Tensor]) -> Iterator[tuple[Tensor, bool]]:
    """Features (n ≤ SOUND_FRAMES, mels) that overlap by SOUND_OVERLAP frames, and whether each is the last."""
    held: Tensor | None = None
    for piece in pieces:
        held = piece[0] if held is None else torch.cat([held, piece[0]])
        while len(held) > SOUND_FRAMES + SOUND_OVERLAP:
            yield held[:SOUND_FRAMES], False
            held = held[SOUND_FRAMES - SOUND_OVERLAP :]
    if held is not None:
        yield held, True
