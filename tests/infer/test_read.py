"""Results on disk: what was computed comes back, damage is told in a line, and interrupted work goes on."""

from __future__ import annotations

import io
import json
import os
import signal
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from small_models import Plane, plane_model, signal_model, write_signal

import bridle
from bridle.console import ProgressLine
from bridle.data.arrays.source import SignalFormat, SignalReader
from bridle.data.sources import Window
from bridle.errors import DataError, Interrupted, UsageError
from bridle.files import locked_folder
from bridle.infer import formats
from bridle.infer.feature_spec import FeatureSpec
from bridle.infer.model import Model
from bridle.infer.read import StoredGeometry
from bridle.infer.write import Options, embed_inputs, tokenize_inputs


@pytest.fixture
def model() -> Model:
    return signal_model()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Four signals, 8, 6, 4 and 3 tokens long, one of them a folder further down."""
    (tmp_path / "in" / "deep").mkdir(parents=True)
    for name, frames in (("a.npy", 24), ("b.npy", 17), ("deep/c.npy", 12), ("deep/d.npy", 9)):
        write_signal(tmp_path / "in" / name, frames)
    (tmp_path / "in" / "notes.txt").touch()
    return tmp_path / "in"


def quiet() -> ProgressLine:
    return ProgressLine(io.StringIO())


def tokenize(model: Model, named: Any, out: Path, **more: Any) -> Any:
    return tokenize_inputs(model, [str(n) for n in named], out, progress=quiet(), **more)


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_codes_of_a_folder_come_back_file_by_file(model: Model, folder: Path, tmp_path: Path, suffix: str) -> None:
    out = tmp_path / f"codes{suffix}"
    written = tokenize(model, [folder], out, options=Options(batch=3))
    assert (written.files, written.rows, written.failed) == (4, 21, 0)
    stored = bridle.read_codes(out)
    assert len(stored) == 4
    assert [Path(name).name for name, _ in stored] == ["a.npy", "b.npy", "c.npy", "d.npy"]
    for name, found in stored:
        expected = model.tokenize_file(name)
        assert found.codes.dtype == np.uint8
        assert np.array_equal(found.codes, expected.codes)
        assert np.array_equal(found.positions, expected.positions)
        assert found.times is None
        assert found.name == name
    assert stored.header.model == model.fingerprint
    assert stored.header.geometry == StoredGeometry(channels=2, input=(12,), patch=(3,))
    assert stored.header.codebook_sizes == (16, 16)
    assert stored.header.bits_per_token == 8.0
    assert sorted(path.name for path in tmp_path.iterdir()) == [out.name, "in"]  # nothing else is left


def test_other_tools_read_the_files_too(model: Model, folder: Path, tmp_path: Path) -> None:
    tokenize(model, [folder / "a.npy"], tmp_path / "one.npz")
    with np.load(tmp_path / "one.npz", allow_pickle=False) as arrays:
        assert arrays["codes"].shape == (8, 2)  # one file: simply (T, M)
        assert arrays["positions"].shape == (8, 1)
        assert arrays["files"].tolist() == [str(folder / "a.npy")]
        assert arrays["starts"].tolist() == [0, 8]
        assert json.loads(arrays["header"].item())["kind"] == "codes"
    tokenize(model, [folder], tmp_path / "all.safetensors")
    tensors = load_file(tmp_path / "all.safetensors")
    assert tensors["starts"].tolist() == [0, 8, 14, 18, 21]
    assert tensors["codes"].shape == (21, 2)


def test_the_same_work_gives_the_same_bytes(model: Model, folder: Path, tmp_path: Path) -> None:
    for name in ("one.npz", "two.npz"):
        tokenize(model, [folder], tmp_path / name)
    assert (tmp_path / "one.npz").read_bytes() == (tmp_path / "two.npz").read_bytes()


def test_times_and_rates_are_stored_where_the_first_axis_is_time(tmp_path: Path) -> None:
    (tmp_path / "a.wav").touch()
    model = plane_model(Plane([Window(torch.zeros(1, 4, 6), None, 0), Window(torch.ones(1, 4, 6), None, 4)]))
    written = tokenize(model, [tmp_path / "a.wav"], tmp_path / "a.npz")
    # A frame takes 0.5 s, a patch 2 frames, and 2 bands lie side by side: 2 tokens of 8 bits a second.
    assert written.header.tokens_per_second == 2.0
    assert written.header.bits_per_second == 16.0
    ((_, found),) = bridle.read_codes(tmp_path / "a.npz")
    assert found.times is not None
    assert found.times.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_features_come_back_by_token_or_pooled(model: Model, folder: Path, tmp_path: Path, suffix: str) -> None:
    out = tmp_path / f"z{suffix}"
    embed_inputs(model, [str(folder)], out, spec=FeatureSpec(layer=2), progress=quiet())
    for name, found in bridle.read_features(out):
        np.testing.assert_allclose(found.z, model.encode_file(name, layer=2).z, atol=1e-6)
        assert found.positions is not None
    pooled, again = FeatureSpec(pool="mean"), Options(overwrite=True)
    embed_inputs(model, [str(folder)], out, spec=pooled, options=again, progress=quiet())
    stored = bridle.read_features(out)
    assert stored.header.pool == "mean"
    for name, found in stored:
        assert found.z.shape == (8,)
        np.testing.assert_allclose(found.z, model.encode_file(name, pool="mean").z, atol=1e-6)
        assert found.positions is None
    with pytest.raises(UsageError, match=r"holds 'features', not codes; read it with bridle\.read_features"):
        bridle.read_codes(out)


def test_bad_files_are_listed_with_reasons_and_the_rest_goes_on(model: Model, folder: Path, tmp_path: Path) -> None:
    (folder / "b.npy").write_text("no array")
    written = tokenize(model, [folder], tmp_path / "c.npz")
    assert (written.files, written.failed) == (3, 1)
    (line,) = written.quarantine.read_text().splitlines()
    assert json.loads(line)["path"] == str(folder / "b.npy")
    assert "cannot be read as a .npy array" in json.loads(line)["reason"]
    assert [len(found.codes) for _, found in bridle.read_codes(tmp_path / "c.npz")] == [8, 4, 3]
    # Mended and written again, the list of bad files goes away.
    write_signal(folder / "b.npy", 17)
    tokenize(model, [folder], tmp_path / "c.npz", options=Options(overwrite=True))
    assert not written.quarantine.exists()


def test_a_file_that_turns_bad_at_its_end_leaves_no_rows(model: Model, folder: Path, tmp_path: Path) -> None:
    np.save(folder / "b.npy", np.full((2, 60), [1.0] * 50 + [np.inf] * 10))
    tokenize(model, [folder], tmp_path / "c.npz", options=Options(batch=1))
    for name, found in bridle.read_codes(tmp_path / "c.npz"):
        assert np.array_equal(found.codes, model.tokenize_file(name).codes)


def test_strict_stops_at_the_first_bad_file_and_nothing_readable_is_an_error(
    model: Model, folder: Path, tmp_path: Path
) -> None:
    (folder / "b.npy").write_text("no array")
    with pytest.raises(DataError, match=r"b\.npy"):
        tokenize(model, [folder], tmp_path / "c.npz", options=Options(strict=True))
    assert not (tmp_path / "c.npz").exists()
    interrupt(model, [folder], tmp_path / "e.npz", at="c.npy")  # has found b.npy to be bad
    with pytest.raises(DataError, match=r"b\.npy"):
        tokenize(model, [folder], tmp_path / "e.npz", options=Options(strict=True))
    with pytest.raises(DataError, match="none of the 1 files could be read"):
        tokenize(model, [folder / "b.npy"], tmp_path / "d.npz")
    assert (tmp_path / "d.npz.quarantine.jsonl").exists()
    assert not (tmp_path / "d.npz.parts").exists()


def test_a_result_that_exists_is_kept_unless_told_otherwise(model: Model, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "c.npz").write_text("mine")
    with pytest.raises(UsageError, match="exists; give --overwrite"):
        tokenize(model, [folder], tmp_path / "c.npz")
    assert (tmp_path / "c.npz").read_text() == "mine"
    with pytest.raises(UsageError, match=r"an ending of \.npz, \.safetensors, \.parquet"):
        tokenize(model, [folder], tmp_path / "c.csv")


class Counting(SignalReader):
    """Notes which files it reads, and sends itself a signal before the file named `stop_at`."""

    def __init__(self, model: Model, stop_at: str | None = None) -> None:
        super().__init__(format=SignalFormat(model.geometry))
        self.read: list[str] = []
        self.stop_at = stop_at

    def windows(self, path: Path) -> Iterator[Window]:
        self.read.append(path.name)
        if path.name == self.stop_at:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().windows(path)


def interrupt(model: Model, named: list[Path], out: Path, *, at: str) -> None:
    model.reader = Counting(model, stop_at=at)
    with pytest.raises(Interrupted, match="Run the same command again"):
        tokenize(model, named, out, options=Options(batch=1))


def test_interrupted_work_goes_on_without_loss_or_repetition(model: Model, folder: Path, tmp_path: Path) -> None:
    (folder / "a0.npy").write_text("no array")
    tokenize(model, [folder], tmp_path / "whole.npz", options=Options(batch=1))
    interrupt(model, [folder], tmp_path / "c.npz", at="c.npy")
    assert not (tmp_path / "c.npz").exists()
    # A crash in the middle of a write: rows and half a line that the ledger does not vouch for.
    with (tmp_path / "c.npz.parts" / "job" / "part-00000000" / "codes.bin").open("ab") as file:
        file.write(b"xyz")
    with (tmp_path / "c.npz.parts" / "job" / "part-00000000" / "ledger.jsonl").open("a") as ledger:
        ledger.write('{"name": "half')
    again = Counting(model)
    model.reader = again
    written = tokenize(model, [folder], tmp_path / "c.npz", options=Options(batch=1))
    assert again.read == ["c.npy", "d.npy"]
    assert written.failed == 1
    assert (tmp_path / "c.npz").read_bytes() == (tmp_path / "whole.npz").read_bytes()
    assert not (tmp_path / "c.npz.parts").exists()


def test_rows_lost_in_a_power_cut_are_computed_again(model: Model, folder: Path, tmp_path: Path) -> None:
    tokenize(model, [folder], tmp_path / "whole.npz", options=Options(batch=1))
    interrupt(model, [folder], tmp_path / "c.npz", at="d.npy")
    with (tmp_path / "c.npz.parts" / "job" / "part-00000000" / "positions.bin").open("r+b") as file:
        file.truncate(10 * 4)  # of 18 rows: only a.npy with its 8 is whole
    again = Counting(model)
    model.reader = again
    tokenize(model, [folder], tmp_path / "c.npz", options=Options(batch=1))
    assert again.read == ["b.npy", "c.npy", "d.npy"]
    assert (tmp_path / "c.npz").read_bytes() == (tmp_path / "whole.npz").read_bytes()


def test_an_unfinished_job_is_not_mixed_with_another(model: Model, folder: Path, tmp_path: Path) -> None:
    interrupt(model, [folder], tmp_path / "c.npz", at="c.npy")
    model.reader = SignalReader(format=SignalFormat(model.geometry))
    with pytest.raises(UsageError, match="another codebook_sizes"):
        tokenize(model, [folder], tmp_path / "c.npz", stages=1)
    with pytest.raises(UsageError, match=r"another .*model"):
        tokenize(signal_model("seed=1"), [folder], tmp_path / "c.npz")
    with pytest.raises(UsageError, match="another files"):
        tokenize(model, [folder / "b.npy"], tmp_path / "c.npz")
    write_signal(folder / "a.npy", 36)
    with pytest.raises(UsageError, match=r"a\.npy' has changed since"):
        tokenize(model, [folder], tmp_path / "c.npz")
    written = tokenize(model, [folder], tmp_path / "c.npz", options=Options(overwrite=True))
    assert written.rows == 12 + 6 + 4 + 3
    for name, found in bridle.read_codes(tmp_path / "c.npz"):
        assert np.array_equal(found.codes, model.tokenize_file(name).codes)


def test_two_commands_do_not_write_the_same_result(model: Model, folder: Path, tmp_path: Path) -> None:
    state = tmp_path / "c.npz.parts" / "job"
    state.mkdir(parents=True)
    with locked_folder(state), pytest.raises(UsageError, match="another bridle command"):
        tokenize(model, [folder], tmp_path / "c.npz")


def test_inputs_are_files_folders_patterns_manifests_and_lists(model: Model, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "list.csv").write_text("path,label,split\nin/b.npy,x,train\nin/gone.npy,y,test\nin/a.npy,x,test\n")
    named = [folder / "deep" / "d.npy", f"{folder}/**/c*", tmp_path / "list.csv", "-", folder / "a.npy"]
    stdin = io.BytesIO(f"{folder}/deep/c.npy\n\n{tmp_path}/none.npy\r\n".encode())
    written = tokenize(model, named, tmp_path / "c.npz", stdin=stdin)
    names = [Path(name).name for name in bridle.read_codes(tmp_path / "c.npz").files]
    assert names == ["d.npy", "c.npy", "b.npy", "a.npy"]  # in the order named, each once
    bad = [json.loads(line) for line in written.quarantine.read_text().splitlines()]
    assert [Path(row["path"]).name for row in bad] == ["gone.npy", "none.npy"]  # of lists; they do not stop the rest
    assert "No such file" in bad[0]["reason"]


@pytest.mark.parametrize(
    ("name", "kind", "expected"),
    [
        ("gone.npy", UsageError, "does not exist"),
        ("in/notes.txt", UsageError, r"it reads \.npy"),
        ("in/*.wav", UsageError, "matches no"),
        ("empty", DataError, r"no \.npy \.npz \.csv \.tsv \.hea files"),
        ("spans.csv", UsageError, "start or end"),
        ("-", DataError, "nothing to read"),
    ],
)
def test_wrong_inputs_are_told_at_once(
    model: Model, folder: Path, tmp_path: Path, name: str, kind: type[Exception], expected: str
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "spans.csv").write_text("path,start,end\nin/a.npy,1,2\n")
    named = name if name == "-" else tmp_path / name
    with pytest.raises(kind, match=expected):
        tokenize(model, [named], tmp_path / "c.npz", stdin=io.BytesIO(b""))
    assert not (tmp_path / "c.npz.parts").exists()


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_a_damaged_result_is_told_in_one_line(model: Model, folder: Path, tmp_path: Path, suffix: str) -> None:
    out = tmp_path / f"c{suffix}"
    tokenize(model, [folder], out)
    whole = out.read_bytes()
    for size in (0, 5, len(whole) // 2, len(whole) - 1):
        out.write_bytes(whole[:size])
        with pytest.raises(DataError, match="damaged, cut short, or not written by bridle") as told:
            list(bridle.read_codes(out))
        assert "\n" not in str(told.value)
    with pytest.raises(UsageError, match="does not exist"):
        bridle.read_codes(tmp_path / f"gone{suffix}")


def test_arrays_that_do_not_belong_together_or_hold_objects_are_refused(tmp_path: Path) -> None:
    header = json.dumps({"format": 1, "kind": "codes"})
    codes = np.zeros((3, 2), np.uint8)
    good = {
        "codes": codes,
        "positions": np.zeros((3, 1), np.int32),
        "starts": np.array([0, 3]),
        "files": np.array(["a"]),
    }
    np.savez(tmp_path / "c.npz", header=header, **good)
    assert len(bridle.read_codes(tmp_path / "c.npz")) == 1
    for wrong in (
        {"starts": np.array([0, 4])},
        {"starts": np.array([1, 3])},
        {"starts": np.array([0, 3, 3])},
        {"files": np.array(["a", object()])},
        {"codes": np.array([[object()] * 2] * 3)},
        {"codes": np.zeros(3, np.uint8)},
        {"positions": np.zeros((2, 1), np.int32)},
        {"header": "not JSON"},
        {"header": "[]"},
    ):
        np.savez(tmp_path / "c.npz", **{"header": header, **good, **wrong})
        with pytest.raises(DataError, match="damaged"):
            list(bridle.read_codes(tmp_path / "c.npz"))
    np.savez(tmp_path / "c.npz", header=json.dumps({"format": 9, "kind": "codes"}), **good)
    with pytest.raises(DataError, match="newer bridle"):
        bridle.read_codes(tmp_path / "c.npz")


def test_a_header_that_promises_more_than_the_file_holds_costs_no_memory(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "c.npz", "w") as archive:
        for name, described in (("codes", "'<u1'"), ("files", "'<U4'"), ("starts", "'<i8'"), ("header", "'<U4'")):
            text = f"{{'descr': {described}, 'fortran_order': False, 'shape': (1{'0' * 14},), }}\n".encode()
            archive.writestr(f"{name}.npy", b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + b"0000")
    with pytest.raises(DataError, match="damaged"):
        bridle.read_codes(tmp_path / "c.npz")


def test_a_full_disk_leaves_no_half_result(
    model: Model, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Any, file: Any, content: Any) -> None:
        file.write(b"0")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(formats.NpzWriter, "write", fail)
    with pytest.raises(OSError, match="No space"):
        tokenize(model, [folder], tmp_path / "c.npz")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c.npz.parts", "in"]
    monkeypatch.undo()
    reader = Counting(model)
    model.reader = reader
    tokenize(model, [folder], tmp_path / "c.npz")
    assert reader.read == []  # everything was computed before the disk was full


def test_names_that_are_not_text_are_kept_readable(model: Model, tmp_path: Path) -> None:
    name = os.fsencode(tmp_path) + b"/caf\xe9.npy"
    write_signal(tmp_path / "x.npy", 12)
    os.rename(os.fsencode(tmp_path / "x.npy"), name)
    for suffix in (".npz", ".safetensors"):
        tokenize(model, [tmp_path], tmp_path / f"c{suffix}")
        assert bridle.read_codes(tmp_path / f"c{suffix}").files == [f"{tmp_path}/caf\\udce9.npy"]


def test_a_compressed_archive_is_refused_because_it_could_swell(tmp_path: Path) -> None:
    path = tmp_path / "codes.npz"
    np.savez_compressed(path, codes=np.zeros((10_000, 4), dtype=np.uint8), header=np.array("{}"), files=np.array(["a"]))
    with pytest.raises(DataError, match="compressed"):
        bridle.read_codes(path)
