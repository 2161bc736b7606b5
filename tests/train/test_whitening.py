"""Whitening inside a run: what is measured, who takes it over, what checkpoints and exports carry."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import SMALL
from safetensors.torch import load_file

import bridle
from bridle import api, failpoints
from bridle.config import Config, load_config
from bridle.errors import ConfigError
from bridle.evaluate.finetune import finetune_run
from bridle.models.build import build_encoder
from bridle.models.vit_weights import load_vit
from bridle.nn.patch import patchify
from bridle.nn.whiten import PatchMoments
from bridle.runs.checkpoint import load as load_checkpoint
from bridle.seeding import generator

Small = Callable[..., Config]
WHITE = ["encoder.whiten=0.1", "tokenizer.whiten=0.5", "probe.enabled=false"]


def tensors(folder: Path, part: str) -> dict[str, torch.Tensor]:
    """The tensors of a run's last checkpoint whose names contain `part`."""
    last = sorted((folder / "checkpoints").iterdir())[-1]
    return {name: value for name, value in load_checkpoint(last).group("model").items() if part in name}


def test_a_run_measures_its_samples_once_and_all_encoders_share_it(small: Small, tmp_path: Path) -> None:
    config = small(*WHITE, "schedule.encoder_restart=fresh", "schedule.iterations=2")
    api.pretrain(config, out=tmp_path / "run")
    found = tensors(tmp_path / "run", "whitening") | tensors(tmp_path / "run", "embed.mean")
    assert set(found) == {f"{e}.embed.{n}" for e in ("encoder", "tokenizer.encoder") for n in ("mean", "whitening")}
    own = bridle.config.read_config(tmp_path / "run" / "config.yaml")
    moments, data = PatchMoments(4, torch.device("cpu")), api.open_data(own).train
    assert own.data.mean is not None
    assert own.data.std is not None
    for i in range(len(data)):  # 1,437 digits of 64 tokens are more than a measurement takes: near, not equal
        x = (data.load(i, None).x[None] - own.data.mean[0]) / own.data.std[0]
        moments.add(patchify(x, own.geometry.patch), None)
    spectrum = moments.spectrum()
    for encoder in ("encoder", "tokenizer.encoder"):
        assert torch.allclose(found[f"{encoder}.embed.mean"], spectrum.mean.float(), atol=0.02)
        assert torch.allclose(found[f"{encoder}.embed.whitening"], spectrum.whitening(0.1).float(), atol=0.05)
    assert torch.equal(found["encoder.embed.whitening"], found["tokenizer.encoder.embed.whitening"])


@pytest.mark.parametrize("settings", [["loss.target=patches"], ["schedule.mode=joint"]])
def test_patch_targets_and_joint_training_are_whitened_too(small: Small, tmp_path: Path, settings: list[str]) -> None:
    config = small("encoder.whiten=0.1", "probe.enabled=false", "schedule.iterations=1", *settings)
    api.pretrain(config, out=tmp_path / "run")
    for value in tensors(tmp_path / "run", "whitening").values():
        assert (value - torch.eye(4)).abs().max() > 0.1


def test_an_interrupted_measurement_is_redone(small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = small(*WHITE, "schedule.iterations=1")
    api.pretrain(config, out=tmp_path / "whole")
    monkeypatch.setattr(failpoints, "hit", lambda name: exec("raise KeyboardInterrupt") if "kmeans" in name else None)
    with pytest.raises(KeyboardInterrupt):
        api.pretrain(config, out=tmp_path / "broken")
    monkeypatch.undo()
    api.pretrain(config, out=tmp_path / "broken")
    whole, broken = (tensors(tmp_path / name, "") for name in ("whole", "broken"))
    assert all(torch.equal(whole[name], broken[name]) for name in whole)


def test_an_export_and_weights_taken_from_it_give_the_run_s_features(small: Small, tmp_path: Path) -> None:
    api.pretrain(small(*WHITE, "schedule.iterations=1"), out=tmp_path / "run")
    model = bridle.load(tmp_path / "run", device="cpu")
    model.save_pretrained(tmp_path / "exported")
    x = torch.rand(3, 1, 16, 16, generator=generator("x"))
    z = model.encode(x)
    again = bridle.load(tmp_path / "exported", device="cpu")
    assert torch.equal(again.encode(x), z)
    assert torch.equal(again.tokenize(x), model.tokenize(x))
    plain = build_encoder(small(f"encoder.weights={tmp_path / 'exported'}")).eval()
    started = load_vit(plain, tmp_path / "exported")
    assert "its whitening of patches is multiplied into the patch kernel" in started.notes
    assert not any("embed" in name for name in started.unused)
    inputs = (x - model.mean) / model.std
    with torch.no_grad():
        assert torch.allclose(plain(inputs).z, z, atol=1e-4)


def test_the_untrained_baseline_sees_plain_patches(small: Small) -> None:
    x = torch.randn(2, 1, 16, 16, generator=generator("x"))
    plain, ridged = (build_encoder(small(*more)).eval() for more in ([], ["encoder.whiten=0.1"]))
    assert torch.allclose(plain(x).z, ridged(x).z, atol=1e-5)


def test_an_encoder_that_never_was_pretrained_is_whitened_by_its_training_items(small: Small, tmp_path: Path) -> None:
    config = small("encoder.whiten=0.1", "schedule.iterations=1", "probe.enabled=false")
    api.pretrain(config, out=tmp_path / "run")
    finetune_run(tmp_path / "run", ["finetune.from_scratch=true", "finetune.steps=1"])
    (saved,) = (tmp_path / "run" / "finetune").rglob("*-end/model.safetensors")
    found = {name: value for name, value in load_file(saved).items() if "whitening" in name}
    assert set(found) == {"classifier.encoder.embed.whitening"}
    for value in found.values():  # 512 of the items
        assert torch.allclose(value, tensors(tmp_path / "run", "encoder.embed.whitening").popitem()[1], atol=0.3)
        assert (value - torch.eye(4)).abs().max() > 0.3


def test_weights_from_elsewhere_turn_off_a_recipe_s_whitening(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("extends: digits-tiny\nencoder: {whiten: 0.1}\n")
    assert load_config(str(recipe)).encoder.whiten == 0.1
    assert load_config(str(recipe), ["encoder.weights=null"]).encoder.whiten == 0.1
    assert load_config(str(recipe), ["encoder.weights=vit.safetensors"]).encoder.whiten is None


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["encoder.whiten=0.1", "encoder.weights=vit.safetensors"], r"encoder\.whiten: .* add encoder\.whiten=null"),
        (["tokenizer.components=4"], r"tokenizer\.components: needs tokenizer\.whiten"),
        (["tokenizer.whiten=0.5", "tokenizer.components=40"], r"tokenizer\.components: 40 of patches with 16 values"),
        (["encoder.whiten=0"], r"encoder\.whiten: .*greater than 0"),
        (["tokenizer.whiten=2"], r"tokenizer\.whiten: .*less than or equal to 1"),
    ],
)
def test_settings_that_cannot_be_are_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config("digits-tiny", [*SMALL, *overrides])
