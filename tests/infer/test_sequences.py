"""Codes as sequences for language models: patterns worked by hand, files that other tools read, and bad input."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from sequence_blocks import unpack

import bridle
from bridle.errors import DataError, UsageError
from bridle.infer.sequences import make_vocabulary, write_sequences

CODES = np.array([[1, 2, 0], [3, 4, 1]], dtype=np.uint8)  # 2 tokens, 3 stages of 4, 5 and 2 codes
SIZES = [4, 5, 2]


def write_codes(path: Path, files: dict[str, np.ndarray], *, model: str = "abc") -> Path:
    """A file of codes as `bridle tokenize` stores it."""
    header = {"format": 1, "kind": "codes", "model": model, "run": "r", "codebook_sizes": SIZES, "bits_per_token": 5.3}
    starts = np.cumsum([0, *map(len, files.values())]).astype(np.int64)
    codes = np.concatenate(list(files.values()))
    arrays = {"codes": codes, "positions": np.zeros((len(codes), 1), np.int32), "starts": starts}
    save_file(arrays, path, {"files": json.dumps(list(files)), "header": json.dumps(header)})
    return path


@pytest.fixture
def codes(tmp_path: Path) -> Path:
    return write_codes(tmp_path / "codes.safetensors", {"a.wav": CODES, "b.wav": CODES[:1]})


def test_every_pattern_by_hand() -> None:
    # 0–4 are pad, bos, eos, sep, empty; stage 1 begins at 5, stage 2 at 9, stage 3 at 14.
    interleaved = make_vocabulary(SIZES, "interleaved")
    assert (interleaved.offsets, interleaved.size) == ((5, 9, 14), 16)
    assert interleaved.encode(CODES).tolist() == [6, 11, 14, 8, 13, 15]
    delayed = make_vocabulary(SIZES, "delayed").encode(CODES).reshape(-1, 3)
    assert delayed.tolist() == [[6, 4, 4], [8, 11, 4], [4, 13, 14], [4, 4, 15]]
    first = make_vocabulary(SIZES, "stage1")
    assert (first.encode(CODES[:, :1]).tolist(), first.size) == ([6, 8], 9)


@pytest.mark.parametrize(
    ("pattern", "ids", "problem"),
    [
        ("interleaved", [6, 11], "cut off: every token has 3 codes"),
        ("interleaved", [6, 6, 14], "id 6 at token 0 is no code of stage 2"),
        ("delayed", [6, 4, 4], "takes 3 steps to hold one token"),
        ("delayed", [6, 4, 4, 8, 11, 4, 5, 13, 14, 4, 4, 15], "an id stands where the pattern leaves a gap"),
    ],
)
def test_ids_in_wrong_places_are_refused(pattern: str, ids: list[int], problem: str) -> None:
    with pytest.raises(DataError, match=problem):
        make_vocabulary(SIZES, pattern).decode(np.array(ids))


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
@pytest.mark.parametrize("pattern", ["interleaved", "delayed", "stage1"])
def test_a_folder_gives_back_the_codes(codes: Path, tmp_path: Path, pattern: str, form: str) -> None:
    out = tmp_path / "sequences"
    written = write_sequences([codes], out, pattern=pattern, context=8, file_format=form)
    stored = bridle.read_sequences(out)
    stages = 1 if pattern == "stage1" else 3
    found = dict(stored)
    assert list(found) == ["a.wav", "b.wav"]
    assert np.array_equal(found["a.wav"], CODES[:, :stages])
    assert np.array_equal(found["b.wav"], CODES[:1, :stages])
    blocks = stored.blocks()
    assert blocks.shape == (written.blocks, 8)
    assert blocks.dtype == np.uint16
    rows = [ids for _, ids in stored.rows()]
    assert all(np.array_equal(one, other) for one, other in zip(unpack(blocks), rows, strict=True))
    assert sum(map(len, rows)) == written.ids


def test_other_tools_read_the_files(codes: Path, tmp_path: Path) -> None:
    """Without a line of bridle: JSON lines, Parquet columns, numpy blocks."""
    import pyarrow.parquet

    write_sequences([codes], tmp_path / "j", file_format="jsonl")
    rows = [json.loads(line) for line in (tmp_path / "j" / "sequences.jsonl").read_text().splitlines()]
    assert rows[0] == {"file": "a.wav", "input_ids": [1, 6, 11, 14, 8, 13, 15, 2]}
    write_sequences([codes], tmp_path / "p", file_format="parquet", context=4)
    table = pyarrow.parquet.read_table(tmp_path / "p" / "sequences.parquet").to_pydict()
    assert table["input_ids"] == [row["input_ids"] for row in rows]
    blocks = np.load(tmp_path / "p" / "blocks.npy", mmap_mode="r")
    # file a, sep, file b, padding
    assert blocks.tolist() == [[1, 6, 11, 14], [8, 13, 15, 2], [3, 1, 6, 11], [14, 2, 0, 0]]
    described = json.loads((tmp_path / "p" / "vocabulary.json").read_text())
    assert described["vocab_size"] == 16
    assert described["special"] == {"pad": 0, "bos": 1, "eos": 2, "sep": 3, "empty": 4}
    assert described["offsets"] == [5, 9, 14]


def test_several_files_of_one_model_go_together_and_of_two_do_not(codes: Path, tmp_path: Path) -> None:
    more = write_codes(tmp_path / "more.safetensors", {"c.wav": CODES})
    written = write_sequences([codes, more], tmp_path / "both")
    assert written.files == 3
    other = write_codes(tmp_path / "other.safetensors", {"c.wav": CODES}, model="xyz")
    with pytest.raises(UsageError, match="another model or other codebook sizes than"):
        write_sequences([codes, other], tmp_path / "mixed")


def test_what_exists_is_kept(codes: Path, tmp_path: Path) -> None:
    out = tmp_path / "sequences"
    write_sequences([codes], out)
    with pytest.raises(UsageError, match="--overwrite"):
        write_sequences([codes], out)
    write_sequences([codes], out, pattern="stage1", overwrite=True)
    assert bridle.read_sequences(out).vocabulary.pattern == "stage1"
    (tmp_path / "mine").mkdir()
    with pytest.raises(UsageError, match="no folder of sequences and is not replaced"):
        write_sequences([codes], tmp_path / "mine", overwrite=True)
    with pytest.raises(UsageError, match="expected one of interleaved, delayed, stage1"):
        write_sequences([codes], tmp_path / "x", pattern="zigzag")
    with pytest.raises(UsageError, match="expected one of jsonl, parquet"):
        write_sequences([codes], tmp_path / "x", file_format="csv")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["codes.safetensors", "mine", "sequences"]


def test_damage_is_one_line(codes: Path, tmp_path: Path) -> None:
    out = tmp_path / "sequences"
    write_sequences([codes], out, context=8)
    lines = (out / "sequences.jsonl").read_text()
    (out / "sequences.jsonl").write_text(lines.splitlines()[0] + "\n")
    with pytest.raises(DataError, match=r"1 sequences, but vocabulary\.json says 2"):
        list(bridle.read_sequences(out))
    (out / "sequences.jsonl").write_text(lines[:-20])
    with pytest.raises(DataError, match="damaged, cut short"):
        list(bridle.read_sequences(out))
    described = json.loads((out / "vocabulary.json").read_text())
    (out / "vocabulary.json").write_text(json.dumps({**described, "offsets": [0, 1, 2]}))
    with pytest.raises(DataError, match="offsets"):
        bridle.read_sequences(out)
    with pytest.raises(UsageError, match=r"holds no vocabulary\.json"):
        bridle.read_sequences(tmp_path)
