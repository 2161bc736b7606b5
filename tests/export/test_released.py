"""Every model that comes with the package: its card, and the same features and codes by ONNX and by transformers."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from transformers import AutoModel

import bridle
from bridle.data.loading.loader import normalise
from bridle.export.hub import find_model, released_names
from bridle.export.onnx import export_model
from bridle.infer.model import Model
from bridle.seeding import generator

MODALITIES = {"digits-tiny": "digits", "scenes-tiny": "audio", "pictures-tiny": "images", "clips-tiny": "video"}
LARGEST = 10_000_000  # bytes of the wheel, all together


def test_there_is_a_model_for_every_modality_and_together_they_are_small(tmp_path: Path) -> None:
    sources = {name: bridle.load(name).config.data.source for name in released_names()}
    assert sources == MODALITIES
    with zipfile.ZipFile(packed := tmp_path / "packed.zip", "w", zipfile.ZIP_DEFLATED) as wheel:
        for path in (path for name in sources for path in find_model(name).iterdir()):
            wheel.write(path, f"{path.parent.name}/{path.name}")
    assert packed.stat().st_size < LARGEST


@pytest.fixture(scope="module", params=MODALITIES)
def released(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Model, Path]:
    """A model, and its folder with graphs and what transformers needs."""
    model, folder = bridle.load(request.param, device="cpu"), tmp_path_factory.mktemp(request.param) / "model"
    export_model(model.trained(), folder, onnx=True, auto=True)
    return model, folder


def inputs_of(model: Model) -> tuple[torch.Tensor, torch.Tensor]:
    """Two smooth inputs in the units of the data, and which of their tokens are no padding: all."""
    x = torch.randn(2, *model.geometry.shape, generator=generator("released")).cumsum(-1)
    shape = (-1, *(1,) * model.geometry.rank)
    return 0.2 * x * model.std.view(shape) + model.mean.view(shape), torch.ones(2, model.geometry.tokens).bool()


def test_onnxruntime_gives_the_features_and_codes_of_bridle(released: tuple[Model, Path]) -> None:
    model, folder = released
    x, valid = inputs_of(model)
    found = []
    for graph, output in (("encoder", "features"), ("tokenizer", "codes")):
        session = onnxruntime.InferenceSession(folder / f"{graph}.onnx", providers=["CPUExecutionProvider"])
        given = {"x": x.numpy(), "valid": valid.numpy()}
        found += session.run([output], {one.name: given[one.name] for one in session.get_inputs()})
    assert np.abs(found[0] - model.encode(x).numpy()).max() < 1e-4
    assert (found[1] == model.tokenize(x).numpy()).mean() >= 0.999


@torch.no_grad()
def test_transformers_gives_the_features_and_codes_of_bridle(
    released: tuple[Model, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    model, folder = released
    x, _ = inputs_of(model)
    loaded: Any = AutoModel.from_pretrained(folder, trust_remote_code=True)
    found = loaded(normalise(x, mean=model.mean, std=model.std))  # as the processor does
    torch.testing.assert_close(found.last_hidden_state, model.encode(x), rtol=0, atol=1e-5)
    assert torch.equal(found.codes, model.tokenize(x))


@pytest.mark.parametrize("name", sorted(MODALITIES))
def test_a_card_names_data_licence_and_scores_beside_the_baselines(name: str) -> None:
    card = (find_model(name) / "README.md").read_text(encoding="utf-8")
    assert all(text in card for text in ("trained on", "licence of the data", "| raw ", "| untrained encoder |"))
    assert card.count(" % ") >= 4
