"""bridle from Python: any Dataset in, a model out, callbacks on the way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import SMALL
from PIL import Image
from torch.utils.data import Dataset

import bridle
from bridle.config import load_config
from bridle.data.audio.modality import front_end
from bridle.errors import ConfigError, UsageError
from bridle.runs.folder import RunFolder
from bridle.runs.results import read_results
from bridle.seeding import generator


class Stripes(Dataset[tuple[torch.Tensor, int]]):
    """Two kinds of striped pictures in three channels."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        label = index % 2
        stripe = torch.arange(24).remainder(2 + 4 * label).float().expand(3, 24, 24)
        return stripe + 0.1 * torch.randn(3, 24, 24, generator=generator("stripes", index)), label


class Column:
    def __init__(self, names: list[str]) -> None:
        self.names = names


class HubRows:
    """Rows as a Hugging Face dataset gives them: dicts by place, columns by name."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows, self.column_names = rows, list(rows[0])
        self.features = {key: Column(["low", "high"]) if key == "label" else Column([]) for key in rows[0]}

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, at: int | str) -> Any:
        return [row[at] for row in self.rows] if isinstance(at, str) else self.rows[at]


def test_sounds_of_a_hugging_face_dataset_train_as_log_mel_features(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def sound(i: int) -> dict[str, Any]:
        rate = (8000, 16_000)[i % 3 == 0]  # rates and lengths differ
        wave = np.sin(2 * np.pi * (300, 2000)[i % 2] * np.arange(rate // 2 + 400 * i) / rate)
        return {"audio": {"array": wave, "sampling_rate": rate, "path": None}, "label": i % 2}

    small = [*SMALL, "geometry.input=[64, 32]", "geometry.patch=[16, 16]", "schedule.iterations=1"]
    rows: Any = HubRows([sound(i) for i in range(24)])
    run = bridle.pretrain("audio", dataset=rows, out=tmp_path / "r", max_steps=2, overrides=small)
    assert "sounds of any rate and length as log-mel features of [64, 32], with a label" in capsys.readouterr().err
    assert run.splits is not None
    assert run.splits.train.classes == ["low", "high"]
    sample = run.splits.train.load(0, None)
    own = front_end(load_config("audio", small))(torch.tensor(rows[0]["audio"]["array"]).float())
    assert sample.valid is not None and sample.valid.float().mean() == 0.75  # 48 frames of 64
    assert torch.equal(sample.x[0, :48], own)
    scores = run.results.evaluations[-1].scores
    assert scores is not None and scores.classes == 2


def test_pictures_of_several_sizes_are_fitted_to_the_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows: Any = HubRows([{"image": Image.new("RGB", (40 + i, 30), (10 * i, 0, 0)), "label": i % 2} for i in range(20)])
    small = [*SMALL, "geometry.input=[16, 16]", "geometry.patch=[4, 4]", "schedule.iterations=1"]
    run = bridle.pretrain("image", dataset=rows, out=tmp_path / "r", max_steps=1, overrides=small)
    assert "fitted to [16, 16], with a label" in capsys.readouterr().err
    assert run.splits is not None
    x = run.splits.train.load(5, None).x
    assert tuple(x.shape) == (3, 16, 16) and x[0].unique().tolist() == pytest.approx([50 / 255])


class Listener:
    def __init__(self) -> None:
        self.heard: list[str] = []

    def on_start(self, *, folder: Path, config: Any) -> None:
        self.heard.append(f"start {config['name']}")

    def on_metrics(self, row: Any) -> None:
        self.heard.append(f"{row['phase']} {row['step']}")

    def on_evaluation(self, result: Any) -> None:
        self.heard.append(f"evaluated {result['iteration']}")

    def on_end(self) -> None:
        self.heard.append("end")


def test_any_dataset_trains_and_the_model_loads(tmp_path: Path) -> None:
    listener = Listener()
    run = bridle.pretrain(
        "image",
        dataset=Stripes(),
        out=tmp_path / "mine",
        size="tiny",
        max_steps=3,
        overrides=[*SMALL, "schedule.iterations=2"],
        callbacks=[listener],
    )
    probed, near = run.probe("probe.shots=[2]"), run.knn()
    assert probed.evaluations[-1].probe is not None and near.evaluations[-1].probe is not None
    assert "<html" in run.report(tmp_path / "page.html").read_text()
    assert repr(run).startswith(f"Finished('{tmp_path}/mine', 2 iterations, accuracy ")
    assert listener.heard[0] == "start image"
    assert "encoder 3" in listener.heard
    assert listener.heard.index("evaluated 1") < listener.heard.index("tokenizer 1")
    assert listener.heard[-1] == "end"
    assert run.results.evaluations[1].probe.classes == 2
    assert any((tmp_path / "mine" / "tensorboard").iterdir())  # it is installed with the tests
    model = bridle.load(tmp_path / "mine")
    assert model.geometry.input == (24, 24)
    x = torch.stack([Stripes()[i][0] for i in range(5)])
    codes, z = model.tokenize(x), model.encode(x)
    assert codes.shape == (5, 9, 4)
    assert codes.min() >= 0
    assert codes.max() < 16
    assert z.shape == (5, 9, 16)
    assert model.decode_codes(codes).shape == (5, 9, 8)
    assert torch.equal(run.load().encode(x), z)
    assert torch.equal(model.encode(x[2]), model.encode(x[2:3]))  # a single sample is a batch of one
    first = bridle.load(tmp_path / "mine", iteration=1)
    assert not torch.equal(first.encode(x), z)


def test_a_wrong_shape_is_told_with_what_was_expected(tmp_path: Path) -> None:
    bridle.pretrain(
        "image", dataset=Stripes(), out=tmp_path / "r", overrides=[*SMALL, "schedule.iterations=1"], max_steps=1
    )
    with pytest.raises(UsageError, match=r"\(B, 3, 24, 24\) or \(3, 24, 24\), got \(1, 3, 20, 24\)"):
        bridle.load(tmp_path / "r").encode(torch.zeros(1, 3, 20, 24))


def test_mistakes_are_told_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'seed'"):
        bridle.pretrain("image", dataset=Stripes(), out=tmp_path / "r", sed=1)
    with pytest.raises(UsageError, match="got int"):
        bridle.pretrain("image", dataset=[[1, 2]], out=tmp_path / "r")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="empty"):
        bridle.pretrain("image", dataset=[], out=tmp_path / "r")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="map-style dataset"):
        bridle.pretrain("image", dataset=iter([1]), out=tmp_path / "r")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="takes no overrides"):
        bridle.pretrain(load_config("digits-tiny"), out=tmp_path / "r", seed=3)
    with pytest.raises(UsageError, match="not a run directory"):
        bridle.load(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_an_unfinished_run_says_how_to_go_on(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("extends: digits-tiny\nname: x\n")
    with pytest.raises(ConfigError, match="extends"):
        bridle.load(tmp_path)


def test_a_finished_run_is_lengthened_and_keeps_what_was_measured(tmp_path: Path) -> None:
    settings = [*SMALL, "schedule.iterations=1", "encoder_phase.epochs=null", "encoder_phase.warmup_epochs=null"]

    def train(steps: int) -> bridle.Finished:
        return bridle.pretrain("digits-tiny", out=tmp_path, overrides=[*settings, f"encoder_phase.steps={steps}"])

    train(3)
    longer = train(5)
    assert not longer.was_finished
    assert train(5).was_finished
    assert [row["step"] for row in RunFolder(tmp_path).metrics()][-1] == 5
    assert RunFolder(tmp_path).metrics()[-1]["resumed_from"] == 3
    assert len(longer.results.evaluations) == 1
    assert read_results(tmp_path / "earlier" / "steps-3" / "results.json").evaluations != longer.results.evaluations
    assert [path.name[-12:-4] for path in RunFolder(tmp_path).encoder_ends()] == ["00000005"]
    with pytest.raises(ConfigError, match=r"encoder_phase\.steps"):
        train(4)
