"""A model as people use it: one vector per file, pooled as its probe pools; bytes, open files and waveforms."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from small_models import SIZES, build_model, signal_model, write_signal

import bridle
from bridle.config import load_config
from bridle.console import ProgressLine
from bridle.errors import UsageError
from bridle.infer.feature_spec import FeatureSpec
from bridle.infer.model import Model
from bridle.infer.write import embed_inputs
from bridle.seeding import generator

PROBE = ("probe.pool=axis", "probe.axis=0", "probe.deviation=true", "probe.layer=2")


@pytest.fixture(scope="module")
def listener() -> Model:
    """A model of recordings: 16 kHz, 64 frames of 32 bands in patches of 16 × 16."""
    shape = ("geometry.input=[64, 32]", "geometry.patch=[16, 16]", "quantizer.codes=16")
    return build_model(load_config("audio", [*SIZES, *shape]))


def test_a_vector_of_an_array_is_what_the_probe_sees() -> None:
    model = signal_model("probe.pool=mean", "probe.deviation=true", "probe.layer=2")
    x = torch.randn(3, 2, 12, generator=generator("embed"))
    z = model.encode(x, layers=2).numpy()  # (3, 4, 8)
    expected = np.concatenate([z.mean(1), z.std(1)], axis=1)
    np.testing.assert_allclose(model.embed(x), expected, atol=1e-6)
    np.testing.assert_allclose(model.embed(x[0]), expected[0], atol=1e-6)


def test_every_block_is_embedded_where_the_probe_read_every_block(tmp_path: Path) -> None:
    model = signal_model("probe.pool=mean", "probe.deviation=true", "probe.layer=all")
    x = torch.randn(3, 2, 12, generator=generator("embed"))
    encoder = model.encoder
    embedded = encoder.embed((x - model.mean) / model.std) + encoder.position
    blocks = [embedded, *(model.encode(x, layers=n) for n in (1, 2, 3))]  # (3, 4, 8) each
    expected = torch.cat([part for z in blocks for part in (z.mean(1), z.std(1, correction=0))], dim=1)
    np.testing.assert_allclose(model.embed(x), expected, atol=1e-6)
    write_signal(tmp_path / "a.npy", 12)
    assert model.embed(tmp_path / "a.npy").shape == (4 * 2 * 8,)
    with pytest.raises(UsageError, match="needs pooled features"):
        model.encode_file(tmp_path / "a.npy", layer="all")


def test_a_long_file_is_pooled_window_by_window_weighted_by_real_tokens(tmp_path: Path) -> None:
    model = signal_model(*PROBE)
    write_signal(tmp_path / "a.npy", 17)  # 4 tokens, then 2
    z = model.encode_file(tmp_path / "a.npy", layer=2).z
    means = [(z[0] + z[4]) / 2, (z[1] + z[5]) / 2, z[2], z[3]]
    expected = np.concatenate([*means, np.zeros(4 * 8)])  # one token at a position deviates from nothing
    np.testing.assert_allclose(model.embed(tmp_path / "a.npy"), expected, atol=1e-6)
    plain = signal_model("probe.deviation=true", "probe.layer=null").embed(tmp_path / "a.npy")
    z = signal_model().encode_file(tmp_path / "a.npy").z
    np.testing.assert_allclose(plain[:8], z.mean(0), atol=1e-6)
    np.testing.assert_allclose(plain[8:], (4 * z[:4].std(0) + 2 * z[4:].std(0)) / 6, atol=1e-6)


def test_paths_bytes_and_open_files_give_the_same(tmp_path: Path) -> None:
    model = signal_model("probe.deviation=false", "probe.layer=null")
    for name in ("a.npy", "b.npy"):
        write_signal(tmp_path / name, 24)
    paths = [tmp_path / "a.npy", tmp_path / "b.npy"]
    expected = np.stack([model.encode_file(path, pool="mean").z for path in paths])
    with paths[0].open("rb") as opened:
        found = model.embed([opened, paths[1].read_bytes()])
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(model.embed([str(path) for path in paths]), expected)
    np.testing.assert_array_equal(model.embed(io.BytesIO(paths[0].read_bytes())), expected[0])
    codes = model.tokenize_file(paths[0].read_bytes()).codes
    np.testing.assert_array_equal(codes, model.tokenize_file(paths[0]).codes)
    assert model.embed([]).shape == (0, 8)
    with pytest.raises(UsageError, match="expected a path, bytes or an open binary file, got int"):
        model.embed([7])  # type: ignore[list-item]


@pytest.mark.parametrize("rate", [16_000, 8_000])
def test_a_waveform_gives_what_its_file_gives(listener: Model, tmp_path: Path, rate: int) -> None:
    wave = 0.1 * np.random.default_rng(0).standard_normal((2, rate)).astype(np.float32)
    soundfile.write(tmp_path / "a.wav", wave.T, rate, subtype="FLOAT")
    from_file = listener.encode_file(tmp_path / "a.wav")
    found = listener.encode_waveform(wave, rate)
    np.testing.assert_array_equal(found.z, from_file.z)
    np.testing.assert_array_equal(found.times, from_file.times)
    mono = listener.tokenize_waveform(torch.from_numpy(wave.mean(0)), rate)
    np.testing.assert_array_equal(mono.codes, listener.tokenize_file(tmp_path / "a.wav").codes)


def test_sixteen_bit_samples_are_shares_of_their_range(listener: Model) -> None:
    wave = (8_000 * np.sin(np.arange(16_000) / 20)).astype(np.int16)
    found, shares = listener.encode_waveform(wave, 16_000), listener.encode_waveform(wave / 32_768, 16_000)
    np.testing.assert_allclose(found.z, shares.z, atol=1e-6)


def test_a_model_that_reads_no_recordings_refuses_a_waveform(listener: Model) -> None:
    with pytest.raises(UsageError, match=r"reads \.npy .*files, not recordings"):
        signal_model().encode_waveform(np.zeros(16_000), 16_000)
    with pytest.raises(UsageError, match=r"\(N,\) or \(channels, N\)"):
        listener.encode_waveform(np.zeros((2, 2, 2)), 16_000)


def test_written_features_are_those_of_the_probe_and_others_come_with_a_note(tmp_path: Path) -> None:
    model = signal_model(*PROBE)
    write_signal(tmp_path / "a.npy", 12)

    def embed(name: str, spec: FeatureSpec | None) -> str:
        said = io.StringIO()
        embed_inputs(model, [str(tmp_path / "a.npy")], tmp_path / name, spec=spec, progress=ProgressLine(said))
        return said.getvalue()

    assert "note:" not in embed("probe.npz", None)
    stored = bridle.read_features(tmp_path / "probe.npz")
    header = stored.header
    assert (header.layer, header.pool, header.axis, header.deviation) == (2, "axis", 0, True)
    ((_, found),) = stored
    np.testing.assert_array_equal(found.z, model.embed(tmp_path / "a.npy"))
    said = embed("mean.npz", FeatureSpec(pool="mean"))
    assert "the mean over tokens of the last block" in said
    assert "this run's probe uses means along grid axis 0 and standard deviations of block 2" in said
    assert "note:" not in embed("tokens.npz", FeatureSpec())


def test_a_model_shows_itself_on_a_screen(listener: Model) -> None:
    lines = repr(listener).splitlines()
    assert len(lines) == 5
    assert max(map(len, lines)) < 100
    assert "1 × 64×32, patches 16×16: 8 tokens" in lines[1]
    assert "16 × 16" in lines[3]


def test_the_public_names_are_listed() -> None:
    assert dir(bridle) == sorted(bridle.__all__)
    assert all(hasattr(bridle, name) for name in dir(bridle))
