"""Features on disk: found again only for the same model and data, checked, bounded, and never in the way."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import SMALL
from PIL import Image

from bridle import api
from bridle.config import load_config
from bridle.data.arrays.memory import TensorSource
from bridle.data.build import open_data
from bridle.data.digests import data_digest, splits_digest
from bridle.data.sources import Splits
from bridle.data.subset import subset_of
from bridle.evaluate import collector
from bridle.evaluate.feature_cache import FeatureCache, make_key, weights_digest
from bridle.evaluate.features import Features
from bridle.evaluate.finetune import finetune_run
from bridle.evaluate.probe_command import knn_run, probe_run
from bridle.runs.results import read_results


def features(number: float, items: int = 4) -> Features:
    return Features(np.full((items, 3), number, dtype=np.float32), np.arange(items))


@pytest.fixture
def told() -> list[str]:
    return []


@pytest.fixture
def cache(tmp_path: Path, told: list[str]) -> FeatureCache:
    return FeatureCache(tmp_path / "cache", limit=10_000, tell=told.append)


def never() -> Features:
    pytest.fail("computed again")


def test_what_was_made_once_is_read_the_next_time(cache: FeatureCache, told: list[str]) -> None:
    made = features(1.0)._replace(valid=np.ones((4, 2), dtype=bool))
    assert cache.get("a", lambda: made) is made
    found = cache.get("a", never)
    np.testing.assert_array_equal(found.x, made.x)
    np.testing.assert_array_equal(found.y, made.y)
    assert found.valid is not None and found.valid.dtype == bool
    assert cache.get("b", lambda: features(2.0)).x[0, 0] == 2.0
    assert told == []


def test_a_file_that_may_only_be_read_is_used_all_the_same(
    cache: FeatureCache, told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(1, "Operation not permitted")

    cache.get("a", lambda: features(1.0))
    monkeypatch.setattr(os, "utime", refuse)
    assert cache.get("a", never).x[0, 0] == 1.0
    assert told == []


def test_a_changed_bit_anywhere_is_noticed_and_the_features_are_made_again(
    cache: FeatureCache, told: list[str]
) -> None:
    cache.get("a", lambda: features(1.0))
    (path,) = cache.folder.iterdir()
    whole = path.read_bytes()
    for place in range(0, len(whole), 7):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        assert cache.get("a", lambda: features(1.0)).x[0, 0] == 1.0
        if told:  # else a space of the header: nothing that counts
            assert "damaged" in told[-1] and "computed again" in told[-1]
            assert path.read_bytes() == whole
    assert len(told) > len(whole) // 10
    path.write_bytes(whole[: len(whole) // 2])
    cache.get("a", lambda: features(1.0))
    assert path.read_bytes() == whole


def test_what_was_used_longest_ago_goes_first(cache: FeatureCache) -> None:
    cache.limit = 4000
    for name, age in (("old", 30), ("used", 20), ("new", 10)):
        cache.get(name, lambda: features(1.0, 40))
        os.utime(cache.folder / f"{name}.safetensors", (1e9 - age, 1e9 - age))
    cache.get("old", never)  # now the youngest
    cache.get("more", lambda: features(1.0, 40))
    assert sorted(path.stem for path in cache.folder.iterdir()) == ["more", "new", "old"]
    assert sum(path.stat().st_size for path in cache.folder.iterdir()) <= 4000


def test_what_is_too_large_is_used_and_not_kept(cache: FeatureCache, told: list[str]) -> None:
    cache.limit = 10
    assert cache.get("a", lambda: features(1.0)).x.shape == (4, 3)
    assert not cache.folder.exists() and "probe.cache_mb" in told[0]


def test_a_folder_that_cannot_be_written_costs_nothing_but_a_line(cache: FeatureCache, told: list[str]) -> None:
    cache.folder.write_text("a file is in the way")
    assert cache.get("a", lambda: features(1.0)).x.shape == (4, 3)
    assert len(told) == 1 and "cannot be kept" in told[0]


def test_what_a_killed_process_left_behind_is_swept_away(cache: FeatureCache) -> None:
    cache.get("a", lambda: features(1.0))
    left = cache.folder / ".x.safetensors.host.1.tmp"
    left.write_bytes(b"half")
    cache.get("b", lambda: features(1.0))
    assert left.exists()  # it may still be at work
    os.utime(left, (1e9, 1e9))
    cache.get("c", lambda: features(1.0))
    assert not left.exists()


# Keys.


def test_other_weights_have_another_name() -> None:
    network = torch.nn.Linear(3, 2)
    before = weights_digest(network)
    assert weights_digest(network) == before
    with torch.no_grad():
        network.bias[1] += 1e-6
    assert weights_digest(network) != before
    assert make_key({"a": 1, "b": 2}) == make_key({"b": 2, "a": 1}) != make_key({"a": 1, "b": 3})


def test_items_in_memory_are_named_by_their_numbers_and_labels() -> None:
    x = torch.arange(12.0).reshape(6, 2)
    source = TensorSource(x=x, labels=[0, 1] * 3)
    whole = data_digest(source)
    assert data_digest(TensorSource(x=x.clone(), labels=[0, 1] * 3)) == whole
    assert data_digest(TensorSource(x=x + 1, labels=[0, 1] * 3)) != whole
    assert data_digest(TensorSource(x=x, labels=[1, 0] * 3)) != whole
    part = subset_of(subset_of(source, [0, 2, 4]), [1, 2])
    assert data_digest(part) == data_digest(subset_of(source, [2, 4])) != data_digest(subset_of(source, [0, 2]))


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    for name, level in (("dark", 50), ("light", 200)):
        (tmp_path / "data" / name).mkdir(parents=True)
        for i in range(3):
            Image.new("RGB", (32, 32), (level, level, i)).save(tmp_path / "data" / name / f"{i}.png")
    return tmp_path / "data"


def test_files_are_named_by_path_size_and_time(pictures: Path) -> None:
    def digest() -> str | None:
        return data_digest(open_data(load_config("image", [f"data.root={pictures}"])).train)

    before = digest()
    assert before is not None and digest() == before
    file = pictures / "dark" / "1.png"
    status = file.stat()
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    changed = digest()
    assert changed != before
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert digest() == before
    file.rename(pictures / "dark" / "7.png")
    assert digest() not in (before, changed)


def test_a_source_whose_content_is_unknown_is_not_named() -> None:
    class Strange(TensorSource):
        pass

    class Foreign:
        labels, classes = [0, 1], None

        def __len__(self) -> int:
            return 2

    assert data_digest(Strange(x=torch.zeros(2, 1), labels=[0, 1])) is not None
    assert data_digest(Foreign()) is None  # type: ignore[arg-type]


# The commands.


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cached") / "run"
    changes = [*SMALL, "geometry.patch=[4, 4]", "max_steps=2", "schedule.iterations=1", "probe.enabled=false"]
    api.pretrain(load_config("digits-tiny", changes), out=folder)
    return folder


@pytest.fixture
def extracted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A line for every set of items whose features were extracted."""
    lines: list[str] = []
    collect: Callable[..., Features] = collector.collect_features

    def counted(*given: Any, **named: Any) -> Features:
        lines.append("extracted")
        return collect(*given, **named)

    monkeypatch.setattr(collector, "collect_features", counted)
    return lines


def test_a_probe_and_then_neighbours_extract_once(run: Path, tmp_path: Path, extracted: list[str]) -> None:
    run = Path(
        shutil.copytree(run, tmp_path / "run", ignore=shutil.ignore_patterns("cache", "*probe.json", "knn.json"))
    )
    probe_run(run, [])
    assert len(extracted) == 6  # train and test items of raw features, untrained encoder, encoder
    first = (run / "probe.json").read_text()
    knn_run(run, [])
    (run / "probe.json").unlink()
    probe_run(run, [])
    assert len(extracted) == 6
    without_clock = [line for line in first.splitlines() if "seconds" not in line]
    assert [line for line in (run / "probe.json").read_text().splitlines() if "seconds" not in line] == without_clock
    probe_run(run, ["probe.pool=axis"])
    assert len(extracted) == 10  # raw features have no pooling
    knn_run(run, ["probe.cache_mb=0", "probe.axis=1"])
    assert len(extracted) == 16


def test_shots_and_heads_are_scored_beside_the_baselines(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bridle.evaluate.heads.sgd.FEWEST_STEPS", 40)
    found = read_results(probe_run(run, ["probe.shots=[1,3]", "probe.draws=3", "probe.head=sgd"]))
    (entry,) = found.evaluations
    assert entry.probe.setting["learning_rate"] > 0
    for scores in (entry.probe, *found.baselines.values()):
        assert [(few.shots, len(few.draws), few.items) for few in scores.few_shot.values()] == [(1, 3, 10), (3, 3, 30)]
    assert entry.probe.hits.items == entry.probe.test_items
    known = read_results(knn_run(run, [])).evaluations[0].probe
    assert known is not None and 0 < known.further["retrieval mAP"].value <= 1
    assert known.few_shot == {}


# data that changes under a run


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on files of its own, which has probed itself; they are in DATA beside it."""
    folder = tmp_path_factory.mktemp("changing")
    for name, level in (("dark", 50), ("light", 200)):
        (folder / "data" / name).mkdir(parents=True)
        for i in range(8):
            Image.new("RGB", (16, 16), (level, level, i)).save(folder / "data" / name / f"{i}.png")
    changes = [*SMALL, f"data.root={folder / 'data'}", "geometry.input=[16, 16]", "geometry.patch=[4, 4]"]
    changes += ["max_steps=2", "schedule.iterations=1"]
    api.pretrain(load_config("cifar10-tiny", changes), out=folder / "run")
    return folder / "run"


@pytest.mark.parametrize("evaluate", [probe_run, knn_run])
def test_data_that_changed_is_measured_again_and_said_so(
    evaluate: Callable[[Path, list[str]], Path], own: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before = json.loads(evaluate(own, []).read_text())
    capfd.readouterr()
    assert json.loads(evaluate(own, []).read_text()) == before
    assert "prob" not in capfd.readouterr().err  # nothing was measured
    file = next((own.parent / "data" / "dark").glob("*.png"))
    file.rename(own.parent / "data" / "light" / f"once-dark-{file.name}")  # another label
    after = json.loads(evaluate(own, []).read_text())
    said = capfd.readouterr().err
    assert said.count("files or labels of the data have changed since; measuring again.") == 1
    assert "probing" in said
    assert after["protocol"]["data"] != before["protocol"]["data"]
    evaluate(own, [])
    assert "prob" not in capfd.readouterr().err


def test_what_a_run_measured_before_its_data_changed_is_not_taken_over(
    own: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (own / "probe.json").unlink(missing_ok=True)
    Image.new("RGB", (16, 16), (50, 50, 99)).save(own.parent / "data" / "dark" / "new.png")
    probe_run(own, [])
    assert "probing" in capfd.readouterr().err


def test_a_finished_fine_tuning_says_that_its_data_changed(own: Path, capfd: pytest.CaptureFixture[str]) -> None:
    changes = ["finetune.epochs=null", "finetune.steps=1", "finetune.batch=4", "finetune.warmup_epochs=0"]
    before = json.loads(finetune_run(own, changes).read_text())
    finetune_run(own, changes)
    assert "changed" not in capfd.readouterr().err
    Image.new("RGB", (16, 16), (50, 50, 98)).save(own.parent / "data" / "dark" / "newer.png")
    assert json.loads(finetune_run(own, changes).read_text()) == before
    assert "have changed since; delete it to fine-tune again." in capfd.readouterr().err


def test_folds_and_both_splits_name_a_data_set() -> None:
    one, two = (TensorSource(x=torch.full((2, 1), float(v)), labels=[0, 1]) for v in (1, 2))
    known = {splits_digest(Splits(one, test, folds)) for test in (None, one, two) for folds in (None, [0, 1], [1, 0])}
    assert len(known) == 9 and None not in known
