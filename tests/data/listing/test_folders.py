"""Folders of files as train, test and classes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bridle.data.listing.columns import PathList
from bridle.data.listing.folders import printable
from bridle.data.listing.layouts import find_data
from bridle.data.listing.table import DataListing
from bridle.errors import DataError, UsageError


def touch(root: Path, *names: str) -> Path:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
    return root


def find(folder: Path) -> DataListing:
    return find_data(root=str(folder), manifest=None, layout="folders", extensions=[".png"])


def names(paths: PathList, root: Path) -> list[str]:
    return [path.relative_to(root).as_posix() for path in paths]


def test_train_and_test_with_class_folders(tmp_path: Path) -> None:
    touch(tmp_path, "train/dog/b.png", "train/cat/a.png", "train/dog/a.png", "test/dog/c.png")
    found = find(tmp_path)
    assert found.classes == ("cat", "dog")
    assert names(found.train.paths, tmp_path) == ["train/cat/a.png", "train/dog/a.png", "train/dog/b.png"]
    assert list(found.train.labels or ()) == [0, 1, 1]
    assert found.test is not None
    assert names(found.test.paths, tmp_path) == ["test/dog/c.png"]
    assert list(found.test.labels or ()) == [1]


def test_val_serves_as_test_unless_there_is_a_test_folder(tmp_path: Path) -> None:
    touch(tmp_path, "train/x/a.png", "val/x/v.png")
    found = find(tmp_path)
    assert found.test is not None
    assert names(found.test.paths, tmp_path) == ["val/x/v.png"]
    touch(tmp_path, "test/x/t.png")
    found = find(tmp_path)
    assert found.test is not None
    assert names(found.test.paths, tmp_path) == ["test/x/t.png"]


def test_class_folders_without_splits_are_all_train(tmp_path: Path) -> None:
    touch(tmp_path, "b/1.png", "a/deep/er/2.png")
    found = find(tmp_path)
    assert (found.classes, list(found.train.labels or ()), found.test) == (("a", "b"), [0, 1], None)


def test_a_flat_folder_is_unlabelled(tmp_path: Path) -> None:
    touch(tmp_path, "b.png", "a.png")
    found = find(tmp_path)
    assert names(found.train.paths, tmp_path) == ["a.png", "b.png"]
    assert (found.classes, found.train.labels, found.test, found.notes) == (None, None, None, ())


def test_a_flat_train_folder_is_unlabelled_and_so_is_its_test(tmp_path: Path) -> None:
    touch(tmp_path, "train/a.png", "test/x/b.png")
    found = find(tmp_path)
    assert found.train.labels is None
    assert found.test is not None
    assert found.test.labels is None


def test_an_unlabelled_test_folder_beside_labelled_train_is_left_out_and_said_so(tmp_path: Path) -> None:
    touch(tmp_path, "train/x/a.png", "test/b.png")
    found = find(tmp_path)
    assert found.test is None
    assert "no class folders" in found.notes[0]


def test_files_beside_folders_are_unlabelled_and_said_so(tmp_path: Path) -> None:
    touch(tmp_path, "a.png", "x/b.png")
    found = find(tmp_path)
    assert names(found.train.paths, tmp_path) == ["a.png", "x/b.png"]
    assert found.classes is None
    assert "beside folders" in found.notes[0]


def test_hidden_and_foreign_files_do_not_count_and_case_does_not_matter(tmp_path: Path) -> None:
    touch(tmp_path, "a.PNG", ".hidden.png", ".git/b.png", "readme.txt", "._a.png")
    assert names(find(tmp_path).train.paths, tmp_path) == ["a.PNG"]


def test_a_missing_root_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"does not exist; set data\.root"):
        find_data(root=str(tmp_path / "nowhere"), manifest=None, layout="folders", extensions=[".png"])


def test_a_file_as_root_is_a_usage_error(tmp_path: Path) -> None:
    touch(tmp_path, "a.png")
    with pytest.raises(UsageError, match=r"is a file; set data\.root"):
        find_data(root=str(tmp_path / "a.png"), manifest=None, layout="folders", extensions=[".png"])


def test_a_folder_without_fitting_files_says_what_was_looked_for_and_what_is_there(tmp_path: Path) -> None:
    touch(tmp_path, "a.txt", "b/c.txt")
    with pytest.raises(
        DataError, match=r"no \.png \.jpg files in .* \(2 files of other kinds\); set data\.root"
    ) as caught:
        find_data(root=str(tmp_path), manifest=None, layout="folders", extensions=[".png", ".jpg"])
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_empty_train_folder_names_that_folder(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    with pytest.raises(DataError, match=r"no \.png files in '.*train'"):
        find(tmp_path)


def test_test_without_train_is_an_error(tmp_path: Path) -> None:
    touch(tmp_path, "val/x/a.png")
    with pytest.raises(DataError, match="holds val/ but no train/"):
        find(tmp_path)


def test_a_test_class_missing_in_train_is_an_error(tmp_path: Path) -> None:
    touch(tmp_path, "train/cat/a.png", "test/cat/a.png", "test/cow/b.png")
    with pytest.raises(DataError, match="'cow'"):
        find(tmp_path)


def test_a_train_class_missing_in_test_is_fine(tmp_path: Path) -> None:
    touch(tmp_path, "train/cat/a.png", "train/cow/a.png", "test/cow/b.png")
    found = find(tmp_path)
    assert found.test is not None
    assert list(found.test.labels or ()) == [1]


def test_a_link_back_up_does_not_go_round_for_ever(tmp_path: Path) -> None:
    touch(tmp_path, "x/a.png")
    (tmp_path / "x" / "up").symlink_to(tmp_path)
    assert names(find(tmp_path).train.paths, tmp_path) == ["x/a.png"]


def test_linked_class_folders_are_followed(tmp_path: Path) -> None:
    touch(tmp_path, "store/a.png")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "one").symlink_to(tmp_path / "store")
    (tmp_path / "data" / "two").symlink_to(tmp_path / "store")
    found = find_data(root=str(tmp_path / "data"), manifest=None, layout="folders", extensions=[".png"])
    assert found.classes == ("one", "two")


def test_a_dangling_link_stays_listed_and_a_pipe_does_not(tmp_path: Path) -> None:
    (tmp_path / "gone.png").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "link.png").symlink_to(tmp_path / "pipe.png")
    assert names(find(tmp_path).train.paths, tmp_path) == ["gone.png"]


def test_a_name_that_is_not_utf8_is_listed_and_can_be_shown(tmp_path: Path) -> None:
    touch(tmp_path, os.fsdecode(b"caf\xe9.png"))
    paths = find(tmp_path).train.paths
    assert paths[0].exists()
    assert printable(paths[0]).endswith("caf\\udce9.png")


def test_a_path_list_is_a_sequence_of_paths() -> None:
    paths = PathList(Path("/r"), ["a", "bé/c", "d"])
    assert list(paths) == [Path("/r/a"), Path("/r/bé/c"), Path("/r/d")]
    assert paths[-1] == Path("/r/d")
    assert paths[1:] == [Path("/r/bé/c"), Path("/r/d")]
    with pytest.raises(IndexError):
        paths[3]
