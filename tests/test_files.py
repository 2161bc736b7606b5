"""Files are there whole or not at all, and one module alone sees to it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import bridle
from bridle import files
from bridle.errors import CheckpointError, DataError, UsageError

PACKAGE = Path(bridle.__file__).parent
RESERVED = re.compile(
    r"os\.(replace|rename)\(|\.rename\(|\b(temporary|part|partial|path|own|mended)\.replace\(|fsync|flock|file_digest"
)


def test_no_other_module_renames_syncs_hashes_or_locks_files() -> None:
    found = [
        f"{path.relative_to(PACKAGE)}: {match[0]}"
        for path in PACKAGE.rglob("*.py")
        if path != PACKAGE / "files.py"
        for match in RESERVED.finditer(_code(path))
    ]
    assert found == []


def _code(path: Path) -> str:
    """Source without docstrings, which may speak of fsync."""
    return re.sub(r'""".*?"""', "", path.read_text(), flags=re.DOTALL)


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    files.write_json(path, {"n": 1})
    with pytest.raises(ValueError, match="JSON compliant"):
        files.write_json(path, {"n": float("nan")})
    with pytest.raises(OSError, match="no room") as caught, files.replacing(path) as temporary:
        temporary.write_text("half")
        raise OSError(28, "no room")
    assert caught.value.filename == str(path)
    assert files.read_json(path) == {"n": 1}
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_replaces_an_older_one_when_it_is_complete(tmp_path: Path) -> None:
    folder = tmp_path / "f"
    for content in ("old", "new"):
        with files.replacing_folder(folder) as temporary:
            (temporary / "x").write_text(content)
            assert not folder.exists() or (folder / "x").read_text() == "old"
    assert (folder / "x").read_text() == "new"
    with pytest.raises(RuntimeError), files.replacing_folder(folder) as temporary:
        (temporary / "x").write_text("half")
        raise RuntimeError
    with files.replacing_folder(folder, keep=True) as temporary:
        (temporary / "x").write_text("later")
    assert (folder / "x").read_text() == "new"
    assert list(tmp_path.iterdir()) == [folder]


def test_a_folder_never_replaces_a_file(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("mine")
    with pytest.raises(NotADirectoryError), files.replacing_folder(tmp_path / "f"):
        pass
    assert (tmp_path / "f").read_text() == "mine"


def test_a_row_after_one_cut_short_takes_its_place(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": 1}\n{"a": 2')
    assert files.read_lines(path) == [{"a": 1}]
    files.append_line(path, {"a": 3})
    assert files.read_lines(path) == [{"a": 1}, {"a": 3}]
    assert files.read_lines(tmp_path / "none.jsonl") == []


@pytest.mark.parametrize(("content", "reason"), [("{", "Expecting"), ("[1]", "got list"), ("[" * 100_000, "recursion")])
def test_json_that_is_no_object_is_refused_with_a_remedy(tmp_path: Path, content: str, reason: str) -> None:
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(DataError, match=rf"a\.json: .*{reason}.*; write it again\."):
        files.read_json(tmp_path / "a.json", error=DataError, remedy="write it again")


def test_a_missing_json_file_is_a_checkpoint_error_by_default(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="No such file"):
        files.read_json(tmp_path / "none.json")


def test_a_lock_keeps_other_processes_out_until_it_is_released(tmp_path: Path) -> None:
    code = f"import pathlib, bridle.files as f\nwith f.locked_folder(pathlib.Path({str(tmp_path)!r})): pass"
    with files.locked_folder(tmp_path):
        told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert "another bridle command is running" in told.stderr
        with pytest.raises(UsageError, match="another"), files.locked_folder(tmp_path):
            pass
    with files.locked_folder(tmp_path):
        pass
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_checksums_are_those_of_everybody_else(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    abc = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert files.fingerprint(tmp_path / "a") == {"bytes": 3, "sha256": abc}
    assert files.sha256_of_json({"b": 1, "a": 2}) == files.sha256_of_json({"a": 2, "b": 1})


def test_too_little_space_is_said_in_bytes_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"needed [\d,]{15,} bytes, free [\d,]+ bytes"):
        files.require_space(tmp_path / "not" / "there", 10**15, what="a test")
