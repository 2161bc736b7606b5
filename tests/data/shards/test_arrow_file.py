"""Folders that the real Hugging Face `datasets` writes: pictures and recordings read by offset, with their labels."""

from __future__ import annotations

import io
import sys
import tarfile
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import soundfile
import torch
from PIL import Image
from typer.testing import CliRunner

import bridle
from bridle.cli import app
from bridle.config import load_config
from bridle.data.build import open_data
from bridle.data.inspect.survey import survey_data
from bridle.data.listing.layouts import find_data
from bridle.data.listing.table import DataListing
from bridle.errors import ConfigError, DataError, UsageError

datasets.disable_progress_bars()
FEATURES = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["moth", "bee"])})


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")


def pictures(count: int, *, seed: int = 0) -> datasets.Dataset:
    random = np.random.default_rng(seed)
    images = [Image.fromarray(random.integers(0, 255, (20, 24, 3), np.uint8)) for _ in range(count)]
    return datasets.Dataset.from_dict({"image": images, "label": [i % 2 for i in range(count)]}, features=FEATURES)


def listed(root: Path | str, *, extensions: tuple[str, ...] = (".png", ".jpg"), **wanted: Any) -> DataListing:
    return find_data(root=str(root), manifest=None, layout="auto", extensions=extensions, **wanted)


def encoded(dataset: datasets.Dataset) -> list[bytes]:
    return [row["image"]["bytes"] for row in dataset.cast_column("image", datasets.Image(decode=False))]


def test_splits_labels_class_names_and_bytes_are_those_of_the_dataset(tmp_path: Path) -> None:
    train, test = pictures(7), pictures(4, seed=1)
    datasets.DatasetDict({"train": train, "test": test}).save_to_disk(
        tmp_path / "d", num_shards={"train": 2, "test": 1}
    )
    found = listed(tmp_path / "d")
    assert found.classes == ("moth", "bee")  # in the order of the dataset
    assert found.test is not None
    for split, dataset in ((found.train, train), (found.test, test)):
        assert [path.read() for path in split.paths] == encoded(dataset)  # type: ignore[union-attr]
        assert list(split.labels or ()) == dataset["label"][:]


def test_rows_that_were_shuffled_and_selected_are_read_in_that_order(tmp_path: Path) -> None:
    chosen = pictures(9).shuffle(seed=3).select(range(5))
    chosen.save_to_disk(tmp_path / "d")
    found = listed(tmp_path / "d")
    assert [path.read() for path in found.train.paths] == encoded(chosen)  # type: ignore[union-attr]
    assert found.test is None


def test_parquet_files_and_names_of_the_hub_are_prepared_by_datasets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train, held_out = pictures(6), pictures(2, seed=1)
    (tmp_path / "me" / "bees" / "data").mkdir(parents=True)
    train.to_parquet(tmp_path / "me" / "bees" / "data" / "train-00000-of-00001.parquet")
    held_out.to_parquet(tmp_path / "me" / "bees" / "data" / "validation-00000-of-00001.parquet")
    monkeypatch.chdir(tmp_path)  # where load_dataset finds the folder me/bees before it would ask the hub
    for root in (tmp_path / "me" / "bees", "hf://datasets/me/bees"):
        found = listed(root)
        assert [path.read() for path in found.train.paths] == encoded(train)  # type: ignore[union-attr]
        assert found.test is not None
        assert list(found.test.labels or ()) == held_out["label"][:]


def test_recordings_come_with_folds_several_labels_and_the_names_of_their_files(tmp_path: Path) -> None:
    file = io.BytesIO()
    wave = np.sin(np.arange(16_000) / 20)
    soundfile.write(file, wave, 16_000, format="FLAC")
    sounds = [{"bytes": file.getvalue(), "path": "far/away/a.b.flac"}, {"bytes": file.getvalue(), "path": None}]
    plain = datasets.Dataset.from_dict({"audio": sounds, "tags": [["x", "y"], []], "fold": [1, 2]})
    plain.cast_column("audio", datasets.Audio()).save_to_disk(tmp_path / "d")
    config = load_config("audio", [f"data.root={tmp_path / 'd'}", "data.columns=[audio,tags]"])
    found = listed(tmp_path / "d", extensions=(".wav", ".flac"), columns=("audio", "tags"))
    assert (found.classes, list(found.train.labels or ()), list(found.folds or ())) == (
        ("x", "y"),
        [(0, 1), ()],
        [1, 2],
    )
    assert [path.name for path in found.train.paths] == ["00000000-a.b.flac", "00000001.wav"]
    soundfile.write(tmp_path / "a.flac", wave, 16_000)
    alone = load_config("audio", [f"data.manifest={tmp_path / 'a.csv'}"])
    (tmp_path / "a.csv").write_text("path\na.flac\n")
    samples = [open_data(one).train.load(0, None).x for one in (config, alone)]
    assert torch.equal(*samples)


def test_a_missing_package_is_named_with_the_extra_that_brings_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pictures(2).save_to_disk(tmp_path / "arrow")
    (tmp_path / "parquet").mkdir()
    pictures(2).to_parquet(tmp_path / "parquet" / "train.parquet")
    for name, folder in (("datasets", "parquet"), ("pyarrow", "arrow")):
        monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(UsageError, match=rf'^{name} is not installed; install it with .*"bridle\[datasets\]"'):
            listed(tmp_path / folder)


def test_commands_decode_every_row_and_propose_a_recipe(tmp_path: Path) -> None:
    rows = [row["image"] for row in pictures(12).cast_column("image", datasets.Image(decode=False))]
    rows[3]["bytes"] = rows[3]["bytes"][:50]
    names = ["moth" if i % 2 else "bee" for i in range(12)]
    plain = datasets.Dataset.from_dict({"image": rows, "species": names})
    plain.cast_column("image", datasets.Image()).save_to_disk(tmp_path / "d", num_shards=2)
    checked = CliRunner().invoke(app, ["data", "check", str(tmp_path / "d"), "--strict"])
    assert checked.exit_code == 65
    assert "1 of 12 files have findings" in checked.output
    survey = survey_data(tmp_path / "d")
    assert (survey.train, survey.sizes(1), [Path(name).name for name, _ in survey.bad]) == (
        12,
        [20] * 11,
        ["00000003.png"],
    )
    (note,) = survey.notes
    assert note == "none of the columns species is taken for labels; data.columns=[image,LABEL] names one."


def test_unlabelled_rows_cells_of_paths_and_wrong_columns_are_told(tmp_path: Path) -> None:
    hidden = pictures(2).remove_columns("label").add_column("label", [-1, -1])
    hidden.save_to_disk(tmp_path / "hidden")
    assert listed(tmp_path / "hidden").train.labels is None
    with pytest.raises(DataError, match=r"image \(Image\), label \(ClassLabel\)'; expected a column of type"):
        pictures(2).save_to_disk(tmp_path / "d")
        listed(tmp_path / "d", extensions=(".wav",))
    with pytest.raises(DataError, match=r"data.columns=\[INPUT,LABEL\]"):
        listed(tmp_path / "d", columns=("image", "species"))
    with pytest.raises(ConfigError, match=r"\['image'\] given, but .* is no Hugging Face dataset"):
        listed(tmp_path, columns=("image",))
    (tmp_path / "list.csv").write_text("path\na.png\n")
    with pytest.raises(ConfigError, match=r"list\.csv' is no Hugging Face dataset"):
        find_data(
            root=None, manifest=str(tmp_path / "list.csv"), layout="auto", extensions=(".png",), columns=("image",)
        )
    (tmp_path / "tars").mkdir()
    tarfile.open(tmp_path / "tars" / "0.tar", "w").close()
    with pytest.raises(ConfigError, match=r"\['image'\] given, but the tar files of .* have no columns"):
        listed(tmp_path / "tars", columns=("image",))
    Image.new("RGB", (4, 4)).save(tmp_path / "a.png")
    paths = datasets.Dataset.from_dict({"image": [str(tmp_path / "a.png")]}).cast_column("image", datasets.Image())
    (tmp_path / "paths").mkdir()
    with datasets.arrow_writer.ArrowWriter(path=str(tmp_path / "paths" / "p.arrow"), features=paths.features) as writer:
        writer.write_table(paths.data.table)
        writer.finalize()
    with pytest.raises(DataError, match=r"row 0 of .* holds the path .*save_to_disk"):
        listed(tmp_path / "paths")


def test_damage_costs_training_rows_and_is_told(tmp_path: Path) -> None:
    pictures(2100).save_to_disk(tmp_path / "d")  # several record batches
    (file,) = (tmp_path / "d").glob("*.arrow")
    file.write_bytes(file.read_bytes()[:-50_000])
    found = listed(tmp_path / "d")
    assert len(found.train.paths) == 2000
    assert "is damaged after row 2000" in found.notes[0]
    file.write_bytes(b"nonsense")
    with pytest.raises(DataError, match=r"cannot be read as an Arrow file"):
        listed(tmp_path / "d")


def test_a_stream_is_refused_with_the_line_that_writes_it_to_disk(tmp_path: Path) -> None:
    whole = pictures(5)
    stream = whole.to_iterable_dataset()
    with pytest.raises(UsageError, match=r"no length or index") as refused:
        bridle.pretrain("image", dataset=stream, out=tmp_path / "run")
    line = str(refused.value).partition("once: ")[2].partition(";")[0]
    names = {"datasets": datasets, "STREAM": stream}
    eval(line.replace("FOLDER", str(tmp_path / "written")), names)
    found = listed(tmp_path / "written")
    assert [path.read() for path in found.train.paths] == encoded(whole)  # type: ignore[union-attr]
