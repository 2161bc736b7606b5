"""Recordings from folder to numbers: ESC-50's and AudioSet's layouts, made here, through pretraining and evaluation."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import soundfile
from conftest import SMALL

import bridle
from bridle.api import _complete
from bridle.config import load_config
from bridle.console import ProgressLine
from bridle.data.build import open_data
from bridle.data.inspect.statistics import measure_data
from bridle.evaluate.finetune import finetune_run
from bridle.evaluate.probe_command import probe_run
from bridle.runs.results import read_results

RATE = 16_000
MIDS = {"/m/09x0r": "Speech", "/m/0dgbq": "Civil defense siren", "/m/05zppz": "Male speech, man speaking"}
TONES = {"/m/09x0r": 300.0, "/m/0dgbq": 1500.0, "/m/05zppz": 5000.0}
QUICK = (*SMALL, "encoder_phase.warmup_epochs=null", "encoder_phase.epochs=null", "encoder_phase.steps=6",
         "tokenizer_phase.warmup_epochs=null", "tokenizer_phase.epochs=null", "tokenizer_phase.steps=3",
         "data.workers=0", "data.bad_share=0.5", "probe.pool=mean")  # fmt: skip


def tone(hertz: list[float], *, seconds: float, seed: int) -> np.ndarray:
    time = np.arange(int(seconds * RATE)) / RATE
    noise = 0.02 * np.random.default_rng(seed).standard_normal(len(time))
    return (sum(0.2 * np.sin(2 * np.pi * h * time) for h in hertz) + noise).astype(np.float32)


@pytest.fixture
def audioset(tmp_path: Path) -> Path:
    """Three dozen clips in AudioSet's layout, with the lists in their published form; some listed clips are missing."""
    root = tmp_path / "audioset"
    (root / "audio").mkdir(parents=True)
    with (root / "class_labels_indices.csv").open("w", newline="") as file:
        rows = [(i, mid, name) for i, (mid, name) in enumerate(MIDS.items())]
        csv.writer(file).writerows([("index", "mid", "display_name"), *rows])
    for segment, count in (("balanced_train", 24), ("eval", 12)):
        lines = [
            "# Segments csv created for a test",
            f"# num_ytids={count}",
            "# YTID, start_seconds, end_seconds, positive_labels",
        ]
        for i in range(count):
            mids = [mid for bit, mid in enumerate(MIDS) if (i % 7 + 1) >> bit & 1]
            name = f"{segment[:1]}{i:010d}"
            lines.append(f'{name}, 30.000, 40.000, "{",".join(mids)}"')
            if i % 8 != 7:  # no longer to be had
                sound = tone([TONES[mid] for mid in mids], seconds=0.6, seed=i)
                soundfile.write(root / "audio" / f"{name}.wav", sound, RATE)
        (root / f"{segment}_segments.csv").write_text("\n".join(lines) + "\n")
    return root


def test_audioset_layout_runs_through_pretraining_and_map(audioset: Path, tmp_path: Path) -> None:
    geometry = ["geometry.input=[32, 64]", "geometry.patch=[16, 16]", "decoder.window=auto", "probe.items=null"]
    settings = [*QUICK, *geometry, "size=tiny", "encoder.class_token=false", "decoder.depth=1", "decoder.kind=plain"]
    run = bridle.pretrain(
        "audioset20k", out=tmp_path / "run", overrides=[f"data.root={audioset}", *settings, "estimator.depth=1"]
    )
    probe = run.results.evaluations[-1].probe
    assert probe is not None and probe.classes == 3
    assert (probe.train_items, probe.test_items) == (21, 11)  # of 24 and 12 listed
    assert probe.mean_average_precision > probe.chance + 0.1
    assert 0.5 < probe.mean_auc <= 1
    assert run.results.baselines["raw"].mean_average_precision > 0.9  # pure tones


def test_audioset_layout_can_be_fine_tuned_with_several_labels(audioset: Path, tmp_path: Path) -> None:
    settings = [*QUICK, "geometry.input=[32, 64]", "schedule.iterations=1", "probe.enabled=false", "size=tiny"]
    settings += ["encoder.class_token=false", "decoder.depth=1", "estimator.depth=1"]
    run = bridle.pretrain("audioset20k", out=tmp_path / "run", overrides=[f"data.root={audioset}", *settings])
    tuned = ["finetune.epochs=null", "finetune.steps=4", "finetune.warmup_epochs=0", "finetune.batch=6"]
    found = json.loads(finetune_run(run.folder, [*tuned, "finetune.sampling=balanced"]).read_text())
    result = found["evaluations"][0]["finetune"]
    assert result["test_items"] == 11
    assert 0 < result["mean_average_precision"] <= 1


@pytest.fixture
def esc50(tmp_path: Path) -> Path:
    """Thirty clips of three classes in five folds, in ESC-50's layout."""
    root = tmp_path / "ESC-50"
    (root / "audio").mkdir(parents=True)
    (root / "meta").mkdir()
    rows = []
    for i in range(30):
        name, target = f"{i % 5 + 1}-{i}-A-{i % 3}.wav", i % 3
        soundfile.write(root / "audio" / name, tone([(400.0, 1200.0, 4000.0)[target]], seconds=0.7, seed=i), RATE)
        rows.append([name, i % 5 + 1, target, ("low", "middle", "high")[target], "False", i, "A"])
    with (root / "meta" / "esc50.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["filename", "fold", "target", "category", "esc10", "src_file", "take"], *rows])
    return root


def test_esc50_layout_is_scored_over_its_folds_and_reads_files(esc50: Path, tmp_path: Path) -> None:
    settings = [f"data.root={esc50}", *QUICK, "geometry.input=[32, 64]", "schedule.iterations=1"]
    run = bridle.pretrain("esc50-tiny", out=tmp_path / "run", overrides=settings)
    probe = run.results.evaluations[0].probe
    assert probe is not None and len(probe.folds) == 5
    assert probe.accuracy > 0.8  # three tones
    assert probe.sd is not None
    model = run.load()
    found = model.tokenize_file(esc50 / "audio" / "1-0-A-0.wav")
    frames = 1 + (int(0.7 * RATE) - 400) // 160  # 68: two whole windows and 4 frames, too few for a token
    assert found.codes.shape == (frames // 32 * 8, 4)
    assert found.times is not None
    np.testing.assert_allclose(np.unique(found.times), [0.0, 0.16, 0.32, 0.48], atol=1e-6)


def test_a_held_out_fold_is_neither_pretrained_on_nor_trained_on(esc50: Path) -> None:
    splits = open_data(load_config("esc50-tiny", [f"data.root={esc50}", "data.test_fold=2"]))
    assert splits.test is not None
    assert splits.folds is None
    seen = {splits.train.describe(i) for i in range(len(splits.train))}
    held = {splits.test.describe(i) for i in range(len(splits.test))}
    assert len(seen) == 24
    assert all(Path(name).name.startswith("2-") for name in held)
    assert not seen & held


def test_a_damaged_clip_is_put_aside_in_pretraining_and_left_out_of_a_probe(esc50: Path, tmp_path: Path) -> None:
    (esc50 / "audio" / "1-0-A-0.wav").write_text("this is not a sound")
    settings = [f"data.root={esc50}", *QUICK, "geometry.input=[32, 64]", "schedule.iterations=1"]
    run = bridle.pretrain("esc50-tiny", out=tmp_path / "run", overrides=[*settings, "encoder_phase.batch=30"])
    rows = [json.loads(line) for line in (run.folder / "quarantine.jsonl").read_text().splitlines()]
    assert [Path(row["path"]).name for row in rows] == ["1-0-A-0.wav"]
    for results in (run.results, read_results(probe_run(run.folder, []))):
        scores = results.evaluations[0].probe
        assert scores is not None
        assert [Path(name).name for name in scores.left_out] == ["1-0-A-0.wav"]


def test_measured_deviation_counts_twice_as_data_stats_says(esc50: Path, tmp_path: Path) -> None:
    config = load_config("audio", [f"data.root={esc50}", "data.layout=esc50", "data.cache_mb=0"])
    measured = _complete(config, tmp_path / "none", lambda: open_data(config).train, ProgressLine())
    found = measure_data(config)
    assert measured.data.std == found.std == tuple(2 * std for std in found.moments.std)
