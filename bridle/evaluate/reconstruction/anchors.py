"""Codecs that everybody knows, as anchors for the rate and distortion of codes: JPEG, H.264, Opus, MP3.

Counted are the bits of the coded content. Headers, tables and containers are left out, as codebooks and networks are.
A codec that this build of PyAV lacks is named, not replaced.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from bridle.data.image.pixels import as_bytes, as_tensor
from bridle.errors import needs

QUALITIES = (1, 3, 5, 8, 12, 20, 30, 50, 75, 90)  # of JPEG
RATE_FACTORS = (51, 45, 40, 35, 30, 25, 20)  # of H.264, from coarse to fine
BITRATES = {"libopus": (6, 8, 12, 16, 24, 32, 64), "libmp3lame": (8, 16, 24, 32, 64)}  # kbit/s
NAMES = {"libopus": "Opus", "libmp3lame": "MP3", "libx264": "H.264"}
CONTAINERS = {"libopus": "ogg", "libmp3lame": "mp3"}
RATES = {"libopus": (8000, 12_000, 16_000, 24_000), "libmp3lame": (8000, 16_000, 24_000, 32_000, 44_100)}
OTHER_RATE = 48_000  # Hz, for sounds at none of these rates
LARGEST_DELAY = 4000  # samples by which a decoded sound may be late or early
START_CODE = b"\x00\x00\x01"  # between the units of an H.264 stream


class Coded(NamedTuple):
    """What a codec makes of an item."""

    bits: int
    decoded: Tensor  # (C, H, W), (C, frames, H, W) in 0 … 1; (N,) in ±1


def has_codec(name: str) -> bool:
    """Can this build of PyAV encode with the codec?"""
    with needs("video"):
        import av.codec

    try:
        av.codec.Codec(name, "w")
    except ValueError:  # av.codec.codec.UnknownCodecError
        return False
    return True


def jpeg(x: Tensor, quality: int) -> Coded:
    """A picture (C, H, W) in 0 … 1, C = 1 or 3, as baseline JPEG with the standard tables."""
    with needs("image"):
        from PIL import Image

    file = io.BytesIO()
    Image.fromarray(as_bytes(x)).save(file, "JPEG", quality=quality)
    with Image.open(file) as image:
        return Coded(8 * scan_bytes(file.getvalue()), as_tensor(np.asarray(image)))


def scan_bytes(data: bytes) -> int:
    """Length of the entropy-coded part of a JPEG file with one scan: what lies between its header and the end mark."""
    at = 2
    while data[at + 1] != 0xDA:  # start of scan; every segment says how long it is
        at += 2 + int.from_bytes(data[at + 2 : at + 4], "big")
    return len(data) - (at + 2 + int.from_bytes(data[at + 2 : at + 4], "big")) - 2


def jpeg_frames(x: Tensor, quality: int) -> Coded:
    """A clip (C, frames, H, W), every frame a picture of its own."""
    frames = [jpeg(x[:, t], quality) for t in range(x.shape[1])]
    return Coded(sum(frame.bits for frame in frames), torch.stack([frame.decoded for frame in frames], dim=1))


def h264(x: Tensor, factor: int) -> Coded:
    """A clip (C, frames, H, W) at a constant rate factor, 4:2:0; sides are made even by repeating the last line."""
    with needs("video"):
        import av

    channels, count, height, width = x.shape
    shown = torch.nn.functional.pad(x.transpose(0, 1), (0, width % 2, 0, height % 2), mode="replicate")
    file, bits = io.BytesIO(), 0
    container: Any  # PyAV's types do not tell streams of sound from others
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=25, options={"crf": str(factor), "preset": "medium"})
        stream.width, stream.height, stream.pix_fmt = shown.shape[3], shown.shape[2], "yuv420p"
        frames = (av.VideoFrame.from_ndarray(as_bytes(frame.expand(3, -1, -1)), format="rgb24") for frame in shown)
        for frame in (*frames, None):
            packets = stream.encode(frame)
            bits += 8 * sum(slice_bytes(bytes(packet)) for packet in packets)
            container.mux(packets)
    file.seek(0)
    with av.open(file) as container:
        decoded = [as_tensor(frame.to_ndarray(format="rgb24")) for frame in container.decode(video=0)]
    clip = torch.stack(decoded[:count], dim=1)[:, :, :height, :width]
    return Coded(bits, clip.mean(0, keepdim=True) if channels == 1 else clip)


def slice_bytes(packet: bytes) -> int:
    """Bytes of the coded pictures in a packet: units of kinds 1 to 5; the encoder's remarks and settings are others."""
    units = [unit for unit in packet.split(START_CODE) if unit]
    return sum(len(START_CODE) + len(unit) for unit in units if 1 <= unit[0] & 31 <= 5)


def sound(wave: Tensor, rate: int, codec: str, kbits: int) -> Coded:
    """A waveform (N,) coded at `kbits` kbit/s, decoded at its own sampling rate and moved to where it fits best."""
    with needs("video"):
        import av

    file, bits = io.BytesIO(), 0
    container: Any
    with av.open(file, "w", format=CONTAINERS[codec]) as container:
        stream = container.add_stream(codec, rate=rate if rate in RATES[codec] else OTHER_RATE, layout="mono")
        stream.bit_rate = 1000 * kbits
        samples = (wave.clamp(-1, 1).numpy() * 32767).astype(np.int16)[None]
        frame = av.AudioFrame.from_ndarray(samples, format="s16", layout="mono")
        frame.sample_rate = rate
        for given in (frame, None):
            packets = stream.encode(given)
            bits += 8 * sum(packet.size for packet in packets)
            container.mux(packets)
    file.seek(0)
    convert = av.AudioResampler(format="flt", layout="mono", rate=rate)
    with av.open(file) as container:
        pieces = [part.to_ndarray()[0] for found in container.decode(audio=0) for part in convert.resample(found)]
        pieces += [part.to_ndarray()[0] for part in convert.resample(None)]
    return Coded(bits, aligned(torch.from_numpy(np.concatenate(pieces)), wave))


def aligned(guess: Tensor, wave: Tensor) -> Tensor:
    """`guess` moved by the delay at which it correlates most with `wave`, cut or filled with zeros to its length."""
    size = len(guess) + len(wave)
    spectrum = torch.fft.rfft(guess.double(), size) * torch.fft.rfft(wave.double(), size).conj()
    likeness = torch.fft.irfft(spectrum, size)
    delays = [*range(min(LARGEST_DELAY, len(guess))), *range(-min(LARGEST_DELAY, len(wave) - 1), 0)]
    delay = delays[int(likeness[delays].argmax())]
    moved = guess[delay:] if delay >= 0 else torch.nn.functional.pad(guess, (-delay, 0))
    return torch.nn.functional.pad(moved[: len(wave)], (0, max(0, len(wave) - len(moved))))


def available(codecs: Sequence[str]) -> tuple[list[str], list[str]]:
    """Those that can be used, and a sentence for each that cannot."""
    found = [name for name in codecs if has_codec(name)]
    return found, [f"{NAMES[name]}: this build of PyAV has no {name}." for name in codecs if name not in found]
