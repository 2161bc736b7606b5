"""A folder of parts: the same rows as one file, bounded parts, every file once, whatever stops the work and however."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_models import signal_model, write_signal

import bridle
from bridle import distributed, failpoints
from bridle.console import ProgressLine
from bridle.errors import DataError, UsageError
from bridle.infer import parts_folder
from bridle.infer.feature_spec import FeatureSpec
from bridle.infer.model import Model
from bridle.infer.write import Options, Written, embed_inputs, tokenize_inputs


@pytest.fixture(scope="module")
def model() -> Model:
    return signal_model()


@pytest.fixture(autouse=True)
def disarmed() -> Iterator[None]:
    yield
    failpoints.arm("")


def stop_at(place: str, model: Model, folder: Path, out: Path) -> None:
    """A run that ends where a failpoint says; raised where kill -9 would end the process."""
    failpoints.arm(f"{place}=enospc")
    with pytest.raises(OSError, match="No space left"):
        tokenize(model, folder, out)
    failpoints.arm("")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Ten signals of 4 to 13 tokens; the fourth is no array."""
    (tmp_path / "in").mkdir()
    for number in range(10):
        write_signal(tmp_path / "in" / f"{number}.npy", 12 + 3 * number)
    (tmp_path / "in" / "3.npy").write_text("no array")
    return tmp_path / "in"


def tokenize(model: Model, named: Path, out: Path, **options: Any) -> Written:
    progress = ProgressLine(io.StringIO())
    return tokenize_inputs(model, [str(named)], out, options=Options(batch=1, **options), progress=progress)


def rows_of(path: Path) -> list[tuple[str, list[list[int]], list[list[int]]]]:
    return [(name, found.codes.tolist(), found.positions.tolist()) for name, found in bridle.read_codes(path)]


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.mark.parametrize("form", ["npz", "safetensors", "parquet"])
def test_a_folder_holds_what_one_file_holds(model: Model, folder: Path, tmp_path: Path, form: str) -> None:
    one = tokenize(model, folder, tmp_path / f"one.{form}")
    many = tokenize(model, folder, tmp_path / "many", part_format=form)
    assert (many.files, many.rows, many.failed) == (one.files, one.rows, one.failed) == (9, 78, 1)
    assert rows_of(tmp_path / "many") == rows_of(tmp_path / f"one.{form}")
    assert len(rows_of(tmp_path / "many")) == len(bridle.read_codes(tmp_path / "many")) == 9
    assert next(iter(bridle.read_codes(tmp_path / "many")))[1].codes.dtype == np.uint8
    assert "no array" not in (tmp_path / "many" / "quarantine.jsonl").read_text()
    bad = json.loads((tmp_path / "many" / "quarantine.jsonl").read_text())
    assert Path(bad["path"]).name == "3.npy"
    assert sorted(content(tmp_path / "many")) == ["index.json", f"part-00000000.{form}", "quarantine.jsonl"]
    index = json.loads((tmp_path / "many" / "index.json").read_text())
    assert index["header"] == json.loads(bridle.read_codes(tmp_path / f"one.{form}").header.to_json())


def test_parts_end_when_they_are_large_and_with_their_chunk(
    model: Model, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bridle.infer.write.MEGABYTE", 100)  # a row has 2 codes and a position: 6 bytes
    monkeypatch.setattr(parts_folder, "LONGEST_CHUNK", 5)
    tokenize(model, folder, tmp_path / "c", part_mb=1)
    # Rows of the files: 4 5 6 - 8 | 9 10 11 12 13; 17 rows are the first to reach 100 bytes.
    assert [name for name in content(tmp_path / "c") if "part" in name] == [
        *("part-00000000.npz", "part-00000005.npz", "part-00000007.npz", "part-00000009.npz"),
    ]
    tokenize(model, folder, tmp_path / "one.npz")
    assert rows_of(tmp_path / "c") == rows_of(tmp_path / "one.npz")


@pytest.mark.parametrize(
    "name", ["export.before_ledger", "export.file_done", "export.before_note", "export.after_note"]
)
@pytest.mark.parametrize("count", [1, 2])
def test_a_crash_anywhere_loses_and_repeats_nothing(
    model: Model, folder: Path, tmp_path: Path, name: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts_folder, "LONGEST_CHUNK", 4)
    tokenize(model, folder, tmp_path / "whole")
    stop_at(f"{name}@{count}", model, folder, tmp_path / "c")
    with pytest.raises(UsageError, match="is not finished; run the same command again"):
        bridle.read_codes(tmp_path / "c")
    tokenize(model, folder, tmp_path / "c")
    assert content(tmp_path / "c") == content(tmp_path / "whole")


def test_finished_files_are_not_read_again(
    model: Model, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts_folder, "LONGEST_CHUNK", 4)
    stop_at("export.file_done@7", model, folder, tmp_path / "c")
    read: list[str] = []
    windows = model.reader.windows
    monkeypatch.setattr(model.reader, "windows", lambda path: read.append(path.name) or windows(path))
    tokenize(model, folder, tmp_path / "c")
    assert read == ["7.npy", "8.npy", "9.npy"]


def test_any_number_of_ranks_makes_and_continues_the_same_folder(
    model: Model, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks one after the other in this process: what each does depends on the folder alone."""
    tokenize(model, folder, tmp_path / "one.npz")

    def run_rank(rank: int, ranks: int, **options: Any) -> None:
        monkeypatch.setattr(distributed, "rank", lambda: rank)
        monkeypatch.setattr(distributed, "world_size", lambda: ranks)
        tokenize(model, folder, tmp_path / "c", **options)

    for rank, ranks, after in ((1, 3, 2), (0, 2, 3), (1, 2, 2)):
        failpoints.arm(f"export.file_done@{after}=enospc")
        with pytest.raises(OSError, match="No space"):
            run_rank(rank, ranks)
    failpoints.arm("")
    for rank in (2, 1):
        with pytest.raises(DataError, match="lacks the part of item"):  # ranks that torchrun starts wait for the others
            run_rank(rank, 3)
    run_rank(0, 3)
    assert rows_of(tmp_path / "c") == rows_of(tmp_path / "one.npz")


def test_several_processes_need_a_folder_and_a_list_they_can_share(
    model: Model, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distributed, "world_size", lambda: 2)
    with pytest.raises(UsageError, match="several processes write a folder, such as --out codes"):
        tokenize(model, folder, tmp_path / "c.npz")
    with pytest.raises(UsageError, match="which several processes cannot share"):
        tokenize(model, Path("-"), tmp_path / "c")


def test_jobs_that_do_not_fit_are_refused(model: Model, folder: Path, tmp_path: Path) -> None:
    stop_at("export.file_done@2", model, folder, tmp_path / "c")
    with pytest.raises(UsageError, match="another part_format"):
        tokenize(model, folder, tmp_path / "c", part_format="safetensors")
    write_signal(folder / "x.npy", 12)
    with pytest.raises(UsageError, match="another files"):
        tokenize(model, folder, tmp_path / "c")
    (folder / "x.npy").unlink()
    os.utime(folder / "0.npy", (1, 1))
    with pytest.raises(UsageError, match=r"0\.npy' has changed since"):
        tokenize(model, folder, tmp_path / "c")
    tokenize(model, folder, tmp_path / "c", overwrite=True)
    with pytest.raises(UsageError, match="exists and is finished; give --overwrite"):
        tokenize(model, folder, tmp_path / "c")
    with pytest.raises(UsageError, match="holds something else"):
        tokenize(model, folder, folder)
    with pytest.raises(UsageError, match="holds no codes or features"):
        bridle.read_codes(folder)


def test_overwriting_leaves_the_files_of_others_alone(model: Model, folder: Path, tmp_path: Path) -> None:
    tokenize(model, folder, tmp_path / "c")
    (tmp_path / "c" / "mine.txt").write_text("mine")
    with pytest.raises(UsageError, match="holds something else"):
        tokenize(model, folder, tmp_path / "c", overwrite=True)
    assert (tmp_path / "c" / "mine.txt").read_text() == "mine"


def test_a_part_that_is_missing_or_cut_short_is_told(model: Model, folder: Path, tmp_path: Path) -> None:
    tokenize(model, folder, tmp_path / "c")
    part = tmp_path / "c" / "part-00000000.npz"
    whole = part.read_bytes()
    part.write_bytes(whole[:-10])
    with pytest.raises(DataError, match=f"has {len(whole) - 10} bytes instead of {len(whole)}"):
        bridle.read_codes(tmp_path / "c")
    part.unlink()
    with pytest.raises(DataError, match="is missing; copy it again"):
        bridle.read_codes(tmp_path / "c")
    (tmp_path / "c" / "index.json").write_text("[1]")
    with pytest.raises(DataError, match="damaged, cut short, or not written by bridle"):
        bridle.read_codes(tmp_path / "c")
    (tmp_path / "c" / "index.json").write_text('{"header": {}, "files": 1, "parts": []}')
    with pytest.raises(DataError, match="damaged, cut short, or not written by bridle"):
        bridle.read_codes(tmp_path / "c")


def test_a_flipped_bit_in_a_part_is_told(model: Model, folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    tokenize(model, folder, out, part_format="safetensors")
    (part,) = out.glob("part-*")
    content = bytearray(part.read_bytes())
    content[-1] ^= 1  # a code, which could as well be another one
    part.write_bytes(content)
    with pytest.raises(DataError, match="its SHA-256 is not the one in"):
        rows_of(out)


def test_strict_also_minds_what_an_earlier_command_found(model: Model, folder: Path, tmp_path: Path) -> None:
    stop_at("export.file_done@6", model, folder, tmp_path / "c")
    with pytest.raises(DataError, match=r"3\.npy"):
        tokenize(model, folder, tmp_path / "c", strict=True)


def test_nothing_readable_is_an_error_that_can_be_mended(model: Model, folder: Path, tmp_path: Path) -> None:
    (folder / "only").mkdir()
    (folder / "only" / "a.npy").write_text("no array")
    with pytest.raises(DataError, match="none of the 1 files could be read"):
        tokenize(model, folder / "only", tmp_path / "c")
    assert (tmp_path / "c" / "quarantine.jsonl").exists()
    write_signal(folder / "only" / "a.npy", 12)
    assert tokenize(model, folder / "only", tmp_path / "c").files == 1


def test_pooled_features_as_parquet_are_one_vector_a_row(model: Model, folder: Path, tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    options = Options(part_format="parquet")
    spec, progress = FeatureSpec(pool="mean"), ProgressLine(io.StringIO())
    embed_inputs(model, [str(folder)], tmp_path / "z", spec=spec, options=options, progress=progress)
    table = pq.read_table(tmp_path / "z" / "part-00000000.parquet").to_pydict()
    assert list(table) == ["file", "features"]
    assert [len(vector) for vector in table["features"]] == [8] * 9
    for name, found in bridle.read_features(tmp_path / "z"):
        np.testing.assert_allclose(found.z, table["features"][table["file"].index(name)])
        np.testing.assert_allclose(found.z, model.encode_file(name, pool="mean").z, atol=1e-6)


def test_other_tools_read_parquet_rows_as_files(model: Model, folder: Path, tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    tokenize(model, folder, tmp_path / "c.parquet")
    table = pq.read_table(tmp_path / "c.parquet")
    assert table.schema.field("codes").type == pa.list_(pa.list_(pa.uint8(), 2))
    rows = table.to_pylist()
    assert [row["tokens"] for row in rows] == [4, 5, 6, 8, 9, 10, 11, 12, 13]
    assert rows[1]["codes"] == model.tokenize_file(rows[1]["file"]).codes.tolist()
    assert rows[0]["positions"] == [[0], [1], [2], [3]]
    assert json.loads(table.schema.metadata[b"bridle"])["kind"] == "codes"
