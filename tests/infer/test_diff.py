"""Two files of codes compared: small codes worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from forked import bridle

from bridle.errors import DataError, UsageError
from bridle.infer.diff import diff_codes, pair_names
from bridle.infer.sequences import write_sequences


def write(
    path: Path, codes: list[list[int]], *, files: list[str], model: str = "a" * 16, sizes: tuple[int, ...] = (4, 4)
) -> Path:
    """`codes` shared out evenly over `files`, tokens at 0, 1, … of each."""
    header = {"format": 1, "kind": "codes", "model": model, "codebook_sizes": sizes}
    rows = len(codes) // len(files)
    positions = np.tile(np.arange(rows, dtype=np.int32), len(files))[:, None]
    np.savez(
        path, codes=np.array(codes, np.uint8), positions=positions, files=np.array(files), header=json.dumps(header),
        starts=np.arange(0, len(codes) + 1, rows),
    )  # fmt: skip
    return path


OLD = [[0, 0], [1, 1], [2, 2], [3, 3]]
NEW = [[0, 0], [1, 2], [2, 3], [0, 3]]  # stage 1 differs once, stage 2 twice


def test_shares_per_stage_are_those_counted_by_hand(tmp_path: Path) -> None:
    files = ["x.png", "y.png"]
    found = diff_codes(
        write(tmp_path / "a.npz", OLD, files=files), write(tmp_path / "b.npz", NEW, files=files, model="b" * 16)
    )
    first, second = found.stages
    assert (first.agree, first.given_earlier, first.up_to_here) == (0.75, 0.75, 0.75)
    assert (second.agree, second.given_earlier, second.up_to_here) == (0.5, pytest.approx(1 / 3), 0.25)
    assert first.chance == pytest.approx(0.25)  # old uses all four codes equally often
    assert second.chance == pytest.approx((1 + 0 + 1 + 2) / 16)
    assert "Stage 1 is the first that drifted: 75.0 %" in found.lines()[-1]
    assert "models aaaaaaaaaaaaaaaa and bbbbbbbbbbbbbbbb" in found.lines()[0]


def test_equal_codes_are_called_equal_whatever_the_order(tmp_path: Path) -> None:
    a = write(tmp_path / "a.npz", OLD, files=["x.png", "y.png"])
    b = write(tmp_path / "b.npz", [*OLD[2:], *OLD[:2]], files=["y.png", "x.png"])
    assert diff_codes(a, b).lines()[-1] == "All codes are equal."
    done = bridle("codes", "diff", a, b)
    assert done.code == 0 and "All codes are equal." in done.out


def test_copies_with_another_ending_in_another_folder_are_paired(tmp_path: Path) -> None:
    a = write(tmp_path / "a.npz", OLD, files=["in/x.wav", "in/deep/y.wav"])
    b = write(tmp_path / "b.npz", OLD, files=["mp3/x.mp3", "mp3/deep/y.mp3"])
    assert diff_codes(a, b).files == 2
    assert pair_names(["in/x.wav", "in/x.mp3"], ["out/x.ogg", "out/y.ogg"]) is None, "x stands for two files"


def test_tokens_and_files_of_one_side_are_counted(tmp_path: Path) -> None:
    a = write(tmp_path / "a.npz", OLD, files=["x.png"])
    b = write(tmp_path / "b.npz", [*OLD[:3], [0, 0], [0, 0], [0, 0]], files=["x.png", "z.png"])
    found = diff_codes(a, b)
    assert (found.files, found.only_old, found.only_new, found.tokens, found.unmatched) == (1, 0, 1, 3, 1)


def test_codebooks_of_other_sizes_and_other_files_are_refused(tmp_path: Path) -> None:
    a = write(tmp_path / "a.npz", OLD, files=["x.png"])
    with pytest.raises(UsageError, match="different codebooks"):
        diff_codes(a, write(tmp_path / "b.npz", OLD, files=["x.png"], sizes=(8, 4)))
    with pytest.raises(UsageError, match="no file is in both"):
        diff_codes(a, write(tmp_path / "c.npz", OLD, files=["q.png"]))


@pytest.mark.parametrize(
    "codes, message",
    [
        (np.full((4, 2), np.nan), "whole numbers of 2 stages, got float64"),
        (np.array(OLD, np.int16) - 1, "code -1 of stage 1 at token 0"),
        (np.array(OLD, np.uint8)[:, :1], r"whole numbers of 2 stages, got uint8 \[2, 1\]"),
        (np.array(OLD, np.uint8) + 1, "'y.png': code 4 of stage 1 at token 1 is not below its codebook's size, 4"),
    ],
)
def test_codes_that_cannot_be_are_refused(tmp_path: Path, codes: np.ndarray, message: str) -> None:  # type: ignore[type-arg]
    good = write(tmp_path / "a.npz", OLD, files=["x.png", "y.png"])
    with np.load(good) as stored:
        np.savez(tmp_path / "b.npz", **{**stored, "codes": np.ascontiguousarray(codes)})
    with pytest.raises(DataError, match=message):
        diff_codes(good, tmp_path / "b.npz")
    with pytest.raises(DataError, match=message):
        write_sequences([tmp_path / "b.npz"], tmp_path / "sequences")
    assert not (tmp_path / "sequences").exists()
