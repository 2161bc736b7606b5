"""A good file of every kind that bridle decodes, and how bridle reads it. What bridle writes itself is in `stored`."""

from __future__ import annotations

import io
import json
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import av
import numpy as np
import soundfile
from PIL import Image

from bridle.config import load_config
from bridle.data.arrays.decode import as_channels, read_array
from bridle.data.audio.decode import read_waveform
from bridle.data.build import open_data
from bridle.data.image.source import ImageReader
from bridle.data.listing.audioset import CLASSES, find_audioset
from bridle.data.listing.manifest import read_manifest
from bridle.data.listing.table import DataListing
from bridle.data.loading.loader import load_checked
from bridle.data.video.source import Decoding
from bridle.errors import DataError
from bridle.geometry import Geometry

SLOW = 5.0  # seconds
VIDEO = Decoding(geometry=Geometry(3, (2, 16, 16), (2, 8, 8)), stride=1, short_side=None, timeout=SLOW)


class Specimen(NamedTuple):
    """How a folder with a good file (or several that belong together) is made, and read."""

    write: Callable[[Path], object]  # into an empty folder
    read: Callable[[Path], object]
    spared: tuple[str, ...] = ()  # endings of files that are not mutated
    sign: Callable[[Path], object] | None = None  # makes sums right again, as whoever changed a file could

    def files(self) -> dict[str, bytes]:
        """The good files by name."""
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name) / "good"
            folder.mkdir()
            self.write(folder)
            paths = sorted(path for path in folder.rglob("*") if path.is_file())
            return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def noise() -> np.random.Generator:
    return np.random.default_rng(0)


def sound(ending: str, **how: str) -> Specimen:
    """Decoded by libsndfile."""
    wave = 0.3 * noise().standard_normal(4000)
    return Specimen(
        lambda folder: soundfile.write(folder / f"file.{ending}", wave, 16_000, **how),
        lambda folder: read_waveform(folder / f"file.{ending}", rate=16_000),
    )


def picture(ending: str) -> Specimen:
    pixels = noise().integers(0, 255, (24, 24, 3)).astype(np.uint8)
    return Specimen(
        lambda folder: Image.fromarray(pixels).save(folder / f"file.{ending}"),
        lambda folder: list(ImageReader(geometry=Geometry(3, (8, 8), (4, 4))).windows(folder / f"file.{ending}")),
    )


def film(ending: str, *, codec: str, pixels: str = "yuv420p") -> Specimen:
    return Specimen(
        lambda folder: write_video(folder / f"file.{ending}", codec=codec, pixels=pixels),
        lambda folder: VIDEO.clip(folder / f"file.{ending}", place=0.5, span=(0.0, None)),
    )


def write_video(path: Path, *, codec: str = "mpeg4", pixels: str = "yuv420p", seed: int = 0) -> None:
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=10)
        stream.width = stream.height = 32
        stream.pix_fmt = pixels
        for i in range(6):
            shown = np.random.default_rng([seed, i]).integers(0, 255, (32, 32, 3)).astype(np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(shown, format="rgb24").reformat(format=pixels)))
        container.mux(stream.encode(None))


def write_film_sound(folder: Path) -> None:
    """A sound that libsndfile does not know, decoded by libav."""
    with av.open(str(folder / "file.m4a"), "w") as container:
        stream = container.add_stream("aac", rate=16_000, layout="mono")
        wave = (0.3 * noise().standard_normal((1, 8000))).astype(np.float32)
        frame = av.AudioFrame.from_ndarray(wave, format="fltp", layout="mono")
        frame.sample_rate = 16_000
        container.mux(stream.encode(frame))
        container.mux(stream.encode(None))


def write_tar(folder: Path) -> None:
    with tarfile.open(folder / "file.tar", "w") as archive:
        for i in range(4):
            for ending, content in ((".png", good_picture()), (".cls", str(i % 2).encode())):
                member = tarfile.TarInfo(f"{i}{ending}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))


@cache
def good_picture() -> bytes:
    return picture("png").files()["file.png"]


def read_tar(folder: Path) -> None:
    settings = [f"data.root={folder}", "geometry.input=[8, 8]", "geometry.patch=[4, 4]"]
    train = open_data(load_config("image", settings)).train
    for i in range(len(train)):
        try:
            load_checked(train, i, None)
        except DataError:
            continue  # a sample that is quarantined


def read_npy(folder: Path) -> None:
    read_signal(folder / "file.npy")


def read_npz(folder: Path) -> None:
    read_signal(folder / "file.npz")


def read_signal(path: Path) -> None:
    np.array(as_channels(read_array(path)[0], path, channels=1)[:, :500], dtype=np.float32)


def write_table(folder: Path, *, name: str, between: str) -> None:
    rows = [("path", "labels", "start", "end", "fold", "split")]
    rows += [(f"ä/{i}.wav", f"dog;c{i % 3}", f"{i / 4}", "" if i % 2 else "9.5", str(i % 3), "train") for i in range(9)]
    (folder / name).write_text("".join(between.join(row) + "\n" for row in rows))
    (folder / "classes.txt").write_text("dog\nc0\nc1\nc2\n")


def write_records(folder: Path) -> None:
    rows = [{"path": f"{i}.wav", "labels": ["dog", i % 3], "start": i / 4, "end": None, "fold": i} for i in range(9)]
    (folder / "file.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_audioset(folder: Path) -> None:
    (folder / CLASSES).write_text('index,mid,display_name\n0,/m/09x0r,"Speech"\n1,/m/05zppz,"Male speech, man"\n')
    head = "# Segments csv created\n# num_ytids=4\n# YTID, start_seconds, end_seconds, positive_labels\n"
    rows = [f'--PJHxphWE{i}, {i}.000, 1{i}.000, "/m/09x0r,/m/05zppz"\n' for i in range(6)]
    (folder / "balanced_train_segments.csv").write_text(head + "".join(rows))
    (folder / "eval_segments.csv").write_text("YTID,start_seconds,end_seconds,positive_labels\n" + rows[0])
    for i in range(6):
        (folder / f"--PJHxphWE{i}.wav").touch()


def rows_of(listing: DataListing) -> list[Any]:
    """Everything a listing says."""
    parts = [part for part in (listing.train, listing.test) if part is not None]
    return [listing.classes, listing.folds, *(list(column) for part in parts for column in columns_of(part))]


def columns_of(part: Any) -> Iterator[Any]:
    return (column for column in part if column is not None)


def listed(name: str, write: Callable[[Path], object]) -> Specimen:
    return Specimen(write, lambda folder: rows_of(read_manifest(folder / name, base=None, test_fold=None)))


SPECIMENS: dict[str, Specimen] = {
    **{ending: sound(ending) for ending in ("wav", "flac", "ogg", "mp3", "aiff")},
    "opus": sound("opus", format="OGG", subtype="OPUS"),
    "m4a": Specimen(write_film_sound, lambda folder: read_waveform(folder / "file.m4a", rate=16_000)),
    **{ending: picture(ending) for ending in ("jpg", "png", "webp", "bmp")},
    "tiff (never read)": picture("tiff"),
    "mp4": film("mp4", codec="mpeg4"),
    "avi": film("avi", codec="mpeg4"),
    "mkv": film("mkv", codec="libx264"),
    "webm": film("webm", codec="libvpx-vp9"),
    "gif": film("gif", codec="gif", pixels="rgb8"),
    "npz": Specimen(
        lambda folder: np.savez_compressed(folder / "file.npz", x=noise().standard_normal((1, 500)), sample_rate=50.0),
        read_npz,
    ),
    "npy": Specimen(
        lambda folder: np.save(folder / "file.npy", noise().standard_normal((1, 500)).astype(np.float32)), read_npy
    ),
    "tar": Specimen(write_tar, read_tar),
    "csv": listed("file.csv", partial(write_table, name="file.csv", between=",")),
    "tsv": listed("file.tsv", partial(write_table, name="file.tsv", between="\t")),
    "jsonl": listed("file.jsonl", write_records),
    "AudioSet lists": Specimen(
        write_audioset, lambda folder: rows_of(find_audioset(folder, extensions=(".wav",))), spared=(".wav",)
    ),
}
