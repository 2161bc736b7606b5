"""ONNX in onnxruntime and torch.export programs against the model they were made of, for three kinds of input."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import SMALL

from bridle.config import load_config
from bridle.data.audio.logmel import LogMelGraph
from bridle.data.audio.modality import front_end
from bridle.errors import UsageError
from bridle.export import onnx
from bridle.export.onnx import export_model, graphs_of
from bridle.export.trained import Trained, facts_of_nets
from bridle.infer.model import Model
from bridle.models.build import build_cold_start, build_encoder, build_vit_tokenizer
from bridle.models.measure import measure_inputs
from bridle.models.tokenizer import Tokenizer
from bridle.seeding import generator

onnxruntime = pytest.importorskip("onnxruntime", reason="needs the extra `export`")

KINDS = {
    "image": ["geometry.input=[16, 16]", "geometry.patch=[4, 4]", "data.mean=[0.4, 0.5, 0.6]"],
    "audio": ["geometry.input=[64, 32]", "geometry.patch=[16, 16]", "data.mean=[-4.0]"],
    "video": ["geometry.input=[4, 16, 16]", "geometry.patch=[2, 8, 8]", "data.mean=[0.5]", "mask.ratio=0.5"],
}


def model_of(kind: str, *more: str, cold: bool = False) -> Model:
    """Random networks with codebooks started on random inputs."""
    std = {"image": "data.std=[0.2, 0.3, 0.2]", "audio": "data.std=[8.0]", "video": "data.std=[0.25]"}[kind]
    short = [text for text in SMALL if "warmup" not in text]
    white = ["encoder.whiten=0.1", "encoder.stem=20", "tokenizer.whiten=0.5"]
    config = load_config(kind, [*short, *KINDS[kind], std, *white, "encoder.class_token=true", *more])
    encoder = build_encoder(config)
    tokenizer: Tokenizer = build_cold_start(config) if cold else build_vit_tokenizer(config, iteration=2)
    x = torch.randn(24, *config.geometry.build().shape, generator=generator("start"))
    measure_inputs(encoder.embed, [(x.cumsum(-1), None)], generator("stem"))  # neighbours alike, as in real data
    with torch.no_grad():
        tokenizer.take_from(encoder)
        if tokenizer.measures:
            tokenizer.measure([(x.cumsum(-1), None)], generator("rotation"))
        tokenizer.quantizer.start_codebooks(tokenizer.encode(x), generator=generator("books"))
    trained = Trained(encoder, tokenizer, config, facts_of_nets(tokenizer))
    return Model(trained, config, device=torch.device("cpu"))


def inputs_of(model: Model, batch: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    x = torch.randn(batch, *model.geometry.shape, generator=generator("x", batch))
    x = x * model.std.view(-1, *(1,) * model.geometry.rank) + model.mean.view(-1, *(1,) * model.geometry.rank)
    if model.config.data.source == "images":
        return x, None
    valid = torch.ones(batch, model.geometry.tokens, dtype=torch.bool)
    valid[-1, model.geometry.tokens // 2 :] = False
    return x, valid


def test_a_graph_with_the_front_end_gives_what_the_model_gives_for_log_mel_features(tmp_path: Path) -> None:
    model = model_of("audio")
    front = front_end(model.config)
    waveform = 0.1 * torch.randn(2, front.window + 63 * front.shift, generator=generator("wave"))
    x, valid = front(waveform)[:, None], torch.ones(2, model.geometry.tokens, dtype=torch.bool)
    assert x.shape[1:] == model.geometry.shape
    assert (LogMelGraph(front)(waveform) - x[:, 0]).abs().max() < 1e-3
    export_model(model.trained(), tmp_path / "e", onnx=True, waveform=True)
    session = onnxruntime.InferenceSession(tmp_path / "e" / "encoder.onnx", providers=["CPUExecutionProvider"])
    (z,) = session.run(["features"], {"waveform": waveform.numpy(), "valid": valid.numpy()})
    assert np.abs(z - model.encode(x, valid=valid).numpy()).max() < 1e-3


def test_a_front_end_is_refused_where_there_is_no_waveform_or_no_graph(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--waveform: this model reads images"):
        export_model(model_of("image").trained(), tmp_path / "e", onnx=True, waveform=True)
    with pytest.raises(UsageError, match=r"--waveform is for graphs"):
        export_model(model_of("audio").trained(), tmp_path / "e", waveform=True)


@pytest.mark.parametrize("kind", ["image", "audio", "video"])
def test_onnx_gives_what_the_model_gives_for_any_batch(kind: str, tmp_path: Path) -> None:
    model = model_of(kind)
    files = export_model(model.trained(), tmp_path / "e", onnx=True)
    assert {"encoder.onnx", "tokenizer.onnx"} <= set(files)
    sessions = {
        name: onnxruntime.InferenceSession(tmp_path / "e" / f"{name}.onnx", providers=["CPUExecutionProvider"])
        for name in ("encoder", "tokenizer")
    }
    for batch in (1, 3):
        x, valid = inputs_of(model, batch)
        fed = {"x": x.numpy()} | ({} if valid is None else {"valid": valid.numpy()})
        (z,) = sessions["encoder"].run(["features"], fed)
        (codes,) = sessions["tokenizer"].run(["codes"], fed)
        real = np.ones(z.shape[:2], dtype=bool) if valid is None else valid.numpy()
        assert np.abs(z - model.encode(x, valid=valid).numpy())[real].max() < 1e-4
        assert (codes == model.tokenize(x, valid=valid).numpy())[real].mean() >= 0.999
    card = (tmp_path / "e" / "README.md").read_text()
    assert "`encoder.onnx`: features within" in card


@pytest.mark.parametrize("standardise", ["dataset", "item"])
def test_programs_are_read_back_and_only_codes_at_an_items_level_need_padding(standardise: str, tmp_path: Path) -> None:
    model = model_of("audio", f"tokenizer.standardise={standardise}", cold=True)
    export_model(model.trained(), tmp_path / "e", program=True)
    x, valid = inputs_of(model, 5)
    encoder = torch.export.load(tmp_path / "e" / "encoder.pt2").module()
    assert torch.allclose(encoder(x, valid), model.encode(x, valid=valid), atol=1e-6)
    tokenizer = torch.export.load(tmp_path / "e" / "tokenizer.pt2").module()
    given = (x, valid) if standardise == "item" else (x,)
    assert torch.equal(tokenizer(*given), model.tokenize(x, valid=valid))


def test_a_graph_that_disagrees_is_not_written() -> None:
    encoder, tokenizer = graphs_of(model_of("image").trained())
    with torch.no_grad():
        good = onnx.compare(encoder, lambda inputs: encoder(*inputs) + 5e-5)
        assert good == "features within 5.0e-05 of torch, batches of 1 and 3"
        with pytest.raises(UsageError, match=r"differs from torch by 2\.0e-04"):
            onnx.compare(encoder, lambda inputs: encoder(*inputs) + 2e-4)
        with pytest.raises(UsageError, match="of the exported tokenizer's codes"):
            onnx.compare(tokenizer, lambda inputs: tokenizer(*inputs).flip(-1))


def test_what_is_missing_is_told_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(UsageError, match=r'pip install "bridle\[export\]"'):
        export_model(model_of("image").trained(), tmp_path / "e", onnx=True)
    assert not (tmp_path / "e").exists()
