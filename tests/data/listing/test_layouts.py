"""Layouts of data sets: lists, ESC-50, and telling them apart. Class folders: test_data_folders.py."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from bridle.data.listing.layouts import find_data, tell_layout
from bridle.data.listing.table import DataListing
from bridle.errors import ConfigError, DataError, UsageError

EXTENSIONS = (".wav", ".ogg", ".mp4")


def find(root: Path, layout: str = "auto", test_fold: int | None = None) -> DataListing:
    return find_data(root=str(root), manifest=None, layout=layout, extensions=EXTENSIONS, test_fold=test_fold)


def names(found: DataListing, root: Path) -> list[str]:
    return [path.relative_to(root).as_posix() for path in found.train.paths]


def write(root: Path, **texts: str) -> Path:
    for name, text in texts.items():
        (root / name.replace("__", ".")).write_text(text)
    return root


def test_class_folders_are_found_by_default(tmp_path: Path) -> None:
    for name in ("dog/a.wav", "cat/b.wav"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).touch()
    found = find(tmp_path)
    assert (names(found, tmp_path), found.classes) == (["cat/b.wav", "dog/a.wav"], ("cat", "dog"))
    assert found.train.labels is not None
    assert (list(found.train.labels), found.train.spans, found.folds) == ([0, 1], None, None)


def test_lists_of_paths_and_class_numbers(tmp_path: Path) -> None:
    write(tmp_path, train__csv="b.mp4 0\na b.mp4 2\n\n/x/c.mp4,1\n", val__csv="d.mp4 2\n")
    found = find(tmp_path)
    assert [str(path) for path in found.train.paths] == [f"{tmp_path}/b.mp4", f"{tmp_path}/a b.mp4", "/x/c.mp4"]
    assert found.train.labels is not None
    assert list(found.train.labels) == [0, 2, 1]
    assert found.classes == ("0", "1", "2")
    assert found.test is not None
    assert found.test.labels is not None
    assert (list(found.test.paths), list(found.test.labels)) == ([tmp_path / "d.mp4"], [2])


def test_lists_of_paths_and_class_names(tmp_path: Path) -> None:
    write(tmp_path, train__csv='path,label\n"a, b.mp4",playing guitar\nc.mp4,archery\n')
    found = find(tmp_path)
    assert found.classes == ("archery", "playing guitar")
    assert found.train.labels is not None
    assert (names(found, tmp_path), list(found.train.labels)) == (["a, b.mp4", "c.mp4"], [1, 0])


def test_a_label_file_names_the_numbers(tmp_path: Path) -> None:
    write(tmp_path, train__csv="a.mp4 2\nb.mp4 0\n", classes__txt="dog\ncat\nbird\n")
    found = find(tmp_path)
    assert found.classes == ("dog", "cat", "bird")
    assert found.train.labels is not None
    assert list(found.train.labels) == [2, 0]


def test_a_number_outside_the_label_file_is_refused(tmp_path: Path) -> None:
    write(tmp_path, train__csv="a.mp4 2\nb.mp4 3\n", classes__txt="dog\ncat\nbird\n")
    with pytest.raises(DataError, match=r"train.csv' line 2: label '3' is not among the 3 of the label file"):
        find(tmp_path)


@pytest.mark.parametrize(("text", "why"), [("dog\ncat\ndog\n", "has 'dog' twice"), ("\n\n", "is empty")])
def test_a_bad_label_file_is_refused(tmp_path: Path, text: str, why: str) -> None:
    write(tmp_path, train__csv="a.mp4 0\n", classes__txt=text)
    with pytest.raises(DataError, match=why):
        find(tmp_path)


def test_lists_without_classes_are_unlabelled(tmp_path: Path) -> None:
    write(tmp_path, train__csv="a.mp4\nmy film.mp4\n")
    found = find(tmp_path)
    assert (names(found, tmp_path), found.classes, found.train.labels) == (["a.mp4", "my film.mp4"], None, None)


def test_lines_with_and_without_a_class_do_not_go_together(tmp_path: Path) -> None:
    write(tmp_path, train__csv="a.mp4 0\nb.mp4\n")
    with pytest.raises(DataError, match=r"line 2 has no label, the rows before it have one"):
        find(tmp_path)


def test_a_test_class_without_training_files_is_refused(tmp_path: Path) -> None:
    write(tmp_path, train__csv="a.mp4 dog\n", test__csv="b.mp4 dog\nc.mp4 cat\n")
    with pytest.raises(DataError, match="1 classes of the test rows have no row in train, the first one 'cat'"):
        find(tmp_path)
    write(tmp_path, classes__txt="cat\ndog\n")
    assert "have no row in train" in find(tmp_path).notes[0]


def test_an_empty_list_is_refused(tmp_path: Path) -> None:
    write(tmp_path, train__csv="\n")
    with pytest.raises(DataError, match=r"train.csv' lists no files"):
        find(tmp_path)
    write(tmp_path, train__csv="a.mp4 0\nb.mp4 1\n", val__csv="")
    with pytest.raises(DataError, match=r"val.csv' lists no files"):
        find(tmp_path)


def test_a_comma_behind_a_known_ending_parts_path_and_class(tmp_path: Path) -> None:
    write(tmp_path, train__csv='my clips/x 0.mp4,Formula 1\n"y, 0.MP4","cat, big"\nz.mp4 , 7\n')
    found = find(tmp_path)
    assert found.classes is not None and found.train.labels is not None
    assert names(found, tmp_path) == ["my clips/x 0.mp4", "y, 0.MP4", "z.mp4"]
    assert [found.classes[label] for label in found.train.labels] == ["Formula 1", "cat, big", "7"]


def test_files_that_are_in_both_splits_are_told(tmp_path: Path) -> None:
    write(tmp_path, train__csv="a.mp4 0\nb.mp4 1\n", val__csv="b.mp4 1\nc.mp4 0\n")
    assert find(tmp_path).notes[0].startswith("1 of the test files")
    write(tmp_path, val__csv="c.mp4 0\n")
    assert not find(tmp_path).notes


def test_headers_are_skipped_and_tables_are_refused(tmp_path: Path) -> None:
    write(tmp_path, train__csv="filename,label\na.mp4,0\nb.mp4,1\n")
    assert find(tmp_path).classes == ("0", "1")
    write(tmp_path, train__csv="label,youtube_id,time_start,time_end,split\narchery,abc,0,10,train\n")
    with pytest.raises(DataError, match=r"data\.manifest=FILE"):
        find(tmp_path)
    (tmp_path / "train.csv").write_text("a.mp4 0\nb.mp4 1\n", encoding="utf-16")
    with pytest.raises(DataError, match="UTF-8"):
        find(tmp_path)


def esc50(root: Path, rows: str, *files: str) -> Path:
    (root / "meta").mkdir()
    (root / "audio").mkdir()
    (root / "meta" / "esc50.csv").write_text(
        "filename,fold,target,category,esc10,src_file,take\n" + rows.replace(";", ",True,1,A\n")
    )
    for name in files:
        (root / "audio" / name).touch()
    return root


ROWS = "1-a-A-7.wav,1,7,rain;2-b-A-0.wav,2,0,dog;2-c-A-0.wav,2,0,dog;"


def test_esc50_has_folds_and_classes_in_the_order_of_their_targets(tmp_path: Path) -> None:
    found = find(esc50(tmp_path, ROWS, "1-a-A-7.wav", "2-b-A-0.wav", "2-c-A-0.wav"))
    assert found.classes == ("dog", "rain")
    assert found.train.labels is not None
    assert found.folds is not None
    assert (list(found.train.labels), list(found.folds), found.test) == ([1, 0, 0], [1, 2, 2], None)
    assert names(found, tmp_path) == ["audio/1-a-A-7.wav", "audio/2-b-A-0.wav", "audio/2-c-A-0.wav"]
    assert found.notes == ()


def test_esc50_in_another_format_is_found_and_missing_clips_are_told_and_kept(tmp_path: Path) -> None:
    found = find(esc50(tmp_path, ROWS, "1-a-A-7.ogg", "2-b-A-0.wav", "2-b-A-0.ogg"))
    assert names(found, tmp_path) == ["audio/1-a-A-7.ogg", "audio/2-b-A-0.wav", "audio/2-c-A-0.wav"]
    assert found.notes[0].startswith("1 of the 3 clips")


def test_one_fold_of_esc50_can_be_held_out(tmp_path: Path) -> None:
    esc50(tmp_path, ROWS + "1-d-A-0.wav,1,0,dog;2-e-A-7.wav,2,7,rain;")
    found = find(tmp_path, test_fold=1)
    assert (len(found.train.paths), found.folds) == (3, None)
    assert found.test is not None
    assert found.test.labels is not None
    assert list(found.test.labels) == [1, 0]
    with pytest.raises(ConfigError, match=r"data.test_fold: 3 given, but .*esc50.csv' has the folds 1, 2"):
        find(tmp_path, test_fold=3)


@pytest.mark.parametrize(
    ("rows", "why"),
    [
        ("a.wav,one,0,dog;", "line 2: fold is 'one'; expected a whole number"),
        ("a.wav,1,0,dog;b.wav,1,1,dog;", "two targets have the same category"),
        ("a.wav,1,0;", "line 2 has 6 fields; expected 7"),
    ],
)
def test_bad_rows_of_esc50_are_refused(tmp_path: Path, rows: str, why: str) -> None:
    with pytest.raises(DataError, match=why):
        find(esc50(tmp_path, rows))


def test_layouts_are_told_by_what_the_folder_holds(tmp_path: Path) -> None:
    assert tell_layout(tmp_path) == "folders"
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "0001.tar").touch()
    assert tell_layout(tmp_path) == "shards"
    write(tmp_path, train__csv="")
    assert tell_layout(tmp_path) == "lists"
    write(tmp_path, class_labels_indices__csv="", eval_segments__csv="")
    assert tell_layout(tmp_path) == "audioset"
    esc50(tmp_path, "")
    assert tell_layout(tmp_path) == "esc50"


def test_wrong_settings_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data.root: give the folder"):
        find_data(root=None, manifest=None, layout="auto", extensions=EXTENSIONS)
    with pytest.raises(UsageError, match="does not exist"):
        find(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="layout 'folders' has no folds"):
        find(tmp_path, test_fold=1)
    with pytest.raises(DataError, match=r"has no train.csv"):
        find(tmp_path, "lists")
    with pytest.raises(DataError, match=r"has no meta/esc50.csv"):
        find(tmp_path, "esc50")
    with pytest.raises(UsageError, match=r"no \.tar or \.arrow files in"):
        find(tmp_path, "shards")


def test_a_listing_travels_to_a_worker_in_little_room(tmp_path: Path) -> None:
    write(tmp_path, train__csv="".join(f"{i:06}.mp4 {i % 7}\n" for i in range(10_000)))
    found = find(tmp_path)
    sent = pickle.dumps(found)
    assert len(sent) < 10_000 * (10 + 8 + 4) + 1_000  # name, its end, its class
    again = pickle.loads(sent)
    assert (again.train.paths[9_999], again.train.labels[9_999]) == (tmp_path / "009999.mp4", 9_999 % 7)


ESC50 = Path(__file__).parents[4] / "shared/data/ESC-50"  # beside the repository


@pytest.mark.skipif(not ESC50.is_dir(), reason=f"needs {ESC50}")
def test_the_real_esc50_is_complete() -> None:
    found = find(ESC50)
    assert found.classes is not None
    assert (len(found.train.paths), len(found.classes), found.classes[0], found.notes) == (2_000, 50, "dog", ())
