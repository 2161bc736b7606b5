"""Mutated configs and files: whatever comes, the answer is a value or an error of ours, within seconds.

Everything is a function of (kind, seed). Trials run in worker processes, so that a crash or a hang is counted and not
the end; `Outcome.held` says what was promised.
"""

from __future__ import annotations

import hashlib
import io
import json
import random
import tarfile
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import av
import numpy as np
import soundfile
import torch
from PIL import Image
from safetensors.torch import save

from bridle.config import load_config, read_config, recipe_names
from bridle.data import watch
from bridle.data.build import open_data
from bridle.data.image import read_image
from bridle.data.loader import load_sound
from bridle.data.signal import open_signal
from bridle.data.video import Decoding
from bridle.data.waveform import read_waveform
from bridle.data.workers import in_order
from bridle.errors import BridleError, DataError
from bridle.export.codes import read_codes
from bridle.geometry import Geometry
from bridle.train.checkpoint import load_latest, publish
from soak.faults import SERVER

SLOW = 5.0  # seconds
VIDEO = Decoding(geometry=Geometry(3, (2, 16, 16), (2, 8, 8)), stride=1, short_side=None, timeout=SLOW)
TOKENS = (
    *("null", "-1", "1e999", ".nan", "[]", "{}", "[1, 2, 3]", "'", '"', "!!python/name:os.system", "&a", "*a", "\x00"),
    *("9" * 400, "true", "é", "\u202e", "- ", ": ", "? ", "<<: *a", "16", "0", "0.5", "[[", "}}", "#", "%", "|", ">"),
)


class Outcome(NamedTuple):
    """What became of the trials of one kind."""

    kind: str
    count: Counter[str]  # type: ignore[assignment]  # used, refused, contained, slow, or the name of an error that is not ours

    @property
    def tried(self) -> int:
        return sum(self.count.values())

    @property
    def held(self) -> int:
        return self.count["used"] + self.count["refused"]


def fuzz(kind: str, count: int, *, workers: int = 2, first: int = 0) -> Outcome:
    """Try `count` mutations of a kind of file, or of configs (kind "config"), or of overrides (kind "override")."""
    with tempfile.TemporaryDirectory() as folder:
        before, watch.PATIENCE = watch.PATIENCE, SLOW + 1
        try:
            trials = in_order(partial(trial, kind, folder), range(first, first + count), workers=workers)
            return Outcome(kind, Counter(trials))
        finally:
            watch.PATIENCE = before


def fuzz_apart(kind: str, count: int, *, first: int, told: Path) -> Outcome:
    """The same in a process of its own, because forks of a process with threads are not to be trusted."""
    process = SERVER.Process(target=_fuzz_apart, args=(kind, count, first, str(told)))
    process.start()
    process.join()
    return Outcome(kind, Counter(json.loads(told.read_text())))


def _fuzz_apart(kind: str, count: int, first: int, told: str) -> None:
    Path(told).write_text(json.dumps(fuzz(kind, count, workers=1, first=first).count))


def trial(kind: str, folder: str, seed: int) -> str:
    chance = random.Random(f"{kind} {seed}")
    attempt: Callable[[], Any]
    if kind == "override":
        attempt = partial(load_config, chance.choice(recipe_names()), [mutated_override(chance)])
    elif kind == "config":
        path = Path(folder) / f"{seed}.yaml"
        path.write_bytes(mutated_config(chance))
        attempt = partial(read_config, path)
    else:
        path = Path(folder) / f"{seed}" / f"file{ENDINGS.get(kind, '.' + kind)}"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(mutated(good_file(kind), chance))
        attempt = partial(READERS[kind], path)
    began = time.monotonic()
    try:
        with watch.watched(f"{folder} {kind} {seed}"):
            attempt()
        said = "used"
    except BridleError as error:
        said = "contained" if "made its decoder crash" in str(error) or "was given up" in str(error) else "refused"
    except Exception as error:
        said = f"{type(error).__name__}: {str(error)[:80]} (seed {seed})"
    return "slow" if time.monotonic() - began > SLOW else said


def mutated(content: bytes, chance: random.Random) -> bytes:
    """One to eight changes: flipped bits, random bytes, cuts, repeats, extreme numbers; often near the beginning."""
    data = bytearray(content)
    for _ in range(chance.choice((1, 1, 2, 4, 8))):
        at = chance.randrange(min(len(data), 200) if chance.random() < 0.5 else len(data)) if data else 0
        match chance.randrange(7):
            case 0 if data:
                data[at] ^= 1 << chance.randrange(8)
            case 1 if data:
                data[at] = chance.randrange(256)
            case 2:
                del data[at:]
            case 3:
                del data[at : at + chance.randrange(1, 64)]
            case 4:
                data[at:at] = chance.randbytes(chance.randrange(1, 64))
            case 5:
                data[at : at + 4] = chance.choice(
                    (b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", bytes(4), b"\xff\xff\xff\x7f")
                )
            case _:
                data[at:at] = data[at : at + 256]
    return bytes(data)


@cache
def recipe_texts() -> tuple[str, ...]:
    folder = Path(load_config.__code__.co_filename).parent / "recipes"
    return tuple(path.read_text() for path in sorted(folder.glob("*.yaml")))


def mutated_config(chance: random.Random) -> bytes:
    """A recipe with words replaced, lines doubled, moved or cut, and now and then plain damage."""
    lines = chance.choice(recipe_texts()).splitlines()
    for _ in range(chance.choice((1, 1, 2, 3, 6))):
        at = chance.randrange(len(lines))
        match chance.randrange(6):
            case 0:
                key, colon, _ = lines[at].partition(":")
                lines[at] = f"{key}{colon} {chance.choice(TOKENS)}"
            case 1:
                lines.insert(at, lines[chance.randrange(len(lines))])
            case 2:
                lines[at] = " " * chance.randrange(9) + lines[at].lstrip()
            case 3:
                place = chance.randrange(len(lines[at]) + 1)
                lines[at] = lines[at][:place] + chance.choice(TOKENS) + lines[at][place:]
            case 4:
                lines[at] = f"{mutated_override(chance).replace('=', ': ', 1)}"
            case _:
                lines[at] = lines[at][: chance.randrange(len(lines[at]) + 1)]
    content = "\n".join(lines).encode()
    return mutated(content, chance) if chance.random() < 0.2 else content


@cache
def all_keys() -> tuple[str, ...]:
    found: list[str] = []

    def walk(value: Any, path: str) -> None:
        for key, entry in value.items():
            here = f"{path}{key}"
            found.append(here)
            if isinstance(entry, dict):
                walk(entry, f"{here}.")

    walk(load_config("digits-tiny").model_dump(), "")
    return tuple(found)


def mutated_override(chance: random.Random) -> str:
    key = chance.choice(all_keys())
    if chance.random() < 0.2:
        place = chance.randrange(len(key))
        key = key[:place] + chance.choice(TOKENS) + key[place + 1 :]
    return f"{key}={chance.choice(TOKENS)}"


@cache
def good_file(kind: str) -> bytes:
    """A small sound file of each kind."""
    noise = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"file{ENDINGS.get(kind, '.' + kind)}"
        if kind in ("wav", "flac", "ogg", "mp3"):
            soundfile.write(path, 0.3 * noise.standard_normal(4000), 16_000)
        elif kind in ("jpg", "png", "webp", "bmp"):
            Image.fromarray(noise.integers(0, 255, (24, 24, 3)).astype(np.uint8)).save(path)
        elif kind == "mp4":
            write_video(path)
        elif kind == "npy":
            np.save(path, noise.standard_normal((1, 500)).astype(np.float32))
        elif kind == "npz":
            np.savez(path, codes=np.zeros((4, 2), np.int64), positions=np.arange(4))
        elif kind == "tar":
            write_tar(path)
        else:
            path.write_bytes(save({"w": torch.arange(30.0), "v": torch.zeros(2, 3)}))
        return path.read_bytes()


def write_video(path: Path) -> None:
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=10)
        stream.width = stream.height = 32
        stream.pix_fmt = "yuv420p"
        for i in range(6):
            picture = np.random.default_rng(i).integers(0, 255, (32, 32, 3)).astype(np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode(None))


def write_tar(path: Path) -> None:
    with tarfile.open(path, "w") as archive:
        for i in range(4):
            for ending, content in ((".png", good_file("png")), (".cls", str(i % 2).encode())):
                member = tarfile.TarInfo(f"{i}{ending}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))


def read_tar(path: Path) -> None:
    settings = [f"data.root={path.parent}", "geometry.input=[8, 8]", "geometry.patch=[4, 4]"]
    train = open_data(load_config("image", settings)).train
    for i in range(len(train)):
        try:
            load_sound(train, i, None)
        except DataError:
            continue  # a sample that is quarantined


def read_tensors(path: Path) -> None:
    """As a checkpoint whose manifest is right about the file."""
    root = path.parent / "checkpoints"
    folder = publish(root, "p0000-iter1-encoder-00000001", {"model": {"w": torch.ones(1)}}, {}, keep=1)
    content = path.read_bytes()
    (folder / "model.safetensors").write_bytes(content)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"]["model.safetensors"] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    load_latest(root)


def read_npy(path: Path) -> None:
    np.array(open_signal(path, channels=1)[:, :500], dtype=np.float32)


ENDINGS = {"safetensors": ".safetensors"}
SOUND, PICTURE = ("wav", "flac", "ogg", "mp3"), ("jpg", "png", "webp", "bmp")
READERS: dict[str, Callable[[Path], Any]] = {
    **{kind: partial(read_waveform, rate=16_000) for kind in SOUND},
    **{kind: partial(read_image, channels=3, size=(8, 8)) for kind in PICTURE},
    "mp4": partial(VIDEO.clip, place=0.5, span=(0.0, None)),
    "npy": read_npy,
    "npz": read_codes,
    "tar": read_tar,
    "safetensors": read_tensors,
}
KINDS = tuple(READERS)
