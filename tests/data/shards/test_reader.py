"""Pictures inside tar files: found by their headers, read by offset, labelled by their neighbours."""

from __future__ import annotations

import io
import json
import pickle
import tarfile
import tracemalloc
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from bridle.config import load_config
from bridle.data.build import open_data
from bridle.data.file_source import open_splits
from bridle.data.image.source import EXTENSIONS, Images
from bridle.data.listing.layouts import find_data
from bridle.data.listing.table import Listing
from bridle.data.loading.loader import Loader, sequential
from bridle.data.shards.reader import find_shards
from bridle.data.shards.tar_member import TarMember
from bridle.errors import DataError, UsageError
from bridle.geometry import Geometry

GEOMETRY = Geometry(3, (8, 8), (4, 4))


def picture(shade: int, kind: str = "PNG") -> bytes:
    """Of one shade on the whole, but not everywhere the same."""
    file = io.BytesIO()
    pixels = np.empty((10, 12, 3), dtype=np.uint8)
    pixels[::2] = max(shade - 1, 0)
    pixels[1::2] = shade + 1
    Image.fromarray(pixels).save(file, kind)
    return file.getvalue()


def write(path: Path, members: dict[str, bytes], *, layout: int = tarfile.USTAR_FORMAT) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=layout) as archive:
        for name, body in members.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(body)
            archive.addfile(entry, io.BytesIO(body))
    return path


def shades(source: Images) -> list[int]:
    return [round(float(source.load(i, None).x.mean()) * 255) for i in range(len(source))]


def test_pictures_and_labels_with_one_key_belong_together(tmp_path: Path) -> None:
    write(tmp_path / "b.tar", {"k/3.cls": b"2\n", "k/3.png": picture(30)})  # the label may come first
    write(
        tmp_path / "a.tar",
        {
            "1.jpg": picture(10, "JPEG"),
            "1.cls": b"0",
            "2.PNG": picture(20),
            "2.json": json.dumps({"label": 1, "width": 12}).encode(),
        },
    )
    splits = open_splits(find_shards(tmp_path, extensions=EXTENSIONS), partial(Images, geometry=GEOMETRY))
    assert isinstance(splits.train, Images)
    assert shades(splits.train) == [10, 20, 30]
    assert list(splits.train.labels or ()) == [0, 1, 2]
    assert [splits.train.load(i, None).label for i in range(3)] == [0, 1, 2]
    assert splits.train.classes == ("0", "1", "2")
    assert splits.train.describe(2) == str(tmp_path / "b.tar" / "k" / "3.png")
    assert splits.test is None
    assert splits.notes == ()


@pytest.mark.parametrize("layout", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_long_and_foreign_names_are_read_in_every_tar_dialect(tmp_path: Path, layout: int) -> None:
    long = "/".join(["folder" * 8] * 3) + "/äpfel"
    write(tmp_path / "a.tar", {f"{long}.png": picture(7), f"{long}.cls": b"5"}, layout=layout)
    found = find_shards(tmp_path, extensions=EXTENSIONS)
    assert found.train.paths[0].name == f"{long}.png"
    assert list(found.train.labels or ()) == [5]


@pytest.mark.parametrize(
    ("train", "test"), [("train/0.tar", "test/0.tar"), ("train/0.tar", "val/0.tar"), ("train-0.tar", "val-0.tar")]
)
def test_train_and_test_are_told_by_folder_or_name(tmp_path: Path, train: str, test: str) -> None:
    write(tmp_path / train, {"1.png": picture(1), "1.cls": b"cat", "2.png": picture(2), "2.cls": b"ape"})
    write(tmp_path / test, {"1.png": picture(3), "1.cls": b"cat"})
    found = find_shards(tmp_path, extensions=EXTENSIONS)
    assert found.classes == ("ape", "cat")
    assert list(found.train.labels or ()) == [1, 0]
    assert found.test is not None
    assert list(found.test.labels or ()) == [1]


def test_only_the_first_word_of_a_name_holds_a_shard_out(tmp_path: Path) -> None:
    for name in ("train-0", "testing-0", "valley_1", "a-test-1", "test-0", "val-0"):
        write(tmp_path / f"{name}.tar", {f"{name}.png": picture(1)})
    found = find_shards(tmp_path, extensions=EXTENSIONS)
    assert found.test is not None
    assert [m.name for m in found.train.paths] == ["a-test-1.png", "testing-0.png", "train-0.png", "valley_1.png"]  # type: ignore[union-attr]
    assert [m.name for m in found.test.paths] == ["test-0.png"]  # type: ignore[union-attr]
    assert "the 1 val shards are left out" in found.notes[0]
    assert "'a-test-1.tar' is trained on" in found.notes[1]


def test_rows_in_json_are_samples_of_their_own(tmp_path: Path) -> None:
    rows = {"rows": [{"label": "b", "start": 1, "end": 2.5, "fold": 1}, {"label": "a", "start": 3, "fold": 2}]}
    several = {"labels": ["b", "a"]}
    write(tmp_path / "a.tar", {"1.wav": b"x", "1.json": json.dumps(rows).encode()})
    found = find_shards(tmp_path, extensions=(".wav",))
    assert list(found.train.spans or ()) == [(1.0, 2.5), (3.0, None)]
    assert list(found.train.labels or ()) == [1, 0]
    assert list(found.folds or ()) == [1, 2]
    assert found.train.paths[0] == found.train.paths[1]
    write(tmp_path / "a.tar", {"1.wav": b"x", "1.json": json.dumps(several).encode(), "2.wav": b"y", "2.cls": b"a"})
    found = find_shards(tmp_path, extensions=(".wav",))
    assert list(found.train.labels or ()) == [(1, 0), (0,)]
    assert found.classes == ("a", "b")


def test_a_class_list_names_the_numbers(tmp_path: Path) -> None:
    write(tmp_path / "a.tar", {"1.png": picture(1), "1.cls": b"1", "2.png": picture(2), "2.cls": b"sea"})
    (tmp_path / "classes.txt").write_text("sea\nsky\n")
    found = find_shards(tmp_path, extensions=EXTENSIONS)
    assert found.classes == ("sea", "sky")
    assert list(found.train.labels or ()) == [1, 0]


@pytest.mark.parametrize(("label", "shown"), [(b"3", "'3'"), (b"dog", "'dog'")])
def test_a_held_out_label_that_train_does_not_know_is_refused(tmp_path: Path, label: bytes, shown: str) -> None:
    write(tmp_path / "train-0.tar", {"1.png": picture(1), "1.cls": b"0", "2.png": picture(1), "2.cls": b"1"})
    write(tmp_path / "test-0.tar", {"9.png": picture(1), "9.cls": label})
    with pytest.raises(DataError, match=f"test-0.tar/9.png' has the label {shown}, which is none of the 2 classes"):
        find_shards(tmp_path, extensions=EXTENSIONS)


def test_samples_without_labels_make_an_unlabelled_set(tmp_path: Path) -> None:
    write(tmp_path / "a.tar", {"1.png": picture(1), "2.png": picture(2), "2.json": b'{"width": 3}'})
    assert find_shards(tmp_path, extensions=EXTENSIONS).train.labels is None
    write(tmp_path / "a.tar", {"1.png": picture(1), "2.png": picture(2), "2.cls": b"1"})
    found = find_shards(tmp_path, extensions=EXTENSIONS)
    assert found.train.labels is None
    assert found.notes == ("1 of 2 training samples have no label, so none is used.",)


def test_members_that_lead_elsewhere_are_left_aside_and_told(tmp_path: Path) -> None:
    (tmp_path / "secret.png").write_bytes(picture(99))
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for name, kind, target in (
            ("link.png", tarfile.SYMTYPE, str(tmp_path / "secret.png")),
            ("hard.png", tarfile.LNKTYPE, "1.png"),
            ("null.png", tarfile.CHRTYPE, ""),
            ("pipe.png", tarfile.FIFOTYPE, ""),
            ("folder", tarfile.DIRTYPE, ""),
        ):
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname = kind, target
            archive.addfile(entry)
        for name in ("/etc/1.png", "../1.png", "a/../../1.png", "notes.txt", ".png", "1.png"):
            entry = tarfile.TarInfo(name)
            entry.size = len(picture(5))
            archive.addfile(entry, io.BytesIO(picture(5)))
    found = find_shards(tmp_path, extensions=EXTENSIONS)
    assert [member.name for member in found.train.paths] == ["1.png"]
    assert "7 member(s)" in found.notes[0]
    assert "links, devices or lead outside" in found.notes[0]
    assert "2 member(s)" in found.notes[1]


def test_a_truncated_training_shard_keeps_what_it_has_and_says_what_is_lost(tmp_path: Path) -> None:
    path = write(tmp_path / "train-0.tar", {f"{i}.png": picture(i) for i in range(9)})
    block = path.stat().st_size
    third = find_shards(tmp_path, extensions=EXTENSIONS).train.paths[3]
    path.write_bytes(path.read_bytes()[: third.offset + 20])  # inside the fourth picture
    splits = open_splits(find_shards(tmp_path, extensions=EXTENSIONS), partial(Images, geometry=GEOMETRY))
    assert len(splits.train) == 4
    assert f"damaged at byte {third.offset + 20} of {third.offset + 20}" in splits.notes[0]
    assert third.offset + 20 < block
    with pytest.raises(DataError, match=r"train-0.tar/3.png' should end at byte .* truncated"):
        splits.train.load(3, None)
    loader = Loader(source=splits.train, seed=0, phase="p", batch=8, mean=[0.0], std=[1.0])
    bad = next(loader.steps(0, 1))[0].bad
    assert [sample.name for sample in bad] == [str(tmp_path / "train-0.tar" / "3.png")]
    with pytest.raises(DataError, match="truncated"):
        list(sequential(splits.train, batch=4, mean=[0.0], std=[1.0]))


def test_damaged_held_out_shards_end_the_reading(tmp_path: Path) -> None:
    write(tmp_path / "train-0.tar", {"1.png": picture(1)})
    path = write(tmp_path / "test-0.tar", {f"{i}.png": picture(i) for i in range(9)})
    body = bytearray(path.read_bytes())
    second = body.index(b"2.png")
    body[second : second + 100] = bytes(99) + b"x"  # a header whose checksum is wrong
    path.write_bytes(body)
    with pytest.raises(DataError, match=f"damaged at byte {second} of .* Scores need every held-out sample"):
        find_shards(tmp_path, extensions=EXTENSIONS)


def test_headers_that_claim_the_impossible_are_damage(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tar", {"1.png": picture(1), "2.png": picture(2), "3.png": picture(3)})
    sound = path.read_bytes()
    at = sound.index(b"2.png")
    for size in (b"\xff" + bytes(10) + b"\x01", b"\x80" + b"\x7f" * 11, b"rubbish12345"):  # negative, huge, no number
        header = bytearray(sound[at : at + 512])
        header[124:136] = size
        header[148:156] = b" " * 8
        header[148:156] = b"%06o\0 " % sum(header)
        path.write_bytes(sound[:at] + bytes(header) + sound[at + 512 :])
        tracemalloc.start()
        found = find_shards(tmp_path, extensions=EXTENSIONS)
        assert tracemalloc.get_traced_memory()[1] < 5_000_000
        tracemalloc.stop()
        assert [member.name for member in found.train.paths][:1] == ["1.png"]
        assert "damaged" in found.notes[0]
        for member in found.train.paths[1:]:
            with pytest.raises(DataError, match="truncated"):
                member.read()


@pytest.mark.parametrize(
    ("members", "reason"),
    [
        ({"1.png": b"", "1.cls": b""}, "holds the label ''"),
        ({"1.png": b"", "1.cls": b"\xff\xfe"}, "cannot be read as a label"),
        ({"1.png": b"", "1.cls": b"x" * 70_000}, "70000 bytes"),
        ({"1.png": b"", "1.json": b"{"}, "cannot be read as a label"),
        ({"1.png": b"", "1.json": b"[1]"}, "cannot be read as a label"),
        ({"1.png": b"", "1.json": b'{"label": [1]}'}, "expected a whole number or a name"),
        ({"1.png": b"", "1.json": b'{"label": -1}'}, "none of the"),
        ({"1.png": b"", "1.json": b'{"labels": "a;b"}'}, "expected a list"),
        ({"1.png": b"", "1.json": b'{"rows": [{"start": -1}]}'}, "start is '-1'; expected seconds"),
        ({"1.png": b"", "1.cls": b"99999999"}, "no class number"),
        ({"readme.txt": b"hello"}, "no .jpg"),
    ],
)
def test_what_is_no_sample_and_label_is_refused_with_its_place(
    tmp_path: Path, members: dict[str, bytes], reason: str
) -> None:
    write(tmp_path / "a.tar", members)
    with pytest.raises(DataError, match=reason) as caught:
        find_shards(tmp_path, extensions=EXTENSIONS)
    assert "\n" not in str(caught.value)
    assert "a.tar" in str(caught.value) or str(tmp_path) in str(caught.value)


def test_folders_without_usable_shards_are_refused_with_advice(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not exist"):
        find_data(root=str(tmp_path / "nowhere"), manifest=None, layout="shards", extensions=EXTENSIONS)
    with pytest.raises(UsageError, match=r"no \.tar or \.arrow files"):
        find_shards(tmp_path, extensions=EXTENSIONS)
    (tmp_path / "a.tar.gz").write_bytes(b"")
    with pytest.raises(UsageError, match="decompress"):
        find_shards(tmp_path, extensions=EXTENSIONS)
    (tmp_path / "empty.tar").write_bytes(b"")
    (tmp_path / "folder.tar").mkdir()
    with pytest.raises(DataError, match="cannot be read as a tar file"):
        find_shards(tmp_path, extensions=EXTENSIONS)
    write(tmp_path / "good.tar", {"1.png": picture(1)})
    found = find_shards(tmp_path, extensions=EXTENSIONS)
    assert len(found.train.paths) == 1
    assert len(found.notes) == 2  # one for each shard that cannot be read


def test_a_missing_or_bad_member_is_a_data_error_with_its_place(tmp_path: Path) -> None:
    write(tmp_path / "a.tar", {"1.png": b"not a picture"})
    source = open_splits(find_shards(tmp_path, extensions=EXTENSIONS), partial(Images, geometry=GEOMETRY)).train
    with pytest.raises(DataError, match=r"a.tar/1.png' cannot be read as an image: not a JPEG"):
        source.load(0, None)
    with pytest.raises(DataError, match="No such file"):
        TarMember(tmp_path / "gone.tar", "1.png", 512, 3).read()


def test_samples_do_not_depend_on_whether_they_lie_in_files_or_shards(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    members = {}
    for i in range(4):
        file = io.BytesIO()
        Image.fromarray(rng.integers(0, 255, (40, 50, 3), dtype=np.uint8)).save(file, "JPEG")
        members[f"{i}.jpg"] = file.getvalue()
        (tmp_path / f"{i}.jpg").write_bytes(file.getvalue())
    write(tmp_path / "a.tar", members)
    packed = open_splits(find_shards(tmp_path, extensions=EXTENSIONS), partial(Images, geometry=GEOMETRY)).train
    files = Images(Listing([tmp_path / name for name in members]), None, geometry=GEOMETRY)
    for i in range(4):
        first, second = (source.load(i, torch.Generator().manual_seed(i)).x for source in (packed, files))
        assert torch.equal(first, second)


def test_a_list_of_many_members_is_small(tmp_path: Path) -> None:
    body = b"x"
    write(tmp_path / "a.tar", {f"{i:06d}.png": body for i in range(2000)})
    found = find_shards(tmp_path, extensions=EXTENSIONS)
    assert len(pickle.dumps(found.train.paths)) < 2000 * 45  # 10 bytes of name, 28 of numbers


@pytest.mark.parametrize("layout", ["auto", "shards"])
def test_a_config_finds_shards_by_what_the_folder_holds(tmp_path: Path, layout: str) -> None:
    write(tmp_path / "train-0.tar", {"1.png": picture(9), "1.cls": b"cat"})
    config = load_config("image", [f"data.root={tmp_path}", f"data.layout={layout}"])
    train = open_data(config).train
    assert len(train) == 1
    assert train.load(0, None).label == 0
    assert train.load(0, None).x.shape == (3, 64, 64)
