"""The stem inside a run: measured once, shared by all encoders, kept by exports, scored alone beside the blocks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import bridle
from bridle import api
from bridle.config import Config, load_config
from bridle.errors import ConfigError, UsageError
from bridle.evaluate.finetune import finetune_run
from bridle.evaluate.verdict import judge_results
from bridle.models.build import build_encoder
from bridle.models.vit_weights import load_vit
from bridle.runs.checkpoint import load as load_checkpoint
from bridle.runs.results import read_results
from bridle.seeding import generator

Small = Callable[..., Config]
STEM = ["encoder.stem=12", "schedule.iterations=1"]


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    last = sorted((folder / "checkpoints").iterdir())[-1]
    return dict(load_checkpoint(last).group("model"))


def test_every_encoder_of_a_run_has_the_same_stem_and_it_never_trains(small: Small, tmp_path: Path) -> None:
    config = small(*STEM, "probe.enabled=false", "schedule.encoder_restart=fresh", "schedule.iterations=2")
    api.pretrain(config, out=tmp_path / "run")
    api.pretrain(config.model_copy(update={"max_steps": 1}), out=tmp_path / "short")
    found, short = tensors(tmp_path / "run"), tensors(tmp_path / "short")
    for name in ("mean", "whitening", "centres", "offset", "scale"):
        own = found[f"encoder.embed.stem.{name}"]
        assert torch.equal(own, found[f"tokenizer.encoder.embed.stem.{name}"])
        assert torch.equal(own, short[f"encoder.embed.stem.{name}"])
        assert own.any()


@pytest.mark.parametrize("settings", [["loss.target=patches"], ["schedule.mode=joint"]])
def test_patch_targets_and_joint_training_have_a_stem_too(small: Small, tmp_path: Path, settings: list[str]) -> None:
    api.pretrain(small(*STEM, "probe.enabled=false", *settings), out=tmp_path / "run")
    assert tensors(tmp_path / "run")["encoder.embed.stem.centres"].any()


def test_every_block_is_read_with_the_stem_which_is_scored_alone_beside_it(small: Small, tmp_path: Path) -> None:
    settings = ["probe.items=200", "probe.layer=all", "probe.deviation=true", "probe.shots=[2]"]
    config = small(*STEM, *settings)
    api.pretrain(config, out=tmp_path / "run")
    results = read_results(tmp_path / "run" / "results.json")
    assert list(results.baselines) == ["raw", "untrained", "stem"]
    verdict = judge_results(results)
    assert verdict is not None and "its stem alone" in verdict.text
    model = bridle.load(tmp_path / "run", device="cpu")
    x = torch.rand(3, 1, 16, 16, generator=generator("x"))
    every, stem = (model.encode(x, layers=layer, pool="mean", deviation=True) for layer in ("all", "stem"))
    assert every.shape == (3, 2 * 12 + 3 * 2 * 16) and torch.equal(every[:, :24], stem)
    assert model.encode(x, layers="stem").shape == (3, 64, 12)
    api.pretrain(config.model_copy(update={"seed": 1}), out=tmp_path / "other")
    with pytest.raises(UsageError, match="trained without"):
        bridle.load("digits-tiny", device="cpu").encode(x, layers="stem", pool="mean")


def test_the_stem_alone_scores_as_a_probe_of_it_does(small: Small, tmp_path: Path) -> None:
    settings = ["probe.items=200", "probe.deviation=true"]
    run = api.pretrain(small(*STEM, *settings, "probe.layer=all"), out=tmp_path / "run")
    alone = read_results(tmp_path / "run" / "results.json").baselines["stem"]
    probed = run.probe("probe.layer=stem").evaluations[-1].scores
    assert probed is not None and probed.main == alone.main


def test_an_export_and_weights_taken_from_it_keep_the_stem(small: Small, tmp_path: Path) -> None:
    api.pretrain(small(*STEM, "probe.enabled=false"), out=tmp_path / "run")
    model = bridle.load(tmp_path / "run", device="cpu")
    model.save_pretrained(tmp_path / "exported")
    x = torch.rand(3, 1, 16, 16, generator=generator("x"))
    again = bridle.load(tmp_path / "exported", device="cpu")
    assert torch.equal(again.encode(x), model.encode(x))
    begun = build_encoder(small(f"encoder.weights={tmp_path / 'exported'}", *STEM)).eval()
    started = load_vit(begun, tmp_path / "exported")
    assert not any("stem" in name for name in (*started.unused, *started.missing))
    with torch.no_grad():
        assert torch.allclose(begun((x - model.mean) / model.std).z, model.encode(x), atol=1e-5)
    with pytest.raises(ConfigError, match=r"a stem of 12 centres; give encoder\.stem=12"):
        load_vit(build_encoder(small(f"encoder.weights={tmp_path / 'exported'}")), tmp_path / "exported")


def test_weights_without_a_stem_are_not_changed_by_one(small: Small, tmp_path: Path) -> None:
    api.pretrain(small("schedule.iterations=1", "probe.enabled=false"), out=tmp_path / "run")
    model = bridle.load(tmp_path / "run", device="cpu")
    model.save_pretrained(tmp_path / "exported")
    run = api.pretrain(
        small(*STEM, f"encoder.weights={tmp_path / 'exported'}", "probe.enabled=false", "max_steps=1"),
        out=tmp_path / "next",
    )
    start = load_vit(build_encoder(small(*STEM)), tmp_path / "exported")
    assert "it has no stem: ours adds nothing at first" in start.notes
    assert tensors(run.folder)["encoder.embed.stem.centres"].any()


def test_training_from_scratch_on_labels_has_a_stem(small: Small, tmp_path: Path) -> None:
    api.pretrain(small(*STEM, "probe.enabled=false"), out=tmp_path / "run")
    finetune_run(tmp_path / "run", ["finetune.from_scratch=true", "finetune.steps=1"])
    model = bridle.load(tmp_path / "run", device="cpu")
    assert model.encoder.embed.stem is not None
    assert np.isfinite(model.encoder.embed.stem.centres.numpy()).all()


def test_reading_the_stem_needs_one() -> None:
    with pytest.raises(ConfigError, match=r"probe\.layer: 'stem' needs encoder\.stem"):
        load_config("digits-tiny", ["probe.layer=stem"])
