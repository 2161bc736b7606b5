"""Manifests: CSV, TSV and JSONL lists of files, and what is wrong with them."""

from __future__ import annotations

import os
import tracemalloc
from pathlib import Path

import pytest

from bridle.data.listing.layouts import find_data
from bridle.data.listing.manifest import read_manifest
from bridle.data.listing.table import DataListing
from bridle.errors import ConfigError, DataError, UsageError


def read(path: Path, text: str, name: str = "list.csv", test_fold: int | None = None) -> DataListing:
    (path / name).write_text(text)
    return read_manifest(path / name, base=None, test_fold=test_fold)


def test_a_path_is_all_that_is_needed(tmp_path: Path) -> None:
    found = read(tmp_path, "path\na.wav\nsub/b c.wav\n/abs/d.wav\n")
    assert list(found.train.paths) == [tmp_path / "a.wav", tmp_path / "sub/b c.wav", Path("/abs/d.wav")]
    assert found.train.labels is found.train.spans is found.classes is found.folds is found.test is None


def test_paths_start_at_the_root_if_there_is_one(tmp_path: Path) -> None:
    (tmp_path / "list.csv").write_text("path\na.wav\n")
    (tmp_path / "root").mkdir()
    found = find_data(
        root=str(tmp_path / "root"), manifest=str(tmp_path / "list.csv"), layout="auto", extensions=(".wav",)
    )
    assert list(found.train.paths) == [tmp_path / "root" / "a.wav"]


KINDS = {
    "list.csv": "Path, start ,end,label,extra\na.wav,1.5,2,dog,x\nb.wav,,,cat,\nc.wav,3,,dog,\n",
    "list.tsv": "path\tstart\tend\tlabel\na.wav\t1.5\t2\tdog\nb.wav\t\t\tcat\nc.wav\t3\t\tdog\n",
    "list.jsonl": '{"path": "a.wav", "start": 1.5, "end": 2, "label": "dog"}\n'
    '{"path": "b.wav", "start": null, "label": "cat"}\n\n{"path": "c.wav", "start": 3, "label": "dog", "x": []}\n',
}


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_list_reads_the_same(tmp_path: Path, name: str) -> None:
    found = read(tmp_path, "\ufeff" + KINDS[name] if name == "list.csv" else KINDS[name], name)
    assert found.classes == ("cat", "dog")
    assert found.train.labels is not None
    assert found.train.spans is not None
    assert list(found.train.labels) == [1, 0, 1]
    assert list(found.train.spans) == [(1.5, 2.0), (0.0, None), (3.0, None)]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.csv", 'path,labels\na.wav,dog;cat\nb.wav,\nc.wav,dog|bird|dog\nd.wav,"[""cat""]"\n'),
        (
            "a.jsonl",
            '{"path": "a.wav", "labels": ["dog", "cat"]}\n{"path": "b.wav", "labels": []}\n'
            '{"path": "c.wav", "labels": "dog;bird"}\n{"path": "d.wav", "labels": ["cat"]}\n',
        ),
    ],
)
def test_a_file_may_have_several_labels(tmp_path: Path, name: str, text: str) -> None:
    found = read(tmp_path, text, name)
    assert found.classes == ("bird", "cat", "dog")
    assert found.train.labels is not None
    assert [tuple(sorted(y)) for y in found.train.labels if isinstance(y, tuple)] == [(1, 2), (), (0, 2), (1,)]
    assert (found.train.labels[-1], found.train.labels[1:2]) == ((1,), [()])


def test_numbers_as_labels_are_sorted_as_numbers(tmp_path: Path) -> None:
    found = read(tmp_path, '{"path": "a", "label": 10}\n{"path": "b", "label": 2}\n', "a.jsonl")
    assert found.classes == ("2", "10")


def test_splits_and_folds(tmp_path: Path) -> None:
    found = read(tmp_path, "path,split\na,train\nb,test\nc,\nd,Val\n")
    assert found.test is not None
    assert [path.name for path in found.train.paths] == ["a", "c"]
    assert [path.name for path in found.test.paths] == ["b"]
    assert "1 val rows are left out" in found.notes[0]
    folded = "path,fold,label\na,1,x\nb,2,x\nc,1,x\n"
    found = read(tmp_path, folded)
    assert found.folds is not None
    assert (list(found.folds), found.test) == ([1, 2, 1], None)
    found = read(tmp_path, folded, test_fold=2)
    assert found.test is not None
    assert ([path.name for path in found.test.paths], found.folds) == (["b"], None)


def test_a_label_file_beside_the_list_fixes_the_classes(tmp_path: Path) -> None:
    (tmp_path / "classes.txt").write_text("dog\nbird\ncat\n")
    found = read(tmp_path, "path,label\na,cat\nb,dog\n")
    assert found.classes == ("dog", "bird", "cat")
    assert found.train.labels is not None
    assert list(found.train.labels) == [2, 0]
    with pytest.raises(DataError, match=r"list.csv' line 3: label 'fish' is not among the 3 of the label file"):
        read(tmp_path, "path,label\na,cat\nb,fish\n")
    assert list(read(tmp_path, "path,label\na,2\nb,0\n").train.labels or ()) == [2, 0]  # by position


def test_classes_called_by_numbers_are_not_taken_for_positions(tmp_path: Path) -> None:
    (tmp_path / "classes.txt").write_text("1\n2\n3\n")
    assert list(read(tmp_path, "path,label\na,3\nb,1\n").train.labels or ()) == [2, 0]
    with pytest.raises(DataError, match=r"line 2: label '0' is not among the 3"):
        read(tmp_path, "path,label\na,0\nb,1\n")


BAD = {
    "no path column": (
        "file,label\na,b\n",
        r"no column 'path'; its first row, which names the columns, reads 'file, l",
    ),
    "no header": ("a.wav,dog\nb.wav,cat\n", "has no column 'path'"),
    "two columns of a name": ("path,path\na,b\n", "has two columns 'path'"),
    "a missing field": ("path,label\na,x\nb\n", r"line 3 has 1 fields; expected 2 \(path, label\)"),
    "a field too many": ("path,label\na,x,y\n", "line 2 has 3 fields"),
    "a bad start": ("path,start\na,soon\n", "line 2: start is 'soon'; expected seconds"),
    "a negative start": ("path,start\na,-1\n", "line 2: start is '-1'"),
    "a start that is not finite": ("path,start\na,nan\n", "line 2: start is 'nan'"),
    "an end before the start": ("path,start,end\na,3,3\n", "line 2: end 3 is not after start 3"),
    "an unknown split": ("path,split\na,trian\n", "line 2: split is 'trian'; expected train, test or val"),
    "a bad fold": ("path,fold\na,1.5\n", "line 2: fold is '1.5'; expected a whole number"),
    "folds in some rows": ("path,fold\na,1\nb,\n", "line 3: fold is None; give a fold in every row"),
    "labels in some rows": ("path,label\na,x\nb,\n", "line 3 has no label, the rows before it have one"),
    "label and labels": ("path,label,labels\na,x,y\n", "line 2 has 'label' where this list has 'labels'; use one"),
    "an empty path": ("path,label\n,x\n", "line 2 has no path"),
    "no rows": ("path,label\n", "lists no files"),
    "nothing": ("", "lists no files"),
    "only test rows": ("path,split\na,test\n", "lists no files to train on"),
    "an open quote": ('path\n"a.wav\nb.wav\n', "cannot be read as a table"),
    "broken JSON labels": ('path,labels\na,"[x"\n', "begin like a JSON list"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_list_is_refused_with_the_line(tmp_path: Path, case: str) -> None:
    text, why = BAD[case]
    with pytest.raises(DataError, match=why):
        read(tmp_path, text)


BAD_RECORDS = {
    "no path": ('{"file": "a", "label": "x"}\n', r"line 1 has no path \(it has: 'file, label'\)"),
    "a path that is no text": ('{"path": 3}\n', "line 1 has no path"),
    "not JSON": ('{"path": "a"}\n{path: b}\n', "line 2 is not JSON"),
    "not a record": ('["a"]\n', "line 1 is not a record"),
    "a label that is no text": ('{"path": "a", "label": [1]}\n', r"line 1: label is '\[1\]'; expected text"),
    "a start that is no number": ('{"path": "a", "start": true}\n', "line 1: start is 'True'"),
    "a name no file can have": ('{"path": "\\ud800.wav"}\n', "line 1: path .* cannot be the name of a file"),
    "deep nesting": ("[" * 100_000 + "\n", "line 1 is not JSON"),
}


@pytest.mark.parametrize("case", BAD_RECORDS)
def test_a_bad_record_is_refused_with_the_line(tmp_path: Path, case: str) -> None:
    text, why = BAD_RECORDS[case]
    with pytest.raises(DataError, match=why):
        read(tmp_path, text, "list.jsonl")


def test_a_list_that_is_not_there_or_of_no_known_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"nowhere.csv' does not exist"):
        read_manifest(tmp_path / "nowhere.csv", base=None)
    with pytest.raises(UsageError, match=r"list.xlsx' is not a .csv, .tsv or .jsonl file"):
        read(tmp_path, "path\n", "list.xlsx")


def test_folds_that_are_not_there_cannot_be_held_out(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data.test_fold: 1 given, but .* has no folds"):
        read(tmp_path, "path\na\n", test_fold=1)
    with pytest.raises(ConfigError, match="says itself which items are for testing"):
        read(tmp_path, "path,split,fold\na,train,1\nb,test,2\n", test_fold=1)


def test_names_that_are_not_utf8_are_kept(tmp_path: Path) -> None:
    (tmp_path / "list.csv").write_bytes(b"path\ncaf\xe9.wav\n")
    found = read_manifest(tmp_path / "list.csv", base=None)
    assert os.fsencode(found.train.paths[0]).endswith(b"/caf\xe9.wav")


def test_a_row_costs_little_memory(tmp_path: Path) -> None:
    with open(tmp_path / "list.csv", "w") as file:
        file.write("path,start,end,label\n")
        file.writelines(f"clips/{i:08}.wav,1,2,class{i % 100}\n" for i in range(20_000))
    tracemalloc.start()
    found = read_manifest(tmp_path / "list.csv", base=None)
    kept, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(found.train.paths) == 20_000
    assert kept < 100 * 20_000  # bytes; its path alone has 18
    assert peak < 200 * 20_000


def test_a_first_record_without_labels_is_named_as_what_it_is(tmp_path: Path) -> None:
    records = '{"path": "a.wav"}\n{"path": "b.wav", "labels": ["x"]}\n'
    with pytest.raises(DataError, match="line 2 has a label, the rows before it have none; label every row, or none"):
        read(tmp_path, records, "list.jsonl")
    mixed = '{"path": "a.wav", "labels": ["x"]}\n{"path": "b.wav", "label": "x"}\n'
    with pytest.raises(DataError, match="line 2 has 'label' where this list has 'labels'; use one"):
        read(tmp_path, mixed, "list.jsonl")
