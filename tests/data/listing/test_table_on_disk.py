"""Long lists on disk: read once, mapped ever after, the same rows as in memory, and never a stale or damaged one."""

from __future__ import annotations

import csv
import io
import json
import os
import pickle
import shutil
import tarfile
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from bridle.data.listing import layouts, manifest, table_on_disk
from bridle.data.listing import table as listing_table
from bridle.data.listing.columns import Column
from bridle.data.listing.layouts import find_data
from bridle.data.listing.table import DataListing
from bridle.data.shards import reader as shards_reader
from bridle.errors import DataError


@pytest.fixture(autouse=True)
def everything_is_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Index the shortest lists too, and keep the cache out of the user's home."""
    for module in (manifest, layouts, shards_reader):
        monkeypatch.setattr(module, "LARGE", 0)
    monkeypatch.setenv("BRIDLE_CACHE", str(tmp_path / "cache"))


def write(path: Path, count: int, *, labels: str = "label") -> Path:
    """Rows with a span, a fold and labels that come in no order."""
    with path.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["path", labels, "start", "end", "fold"])
        for i in range(count):
            label = f"c{(i * 7) % 5}" if labels == "label" else ";".join(f"c{j}" for j in range(i % 3, 3))
            table.writerow([f"ä/{i:03d}.wav", label, i / 4, "" if i % 2 else i / 4 + 1, i % 3])
    return path


def read(path: Path, **options: int) -> DataListing:
    return find_data(root=None, manifest=str(path), layout="auto", extensions=(".wav",), **options)  # type: ignore[arg-type]


def in_memory(path: Path, test_fold: int | None = None) -> DataListing:
    found = manifest.parse_manifest(path, path.parent)
    return listing_table.hold_out(found, test_fold, path, declared=False)


def must_not_run(*args: object) -> DataListing:
    raise AssertionError("it was read again")


def everything(found: DataListing) -> list[object]:
    """All that a listing says, as plain lists."""
    said: list[object] = [found.classes, found.notes, None if found.folds is None else list(found.folds)]
    for part in (found.train, found.test):
        said += [] if part is None else [None if column is None else list(column) for column in part]
    return said


@pytest.mark.parametrize("labels", ["label", "labels"])
@pytest.mark.parametrize("test_fold", [None, 1])
def test_a_long_list_says_the_same_as_a_short_one(tmp_path: Path, labels: str, test_fold: int | None) -> None:
    path = write(tmp_path / "list.csv", 20, labels=labels)
    for _ in range(2):  # made, then found
        options = {} if test_fold is None else {"test_fold": test_fold}
        assert everything(read(path, **options)) == everything(in_memory(path, test_fold))
    assert (tmp_path / ".list.csv.index" / "index.json").is_file()
    assert type(next(iter(read(path).train.labels or ()))) in (int, tuple)


def test_the_second_time_the_list_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "list.csv", 5)
    first = everything(read(path))
    monkeypatch.setattr(manifest, "parse_manifest", must_not_run)
    assert everything(read(path)) == first


def test_a_change_of_the_list_or_of_the_class_names_is_noticed(tmp_path: Path) -> None:
    path = write(tmp_path / "list.csv", 5)
    read(path)
    write(path, 6)
    assert len(read(path).train.paths) == 6
    (tmp_path / "classes.txt").write_text("".join(f"c{i}\n" for i in (4, 3, 2, 1, 0)))
    assert read(path).classes == ("c4", "c3", "c2", "c1", "c0")
    assert everything(read(path)) == everything(in_memory(path))


def test_lists_of_two_files_are_indexed_too(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("".join(f"{i}.wav {i % 3}\n" for i in range(7)))
    (tmp_path / "val.csv").write_text("a.wav 2\n")
    found = find_data(root=str(tmp_path), manifest=None, layout="auto", extensions=(".wav",))
    again = find_data(root=str(tmp_path), manifest=None, layout="auto", extensions=(".wav",))
    assert everything(found) == everything(again)
    assert list(again.train.labels or ()) == [0, 1, 2, 0, 1, 2, 0]
    assert again.test is not None
    assert isinstance(again.test.labels, Column)
    assert list(again.test.paths) == [tmp_path / "a.wav"]


@pytest.mark.parametrize("harm", ["truncated", "flipped", "removed"])
def test_a_damaged_index_is_made_anew(tmp_path: Path, harm: str) -> None:
    path = write(tmp_path / "list.csv", 9)
    right = everything(read(path))
    column = tmp_path / ".list.csv.index" / "train.ends.npy"
    body = column.read_bytes()
    if harm == "removed":
        column.unlink()
    else:
        column.write_bytes(body[:-8] if harm == "truncated" else body[:-8] + bytes([body[-8] ^ 4]) + body[-7:])
    assert everything(read(path)) == right
    assert column.read_bytes() == body


def test_where_the_folder_cannot_be_written_the_cache_is_used(tmp_path: Path) -> None:
    path = write(tmp_path / "list.csv", 9)
    (tmp_path / ".list.csv.index").write_text("in the way")  # root may write anywhere, but not into a file
    assert everything(read(path)) == everything(in_memory(path))
    assert [place.name for place in (tmp_path / "cache" / "bridle").iterdir()] == [table_on_disk.cache_place(path).name]
    shutil.rmtree(table_on_disk.cache_place(path))
    table_on_disk.cache_place(path).write_text("in the way")
    write(path, 10)
    found = read(path)
    assert len(found.train.paths) == 10
    assert "made at every start" in found.notes[-1]
    assert not list(tmp_path.glob("**/*.tmp"))
    assert (tmp_path / ".list.csv.index").read_text() == "in the way"


def test_an_open_index_stays_what_it_is_when_another_takes_its_place(tmp_path: Path) -> None:
    path = write(tmp_path / "list.csv", 9)
    old = read(path)
    before = everything(old)
    write(path, 30)
    assert len(read(path).train.paths) == 30
    assert everything(old) == before
    # A copy that another process would open by name must not mix the two.
    with pytest.raises(DataError, match="changed while it was in use"):
        list(pickle.loads(pickle.dumps(old.train.paths)))


def test_a_list_with_a_fault_leaves_no_index(tmp_path: Path) -> None:
    path = write(tmp_path / "list.csv", 9)
    with path.open("a") as file:
        file.write("only one field\n")
    with pytest.raises(DataError, match="line 11 has 1 fields"):
        read(path)
    assert sorted(os.listdir(tmp_path)) == ["list.csv"]


def test_rows_cost_no_memory_once_they_are_on_disk(tmp_path: Path) -> None:
    held, sent = [], []
    for count in (1_000, 8_000):
        path = tmp_path / f"{count}.csv"
        path.write_text("path,label\n" + "".join(f"speaker/{i:08d}.wav,c{i % 7}\n" for i in range(count)))
        read(path)  # made
        tracemalloc.start()
        found = read(path)  # found
        assert found.classes is not None
        assert found.classes[(found.train.labels or ())[count - 1]] == f"c{(count - 1) % 7}"  # type: ignore[index]
        assert found.train.paths[count - 1].name == f"{count - 1:08d}.wav"
        held.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        sent.append(len(pickle.dumps(found)))
    assert held[1] < held[0] + 60_000  # 7,000 more rows would be some 300 kB in arrays, megabytes as objects
    assert sent[1] < sent[0] + 50  # workers are told the names of files


def test_scanned_shards_are_indexed_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "s").mkdir()
    for shard, names in (("train-0.tar", [f"{i}.wav" for i in range(7)]), ("test-0.tar", ["a.wav"])):
        with tarfile.open(tmp_path / "s" / shard, "w") as archive:
            for i, name in enumerate(names):
                entry = tarfile.TarInfo(name)
                entry.size = i
                archive.addfile(entry, io.BytesIO(b"x" * i))
    first = shards_reader.find_shards(tmp_path / "s", extensions=(".wav",))
    monkeypatch.setattr(shards_reader, "scan_shards", must_not_run)
    again = shards_reader.find_shards(tmp_path / "s", extensions=(".wav",))
    assert everything(first) == everything(again)
    assert [member.read() for member in again.train.paths] == [b"x" * i for i in range(7)]  # type: ignore[union-attr]
    assert sorted(path.name for path in (tmp_path / "s").iterdir()) == ["test-0.tar", "train-0.tar"]


@pytest.mark.parametrize("wrong", [np.zeros(3), np.zeros((1, 3), np.int64)])
def test_a_column_of_other_numbers_is_refused(tmp_path: Path, wrong: np.ndarray) -> None:  # type: ignore[type-arg]
    np.save(tmp_path / "train.ends.npy", np.arange(3))
    assert json.dumps(list(Column(tmp_path / "train.ends.npy"))) == "[0, 1, 2]"  # plain numbers
    np.save(tmp_path / "train.ends.npy", wrong)
    with pytest.raises(ValueError, match="other numbers"):
        Column(tmp_path / "train.ends.npy")
