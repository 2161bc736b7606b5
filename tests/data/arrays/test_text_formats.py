"""Signals in tables of numbers and in WFDB records: channels, rate, and what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bridle.data.arrays.decode import read_array
from bridle.data.inspect.check import find_media
from bridle.data.inspect.survey import survey_data
from bridle.data.listing.folders import find_folders
from bridle.errors import DataError
from bridle.propose import propose


@pytest.mark.parametrize(
    ("text", "values", "rate"),
    [
        ("1,2\n3,4\n7,6\n", [[1, 3, 7], [2, 4, 6]], None),
        ("x;y\n1;2\n3;4\n", [[1, 3], [2, 4]], None),
        ("# sample_rate: 62.5\nx\n1\n4\n", [[1, 4]], 62.5),
        ("time,x\n0,5\n0.02,6\n0.04,5\n", [[5, 6, 5]], 50),
        ("time (ms)\tx\n0\t5\n4\t6\n8\t5\n", [[5, 6, 5]], 250),
        (",x\n0,5\n1,6\n2,5\n", [[5, 6, 5]], None),  # a counted row, as pandas writes it
        ("0.5 5\n1.0 6\n1.5 5\n", [[5, 6, 5]], 2),
        ("1,5\n2,6\n4,5\n", [[1, 2, 4], [5, 6, 5]], None),  # rises, but not evenly
        ("load,y\n1,5\n2,6\n3,5\n", [[1, 2, 3], [5, 6, 5]], None),  # a ramp with a name of its own
        ("\ufeffx\r\n1\r\n2\r\n", [[1, 2]], None),
    ],
)
def test_a_table_gives_channels_and_its_rate(
    tmp_path: Path, text: str, values: list[list[float]], rate: float | None
) -> None:
    (tmp_path / "a.csv").write_text(text, encoding="utf-8")
    found = read_array(tmp_path / "a.csv")
    assert found.values.tolist() == values
    assert found.rate == rate


@pytest.mark.parametrize("text", ["", "# only a comment\n", "a,b\n1,2\n3\n", "a,b\n1,2\n3,x\n"])
def test_a_table_with_holes_or_words_is_refused_by_name(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(DataError, match=r"a\.csv"):
        read_array(tmp_path / "a.csv")


def write_record(folder: Path, header: str, **data: bytes) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in data.items():
        (folder / f"{name}.dat").write_bytes(content)
    (folder / "r.hea").write_text(header)
    return folder / "r.hea"


@pytest.mark.parametrize(
    ("kind", "content"),
    [
        ("16", b"\x01\x00\xfe\xff\x00\x01\x03\x00"),
        ("61", b"\x00\x01\xff\xfe\x01\x00\x00\x03"),
        ("24", b"\x01\x00\x00\xfe\xff\xff\x00\x01\x00\x03\x00\x00"),
        ("32", b"\x01\x00\x00\x00\xfe\xff\xff\xff\x00\x01\x00\x00\x03\x00\x00\x00"),
        ("212", b"\x01\xf0\xfe\x00\x01\x03"),  # 0x001 0xffe, 0x100 0x003
        ("16+2", b"??\x01\x00\xfe\xff\x00\x01\x03\x00"),
    ],
)
def test_a_record_gives_two_channels_that_take_turns(tmp_path: Path, kind: str, content: bytes) -> None:
    header = f"r 2 360 2\nd.dat {kind} 2(1)/mV 12 0 0 0 0 I\nd.dat {kind} 1/mV 12 0 0 0 0 II\n# 63 years\n"
    found = read_array(write_record(tmp_path, header, d=content))
    assert found.values.tolist() == [[0.0, 127.5], [-2.0, 3.0]]  # (1, 256) with gain 2 and baseline 1; (−2, 3)
    assert found.rate == 360


def test_bytes_of_format_80_are_offset_and_files_are_joined(tmp_path: Path) -> None:
    header = "r 2 62.5\na.dat 80 1\nb.dat 80 1\n"
    found = read_array(write_record(tmp_path, header, a=b"\x80\x81", b=b"\x7f\x80"))
    assert (found.values.tolist(), found.rate) == ([[0, 1], [-1, 0]], 62.5)


@pytest.mark.parametrize(
    ("header", "said"),
    [
        ("r/3 2 360 2\n", "several segments"),
        ("r 1 360 2\nd.dat 310 1\n", "format '310'"),
        ("r 1 360 2\n../d.dat 16 1\n", "not a plain name"),
        ("r 1 360 9\nd.dat 16 1\n", "promises 9 samples; its data has 2"),
        ("r 1 360 2\ngone.dat 16 1\n", "cannot be read"),
        ("r 0 360 2\n", "names no signals"),
    ],
)
def test_a_record_that_is_not_read_says_why(tmp_path: Path, header: str, said: str) -> None:
    with pytest.raises(DataError, match=r"r\.hea") as caught:
        read_array(write_record(tmp_path, header, d=b"\x00\x00\x00\x00"))
    assert said in str(caught.value)


def test_a_list_beside_other_files_is_no_signal(tmp_path: Path) -> None:
    for name in "ab":
        np.save(tmp_path / f"{name}.npy", np.ones((1, 9)))
    (tmp_path / "labels.csv").write_text("file,label\na.npy,x\n")
    assert len(find_folders(tmp_path, extensions=(".npy", ".csv")).train.paths) == 2
    assert sorted(path.name for path in find_media(tmp_path)) == ["a.npy", "b.npy"]


def test_a_folder_of_tables_gets_a_recipe_with_their_rate(tmp_path: Path) -> None:
    rng, time = np.random.default_rng(0), np.arange(200) / 62.5
    for i in range(8):
        table = np.column_stack([time, rng.standard_normal((200, 2))])
        (tmp_path / f"class{i % 2}").mkdir(exist_ok=True)
        np.savetxt(tmp_path / f"class{i % 2}" / f"{i}.csv", table, delimiter=",", header="time,x,y", comments="")
    config = propose(survey_data(tmp_path), minutes=0.01).config()
    assert config.data.source == "signals"
    assert (config.geometry.channels, config.geometry.input, config.signals.sample_rate) == (2, (200,), 62.5)
