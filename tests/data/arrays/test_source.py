"""Signals in .npy files as samples."""

from __future__ import annotations

import io
import pickle
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from bridle.config import load_config
from bridle.data.arrays.source import SignalFormat, Signals
from bridle.data.build import open_data
from bridle.data.file_source import open_splits
from bridle.data.inspect.check import check_folder
from bridle.data.listing.layouts import find_data
from bridle.data.listing.table import Listing
from bridle.data.shards.writer import files_to_shard, write_shards
from bridle.data.sources import Measured, Splits, Viewed
from bridle.errors import ConfigError, DataError
from bridle.geometry import Geometry

GEOMETRY = Geometry(2, (8,), (4,))
ONE = Geometry(1, (8,), (4,))


def source(path: Path, array: object, geometry: Geometry = GEOMETRY) -> Signals:
    np.save(path / "a.npy", array)  # type: ignore[arg-type]
    return Signals(Listing([path / "a.npy"], None), None, format=SignalFormat(geometry))


def test_evaluation_cuts_out_the_centre(tmp_path: Path) -> None:
    sample = source(tmp_path, np.arange(24.0).reshape(2, 12)).load(0, None)
    assert sample.x.tolist() == [[2, 3, 4, 5, 6, 7, 8, 9], [14, 15, 16, 17, 18, 19, 20, 21]]
    assert sample.x.dtype == torch.float32
    assert sample.valid is None


def test_pretraining_cuts_out_every_place(tmp_path: Path) -> None:
    folder = source(tmp_path, np.arange(24.0).reshape(2, 12))
    starts = {int(folder.load(0, torch.Generator().manual_seed(seed)).x[0, 0]) for seed in range(60)}
    assert starts == {0, 1, 2, 3, 4}


@pytest.mark.parametrize("dtype", ["int16", "uint8", "float64", ">f4", "float16", "bool"])
def test_numbers_of_every_type_are_read(tmp_path: Path, dtype: str) -> None:
    assert source(tmp_path, np.ones((2, 8), dtype=dtype)).load(0, None).x.tolist() == [[1.0] * 8] * 2


@pytest.mark.parametrize("shape", [(8,), (1, 8)])
def test_one_channel_may_be_a_plain_line(tmp_path: Path, shape: tuple[int, ...]) -> None:
    assert source(tmp_path, np.ones(shape), ONE).load(0, None).x.shape == (1, 8)


@pytest.mark.parametrize(
    ("length", "valid"),
    [(7, [True, True]), (6, [True, True]), (5, [True, False]), (4, [True, False]), (2, [True, False])],
)
def test_a_short_signal_is_continued_and_its_padding_marked(tmp_path: Path, length: int, valid: list[bool]) -> None:
    sample = source(tmp_path, np.arange(1.0, length + 1), ONE).load(0, None)
    assert sample.x.tolist() == [[min(i, length) for i in range(1, 9)]]
    assert sample.valid is not None
    assert sample.valid.tolist() == valid


def test_a_signal_shorter_than_half_a_patch_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="too short: 1 frames, but half a patch of 4 needs 2"):
        source(tmp_path, np.ones(1), ONE).load(0, None)


BAD_ARRAYS = {
    "another channel count": (np.ones((3, 8)), r"has shape \[3, 8\]; expected \(2, length\); or set geometry.channels"),
    "transposed": (np.ones((8, 2)), "looks transposed, save array.T"),
    "one line for two channels": (np.ones(8), r"has shape \[8\]; expected \(2, length\)"),
    "three axes": (np.ones((2, 8, 1)), r"expected \(2, length\)"),
    "a single number": (np.float64(3), r"has shape \[\]"),
    "no frames": (np.ones((2, 0)), "is empty"),
    "NaN": (np.full((2, 8), np.nan), "not finite"),
    "infinity": (np.full((2, 8), np.inf), "not finite"),
    "too large for float32": (np.full((2, 8), 1e300), "not finite"),
    "text": (np.full((2, 8), "a"), "expected real numbers"),
    "complex": (np.full((2, 8), 1j), "expected real numbers"),
    "dates": (np.full((2, 8), "2020-01-01", dtype="datetime64[D]"), "expected real numbers"),
    "records": (np.zeros((2, 8), dtype=[("a", "f4")]), "expected real numbers"),
}


@pytest.mark.parametrize("name", BAD_ARRAYS)
def test_an_array_that_does_not_fit_is_refused_with_path_and_reason(tmp_path: Path, name: str) -> None:
    array, reason = BAD_ARRAYS[name]
    with pytest.raises(DataError, match=reason) as caught:
        source(tmp_path, array).load(0, None)
    assert "a.npy" in str(caught.value)


class Bomb:
    def __reduce__(self) -> tuple[object, ...]:
        return (print, ("a pickle was run",))


def pickled_array() -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, np.array([Bomb()], dtype=object), allow_pickle=True)
    return buffer.getvalue()


def archive() -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, a=np.ones((2, 8)))
    return buffer.getvalue()


def cut() -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, np.ones((2, 800)))
    return buffer.getvalue()[:600]


@pytest.mark.parametrize("content", [b"", b"hello", pickle.dumps(Bomb()), pickled_array(), archive(), cut()])
def test_a_bad_file_is_refused_and_no_pickle_is_run(
    tmp_path: Path, content: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = source(tmp_path, np.ones((2, 8)))
    (tmp_path / "a.npy").write_bytes(content)
    with pytest.raises(DataError, match=r"a\.npy' cannot be read as a \.npy array"):
        folder.load(0, None)
    assert "a pickle was run" not in capsys.readouterr().out


def test_a_missing_file_is_a_data_error(tmp_path: Path) -> None:
    folder = Signals(Listing([tmp_path / "gone.npy"], None), None, format=SignalFormat(GEOMETRY))
    with pytest.raises(DataError, match="No such file"):
        folder.load(0, None)


def test_mutated_headers_are_read_or_refused_and_nothing_else(tmp_path: Path) -> None:
    folder, rng = source(tmp_path, np.ones((2, 8))), np.random.default_rng(0)
    sound = np.frombuffer((tmp_path / "a.npy").read_bytes(), dtype=np.uint8)
    refused = 0
    for _ in range(400):
        broken = sound.copy()
        broken[rng.integers(0, 128, 3)] = rng.integers(32, 127, 3)
        (tmp_path / "a.npy").write_bytes(broken.tobytes())
        try:
            folder.load(0, None)
        except DataError:
            refused += 1
    assert refused > 100


def test_open_signals_reads_labels_and_splits(tmp_path: Path) -> None:
    for name in ("train/a/1.npy", "train/b/2.npy", "val/b/3.npy"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        np.save(tmp_path / name, np.ones((2, 8)))
    found = find_data(root=str(tmp_path), manifest=None, layout="auto", extensions=[".npy"])
    splits = open_splits(found, partial(Signals, format=SignalFormat(GEOMETRY)))
    assert [splits.train.load(i, None).label for i in range(2)] == [0, 1]
    assert splits.test is not None
    assert splits.test.load(0, None).label == 1
    assert splits.test.classes == ("a", "b")


def test_a_geometry_that_is_no_length_is_refused() -> None:
    with pytest.raises(ConfigError, match="arrays need \\[length\\]"):
        Signals(Listing([], None), None, format=SignalFormat(Geometry(1, (8, 8), (4, 4))))


def opened(words: list[str], folder: Path) -> Splits:
    shape = ("geometry.channels=2", "geometry.input=[8]", "geometry.patch=[4]", "mask.ratio=0.5")
    return open_data(load_config("signal", [*shape, *words, f"data.root={folder}"]))


def test_an_archive_holds_one_array_and_perhaps_its_rate(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.arange(24.0).reshape(2, 12), sample_rate=50)
    assert opened([], tmp_path).train.load(0, None).x[0].tolist() == [2, 3, 4, 5, 6, 7, 8, 9]
    with pytest.raises(DataError, match="has 50 samples per second; expected 100"):
        opened(["signals.sample_rate=100.0"], tmp_path).train.load(0, None)
    np.savez(tmp_path / "a.npz", x=np.ones((2, 8)), y=np.ones((2, 8)))
    with pytest.raises(DataError, match=r"should hold one array .*its arrays: 'x, y'"):
        opened([], tmp_path).train.load(0, None)


@pytest.mark.parametrize("content", [b"", b"hello", cut(), archive()[:-60], pickled_array()])
def test_a_bad_archive_is_refused_and_no_pickle_is_run(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.npz").write_bytes(content)
    with pytest.raises(DataError, match=r"a\.npz' (cannot be read as a \.npz array|is not)"):
        opened([], tmp_path).train.load(0, None)


def test_a_manifest_gives_labels_folds_and_parts_in_seconds(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(24.0).reshape(2, 12))
    (tmp_path / "list.csv").write_text("path,start,end,label,fold\na.npy,0.2,1.0,x,1\na.npy,0,,y,1\na.npy,0,,x,2\n")
    words = [f"data.manifest={tmp_path / 'list.csv'}", "signals.sample_rate=10.0"]
    splits = opened(words, tmp_path)
    assert splits.train.load(0, None).x[0].tolist() == [2, 3, 4, 5, 6, 7, 8, 9]
    assert splits.train.describe(0).endswith("a.npy [0.2–1 s]")
    assert splits.folds is not None and list(splits.folds) == [1, 1, 2]
    assert splits.train.classes == ("x", "y")
    held_out = opened([*words, "data.test_fold=2"], tmp_path)
    assert held_out.test is not None and held_out.test.load(0, None).label == 0
    with pytest.raises(ConfigError, match=r"set signals\.sample_rate"):
        opened(words[:1], tmp_path)


def test_arrays_in_shards_are_the_arrays_in_files(tmp_path: Path) -> None:
    (tmp_path / "in" / "b").mkdir(parents=True)
    np.save(tmp_path / "in" / "b" / "1.npy", np.arange(24.0).reshape(2, 12))
    np.savez(tmp_path / "in" / "b" / "2.npz", np.arange(24.0).reshape(2, 12) + 1)
    todo = files_to_shard(tmp_path / "in", source=None)
    assert todo.modality.name == "signals"
    extensions = todo.modality.extensions
    write_shards(todo.found, source="signals", extensions=extensions, root=todo.root, out=tmp_path / "out")
    files, packed = (opened([], tmp_path / name).train for name in ("in", "out"))
    for index in range(2):
        assert torch.equal(files.load(index, None).x, packed.load(index, None).x)
    assert packed.classes == ("b",)


def test_views_reach_from_the_beginning_to_the_end_and_a_cache_changes_nothing(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(24.0).reshape(2, 12))
    for words in (["data.views=3"], ["data.views=3", "data.cache_mb=1"]):
        source = opened(words, tmp_path).train
        assert isinstance(source, Viewed)
        assert [source.load_view(0, view).x[0, 0].item() for view in range(3)] == [0, 2, 4]


def test_signals_are_augmented_where_that_is_asked_for(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(1.0, 17.0).reshape(2, 8))
    whole = opened([], tmp_path).train.load(0, None).x

    def drawn(*words: str) -> list[torch.Tensor]:
        source = opened(list(words), tmp_path).train
        return [source.load(0, torch.Generator().manual_seed(seed)).x for seed in range(20)]

    assert all(torch.equal(x, whole) for x in drawn())
    assert {tuple(x[0].tolist()) for x in drawn("augment.roll=true")} <= {
        tuple(whole[0].roll(n).tolist()) for n in range(8)
    }
    louder = torch.stack([x[0, 0] / whole[0, 0] for x in drawn("augment.gain_db=6.0")])
    assert 0.5 < louder.min() < 0.9 and 1.1 < louder.max() < 2.0
    assert all(0.01 < (x - whole).std() / whole.square().mean().sqrt() < 0.5 for x in drawn("augment.noise_db=10.0"))
    masked = drawn("augment.time_mask=4")
    assert {int((x[0] != whole[0]).sum()) for x in masked} == {0, 1, 2, 3, 4}
    assert all(torch.equal(x[0] != whole[0], x[1] != whole[1]) for x in masked)


def test_the_length_in_seconds_is_known_with_the_rate(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.ones((2, 12)))
    for words, seconds in (([], None), (["signals.sample_rate=4.0"], 3.0)):
        source = opened(words, tmp_path).train
        assert isinstance(source, Measured)
        assert source.seconds(0) == seconds


@pytest.mark.parametrize(
    ("array", "findings"),
    [
        (np.random.default_rng(0).normal(size=(2, 500)), []),
        (np.full((2, 500), 3.0), ["blank"]),
        (np.array([[0.0, np.nan, 1.0]]), ["not finite"]),
        (np.zeros((2, 0)), ["empty"]),
        (np.zeros((2, 3, 4)), ["undecodable"]),
        (np.full((2, 3), "a"), ["undecodable"]),
    ],
)
def test_a_check_finds_what_is_wrong_with_an_array(tmp_path: Path, array: np.ndarray, findings: list[str]) -> None:
    np.save(tmp_path / "a.npy", array)
    report = check_folder(tmp_path, workers=0)
    assert list(report.findings) == findings
    assert report.files == {"signal": 1}
