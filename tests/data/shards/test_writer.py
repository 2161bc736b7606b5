"""Data sets written as tar shards: the same samples come back, the same bytes come out, and nothing is lost unsaid."""

from __future__ import annotations

import fcntl
import hashlib
import io
import json
import os
import tarfile
from pathlib import Path

import av
import numpy as np
import pytest
import soundfile
import torch
from PIL import Image
from typer.testing import CliRunner

from bridle.cli import app
from bridle.config import load_config
from bridle.data.build import open_data
from bridle.data.listing.table_on_disk import VERIFIED
from bridle.data.loading.loader import Loader
from bridle.data.shards import writer as shards_writer
from bridle.data.shards.reader import find_shards
from bridle.data.shards.verify import check_shards
from bridle.data.shards.writer import Written, files_to_shard, write_shards
from bridle.data.sources import Source
from bridle.errors import ConfigError, DataError, UsageError

RATE = 16_000


def shard(path: Path, out: Path, *, source: str | None = None, shard_mb: int = 1, workers: int = 0) -> Written:
    todo = files_to_shard(path, source=source)
    return write_shards(
        todo.found,
        source=todo.modality.name,
        extensions=todo.modality.extensions,
        root=todo.root,
        out=out,
        shard_mb=shard_mb,
        workers=workers,
    )


def contents(folder: Path) -> dict[str, str]:
    """SHA-256 of every file below a folder."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def names(shard: Path) -> list[str]:
    with tarfile.open(shard) as archive:
        return archive.getnames()


def member(shard: Path, name: str) -> bytes:
    with tarfile.open(shard) as archive:
        file = archive.extractfile(name)
        assert file is not None
        return file.read()


def save_picture(path: Path, seed: int, size: int = 24) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.random.default_rng(seed).integers(0, 255, (size, size + 4, 3), dtype=np.uint8)).save(path)


def save_sound(path: Path, seed: int, seconds: float) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    soundfile.write(path, np.random.default_rng(seed).uniform(-0.5, 0.5, int(seconds * RATE)), RATE)


def save_video(path: Path, seed: int, frames: int = 12) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=10)
        stream.width = stream.height = 32
        stream.pix_fmt = "yuv420p"
        for _ in range(frames):
            picture = rng.integers(0, 255, (32, 32, 3), dtype=np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode())


def assert_same(first: Source, second: Source) -> None:
    """Every sample bit for bit the same, augmented or not, and every label."""
    assert len(first) == len(second) > 0
    assert first.classes == second.classes
    assert (first.labels is None) == (second.labels is None)
    assert list(first.labels or ()) == list(second.labels or ())
    for i in range(len(first)):
        for seed in (None, i):
            one, two = (
                s.load(i, None if seed is None else torch.Generator().manual_seed(seed)) for s in (first, second)
            )
            assert torch.equal(one.x, two.x)
            assert (
                torch.equal(torch.as_tensor(one.label), torch.as_tensor(two.label)) if one.label is not None else True
            )
            assert (one.valid is None) == (two.valid is None)


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("photos")
    for split in ("train", "test"):
        for i in range(6):
            save_picture(root / split / ("cat", "dog")[i % 2] / f"{i}.png", seed=i)
    return root


def test_pictures_of_class_folders_come_back_bit_for_bit(photos: Path, tmp_path: Path) -> None:
    done = shard(photos, tmp_path / "out")
    assert (done.shards, done.samples, done.skipped, done.renamed) == (2, {"train": 6, "test": 6}, 0, 0)
    assert names(tmp_path / "out" / "train-000000.tar")[:2] == ["cat/0.png", "cat/0.cls"]
    both = [open_data(load_config("image", [f"data.root={root}"])) for root in (photos, tmp_path / "out")]
    assert_same(both[0].train, both[1].train)
    assert both[0].test is not None
    assert both[1].test is not None
    assert_same(both[0].test, both[1].test)
    assert both[1].notes == ()


def test_parts_folds_and_labels_of_recordings_come_back(tmp_path: Path) -> None:
    for i, seconds in enumerate((3.0, 2.0, 1.5)):
        save_sound(tmp_path / "clips" / f"{i}.{('wav', 'flac', 'ogg')[i]}", i, seconds)
    rows = ["clips/0.wav,0,1.5,dog,1", "clips/0.wav,1.5,,cat,1", "clips/1.flac,,,dog,2", "clips/2.ogg,0.25,1.25,cat,2"]
    (tmp_path / "list.csv").write_text("path,start,end,label,fold\n" + "\n".join(rows) + "\n")
    done = shard(tmp_path / "list.csv", tmp_path / "out")
    assert done.samples == {"train": 4}
    facts = json.loads(member(tmp_path / "out" / "train-000000.tar", "clips/0.json"))
    # classes are sorted: cat is 0, dog 1
    assert facts["rows"] == [
        {"label": 1, "start": 0.0, "end": 1.5, "fold": 1},
        {"label": 0, "start": 1.5, "fold": 1},
    ]
    tiny = ["geometry.input=[64,128]", "data.views=2"]
    files = open_data(load_config("audio", [f"data.manifest={tmp_path / 'list.csv'}", *tiny]))
    packed = open_data(load_config("audio", [f"data.root={tmp_path / 'out'}", *tiny]))
    assert_same(files.train, packed.train)
    assert list(packed.folds or ()) == list(files.folds or ()) == [1, 1, 2, 2]
    assert packed.train.describe(1).endswith("train-000000.tar/clips/0.wav [1.5–end s]")


def test_one_fold_of_shards_can_be_held_out(tmp_path: Path) -> None:
    for i in range(4):
        save_picture(tmp_path / f"{i}.png", i)
    text = "".join(json.dumps({"path": f"{i}.png", "label": "ab"[i // 2], "fold": i % 2}) + "\n" for i in range(4))
    (tmp_path / "list.jsonl").write_text(text)
    shard(tmp_path / "list.jsonl", tmp_path / "out")
    found = find_shards(tmp_path / "out", extensions=(".png",), test_fold=1)
    assert found.test is not None
    assert [m.name for m in found.train.paths] == ["0.png", "2.png"]  # type: ignore[union-attr]
    assert [m.name for m in found.test.paths] == ["1.png", "3.png"]  # type: ignore[union-attr]
    assert list(found.test.labels or ()) == [0, 1]
    with pytest.raises(ConfigError, match=r"has the folds 0, 1"):
        find_shards(tmp_path / "out", extensions=(".png",), test_fold=7)


def test_several_labels_of_videos_come_back(tmp_path: Path) -> None:
    for i in range(2):
        save_video(tmp_path / f"{i}.mp4", i)
    (tmp_path / "list.csv").write_text("path,labels\n0.mp4,run;jump\n1.mp4,jump\n")
    shard(tmp_path / "list.csv", tmp_path / "out")
    tiny = ["geometry.input=[4,16,16]", "geometry.patch=[2,8,8]", "video.stride=2"]
    files = open_data(load_config("video", [f"data.manifest={tmp_path / 'list.csv'}", *tiny]))
    packed = open_data(load_config("video", [f"data.root={tmp_path / 'out'}", *tiny]))
    assert list(packed.train.labels or ()) == [(1, 0), (0,)]  # jump is 0, run is 1
    assert_same(files.train, packed.train)


def test_a_truncated_shard_costs_one_sample_of_each_kind_and_not_the_run(tmp_path: Path) -> None:
    save_sound(tmp_path / "in" / "a.wav", 0, 1.0)
    save_sound(tmp_path / "in" / "b.wav", 1, 1.0)
    shard(tmp_path / "in", tmp_path / "out")
    path = tmp_path / "out" / "train-000000.tar"
    path.write_bytes(path.read_bytes()[:50_000])  # inside the second recording
    splits = open_data(load_config("audio", [f"data.root={tmp_path / 'out'}", "geometry.input=[64,128]"]))
    assert "the shards were scanned instead" in splits.notes[-1]
    assert "damaged" in splits.notes[0]
    loader = Loader(source=splits.train, seed=0, phase="p", batch=4, mean=[0.0], std=[1.0])
    bad = next(loader.steps(0, 1))[0].bad
    assert [sample.name for sample in bad] == [f"{path}/b.wav"]
    assert "truncated" in bad[0].reason


def test_bytes_do_not_depend_on_workers_times_or_place(photos: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    for path in sorted(photos.rglob("*.png"), reverse=True):
        target = copy / path.relative_to(photos)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(path.read_bytes())
        os.utime(target, (1, 1))
    shard(photos, tmp_path / "one")
    shard(copy, tmp_path / "two", workers=2)
    one, two = contents(tmp_path / "one"), contents(tmp_path / "two")
    assert {name: sha for name, sha in one.items() if name != "shards.json"} == {
        name: sha for name, sha in two.items() if name != "shards.json"
    }


def big_folder(root: Path) -> Path:
    """Four shards of 1 MB."""
    for i in range(8):
        (root / f"{i}.bmp").parent.mkdir(parents=True, exist_ok=True)
        (root / f"{i}.bmp").write_bytes(bytes([i]) * 500_000)
    return root


def test_a_killed_run_goes_on_and_ends_with_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = big_folder(tmp_path / "in")
    assert shard(root, tmp_path / "whole").shards == 4

    class KilledError(BaseException):
        """Stands for kill -9: nothing may catch it."""

    packed: list[int] = []
    pack = shards_writer.pack

    def dying(groups: object, file: io.BufferedWriter, **options: object) -> object:
        packed.append(1)
        if len(packed) == 3:
            file.write(b"half a sha")
            raise KilledError
        return pack(groups, file, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(shards_writer, "pack", dying)
    with pytest.raises(KilledError):
        shard(root, tmp_path / "killed")
    left = contents(tmp_path / "killed")
    assert {"train-000000.tar", "train-000001.tar"} <= left.keys()
    assert "shards.json" not in left
    done = shard(root, tmp_path / "killed")
    assert (done.kept, len(packed)) == (2, 5)  # two are kept, two written
    assert contents(tmp_path / "killed") == contents(tmp_path / "whole")
    assert shard(root, tmp_path / "killed").kept == 4
    assert len(packed) == 5


def test_a_changed_file_rewrites_only_its_shard(tmp_path: Path) -> None:
    root = big_folder(tmp_path / "in")
    shard(root, tmp_path / "out")
    (root / "7.bmp").write_bytes(b"new" * 1000)
    done = shard(root, tmp_path / "out")
    assert (done.shards, done.kept) == (4, 3)
    for i in range(2, 8):
        (root / f"{i}.bmp").unlink()
    assert shard(root, tmp_path / "out").shards == 1
    assert sorted(path.name for path in (tmp_path / "out").glob("*.tar")) == ["train-000000.tar"]  # no leftovers


def test_odd_names_and_equal_keys_are_kept_apart_and_named(tmp_path: Path) -> None:
    odd = ["a.jpg", "a.png", "a.b.png", "a_b.png", "mit Leer.png", "äpfel.png", os.fsdecode(b"caf\xe9.png")]
    for i, name in enumerate(odd):
        (tmp_path / "in").mkdir(exist_ok=True)
        save_picture(tmp_path / "in" / "x.png", i)
        (tmp_path / "in" / "x.png").rename(tmp_path / "in" / name)
    done = shard(tmp_path / "in", tmp_path / "out")
    assert done.samples == {"train": 7}
    found = find_shards(tmp_path / "out", extensions=(".png", ".jpg"))
    listed = files_to_shard(tmp_path / "in", source="images").found.train.paths
    for packed, path in zip(found.train.paths, listed, strict=True):
        assert packed.read() == path.read_bytes()  # type: ignore[union-attr]
    tar = tmp_path / "out" / "train-000000.tar"
    media = [name for name in names(tar) if not name.endswith(".json")]
    # A key ends at its first dot, and no two samples share one; in the order of the names' bytes.
    assert media == ["a_b.png", "a.jpg", "a-2.png", "a_b-2.png", "caf_.png", "mit Leer.png", "äpfel.png"]
    renamed = {"a_b": "a.b.png", "a-2": "a.png", "a_b-2": "a_b.png", "caf_": "caf\\udce9.png"}
    assert {name[:-5] for name in names(tar) if name.endswith(".json")} == renamed.keys()
    assert {key: json.loads(member(tar, f"{key}.json"))["name"] for key in renamed} == renamed
    assert done.renamed == 4


def test_files_that_cannot_be_read_are_listed(tmp_path: Path) -> None:
    for i in range(2):
        save_picture(tmp_path / f"{i}.png", i)
    os.mkfifo(tmp_path / "pipe.png")
    rows = ["0.png,a", "gone.png,a", "pipe.png,b", "notes.txt,a", "1.png,b"]
    (tmp_path / "list.csv").write_text("path,label\n" + "\n".join(rows) + "\n")
    done = shard(tmp_path / "list.csv", tmp_path / "out")
    assert (done.samples, done.skipped) == ({"train": 2}, 3)
    told = [json.loads(line) for line in (tmp_path / "out" / "skipped.jsonl").read_text().splitlines()]
    assert [Path(row["path"]).name for row in told] == ["gone.png", "pipe.png", "notes.txt"]
    assert [row["reason"][:20] for row in told] == ["No such file or dire", "is not a file", "its name does not en"]


def test_held_out_files_must_be_whole(tmp_path: Path) -> None:
    save_picture(tmp_path / "0.png", 0)
    (tmp_path / "list.csv").write_text("path,label,split\n0.png,a,train\ngone.png,a,test\n")
    with pytest.raises(DataError, match=r"1 held-out files cannot be read, the first one .*gone.png"):
        shard(tmp_path / "list.csv", tmp_path / "out")
    assert not (tmp_path / "out" / "shards.json").exists()
    save_picture(tmp_path / "gone.png", 1)
    assert shard(tmp_path / "list.csv", tmp_path / "out").kept == 1


def test_the_index_says_what_a_scan_says(photos: Path, tmp_path: Path) -> None:
    shard(photos, tmp_path / "out")
    by_index = find_shards(tmp_path / "out", extensions=files_to_shard(photos, source="images").modality.extensions)
    (tmp_path / "out" / "index").rename(tmp_path / "elsewhere")
    by_scan = find_shards(tmp_path / "out", extensions=files_to_shard(photos, source="images").modality.extensions)
    for one, two in ((by_index.train, by_scan.train), (by_index.test, by_scan.test)):
        assert one is not None
        assert two is not None
        assert list(one.paths) == list(two.paths)
        assert list(one.labels or ()) == list(two.labels or ())
    assert (by_index.classes, by_index.notes) == (by_scan.classes, by_scan.notes)


@pytest.mark.parametrize("harm", ["stale", "truncated", "flipped", "facts", "missing", "nonsense"])
def test_an_index_that_does_not_fit_is_told_and_not_used(photos: Path, tmp_path: Path, harm: str) -> None:
    out = tmp_path / "out"
    shard(photos, out)
    labels = out / "index" / "train.labels.npy"
    if harm == "stale":
        (out / "train-000001.tar").write_bytes((out / "train-000000.tar").read_bytes())
    elif harm == "truncated":
        labels.write_bytes(labels.read_bytes()[:-4])
    elif harm == "flipped":
        labels.write_bytes(bytes([labels.read_bytes()[0] ^ 1]) + labels.read_bytes()[1:])
    elif harm == "missing":
        labels.unlink()
    else:
        facts = (out / "index" / "index.json").read_text()
        (out / "index" / "index.json").write_text(facts.replace("cat", "cow") if harm == "facts" else "{")
    assert labels.parent.stat().st_size < VERIFIED
    found = find_shards(out, extensions=files_to_shard(photos, source="images").modality.extensions)
    assert "is not used" in found.notes[-1]
    assert found.classes == ("cat", "dog")
    assert list(found.train.labels or ())[:6] == [0, 0, 0, 1, 1, 1]
    assert len(check_shards(out).faults) == 1


def test_check_finds_changed_missing_and_foreign_shards(photos: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shard(photos, out)
    assert check_shards(out) == (2, 12, True, [], ())
    body = bytearray((out / "train-000000.tar").read_bytes())
    body[700] ^= 1
    (out / "train-000000.tar").write_bytes(body)
    (out / "test-000000.tar").unlink()
    (out / "train-9.tar").write_bytes(bytes(1024))
    faults = {fault.path: fault.detail for fault in check_shards(out, workers=1).faults}
    assert "content changed" in faults["train-000000.tar"]
    assert "No such file" in faults["test-000000.tar"]
    assert "not listed" in faults["train-9.tar"]


def test_what_cannot_be_sharded_is_refused_with_advice(photos: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--source 'smell': expected video, image, audio, signal"):
        files_to_shard(photos, source="smell")
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("x")
    with pytest.raises(DataError, match="1 files of other kinds"):
        files_to_shard(tmp_path / "text", source=None)
    shard(photos, tmp_path / "out")
    with pytest.raises(UsageError, match="holds shards already"):
        files_to_shard(tmp_path / "out", source=None)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "backup.tar").write_bytes(b"")
    with pytest.raises(UsageError, match=r"'backup.tar', which is not of this command"):
        shard(photos, tmp_path / "mine")
    save_picture(tmp_path / "classes" / " x " / "0.png", 0)
    with pytest.raises(DataError, match=r"' x ' cannot be a line of classes.txt"):
        shard(tmp_path / "classes", tmp_path / "other")


def test_one_process_at_a_time_writes(photos: Path, tmp_path: Path) -> None:
    with shards_writer.locked(tmp_path / "out"), pytest.raises(UsageError, match="another process is writing"):
        shard(photos, tmp_path / "out")


def test_what_is_there_is_read_under_the_lock_whose_file_stays(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, looks, known = tmp_path / "out", [], shards_writer.known_records

    def watched(folder: Path) -> dict[str, shards_writer.Record]:
        with (out / ".records.lock").open("w") as other, pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        looks.append(folder)
        return known(folder)

    monkeypatch.setattr(shards_writer, "known_records", watched)
    shard(photos, out)
    assert len(looks) > 1
    before = (out / ".records.lock").stat().st_ino
    shard(photos, out)
    assert (out / ".records.lock").stat().st_ino == before


def test_the_commands_say_what_they_wrote_and_found(photos: Path, tmp_path: Path) -> None:
    runner, out = CliRunner(), str(tmp_path / "out")
    result = runner.invoke(app, ["data", "shard", str(photos), "--out", out, "--workers", "0"])
    assert result.exit_code == 0, result.output
    assert "2 shards" in result.output
    assert "6 train, 6 test (images)" in result.output
    assert f"Next:  bridle pretrain image data.root={out}" in result.output
    result = runner.invoke(app, ["data", "check", out, "--workers", "0", "--strict"])
    assert result.exit_code == 0, result.output
    assert "checksums and index agree" in result.output
    (tmp_path / "out" / "train-000000.tar").write_bytes(b"short")
    result = runner.invoke(
        app, ["data", "check", out, "--workers", "0", "--strict", "--out", str(tmp_path / "f.jsonl")]
    )
    assert result.exit_code == 65
    assert "train-000000.tar: it has 5 bytes instead of" in result.output
    rows = [json.loads(line) for line in (tmp_path / "f.jsonl").read_text().splitlines()]
    assert rows[-1] == {"summary": {"shards": 2, "samples": 12, "faults": 1}}
