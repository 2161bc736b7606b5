"""Data sets with every kind of bad file in them, made for the purpose, and runs on them."""

from __future__ import annotations

import json
import os
import random
import shutil
import socket
import struct
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import soundfile
from conftest import SMALL
from PIL import Image
from torch import Tensor, equal

from soak import faults
from soak.specimens import write_video
from soak.tally import Tally, judged

RATE = 16_000
BAD_FILES, WORKERS = "media: bad files", "media: 1, 2 and spawned workers against 0"
PROCESSES = ((0, "fork"), (1, "fork"), (2, "fork"), (1, "spawn"))  # data.workers, how they start
KILLED = "media: kill while a bad file is listed"
SHAPES = {
    "audio": ["geometry.input=[32, 16]", "geometry.patch=[8, 8]"],
    "image": ["geometry.input=[16, 16]", "geometry.patch=[4, 4]"],
    "video": ["geometry.input=[2, 16, 16]", "geometry.patch=[2, 8, 8]", "video.stride=1"],
}


def good_sound(path: Path, seed: int) -> None:
    soundfile.write(path, 0.2 * np.random.default_rng(seed).standard_normal(6000), RATE)


def good_picture(path: Path, seed: int) -> None:
    pixels = np.random.default_rng(seed).integers(0, 255, (24, 24, 3)).astype(np.uint8)
    Image.fromarray(pixels).save(path)


def good_video(path: Path, seed: int) -> None:
    write_video(path, seed=seed)


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


def make(root: Path, kind: str, *, good: int, seed: int = 0) -> dict[str, str]:
    """ROOT/list.csv of good files and one of every bad kind; returns name of bad file -> what is wrong with it."""
    ending, write, wrong = KINDS[kind]
    root.mkdir(parents=True)
    rows, bad = [], {}
    for i in range(good):
        write(root / f"good{i}{ending}", 1000 * seed + i)
        rows.append(f"good{i}{ending},{i % 2}")
    for number, (what, spoil) in enumerate(sorted(wrong.items())):
        name = f"bad{number}{ending}"
        write(root / name, 1000 * seed + number)
        spoil(root / name)
        rows.append(f"{name},{number % 2}")
        bad[name] = what
    random.Random(seed).shuffle(rows)
    (root / "list.csv").write_text("\n".join(["path,label", *rows]) + "\n")
    return bad


def settings(kind: str, root: Path) -> list[str]:
    """Overrides of the recipe `kind` for a small model of the data set at `root`, of which many files are bad."""
    data = [f"data.manifest={root / 'list.csv'}", "data.bad_share=0.6", "data.mean=[0.1]", "data.std=[1.0]"]
    return ["size=tiny", *SMALL, *SHAPES[kind], *data, "probe.enabled=false"]


def steps_of_an_epoch(files: int) -> int:
    return -(-files // 8)  # SMALL has batches of 8


def listing_faults(listed: Sequence[Mapping[str, str]], bad: Mapping[str, str]) -> list[str]:
    """Where the quarantine is not every bad file once with a reason, and no other."""
    count = Counter(Path(row["path"]).name for row in listed)
    found = [f"{what} ({name}) is listed {count[name]} times" for name, what in bad.items() if count[name] != 1]
    found += [f"{name} is good and listed" for name in count if name not in bad]
    return found + [f"{row['path']} has no reason" for row in listed if not row["reason"]]


def bad_set(kind: str, scratch: Path, *, seed: int) -> tuple[dict[str, str], list[str]]:
    """A fresh data set of which a third of the files are bad: those, and the command that trains on it for an epoch."""
    shutil.rmtree(scratch, ignore_errors=True)
    bad = make(scratch / "data", kind, good=2 * len(KINDS[kind][2]), seed=seed)
    steps = [f"max_steps={steps_of_an_epoch(3 * len(bad))}", "schedule.iterations=1", f"seed={seed}"]
    return bad, ["pretrain", kind, *settings(kind, scratch / "data"), *steps, "runtime.checkpoint_every=2"]


def train_on_bad_files(kind: str, scratch: Path, *, seed: int) -> dict[str, Tally]:
    """Train without workers, with one and two forked ones, and with a spawned one."""
    bad, words = bad_set(kind, scratch, seed=seed)
    wrong, differing, ended = list[str](), list[str](), list[Trained]()
    for workers, method in PROCESSES:
        out = scratch / f"workers{workers}-{method}"
        run = faults.run([*words, f"data.workers={workers}", "--out", str(out)], out, start_method=method)
        name = f"{kind} {seed}, {workers} worker(s), {method}"
        if run.code != 0:
            raise RuntimeError(f"{name}, ended with {run.code}: {run.said[-300:]}")
        ended.append(Trained.read(out))
        wrong += [f"{name}: {text}" for text in listing_faults(ended[-1].listed, bad)]
        differing += [f"{name}: {text}" for text in ended[0].differences(ended[-1])]
    shutil.rmtree(scratch)
    tried, compared = len(PROCESSES) * len(bad), len(PROCESSES) - 1
    return {
        BAD_FILES: Tally(tried, max(0, tried - len(wrong)), wrong),
        WORKERS: Tally(compared, compared - min(compared, len(differing)), differing),
    }


def kill_while_listing(kind: str, scratch: Path, *, seed: int) -> Tally:
    """Killed when a bad file is about to be listed, then continued: as if nothing had happened."""
    bad, words = bad_set(kind, scratch, seed=seed)
    whole, killed = scratch / "whole", scratch / "killed"
    fault = f"quarantine.append@{3 + seed}=kill"
    ended = [faults.run([*words, "--out", str(whole)], whole)]
    ended += [faults.run([*words, "--out", str(killed)], killed, faults=text) for text in (fault, "")]
    if [one.code for one in ended] != [0, -9, 0] or ended[1].fired != [fault]:
        return judged([f"ended with {[one.code for one in ended]}, fired {ended[1].fired}"], name=f"{kind} {seed}")
    found = Trained.read(killed)
    wrong = listing_faults(found.listed, bad) + Trained.read(whole).differences(found)
    shutil.rmtree(scratch)
    return judged(wrong, name=f"{kind} {seed}")


class Trained(NamedTuple):
    """What must depend neither on the number of workers nor on interruptions."""

    listed: list[dict[str, str]]  # in quarantine.jsonl
    metrics: list[dict[str, Any]]
    tensors: dict[str, Tensor]

    @classmethod
    def read(cls, folder: Path) -> Trained:
        listed = [json.loads(line) for line in (folder / "quarantine.jsonl").read_text().splitlines()]
        return cls(sorted(listed, key=str), faults.rows(folder), faults.end_tensors(folder))

    def differences(self, other: Trained) -> list[str]:
        found = [name for name in ("listed", "metrics") if getattr(self, name) != getattr(other, name)]
        found += sorted(set(self.tensors) ^ set(other.tensors))
        return found + [
            n for n in set(self.tensors) & set(other.tensors) if not equal(self.tensors[n], other.tensors[n])
        ]
