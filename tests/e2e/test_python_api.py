"""bridle from Python: any Dataset in, a model out, callbacks on the way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import SMALL
from torch.utils.data import Dataset

import bridle
from bridle.config import load_config
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
    with pytest.raises(UsageError, match="indexable"):
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
