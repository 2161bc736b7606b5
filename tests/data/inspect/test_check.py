"""`bridle data check`: every file once, findings counted and written down, whatever the number of workers."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import soundfile
from PIL import Image
from rich.console import Console
from typer.testing import CliRunner

from bridle.cli import app
from bridle.data.inspect.check import Lengths, check_folder
from bridle.data.listing.layouts import find_listing
from bridle.errors import DataError, UsageError
from bridle.report.data_tables import check_lines, findings_table


def hiss(path: Path, seconds: float = 0.5, rate: int = 16_000) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    soundfile.write(path, 0.1 * np.random.default_rng(0).standard_normal(round(seconds * rate)), rate)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Five sounds of which one is silent, one at another rate, one a text; a picture; a text that is none of these."""
    root = tmp_path / "data"
    hiss(root / "a" / "1.wav")
    hiss(root / "a" / "2.wav", seconds=1.5)
    hiss(root / "b" / "other rate.flac", rate=8_000)
    soundfile.write(root / "b" / "silent.wav", np.zeros(16_000), 16_000)
    (root / "b" / "text.wav").write_text("hello")
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (8, 9, 3), dtype=np.uint8)).save(root / "b" / "p.png")
    (root / "notes.txt").write_text("not media")
    return root


def test_a_folder_is_counted_and_summed_up(folder: Path) -> None:
    report = check_folder(folder)
    assert report.files == {"audio": 5, "image": 1}
    assert report.findings == {"silent": 1, "undecodable": 1, "wrong rate": 1}
    assert (len(report.paths), len(report.flagged), len(report.unusable)) == (6, 3, 1)
    assert report.rates == {16_000: 3, 8_000: 1}
    assert report.sizes == {"9×8": 1}
    assert report.lengths == Lengths(0.5, 0.75, 1.5, 3.5)
    assert report.examples["wrong rate"] == [("b/other rate.flac", "8000 Hz, expected 16000 Hz")]


def test_the_right_rate_can_be_given(folder: Path) -> None:
    assert check_folder(folder, rate=8_000).findings["wrong rate"] == 3


def test_one_kind_can_be_asked_for(folder: Path) -> None:
    assert check_folder(folder, kind="image").files == {"image": 1}
    with pytest.raises(DataError, match="no video files"):
        check_folder(folder, kind="video")
    with pytest.raises(UsageError, match="--kind 'smell': expected video, image, audio, signal"):
        check_folder(folder, kind="smell")


def test_workers_find_the_same_in_the_same_order(folder: Path, tmp_path: Path) -> None:
    here, there = (
        (check_folder(folder, workers=workers, out=tmp_path / f"{workers}.jsonl"), tmp_path / f"{workers}.jsonl")
        for workers in (0, 2)
    )
    assert (here[0].summary(), here[0].examples) == (there[0].summary(), there[0].examples)
    assert here[1].read_bytes() == there[1].read_bytes()


def test_every_finding_is_a_row_and_the_last_row_sums_up(folder: Path, tmp_path: Path) -> None:
    report = check_folder(folder, out=tmp_path / "out.jsonl")
    *rows, last = map(json.loads, (tmp_path / "out.jsonl").read_text(encoding="utf-8").splitlines())
    assert [(Path(row["path"]).name, row["finding"]) for row in rows] == [
        ("silent.wav", "silent"),
        ("text.wav", "undecodable"),
        ("other rate.flac", "wrong rate"),
    ]
    assert rows[0]["path"] == str(folder / "b" / "silent.wav")
    assert last == {"summary": json.loads(json.dumps(report.summary()))}


def test_progress_is_told_file_by_file(folder: Path) -> None:
    told: list[tuple[int, int]] = []
    check_folder(folder, tell=lambda done, total: told.append((done, total)))
    assert told == [(done, 6) for done in range(1, 7)]


def test_a_manifest_names_the_files_each_once_and_missing_ones_are_found(folder: Path) -> None:
    (folder / "list.csv").write_text("path,start,end\na/1.wav,0,0.2\na/1.wav,0.2,0.4\na/gone.wav,0,1\n")
    report = check_folder(folder / "list.csv")
    assert report.files == {"audio": 2}
    assert report.findings == {"missing": 1}


def test_one_file_can_be_checked(folder: Path) -> None:
    assert check_folder(folder / "b" / "silent.wav").findings == {"silent": 1}
    with pytest.raises(UsageError, match="neither a manifest"):
        check_folder(folder / "notes.txt")


def test_a_wrong_path_and_a_folder_without_media_are_errors(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not exist"):
        check_folder(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="no media files"):
        check_folder(tmp_path / "empty")


def test_names_that_are_not_text_are_written_all_the_same(folder: Path, tmp_path: Path) -> None:
    os.rename(os.fsencode(folder / "b" / "text.wav"), os.fsencode(folder / "b") + b"/\xff.wav")
    report = check_folder(folder, out=tmp_path / "out.jsonl", workers=1)
    assert report.examples["undecodable"][0][0] == "b/\\udcff.wav"
    assert "udcff.wav" in (tmp_path / "out.jsonl").read_text(encoding="utf-8")


def shown(folder: Path) -> str:
    console = Console(width=100, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    table = findings_table(check_folder(folder))
    assert table is not None
    console.print(table)
    return console.export_text()


def test_the_table_puts_unusable_files_first_and_names_examples(folder: Path) -> None:
    for number in range(4):
        soundfile.write(folder / f"silent [{number}].wav", np.zeros(16_000), 16_000)
    text = shown(folder)
    assert text.index("undecodable") < text.index("silent")
    assert "silent [0].wav" in text  # brackets are not taken for markup
    assert "silent [3].wav" not in text  # three examples are enough
    assert any(line.split()[:2] == ["silent", "5"] for line in text.splitlines())


def test_a_clean_folder_says_so(tmp_path: Path) -> None:
    hiss(tmp_path / "a.wav")
    report = check_folder(tmp_path)
    assert findings_table(report) is None
    assert list(check_lines(report))[-1] == "verdict   nothing wrong was found"


def test_the_command_shows_table_totals_and_what_it_wrote(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "findings.jsonl"
    done = CliRunner().invoke(app, ["data", "check", str(folder), "--out", str(out), "--workers", "0"])
    assert done.exit_code == 0
    for words in ("undecodable", "8,000 Hz 1×", "files     6 (5 audio, 1 image)", "1 cannot be used", f"wrote {out}"):
        assert words in done.output
    assert len(out.read_text().splitlines()) == 4


def test_strict_fails_only_for_files_that_cannot_be_used(folder: Path) -> None:
    command = ["data", "check", "--strict", "--workers", "0"]
    assert CliRunner().invoke(app, [*command, str(folder)]).exit_code == 65
    (folder / "b" / "text.wav").unlink()
    assert CliRunner().invoke(app, [*command, str(folder)]).exit_code == 0


def test_a_manifest_is_checked_whole_whatever_split_and_ending_its_rows_have(folder: Path, tmp_path: Path) -> None:
    for name in ("a.wav", "b.sound", "c.wav"):
        soundfile.write(tmp_path / name, np.sin(np.arange(8000) / 9), 8000, format="WAV")
    (tmp_path / "list.csv").write_text("path,split\na.wav,train\nb.sound,test\nc.wav,val\ngone.sound,val\n")
    report = check_folder(tmp_path / "list.csv")
    assert report.files == {"audio": 4}
    assert report.findings == {"missing": 1}


def test_the_usable_files_are_written_as_a_manifest_with_their_labels_and_splits(folder: Path, tmp_path: Path) -> None:
    (folder.parent / "all").mkdir()
    folder.rename(folder.parent / "all" / "train")
    hiss(tmp_path / "all" / "test" / "b" / "3.wav")
    out = tmp_path / "good.csv"
    command = ["data", "check", str(tmp_path / "all"), "--write-manifest", str(out), "--workers", "1"]
    said = CliRunner().invoke(app, command, catch_exceptions=False).output
    assert f"wrote {out}: 5 usable files" in said
    found = find_listing(out, extensions=())
    assert [Path(str(path)).name for path in found.train.paths] == ["1.wav", "2.wav", "other rate.flac", "silent.wav"]
    assert (found.classes, list(found.train.labels or ())) == (("a", "b"), [0, 0, 1, 1])
    assert found.test is not None and list(found.test.labels or ()) == [1]
