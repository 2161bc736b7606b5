"""Folders for transformers: features and codes are those of `bridle.load`. The real package, offline."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from PIL import Image
from small_models import SIZES, build_model
from transformers import AutoFeatureExtractor, AutoImageProcessor, AutoModel, pipeline
from typer.testing import CliRunner
from video_files import write_numbered

import bridle.errors
from bridle.cli import app
from bridle.config import load_config
from bridle.export.onnx import export_model

SHAPES = {
    "audio": ("geometry.input=[16, 32]", "geometry.patch=[4, 8]"),
    "image": ("geometry.channels=3", "geometry.input=[16, 16]", "geometry.patch=[8, 8]"),
    "video": ("geometry.channels=3", "geometry.input=[4, 16, 16]", "geometry.patch=[2, 8, 8]"),
}


@pytest.fixture(scope="module", autouse=True)
def _offline(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path_factory.mktemp("modules")))
        patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        yield


@pytest.fixture(scope="module", params=list(SHAPES))
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A folder for transformers, and a file for its model."""
    place, kind = tmp_path_factory.mktemp(request.param), request.param
    channels = 1 if kind == "audio" else 3
    moments = (f"data.mean={[0.5] * channels}", f"data.std={[2.0] * channels}")
    sizes = [setting for setting in SIZES if not setting.startswith(("data.mean", "data.std"))]
    model = build_model(load_config(kind, [*sizes, *SHAPES[kind], *moments, "decoder.kind=plain"]))
    export_model(model.trained(), place / "model", auto=True)
    random = np.random.default_rng(0)
    if kind == "audio":  # 0.115 s: 10 of 16 frames, so that there is padding
        soundfile.write(place / "a.wav", random.uniform(-0.5, 0.5, 1_840), 16_000)
        return place / "model", place / "a.wav"
    if kind == "image":
        Image.fromarray(random.integers(0, 256, (20, 30, 3)).astype(np.uint8)).save(place / "a.png")
        return place / "model", place / "a.png"
    return place / "model", write_numbered(place / "a.mp4", 20)


def processor_of(folder: Path, **options: Any) -> Any:
    sounds = "feature_extractor_type" in (folder / "preprocessor_config.json").read_text()
    return (AutoFeatureExtractor if sounds else AutoImageProcessor).from_pretrained(folder, **options)


@torch.no_grad()
def test_features_hidden_states_and_codes_are_those_of_bridle(exported: tuple[Path, Path]) -> None:
    folder, file = exported
    own = bridle.load(folder, device="cpu")
    window = next(iter(own.reader.windows(file)))
    valid = None if window.valid is None else window.valid[None]
    for options in ({"trust_remote_code": True}, {"trust_remote_code": False}):
        model = AutoModel.from_pretrained(folder, **options)
        assert isinstance(model, bridle.BridleModel)
        inputs = processor_of(folder, **options)(str(file))
        assert ("attention_mask" in inputs) == (valid is not None)
        found = model(**inputs, output_hidden_states=True)
        real = slice(None) if valid is None else valid[0]
        expected = own.encode(window.x[None], valid=valid)[:, real]
        torch.testing.assert_close(found.last_hidden_state[:, real], expected, rtol=0, atol=1e-5)
        blocks = own.encode(window.x[None], valid=valid, layers=[1, 2, 3])
        assert len(found.hidden_states) == 4
        for state, block in zip(found.hidden_states[1:], blocks, strict=True):
            torch.testing.assert_close(state[:, real], block[:, real], rtol=0, atol=1e-5)
        assert torch.equal(found.codes[:, real], own.tokenize(window.x[None], valid=valid)[:, real])


def test_the_feature_extraction_pipeline_gives_the_features(exported: tuple[Path, Path]) -> None:
    folder, file = exported
    found = pipeline("feature-extraction", model=str(folder), trust_remote_code=True, device="cpu")(str(file))
    window = next(iter((own := bridle.load(folder, device="cpu")).reader.windows(file)))
    valid = None if window.valid is None else window.valid[None]
    expected = own.encode(window.x[None], valid=valid)
    real = slice(None) if valid is None else valid[0]
    torch.testing.assert_close(torch.tensor(found)[:, real], expected[:, real], rtol=0, atol=1e-5)


@torch.no_grad()
def test_a_model_saved_by_transformers_is_the_same_model(exported: tuple[Path, Path], tmp_path: Path) -> None:
    folder, file = exported
    inputs, model = processor_of(folder, trust_remote_code=True)(str(file)), AutoModel.from_pretrained(folder)
    model.save_pretrained(tmp_path / "again")
    again = AutoModel.from_pretrained(tmp_path / "again")
    assert torch.equal(again(**inputs).last_hidden_state, model(**inputs).last_hidden_state)
    assert torch.equal(again(**inputs).codes, model(**inputs).codes)


@pytest.mark.parametrize("exported", ["audio"], indirect=True)
def test_waveforms_are_read_as_files_are(exported: tuple[Path, Path]) -> None:
    folder, file = exported
    processor = processor_of(folder, trust_remote_code=True)
    wave, rate = soundfile.read(file, dtype="float32")
    expected = processor(str(file))
    for given in (processor(wave, sampling_rate=rate), processor({"array": wave, "sampling_rate": rate})):
        torch.testing.assert_close(given["input_values"], expected["input_values"], rtol=0, atol=1e-5)
        assert torch.equal(given["attention_mask"], expected["attention_mask"])
    with pytest.raises(bridle.errors.UsageError, match="sampling_rate"):
        processor(wave)


def test_the_command_names_its_files_and_the_folder_runs_the_code_of_the_guide(tmp_path: Path) -> None:
    out = tmp_path / "digits"
    said = CliRunner().invoke(app, ["export", "digits-tiny", "--out", str(out), "--transformers"])
    assert said.exit_code == 0, said.output
    assert all(name in said.stdout for name in ("modeling_bridle.py", "preprocessor_config.json"))
    page = (Path(__file__).parents[2] / "docs" / "with.md").read_text().partition("\n## transformers\n")[2]
    code = page.partition("```python\n")[2].partition("```")[0].replace("models/digits", str(out))
    code += (
        "print(list(found.last_hidden_state.shape), list(found.codes.shape), torch.tensor(extract('a.png')).shape[1:])"
    )
    Image.fromarray(np.zeros((8, 8), np.uint8)).save(tmp_path / "a.png")
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == "[1, 16, 96] [1, 16, 4] torch.Size([16, 96])", done.stderr
