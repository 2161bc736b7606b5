"""`bridle finetune` from the run directory to the table: splits, folds, several labels, views, resuming, refusals."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from forked import bridle
from safetensors.numpy import load_file
from sklearn.metrics import average_precision_score  # type: ignore[import-untyped]

from bridle import api
from bridle.config import Config, load_config
from bridle.data.arrays.memory import TensorSource
from bridle.data.build import open_data
from bridle.data.loading.mixing import Mixed
from bridle.data.sources import Sample, Splits, class_shares
from bridle.errors import ConfigError, DataError, Interrupted, UsageError
from bridle.evaluate import finetune as command
from bridle.evaluate.finetune import find_units, finetune_run, protocol
from bridle.evaluate.finetune_units import Task, Unit, few_label_scores, few_label_units
from bridle.evaluate.scorers.fewshot import class_orders
from bridle.machine import StopRequest
from bridle.report.tables import finetune_table
from bridle.runs.results import read_results
from bridle.seeding import generator

Small = Callable[..., Config]
QUICK = (
    "finetune.batch=16",
    "finetune.steps=3",
    "finetune.warmup_steps=1",
    "finetune.items=60",
    "finetune.drop_path=0",
)


@pytest.fixture
def run(small: Small, tmp_path: Path) -> Path:
    """A run of one iteration, pretrained for a moment."""
    api.pretrain(small("schedule.iterations=1", "probe.enabled=false", steps=2), out=tmp_path / "run")
    return tmp_path / "run"


def results(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text()))


def figures(path: Path) -> dict[str, Any]:
    (entry,) = results(path)["evaluations"]
    return dict(entry["finetune"])


def test_sixty_steps_on_digits_beat_chance_by_far(tmp_path: Path) -> None:
    changes = ["schedule.iterations=1", "max_steps=20", "probe.enabled=false", "encoder.width=48", "encoder.depth=2"]
    api.pretrain(load_config("digits-tiny", changes), out=tmp_path)
    quick = ["finetune.steps=60", "finetune.warmup_steps=5", "finetune.learning_rate=4e-3", "finetune.batch=48"]
    found = figures(finetune_run(tmp_path, [*quick, "finetune.drop_path=0", "finetune.pool=axis"]))
    assert found["accuracy"] > 0.5
    assert found["interval"][0] < found["accuracy"] < found["interval"][1]
    assert found["chance"] < 0.12
    assert found["top5"] > found["accuracy"]
    assert (found["classes"], found["train_items"], found["test_items"]) == (10, 1437, 360)
    assert found["setting"]["steps"] == 60
    assert found["seconds"] > 0


def test_samples_are_augmented_as_fine_tuning_says_and_not_as_pretraining_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("train", "test"):
        for label in ("a", "b"):
            (tmp_path / name / label).mkdir(parents=True)
            wave = 0.1 * np.random.default_rng(0).standard_normal(400 + 95 * 160)  # 96 frames
            soundfile.write(tmp_path / name / label / "0.wav", wave, 16_000)
    changes = ["geometry.input=[96,64]", "data.mean=[0.0]", "data.std=[1.0]", "data.trim=false", "finetune.batch=2"]
    pretraining, tuning = ["augment.gain_beta=10", "augment.band_mask=64"], ["finetune.augment.time_mask=64"]
    config = load_config("audio", [f"data.root={tmp_path}", *changes, *pretraining, *tuning])

    reached: list[Any] = []

    def reach(run: Any, **_: Any) -> None:
        reached.append(run.source)
        raise Interrupted("before the first step.", exit_code=130)

    monkeypatch.setattr(command, "finetune", reach)
    job = command.Job(tmp_path / "job", config, command.Start(1, None), StopRequest(), (), None, trained=config)
    (tmp_path / "job").mkdir()
    with pytest.raises(Interrupted):
        job.entry()
    (mixing,) = reached
    assert isinstance(mixing, Mixed)  # finetune.augment.mixup of the recipe
    source = mixing.source
    plain = source.load(0, None).x[0]
    seen = [(source.load(0, generator(seed)).x[0] != plain) for seed in range(10)]
    assert any(hidden.any() for hidden in seen)
    assert all(torch.equal(hidden.all(1), hidden.any(1)) for hidden in seen)  # frames alone; no bands, no gain


def test_results_stand_beside_the_run_and_asking_again_computes_nothing(run: Path) -> None:
    path = finetune_run(run, QUICK)
    assert path == run / "finetune.json"
    first = results(path)
    assert (first["format"], first["name"], first["title"], first["method"]) == (1, "digits-tiny", "digits", "RQ")
    assert first["protocol"]["finetune"]["steps"] == 3
    (place,) = (run / "finetune").iterdir()
    assert place.name.startswith("iter1-")
    names = {item.name for item in place.iterdir()}
    assert {"config.yaml", "metrics.jsonl", "checkpoints", "scores.safetensors", "result.json"} <= names
    before = {item: item.stat().st_mtime_ns for item in place.rglob("*")}
    assert results(finetune_run(run, QUICK)) == first
    assert {item: item.stat().st_mtime_ns for item in place.rglob("*")} == before


def test_other_settings_get_their_own_folder_and_scratch_stands_beside(run: Path) -> None:
    finetune_run(run, QUICK)
    path = finetune_run(run, [*QUICK, "finetune.from_scratch=true"])
    assert [entry["start"] for entry in results(path)["evaluations"]] == ["scratch", "iter1"]
    path = finetune_run(run, [*QUICK, "finetune.loss=bce", "finetune.augment.cutmix=1.0"])
    assert [entry["start"] for entry in results(path)["evaluations"]] == ["iter1"]
    assert len(list((run / "finetune").iterdir())) == 3
    path = finetune_run(run, QUICK)  # the first settings again: both starts are still there
    assert [entry["start"] for entry in results(path)["evaluations"]] == ["scratch", "iter1"]
    table = finetune_table(read_results(path))
    assert table is not None
    assert [str(cell) for cell in table.columns[0].cells] == ["scratch", "RQ iter1", "commonest class"]


def test_pretraining_is_what_a_fine_tune_starts_from(run: Path) -> None:
    frozen = [*QUICK, "finetune.learning_rate=1e-12"]
    finetune_run(run, frozen)
    finetune_run(run, [*frozen, "finetune.from_scratch=true"])
    ends = {path.parents[2].name.split("-")[0]: path for path in (run / "finetune").rglob("*-end/model.safetensors")}
    (pretrained,) = (run / "checkpoints").glob("*-end/model.safetensors")
    wanted, tuned, scratch = (load_file(path) for path in (pretrained, ends["iter1"], ends["scratch"]))
    name = "encoder.trunk.blocks.1.mlp.fc1.weight"
    assert abs(tuned[f"classifier.{name}"] - wanted[name]).max() < 1e-6
    assert abs(scratch[f"classifier.{name}"] - wanted[name]).max() > 1e-4


def folded(count: int = 60) -> Splits:
    """Three folds of level pictures; the class is the level, two classes."""
    labels = [i % 2 for i in range(count)]
    noise = torch.randn(count, 1, 16, 16, generator=torch.Generator().manual_seed(0))
    x = 0.3 * noise + torch.tensor(labels)[:, None, None, None].float()
    source = TensorSource(x=x, labels=labels, classes=["dark", "light"])
    return Splits(source, None, folds=[1 + i // 2 % 3 for i in range(count)])


def test_every_fold_is_scored_by_a_model_that_never_saw_it(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    splits = folded()
    monkeypatch.setattr(command, "open_data", lambda config: splits)
    shown: dict[str, set[float]] = {}
    real = command.finetune

    def spy(run: Any, **settings: Any) -> Any:
        parts = range(len(run.source))
        shown[run.folder.path.name] = {float(run.source.load(i, None).x.sum()) for i in parts}
        return real(run, **settings)

    monkeypatch.setattr(command, "finetune", spy)
    quick = [*QUICK, "finetune.items=null", "finetune.steps=12", "finetune.learning_rate=5e-3"]
    found = figures(finetune_run(run, quick))
    assert sorted(shown) == ["fold1", "fold2", "fold3"]
    for fold in (1, 2, 3):
        inside = {float(splits.train.load(i, None).x.sum()) for i, f in enumerate(splits.folds or []) if f == fold}
        assert len(inside) == 20
        assert not inside & shown[f"fold{fold}"]
        assert len(shown[f"fold{fold}"]) == 40
    assert [fold["fold"] for fold in found["folds"]] == [1, 2, 3]
    accuracies = [fold["accuracy"] for fold in found["folds"]]
    assert found["accuracy"] == pytest.approx(sum(accuracies) / 3)
    assert found["sd"] == pytest.approx(float(torch.tensor(accuracies, dtype=torch.float64).std()))
    assert (found["train_items"], found["test_items"]) == (40, 60)
    assert found["accuracy"] > 0.9
    table = finetune_table(read_results(run / "finetune.json"))
    assert table is not None
    assert next(iter(table.columns[0].cells)) == "RQ iter1, 3 folds"
    assert str(next(iter(table.columns[1].cells))).endswith("sd")


class StopIn:
    """Sends a signal at a step of the n-th model that is trained."""

    def __init__(self, model: int, step: int) -> None:
        self.model, self.step, self.started = model, step, 0

    def on_start(self, *, folder: Path, config: Mapping[str, Any]) -> None:
        self.started += 1

    def on_metrics(self, row: Mapping[str, Any]) -> None:
        if (self.started, row["step"]) == (self.model, self.step):
            os.kill(os.getpid(), signal.SIGINT)

    def on_evaluation(self, result: Mapping[str, Any]) -> None: ...

    def on_end(self) -> None: ...


def test_an_interrupted_cross_validation_goes_on_and_ends_the_same(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "open_data", lambda config: folded())
    with pytest.raises(Interrupted) as caught:
        finetune_run(run, QUICK, callbacks=[StopIn(2, 2)])
    assert caught.value.exit_code == 130
    (place,) = (run / "finetune").iterdir()
    done = (place / "fold1" / "figures.json").stat().st_mtime_ns
    parts = figures(finetune_run(run, QUICK))
    assert (place / "fold1" / "figures.json").stat().st_mtime_ns == done
    whole = run.parent / "whole"
    run.rename(whole)
    for path in (whole / "finetune").rglob("result.json"):
        path.unlink()
    for fold in (1, 2, 3):
        (whole / "finetune" / place.name / f"fold{fold}").rename(whole / f"old{fold}")
    again = figures(finetune_run(whole, QUICK))
    for one in (parts, again):
        one.pop("seconds")
    assert again == parts
    for fold in (1, 2, 3):
        folders = (whole / f"old{fold}", whole / "finetune" / place.name / f"fold{fold}")
        old, new = (load_file(folder / "scores.safetensors") for folder in folders)
        assert (old["scores"] == new["scores"]).all()


class Labelled:
    """Pictures with any number of three labels, each of which lights its own rows; two views of each."""

    views = 2

    def __init__(self, count: int) -> None:
        self.labels = [tuple(c for c in range(3) if i >> c & 1) for i in range(count)]  # also none, also all
        self.classes = ["a", "b", "c"]

    def __len__(self) -> int:
        return len(self.labels)

    def load(self, index: int, generator: torch.Generator | None) -> Sample:
        x = 0.1 * torch.randn(1, 16, 16, generator=torch.Generator().manual_seed(index))
        for label in self.labels[index]:
            x[:, 5 * label : 5 * label + 5] += 1
        return Sample(x, class_shares(self.labels[index], 3))

    def load_view(self, index: int, view: int) -> Sample:
        sample = self.load(index, None)
        return sample._replace(x=sample.x + 0.01 * view)

    def describe(self, index: int) -> str:
        return f"picture {index}"


def test_several_labels_are_ranked(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "open_data", lambda config: Splits(Labelled(48), Labelled(24)))
    quick = [*QUICK, "finetune.steps=40", "finetune.learning_rate=5e-3", "finetune.pool=axis", "finetune.axis=0"]
    found = figures(finetune_run(run, [*quick, "finetune.sampling=balanced", "finetune.augment.mixup=0.2"]))
    (place,) = (run / "finetune").iterdir()
    stored = load_file(place / "scores.safetensors")
    oracle = average_precision_score(stored["truth"], stored["scores"], average="macro")
    assert found["mean_average_precision"] == pytest.approx(oracle)
    assert found["mean_average_precision"] > 0.9
    assert found["mean_auc"] > 0.9
    assert (found["classes"], found["train_items"], found["test_items"]) == (3, 48, 24)
    with pytest.raises(ConfigError, match=r"finetune\.loss: 'ce' needs one label per item"):
        finetune_run(run, [*QUICK, "finetune.loss=ce"])


def test_scores_are_means_over_the_views(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[int] = []

    class Spy(Labelled):
        def load_view(self, index: int, view: int) -> Sample:
            shown.append(2 * index + view)
            return super().load_view(index, view)

    monkeypatch.setattr(command, "open_data", lambda config: Splits(Labelled(16), Spy(8)))
    finetune_run(run, QUICK)
    assert shown == list(range(16))
    (place,) = (run / "finetune").iterdir()
    assert load_file(place / "scores.safetensors")["scores"].shape == (8, 3)


def test_a_fold_outside_of_which_one_class_is_left_is_refused_before_training(small: Small) -> None:
    source = TensorSource(x=torch.zeros(8, 1, 1), labels=[0] * 4 + [1] * 4, classes=["a", "b"])
    splits, config = Splits(source, None, folds=[1] * 4 + [2] * 4), small()
    with pytest.raises(DataError, match="fold1: fine-tuning needs at least two classes"):
        find_units(splits, config, command.find_task(splits, config))


def test_without_a_test_split_a_fifth_of_each_class_is_held_back(small: Small) -> None:
    labels = [0] * 50 + [1] * 10
    source = TensorSource(x=torch.arange(60.0).reshape(60, 1, 1), labels=labels, classes=["a", "b"])
    config, splits = small(), Splits(source, None)
    (unit,) = find_units(splits, config, command.find_task(splits, config))
    assert sorted(unit.test.labels or []) == [0] * 10 + [1] * 2
    values = [{float(part.load(i, None).x) for i in range(len(part))} for part in (unit.train, unit.test)]
    assert values[0] | values[1] == set(range(60))
    assert not values[0] & values[1]
    few = small("finetune.items=12")
    (unit,) = find_units(splits, few, command.find_task(splits, few))
    assert len(unit.train) + len(unit.test) == 12


def test_what_cannot_be_fine_tuned_is_refused_with_a_reason(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"encoder\.depth: 2 against 3: fine-tuning cannot change this"):
        finetune_run(run, ["encoder.depth=3"])
    with pytest.raises(UsageError, match="no finished encoder phase of iteration 2 yet"):
        finetune_run(run, QUICK, iteration=2)
    with pytest.raises(UsageError, match="exclude each other"):
        finetune_run(run, ["finetune.from_scratch=true"], iteration=1)
    with pytest.raises(UsageError, match="not a run directory"):
        finetune_run(tmp_path, [])
    plain = TensorSource(x=torch.zeros(4, 1, 16, 16))
    monkeypatch.setattr(command, "open_data", lambda config: Splits(plain, None))
    with pytest.raises(DataError, match="fine-tuning needs labels"):
        finetune_run(run, QUICK)
    same = TensorSource(x=torch.zeros(4, 1, 16, 16), labels=[1] * 4, classes=["a", "b"])
    monkeypatch.setattr(command, "open_data", lambda config: Splits(same, None))
    with pytest.raises(DataError, match="at least two classes"):
        finetune_run(run, QUICK)


def test_where_the_work_is_done_is_not_part_of_the_protocol(small: Small) -> None:
    one = protocol(small()).digits
    assert one == protocol(small("data.workers=3", "runtime.threads=2", "finetune.from_scratch=true")).digits
    assert one != protocol(small("finetune.layer_decay=0.6")).digits
    assert one != protocol(small("seed=1")).digits


def test_the_command_prints_a_table_and_what_to_do_next(run: Path) -> None:
    arguments = ["finetune", str(run), *QUICK, "--iteration", "1"]
    ended = bridle(*arguments)
    assert ended.code == 0, ended.err
    assert "fine-tuned from" in ended.out
    assert "RQ iter1" in ended.out
    assert f"wrote {run / 'finetune.json'}" in ended.out
    assert "finetune.from_scratch=true" in ended.out
    assert "finetune      3/3" in ended.err


def test_few_labels_are_those_of_the_few_shot_probe_and_get_their_own_steps(run: Path) -> None:
    changes = ["finetune.steps=3", "finetune.warmup_steps=1", "finetune.batch=16", "finetune.drop_path=0"]
    few = ["finetune.shots=[2,3]", "finetune.draws=2", "finetune.shot_steps=4"]
    path = finetune_run(run, [*changes, *few])
    found = figures(path)
    (place,) = (run / "finetune").iterdir()
    assert found["train_items"] == 1437
    assert {name: one["items"] for name, one in found["further"].items()} == {"2 per class": 20, "3 per class": 30}
    splits = open_data(load_config("digits-tiny"))
    assert splits.test is not None
    task = Task(10, multilabel=False, loss="ce")
    config = command.RunFolder(run).config([*changes, *few])
    units = list(few_label_units([Unit("", splits.train, splits.test)], config, task))
    labels = np.array(splits.train.labels)
    for unit in units:
        order = class_orders(labels, generator(config.seed, "few shots", "", unit.draw))
        wanted = sorted(labels[np.concatenate([own[: unit.shots] for own in order])].tolist())
        assert sorted(label for label in unit.train.labels or () if isinstance(label, int)) == wanted
        rows = (place / unit.name / "metrics.jsonl").read_text().splitlines()
        assert json.loads(rows[-1])["steps"] == 4
        accuracy = results(place / unit.name / "figures.json")["accuracy"]
        assert found["further"][f"{unit.shots} per class"]["draws"][unit.draw] == pytest.approx(accuracy)
    assert [unit.name for unit in units] == ["shots2-draw0", "shots3-draw0", "shots2-draw1", "shots3-draw1"]
    table = finetune_table(read_results(path))
    assert table is not None
    assert "3 per class" in [column.header for column in table.columns]


def test_few_labels_of_folds_are_averaged_over_them_draw_by_draw() -> None:
    source = TensorSource(x=torch.zeros(4, 1, 2, 2), labels=[0, 1, 0, 1])
    units = [Unit(f"fold{fold}-shots1-draw{draw}", source, source, 1, draw) for fold in (1, 2) for draw in (0, 1)]
    (found,) = few_label_scores([Unit("fold1", source, source), *units], [0.9, 0.2, 0.4, 0.6, 0.8]).values()
    assert found.draws == pytest.approx((0.4, 0.6))
    assert (found.value, found.items) == (pytest.approx(0.5), 4)
