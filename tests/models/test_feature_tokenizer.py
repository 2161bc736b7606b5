"""A tokenizer without a network of its own: the encoder's features, centred per position, whitened, quantized."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import bridle
from bridle import api
from bridle.config import Config
from bridle.models.build import build_encoder, build_feature_tokenizer
from bridle.runs.checkpoint import checkpoint_folders
from bridle.runs.checkpoint import load as load_checkpoint
from bridle.seeding import generator

Small = Callable[..., Config]
FEATURES = ["tokenizer.later=features", "schedule.iterations=2", "probe.enabled=false"]


@pytest.mark.parametrize("block", [1, 2])
def test_latents_keep_the_distances_that_numpy_gives(small: Small, block: int) -> None:
    config = small(f"loss.teacher_block={block}", "tokenizer.whiten=0.5")
    encoder, x = build_encoder(config).eval(), torch.randn(30, 1, 16, 16, generator=generator("x"))
    valid = torch.rand(30, 64, generator=generator("valid")) > 0.2
    tokenizer = build_feature_tokenizer(config, iteration=2).eval()
    tokenizer.take_from(encoder)
    tokenizer.measure([(x[:11], valid[:11]), (x[11:], valid[11:])], generator("measure"))
    with torch.no_grad():
        (z,) = (found.z.double() for found in encoder.layers(x, wanted=[block], valid=valid))
    if block < encoder.depth:  # without weights
        z = (z - z.mean(-1, keepdim=True)) / (z.var(-1, correction=0, keepdim=True) + 1e-5).sqrt()
    mean = (z * valid[..., None]).sum(0) / valid.sum(0)[:, None]
    away = (z - mean)[valid].numpy()
    values, vectors = np.linalg.eigh(away.T @ away / len(away))
    wanted = away @ vectors[:, ::-1][:, :8] / values[::-1][:8] ** 0.25
    found = tokenizer.encode(x, valid=valid)[valid].detach().double().numpy()
    assert found.shape[1] == 8
    apart = [np.linalg.norm(a[:60, None] - a[None, :60], axis=-1) for a in (found, wanted)]
    np.testing.assert_allclose(*apart, atol=2e-3)


@pytest.mark.parametrize("restart", ["continue", "fresh"])
def test_the_second_iteration_quantizes_the_first_one_s_encoder(small: Small, tmp_path: Path, restart: str) -> None:
    api.pretrain(small(*FEATURES, f"schedule.encoder_restart={restart}"), out=tmp_path / "run")
    ends = [path for path in checkpoint_folders(tmp_path / "run" / "checkpoints") if path.name.endswith("-end")]
    assert [path.name.split("-", 1)[1].rsplit("-", 2)[0] for path in ends] == ["iter1-encoder", "iter2-encoder"]
    first, second = (load_checkpoint(path).group("model") for path in ends)
    for name, value in first.items():
        if name.startswith("encoder."):
            assert torch.equal(second[f"tokenizer.{name}"], value)
    assert not any(name.startswith("estimator.") for name in second)
    codes = [value for name, value in second.items() if "tokenizer.quantizer" in name and name.endswith("code")]
    assert all(value.abs().sum() > 0 for value in codes)


def test_it_is_resumed_loaded_and_exported_like_any_other(small: Small, tmp_path: Path) -> None:
    config = small(*FEATURES, "runtime.checkpoint_every=2")
    api.pretrain(config, out=tmp_path / "run")
    model = bridle.load(tmp_path / "run", device="cpu")
    model.save_pretrained(tmp_path / "exported")
    x = torch.rand(3, 1, 16, 16, generator=generator("x"))
    assert torch.equal(bridle.load(tmp_path / "exported", device="cpu").tokenize(x), model.tokenize(x))
    last = checkpoint_folders(tmp_path / "run" / "checkpoints")[-1]
    for file in sorted(last.iterdir()):
        file.unlink()
    last.rmdir()  # the run goes on from inside the second iteration
    api.pretrain(config, out=tmp_path / "run")
    assert torch.equal(bridle.load(tmp_path / "run", device="cpu").encode(x), model.encode(x))


def test_codebooks_of_a_trained_tokenizer_may_be_solved_again(small: Small, tmp_path: Path) -> None:
    energies = []
    for restart in ("false", "true"):
        config = small(f"quantizer.restart={restart}", "schedule.iterations=2", "probe.enabled=false", steps=8)
        model = api.pretrain(config, out=tmp_path / restart).load(device="cpu")
        data = api.open_data(config).train
        x = torch.stack([data.load(i, None).x for i in range(64)])
        tokenizer = model.tokenizer
        with torch.no_grad():
            found = tokenizer.quantizer(tokenizer.encode((x - model.mean) / model.std))
        energies.append(float(found.energy[1]))
    assert energies[1] < energies[0]
