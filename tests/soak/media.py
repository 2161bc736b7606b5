"""Data sets with every kind of bad file in them, made for the purpose."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import soundfile
from PIL import Image

from soak.fuzz import write_video

RATE = 16_000


def good_sound(path: Path, seed: int) -> None:
    soundfile.write(path, 0.2 * np.random.default_rng(seed).standard_normal(6000), RATE)


def good_picture(path: Path, seed: int) -> None:
    pixels = np.random.default_rng(seed).integers(0, 255, (24, 24, 3)).astype(np.uint8)
    Image.fromarray(pixels).save(path)


def good_video(path: Path, seed: int) -> None:
    write_video(path)


def cut(share: float) -> Callable[[Path], None]:
    def bad(path: Path) -> None:
        content = path.read_bytes()
        path.write_bytes(content[: int(share * len(content))])

    return bad


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def bound_socket(path: Path) -> None:
    path.unlink()
    here = os.getcwd()
    os.chdir(path.parent)  # the names of sockets are short
    try:
        with socket.socket(socket.AF_UNIX) as one:
            one.bind(path.name)
    finally:
        os.chdir(here)


def loop(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def link_to_nowhere(path: Path) -> None:
    path.unlink()
    path.symlink_to("nowhere")


def link_to_device(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def text(path: Path) -> None:
    path.write_text("<html>404 not found</html>\n" * 40)


def noise(path: Path) -> None:
    path.write_bytes(np.random.default_rng(1).bytes(3000))


def zeros(path: Path) -> None:
    path.write_bytes(bytes(3000))


ANYWHERE: dict[str, Callable[[Path], None]] = {
    "no bytes": lambda path: path.write_bytes(b""),
    "one byte": lambda path: path.write_bytes(b"R"),
    "a tenth": cut(0.1),
    "only zeros": zeros,
    "text": text,
    "noise": noise,
    "a page of errors": lambda path: path.write_bytes(b"PK\x03\x04" + bytes(200)),
    "a folder": folder,
    "a pipe": pipe,
    "a socket": bound_socket,
    "a loop of links": loop,
    "a link to nowhere": link_to_nowhere,
    "a link to a device": link_to_device,
    "gone": lambda path: path.unlink(),
}


def wav_header(frames: int, *, rate: int = RATE, channels: int = 1) -> bytes:
    size = frames * 2 * channels
    return struct.pack(
        "<4sI4s4sIHHIIHH4sI",
        *(b"RIFF", min(36 + size, 2**31 - 1), b"WAVE", b"fmt ", 16, 1, channels, rate, rate * 2 * channels),
        *(2 * channels, 16, b"data", min(size, 2**31 - 70_000)),
    )


def not_finite(path: Path) -> None:
    wave = np.random.default_rng(0).standard_normal(6000).astype(np.float32)
    wave[100] = np.nan
    soundfile.write(path, wave, RATE, subtype="FLOAT", format="WAV")


IN_SOUND: dict[str, Callable[[Path], None]] = {
    **ANYWHERE,
    "half": cut(0.5),
    "NaN": not_finite,
    "silence": lambda path: soundfile.write(path, np.zeros(6000), RATE, format="WAV"),
    "a constant": lambda path: soundfile.write(path, np.full(6000, 0.25), RATE, format="WAV"),
    "one sample": lambda path: soundfile.write(path, np.ones(1) * 0.5, RATE, format="WAV"),
    "no samples": lambda path: soundfile.write(path, np.zeros(0), RATE, format="WAV"),
    "a header of two gigabytes": lambda path: path.write_bytes(wav_header(2**30) + bytes(100)),
    "a rate of 1 Hz": lambda path: path.write_bytes(wav_header(100, rate=1) + bytes(200)),
}


def bomb(path: Path) -> None:
    """A PNG of 50,000 × 50,000 pixels in a few bytes."""
    import zlib

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", 50_000, 50_000, 8, 2, 0, 0, 0)
    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(100))) + chunk(b"IEND", b"")
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + body)


IN_PICTURES: dict[str, Callable[[Path], None]] = {
    **ANYWHERE,
    "half": cut(0.5),
    "all but the end": cut(0.9),
    "one colour": lambda path: Image.new("RGB", (24, 24), (9, 9, 9)).save(path),
    "1×1": lambda path: Image.new("RGB", (1, 1), (9, 9, 9)).save(path),
    "a bomb": bomb,
    "a vector drawing": lambda path: path.write_text("<svg xmlns='http://www.w3.org/2000/svg'/>"),
    "a program for a printer": lambda path: path.write_text("%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n"),
}
IN_VIDEOS: dict[str, Callable[[Path], None]] = {
    **ANYWHERE,
    "a quarter": cut(0.25),
    "a playlist": lambda path: path.write_text("#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n"),
    "a list of files": lambda path: path.write_text("ffconcat version 1.0\nfile '/etc/passwd'\n"),
    "sound only": lambda path: soundfile.write(path, np.zeros(6000), RATE, format="WAV"),
    "a header alone": lambda path: path.write_bytes(path.read_bytes()[:48]),
}
KINDS: dict[str, tuple[str, Callable[[Path, int], None], dict[str, Callable[[Path], None]]]] = {
    "audio": (".wav", good_sound, IN_SOUND),
    "image": (".png", good_picture, IN_PICTURES),
    "video": (".mp4", good_video, IN_VIDEOS),
}


def make(root: Path, kind: str, *, good: int, each: int = 1) -> dict[str, str]:
    """ROOT/list.csv of good files and `each` of every bad kind; returns name of bad file -> what is wrong with it."""
    ending, write, wrong = KINDS[kind]
    root.mkdir(parents=True)
    rows, bad = ["path,label"], {}
    for i in range(good):
        write(root / f"good{i}{ending}", i)
        rows.append(f"good{i}{ending},{i % 2}")
    for number, (what, spoil) in enumerate(sorted(wrong.items()) * each):
        name = f"bad{number}{ending}"
        write(root / name, number)
        spoil(root / name)
        rows.append(f"{name},{number % 2}")
        bad[name] = what
    (root / "list.csv").write_text("\n".join(rows) + "\n")
    return bad
