"""Data from other file systems by fsspec, and patterns of shards that the real `webdataset` writes."""

from __future__ import annotations

import importlib.util
import io
import json
from pathlib import Path

import fsspec
import numpy as np
import pytest
import soundfile
import webdataset
from fsspec.implementations.memory import MemoryFileSystem
from PIL import Image

from bridle.data.listing.address import copied, expanded, local_path
from bridle.data.listing.items import find_inputs
from bridle.data.listing.layouts import find_data
from bridle.data.listing.table import DataListing
from bridle.errors import DataError, UsageError

IMAGES = (".png", ".jpg")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache folder of a test; fsspec's memory is empty."""
    monkeypatch.setenv("BRIDLE_CACHE", str(tmp_path / "cache"))
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]
    return tmp_path / "cache" / "bridle" / "files"


def write_tars(folder: Path, *, labels: str = "cls") -> None:
    """train-000000.tar to train-000002.tar of four pictures each, test-000000.tar of two."""
    folder.mkdir(parents=True)
    random = np.random.default_rng(0)
    for split, count in (("train", 12), ("test", 2)):
        with webdataset.ShardWriter(f"{folder}/{split}-%06d.tar", maxcount=4, verbose=0) as sink:
            for i in range(count):
                label = {"cls": i % 2} if labels == "cls" else {"json": {"label": ("moth", "bee")[i % 2]}}
                sink.write(
                    {"__key__": f"{split}/{i:04d}", "png": random.integers(0, 255, (8, 8, 3), np.uint8), **label}
                )


def listed(root: Path | str | None, manifest: str | None = None, extensions: tuple[str, ...] = IMAGES) -> DataListing:
    root = None if root is None else str(root)
    return find_data(root=root, manifest=manifest, layout="auto", extensions=extensions)


def upload(folder: Path, address: str) -> None:
    fsspec.filesystem("memory").put(str(folder), address.removeprefix("memory:/"), recursive=True)


def test_tars_of_webdataset_are_read_as_webdataset_reads_them(tmp_path: Path) -> None:
    write_tars(tmp_path / "d", labels="json")
    found = listed(tmp_path / "d" / "train-{000000..000002}.tar")
    theirs = webdataset.WebDataset(f"{tmp_path}/d/train-{{000000..000002}}.tar", shardshuffle=False)
    rows = list(theirs)
    assert [path.read() for path in found.train.paths] == [row["png"] for row in rows]  # type: ignore[union-attr]
    assert found.classes == ("bee", "moth")
    names = [found.classes[label] for label in found.train.labels or ()]  # type: ignore[index]
    assert names == [json.loads(row["json"])["label"] for row in rows]
    assert (len(found.train.paths), found.test) == (12, None)


def test_a_pattern_names_the_shards_of_train_and_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert expanded("a-{08..10}-{x,yy}.tar") == [f"a-{n}-{c}.tar" for n in ("08", "09", "10") for c in ("x", "yy")]
    assert expanded("{a}.tar") == ["{a}.tar"]
    write_tars(tmp_path / "d")
    found = listed(tmp_path / "d" / "{train,test}-000000.tar")
    assert found.test is not None
    assert (len(found.train.paths), len(found.test.paths), list(found.test.labels or ())) == (4, 2, [0, 1])
    assert len(listed(tmp_path / "d" / "train-000001.tar").train.paths) == 4  # one shard needs no braces
    monkeypatch.chdir(tmp_path / "d")
    assert len(listed("{train,test}-000000.tar").train.paths) == 4
    monkeypatch.chdir(tmp_path)
    assert len(listed("{d,d}/train-000000.tar").train.paths) == 8
    with pytest.raises(UsageError, match=r"train-000003.tar' does not exist; check the pattern"):
        listed(tmp_path / "d" / "train-{000000..000003}.tar")


class Reader:
    """Of pictures, as far as listing goes."""

    extensions = IMAGES
    timed = False


def test_shards_in_memory_are_copied_once_and_again_only_where_they_changed(tmp_path: Path, cache: Path) -> None:
    write_tars(tmp_path / "d")
    upload(tmp_path / "d", "memory://bucket/d")
    here, there = listed(tmp_path / "d"), listed("memory://bucket/d")
    assert [path.read() for path in there.train.paths] == [path.read() for path in here.train.paths]  # type: ignore[union-attr]
    assert there.test is not None
    assert sorted(path.name for path in (cache / "memory" / "bucket" / "d").iterdir())[0] == "test-000000.tar"
    copies = {path: path.stat().st_ino for path in (cache / "memory" / "bucket" / "d").iterdir()}
    system = fsspec.filesystem("memory")
    system.pipe("/bucket/d/train-000001.tar", (tmp_path / "d" / "train-000000.tar").read_bytes())
    system.rm("/bucket/d/train-000002.tar")
    assert len(listed("memory://bucket/d").train.paths) == 8
    kept = [path.name for path, number in copies.items() if path.exists() and path.stat().st_ino == number]
    assert sorted(kept) == ["test-000000.tar", "train-000000.tar"]


def test_a_pattern_at_an_address_copies_only_its_files(tmp_path: Path, cache: Path) -> None:
    write_tars(tmp_path / "d")
    upload(tmp_path / "d", "memory://d")
    named = find_inputs(["memory://d/train-{000000..000001}.tar"], reader=Reader(), stdin=None)  # type: ignore[arg-type]
    assert len(named.items) == 8
    assert sorted(path.name for path in (cache / "memory" / "d").iterdir()) == ["train-000000.tar", "train-000001.tar"]


def test_a_manifest_at_an_address_brings_the_files_that_it_names(tmp_path: Path, cache: Path) -> None:
    system, wave = fsspec.filesystem("memory"), io.BytesIO()
    soundfile.write(wave, np.zeros(1600), 16_000, format="WAV")
    for name in ("a/1.wav", "a/2.wav", "b/3.wav", "b/never.wav"):
        system.pipe(f"/talks/{name}", wave.getvalue())
    rows = "path,label,split\n./a/1.wav,x,train\na/2.wav,y,train\nb/3.wav,x,test\ngone.wav,x,train\n"
    system.pipe("/talks/list.csv", rows.encode())
    found = listed(None, "memory://talks/list.csv", extensions=(".wav",))
    there = [path.is_file() for path in found.train.paths]  # type: ignore[union-attr]
    assert there == [True, True, False]  # a file that is missing shows when it is read, as of any list
    assert not (cache / "memory" / "talks" / "b" / "never.wav").exists()
    (tmp_path / "own.csv").write_text("path\nb/never.wav\n")
    own = listed("memory://talks", str(tmp_path / "own.csv"), extensions=(".wav",))
    assert own.train.paths[0].is_file()  # type: ignore[union-attr]


def test_local_addresses_are_not_copied_and_caching_file_systems_are_used(tmp_path: Path, cache: Path) -> None:
    write_tars(tmp_path / "d")
    assert local_path(f"file://{tmp_path}/d") == tmp_path / "d"
    upload(tmp_path / "d", "memory://d")
    assert len(listed("filecache::memory://d").train.paths) == 12
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    upload(tmp_path / "a.png", "memory://one/a.png")
    assert local_path("memory://one/a.png").read_bytes() == (tmp_path / "a.png").read_bytes()


def test_what_cannot_be_copied_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    with pytest.raises(UsageError, match=r"^'nosuch://x' cannot be opened: Protocol not known: nosuch\.$"):
        local_path("nosuch://x")
    if importlib.util.find_spec("s3fs") is None:
        with pytest.raises(
            UsageError, match=r"^'s3://x' cannot be opened: Install s3fs .*`pip install \"bridle\[s3\]\"`\.$"
        ):
            local_path("s3://x")
    with pytest.raises(UsageError, match="holds no files; check the address"):
        local_path("memory://empty")
    system = fsspec.filesystem("memory")
    system.pipe("/d/../../../outside.png", b"x")
    system.pipe("/d/a.png", b"x")
    assert "/d/../../../outside.png" in system.find("/d")
    copied("memory://d")
    assert [path.name for path in cache.rglob("*.png")] == ["a.png"]
    monkeypatch.setattr(MemoryFileSystem, "get_file", lambda *_: (_ for _ in ()).throw(TimeoutError("slow")))
    system.pipe("/d/b.png", b"x")
    with pytest.raises(DataError, match=r"^'memory://d': 'b.png' cannot be copied to .*: TimeoutError: slow\.$"):
        copied("memory://d")
    assert [path.name for path in cache.rglob("*.png*")] == ["a.png"]
