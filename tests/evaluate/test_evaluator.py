"""The evaluator on sources with folds, views and several labels, with small encoders that were never trained."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from bridle import api
from bridle.config import Config, load_config
from bridle.console import ProgressLine
from bridle.data.arrays.memory import TensorSource
from bridle.data.sources import Sample, Splits, class_shares
from bridle.errors import ConfigError, DataError
from bridle.evaluate import features, probe_command
from bridle.evaluate.evaluator import Evaluator
from bridle.evaluate.features import while_training
from bridle.evaluate.probe_command import knn_run, probe_run
from bridle.models.build import build_encoder
from bridle.runs.results import Results, read_results
from bridle.runs.results_file import ResultsFile
from bridle.train.run import open_machine


def pictures(items: int, *, seed: int = 0) -> tuple[Tensor, list[int]]:
    """(N, 1, 16, 16) noise, brighter by the class."""
    labels = [i % 3 for i in range(items)]
    x = 0.2 * torch.randn(items, 1, 16, 16, generator=torch.Generator().manual_seed(seed))
    return x + 0.3 * torch.tensor(labels)[:, None, None, None], labels


class TwoHalves(TensorSource):
    """Items with two views: one shows the picture, the other nothing."""

    views = 2

    def load_view(self, index: int, view: int) -> Sample:
        sample = self.load(index, None)
        return sample if view == 0 else sample._replace(x=torch.zeros_like(sample.x))


class Tagged(TensorSource):
    """Items with any number of labels."""

    def __init__(self, *, x: Tensor, tags: Sequence[tuple[int, ...]]) -> None:
        super().__init__(x=x)
        self.classes, self.labels = ["dark", "light", "middle", "nowhere"], list(tags)  # type: ignore[assignment]

    def load(self, index: int, generator: torch.Generator | None) -> Sample:
        assert self.labels is not None
        return Sample(self.x[index], class_shares(self.labels[index], 4))  # type: ignore[arg-type]


@pytest.fixture
def evaluator_of(small: Callable[..., Config], tmp_path: Path) -> Callable[..., Evaluator]:
    def build(splits: Splits, *overrides: str, **named: Any) -> Evaluator:
        config = small("data.mean=[0.3]", "data.std=[0.3]", "probe.items=null", *overrides)
        results = ResultsFile(tmp_path / "r.json", Results())
        return Evaluator(config, splits, open_machine(config.runtime), results, ProgressLine(), strict=True, **named)

    return build


def probe(evaluator: Evaluator) -> Any:
    return evaluator.score_encoder(build_encoder(evaluator.config).eval())


class Sealed(TensorSource):
    """Items that nobody may look at."""

    def load(self, index: int, generator: torch.Generator | None) -> Sample:
        raise AssertionError("a test item was read")


def test_on_validation_no_test_item_is_read(evaluator_of: Callable[..., Evaluator]) -> None:
    x, labels = pictures(60)
    splits = Splits(TensorSource(x=x, labels=labels), Sealed(x=x[:30], labels=labels[:30]))
    with pytest.raises(AssertionError, match="a test item was read"):
        probe(evaluator_of(splits))
    found = probe(evaluator_of(splits, "probe.on=validation"))
    assert (found.train_items, found.test_items) == (48, 12)


class Damaged(TensorSource):
    """Items of which some cannot be read."""

    bad: tuple[int, ...] = ()

    def load(self, index: int, generator: torch.Generator | None) -> Sample:
        if index in self.bad:
            raise DataError(f"{self.describe(index)} cannot be read.")
        return super().load(index, generator)

    def describe(self, index: int) -> str:
        return f"item{index}"


def test_items_that_cannot_be_read_are_left_out_counted_and_named(evaluator_of: Callable[..., Evaluator]) -> None:
    x, labels = pictures(60)
    train, test = Damaged(x=x, labels=labels), Damaged(x=x[:30], labels=labels[:30])
    train.bad, test.bad = (3, 17), (5,)
    found = probe(evaluator_of(Splits(train, test)))
    assert (found.train_items, found.test_items) == (58, 29)
    assert found.left_out == ("item3", "item17", "item5")
    good = [i for i in range(60) if i not in train.bad]
    whole = Splits(TensorSource(x=x[good], labels=[labels[i] for i in good]),
                   TensorSource(x=torch.cat([x[:5], x[6:30]]), labels=[*labels[:5], *labels[6:30]]))  # fmt: skip
    assert found.accuracy == probe(evaluator_of(whole)).accuracy
    folded = probe(evaluator_of(Splits(train, None, folds=[i % 4 + 1 for i in range(60)])))
    assert folded.test_items == 58


def test_too_many_items_that_cannot_be_read_are_an_error(evaluator_of: Callable[..., Evaluator]) -> None:
    x, labels = pictures(60)
    train = Damaged(x=x, labels=labels)
    train.bad = tuple(range(7))
    with pytest.raises(DataError, match=r"7 of 60 labelled items cannot be read, more than data\.bad_share=0\.1"):
        probe(evaluator_of(Splits(train, None)))


def test_on_validation_the_last_fold_is_left_out_but_its_codes_are_still_counted(
    evaluator_of: Callable[..., Evaluator],
) -> None:
    x, labels = pictures(60)
    splits = Splits(TensorSource(x=x, labels=labels), None, folds=[i % 4 + 1 for i in range(60)])
    evaluator = evaluator_of(splits, "probe.on=validation")
    found = probe(evaluator)
    assert [fold.fold for fold in found.folds] == [1, 2, 3]
    assert found.test_items == 45
    assert len(evaluator.everything) == 60


def test_on_folds_all_items_are_scored_once_each_class_in_every_fold(evaluator_of: Callable[..., Evaluator]) -> None:
    (x, labels), (more, other) = pictures(60), pictures(15, seed=1)
    splits = Splits(TensorSource(x=x, labels=labels), TensorSource(x=more, labels=other))
    found = probe(evaluator_of(splits, "probe.on=folds"))
    assert [fold.test_items for fold in found.folds] == [15] * 5
    assert (found.train_items, found.test_items) == (60, 75)
    assert probe(evaluator_of(splits)).folds == ()
    own = Splits(TensorSource(x=x, labels=labels), None, folds=[i % 4 + 1 for i in range(60)])
    assert len(probe(evaluator_of(own, "probe.on=folds")).folds) == 4  # data that has folds keeps them
    folds = np.array(features.stratified_folds(np.array([0] * 7 + [1] * 13 + [2] * 5), 5, seed=0))
    assert np.bincount(folds)[1:].tolist() == [5] * 5
    assert all(1 <= (folds[:7] == fold).sum() <= 2 <= (folds[7:20] == fold).sum() <= 3 for fold in range(1, 6))


def test_a_run_that_is_continued_with_another_probe_keeps_to_the_one_it_began_with(
    small: Callable[..., Config], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = small("schedule.iterations=2", "tokenizer_phase.steps=2", steps=2)
    api.pretrain(config.model_copy(update={"schedule": config.schedule}), out=tmp_path / "run")
    path = tmp_path / "run" / "results.json"
    known = json.loads(path.read_text())
    assert known["protocol"]["probe"]["on"] == "test"
    path.write_text(json.dumps({**known, "evaluations": known["evaluations"][:1]}))  # as if it had been stopped there
    other = config.model_copy(update={"probe": config.probe.model_copy(update={"on": "folds"})})
    api.pretrain(other, out=tmp_path / "run")
    assert "goes on with the settings of the probe that it began with" in capsys.readouterr().err
    again = json.loads(path.read_text())
    assert again["evaluations"][1]["probe"]["accuracy"] == known["evaluations"][1]["probe"]["accuracy"]
    measured = json.loads(probe_run(tmp_path / "run", ["probe.on=folds"]).read_text())
    assert all(len(entry["probe"]["folds"]) == 5 for entry in measured["evaluations"])
    assert measured["title"] == "digits, all items in folds"


def test_scores_of_a_run_on_validation_items_are_taken_over(
    small: Callable[..., Config], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    api.pretrain(small("schedule.iterations=1", "probe.on=validation", steps=2), out=tmp_path / "run")
    capsys.readouterr()
    probe_run(tmp_path / "run", [])
    assert "probing" not in capsys.readouterr().err
    path = tmp_path / "run" / "results.json"
    older = {key: value for key, value in json.loads(path.read_text()).items() if key != "protocol"}
    path.write_text(json.dumps(older))
    (tmp_path / "run" / "probe.json").unlink()
    probe_run(tmp_path / "run", [])
    assert "probing" in capsys.readouterr().err  # nobody knows by what protocol


def test_with_two_folds_the_second_stays_unseen_and_with_a_test_fold_the_others_test_each_other(
    evaluator_of: Callable[..., Evaluator],
) -> None:
    x, labels = pictures(60)
    two = evaluator_of(Splits(TensorSource(x=x, labels=labels), None, folds=[1] * 40 + [2] * 20), "probe.on=validation")
    assert (len(two.train), two.test, two.folds) == (40, None, None)
    held = Sealed(x=x[:6], labels=labels[:6])
    kept = evaluator_of(
        Splits(TensorSource(x=x, labels=labels), held, folds=[2] * 30 + [3] * 30), "probe.on=validation"
    )
    assert [fold.fold for fold in probe(kept).folds] == [2, 3]


def test_padding_of_either_part_survives_joining() -> None:
    whole = features.Features(np.zeros((2, 3, 4), np.float32), np.array([0, 1]))
    padded = features.Features(np.ones((1, 3, 4), np.float32), np.array([2]), np.array([[True, True, False]]))
    both = features.joined(whole, padded)
    assert both.x[:, 0, 0].tolist() == [0, 0, 1] and both.y.tolist() == [0, 1, 2]
    assert both.valid is not None and both.valid.sum(axis=1).tolist() == [3, 3, 2]
    assert features.joined(whole, whole).valid is None


def test_data_with_folds_is_cross_validated(evaluator_of: Callable[..., Evaluator]) -> None:
    x, labels = pictures(60)
    splits = Splits(TensorSource(x=x, labels=labels), None, folds=[i % 4 + 1 for i in range(60)])
    evaluator = evaluator_of(splits)
    evaluator.measure_baselines()
    found = evaluator.results.value.baselines
    assert [fold.fold for fold in found["raw"].folds] == [1, 2, 3, 4]
    assert found["untrained"].test_items == 60 and found["untrained"].sd >= 0
    assert probe(evaluator).accuracy == found["untrained"].accuracy


def test_classical_features_stand_beside_the_other_baselines_when_asked_for(
    evaluator_of: Callable[..., Evaluator],
) -> None:
    x, labels = pictures(60)
    evaluator = evaluator_of(Splits(TensorSource(x=x, labels=labels), None), "probe.classical=true")
    evaluator.measure_baselines()
    found = evaluator.results.value.baselines
    assert list(found) == ["raw", "untrained", "classical"]
    assert found["classical"].test_items == found["raw"].test_items == 12


def test_runs_in_one_folder_share_baselines_as_long_as_nothing_they_depend_on_differs(
    small: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, labels = pictures(60)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "results.json").write_text("[1, 2")
    measured: list[str] = []
    once = Evaluator.baselines
    monkeypatch.setattr(
        Evaluator,
        "baselines",
        lambda evaluator, net: measured.append(evaluator.results.path.parent.name) or once(evaluator, net),
    )

    def baselines(run: str, *overrides: str, shift: float = 0.0) -> Any:
        config = small("data.mean=[0.3]", "data.std=[0.3]", "probe.items=null", *overrides)
        splits = Splits(TensorSource(x=x + shift, labels=labels), None)
        results = ResultsFile(tmp_path / run / "results.json", Results())
        (tmp_path / run).mkdir()
        evaluator = Evaluator(config, splits, open_machine(config.runtime), results, ProgressLine(), strict=True)
        evaluator.measure_baselines()
        return json.loads((tmp_path / run / "results.json").read_text())["baselines"]

    first = baselines("first")
    assert baselines("same", "quantizer=vq", "mask.ratio=0.5") == first and measured == ["first"]
    baselines("seed", "seed=5")
    baselines("probe", "probe.pool=axis", "probe.axis=0")
    baselines("network", "encoder.depth=1")
    baselines("data", shift=0.1)
    assert measured == ["first", "seed", "probe", "network", "data"]


def test_scores_on_a_single_class_are_told_once(
    evaluator_of: Callable[..., Evaluator], capfd: pytest.CaptureFixture[str]
) -> None:
    x, labels = pictures(30)
    test = TensorSource(x=x[:4], labels=[1, 1, 1, 1])
    evaluator = evaluator_of(Splits(TensorSource(x=x, labels=labels), test))
    for _ in range(2):
        probe(evaluator)
    assert capfd.readouterr().err.count("all 4 items that are scored are of one class") == 1
    probe(evaluator_of(Splits(TensorSource(x=x, labels=labels), TensorSource(x=x[:4], labels=labels[:4]))))
    assert "of one class" not in capfd.readouterr().err


def test_fewer_items_keep_their_folds(evaluator_of: Callable[..., Evaluator]) -> None:
    x, labels = pictures(60)
    folds = [1 + (i >= 30) for i in range(60)]
    result = probe(evaluator_of(Splits(TensorSource(x=x, labels=labels), None, folds=folds), "probe.items=50"))
    assert [fold.test_items for fold in result.folds] == [25, 25]


def test_the_probe_of_a_run_is_bounded_and_the_one_that_is_asked_for_is_not(
    small: Callable[..., Config], tmp_path: Path
) -> None:
    config = small("probe.items=null", "probe.training_items=80", "schedule.iterations=1", steps=1)
    found = api.pretrain(config, out=tmp_path / "run").results.evaluations[0].probe
    assert found is not None and (found.train_items, found.test_items) == (80, 80)
    asked = read_results(probe_run(tmp_path / "run", [])).evaluations[0].probe
    assert asked is not None and asked.train_items > 1000
    fits = while_training(
        small("probe.items=50", "probe.training_items=80"), Splits(TensorSource(x=torch.zeros(90, 1, 16, 16)), None)
    )
    assert fits.probe.items == 50
    trial = while_training(small("probe.items=null", "max_steps=5"), Splits(TensorSource(x=torch.zeros(900, 1)), None))
    assert trial.probe.items == 300


def test_a_test_split_goes_before_folds(evaluator_of: Callable[..., Evaluator]) -> None:
    source = TensorSource(x=pictures(30)[0], labels=pictures(30)[1])
    result = probe(evaluator_of(Splits(source, source, folds=[i % 2 for i in range(30)])))
    assert result.folds == () and result.test_items == 30


def test_an_item_is_judged_by_the_mean_over_its_views(evaluator_of: Callable[..., Evaluator]) -> None:
    x, labels = pictures(40)
    evaluator = evaluator_of(Splits(TwoHalves(x=x, labels=labels), None))
    encoder = build_encoder(evaluator.config).eval()
    found = evaluator.collector.features(lambda x, valid: encoder(x).z.mean(dim=1))(evaluator.train)
    with torch.no_grad():
        seen = encoder((x - 0.3) / 0.3).z.mean(dim=1)
        nothing = encoder(torch.full_like(x, -1.0)).z.mean(dim=1)
    np.testing.assert_allclose(found.x, ((seen + nothing) / 2).numpy(), atol=1e-5)
    assert found.y.tolist() == labels


def test_the_views_of_an_item_stay_in_one_batch(evaluator_of: Callable[..., Evaluator]) -> None:
    x, labels = pictures(40)
    evaluator = evaluator_of(Splits(TwoHalves(x=x, labels=labels), None))
    evaluator.collector.rows = 5
    found = evaluator.collector.features(lambda x, valid: x.flatten(1)[:, :1])(evaluator.train)
    np.testing.assert_allclose(found.x[:, 0], ((x[:, 0, 0, 0] - 0.3) / 0.3 - 1).numpy() / 2, atol=1e-6)


def test_several_labels_are_told_by_the_data(evaluator_of: Callable[..., Evaluator]) -> None:
    x, labels = pictures(60)
    tags = [((0,), (1, 2), (2,))[label] for label in labels]
    result = probe(evaluator_of(Splits(Tagged(x=x, tags=tags), Tagged(x=x, tags=tags))))
    assert result.name == "mAP"
    assert (result.classes, result.classes_present) == (4, 3)
    assert result.mean_average_precision > result.chance


@pytest.mark.parametrize("pool", ["mean", "axis", "class", "attentive"])
def test_every_pooling_can_be_probed(
    pool: str, evaluator_of: Callable[..., Evaluator], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bridle.evaluate.heads.attentive.FEWEST_STEPS", 30)
    monkeypatch.setattr("bridle.evaluate.heads.attentive.EPOCHS", 1)
    x, labels = pictures(60)
    splits = Splits(TensorSource(x=x, labels=labels), None)
    result = probe(evaluator_of(splits, f"probe.pool={pool}", "encoder.class_token=true"))
    assert result.name == "accuracy" and result.test_items == 12
    assert ("weight_decay" in result.setting) == (pool == "attentive")


def test_the_class_token_is_what_class_pooling_probes(evaluator_of: Callable[..., Evaluator]) -> None:
    x, labels = pictures(30)
    splits = Splits(TensorSource(x=x, labels=labels), None)
    evaluator = evaluator_of(splits, "probe.pool=class", "encoder.class_token=true")
    seen: list[Any] = []
    evaluator.score = lambda collect, method: seen.append(collect(evaluator.train))  # type: ignore[assignment, method-assign]
    encoder = build_encoder(evaluator.config).eval()
    evaluator.score_encoder(encoder)
    with torch.no_grad():
        expected = encoder((x - 0.3) / 0.3).class_token
    np.testing.assert_allclose(seen[0].x, expected.numpy(), atol=1e-5)


def test_an_earlier_block_can_be_probed(evaluator_of: Callable[..., Evaluator]) -> None:
    x, labels = pictures(30)
    found: dict[str, Any] = {}
    for layer in ("null", "1", "2", "all"):
        evaluator = evaluator_of(
            Splits(TensorSource(x=x, labels=labels), None), f"probe.layer={layer}", "encoder.depth=2"
        )
        evaluator.score = lambda collect, method, to=layer, of=evaluator.train: found.update({to: collect(of).x})  # type: ignore[assignment, method-assign]
        encoder = build_encoder(evaluator.config).eval()
        evaluator.score_encoder(encoder)
    with torch.no_grad():
        embedded = encoder.embed((x - 0.3) / 0.3) + encoder.position
        z = encoder.trunk.blocks[0](embedded)
    np.testing.assert_allclose(found["1"], z.mean(1).numpy(), atol=1e-5)
    np.testing.assert_allclose(found["2"], found["null"], atol=1e-6)
    assert np.abs(found["1"] - found["2"]).max() > 0.1
    np.testing.assert_allclose(
        found["all"], np.concatenate([embedded.mean(1), found["1"], found["2"]], axis=1), atol=1e-6
    )


def test_attentive_pooling_that_needs_too_much_memory_names_the_setting(
    evaluator_of: Callable[..., Evaluator], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(features, "TOKEN_LIMIT", 1000)
    x, labels = pictures(30)
    evaluator = evaluator_of(Splits(TensorSource(x=x, labels=labels), None), "probe.pool=attentive")
    with pytest.raises(DataError, match=r"probe\.items="):
        probe(evaluator)


def test_few_labels_heads_and_retrieval_work_with_folds_and_several_labels(
    evaluator_of: Callable[..., Evaluator], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bridle.evaluate.heads.sgd.FEWEST_STEPS", 20)
    x, labels = pictures(48)
    folded = Splits(TensorSource(x=x, labels=labels), None, folds=[i // 16 for i in range(48)])
    tagged = Splits(Tagged(x=x, tags=[((0,), (1, 2), (2,))[label] for label in labels]), None)
    for splits, score in ((folded, "accuracy"), (tagged, "mean_average_precision")):
        found = probe(evaluator_of(splits, "probe.shots=[2]", "probe.draws=2", "probe.head=adamw", "probe.epochs=1"))
        assert found.setting["learning_rate"] > 0
        assert getattr(found, score) is not None and 0 <= found.few_shot[2].value <= 1
        near = probe(evaluator_of(splits, classifier="neighbours"))
        assert 0 < near.further["retrieval mAP"].value <= 1 and near.few_shot == {}


def test_large_inputs_go_through_the_network_a_few_at_a_time(evaluator_of: Callable[..., Evaluator]) -> None:
    splits = Splits(TensorSource(x=pictures(3)[0]), None)
    assert evaluator_of(splits, "geometry.input=[32, 32]", "geometry.patch=[16, 16]").collector.rows == 256
    assert evaluator_of(splits, "geometry.input=[1024, 1024]", "geometry.patch=[128, 128]").collector.rows == 16
    evaluator = evaluator_of(splits, "geometry.input=[32, 32]", "geometry.patch=[1, 1]")
    assert evaluator.collector.rows == 4  # 1,024 tokens each


# the commands


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of one iteration on the embedded digits."""
    from conftest import SMALL

    folder = tmp_path_factory.mktemp("judged") / "run"
    changes = [*SMALL, "geometry.patch=[4, 4]", "max_steps=3", "schedule.iterations=1"]
    api.pretrain(load_config("digits-tiny", changes), out=folder)
    return folder


def test_neighbours_get_a_file_of_the_same_form_and_are_not_asked_twice(
    run: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = knn_run(run, [])
    assert "k-NN: accuracy" in capfd.readouterr().err
    found = json.loads(path.read_text())
    assert path.name == "knn.json" and found["evaluation"] == "k-NN"
    assert set(found["baselines"]) == {"raw", "untrained"}
    assert found["evaluations"][0]["probe"]["setting"]["neighbours"] >= 1
    assert found["evaluations"][0]["probe"]["test_items"] == 60
    knn_run(run, [])
    assert "k-NN" not in capfd.readouterr().err
    with pytest.raises(ConfigError, match="mean, axis or class"):
        knn_run(run, ["probe.pool=attentive"])


def test_a_probe_may_change_how_data_is_seen_but_not_the_network(run: Path) -> None:
    assert "evaluation" not in json.loads(probe_run(run, []).read_text())
    again = json.loads(probe_run(run, ["data.views=3", "probe.items=30"]).read_text())
    assert again["protocol"]["views"] == 3
    assert again["evaluations"][0]["probe"]["train_items"] == 30
    with pytest.raises(ConfigError, match="a probe cannot change this"):
        probe_run(run, ["audio.sample_rate=8000"])


def test_what_the_run_measured_by_the_same_protocol_is_taken_over(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = json.loads((run / "results.json").read_text())
    monkeypatch.setattr(probe_command, "Evaluator", lambda *given, **named: lambda *nets: pytest.fail("measured again"))
    assert json.loads(probe_run(run, []).read_text())["evaluations"] == known["evaluations"]
