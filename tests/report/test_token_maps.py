"""Pictures of tokens: where patches are drawn, which are chosen, and what happens where there is no data."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from PIL import Image
from run_folders import write_run

from bridle.config import Config, load_config
from bridle.data.modality import find_modality
from bridle.geometry import Geometry
from bridle.models.build import build_nets
from bridle.nn.patch import patchify
from bridle.report.sample_pictures import Canvas, code_colors, data_uri, limits_of, sound_uri
from bridle.report.token_maps import gallery_of, stage_distances

Small = Callable[..., Config]
UNIT = (0.0, 1.0)


def opened(uri: str) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(uri.split(",")[1])))


@pytest.mark.parametrize(
    ("kind", "geometry"),
    [
        ("picture", Geometry(channels=1, input=(6, 8), patch=(3, 2))),
        ("frames", Geometry(channels=1, input=(4, 6, 4), patch=(2, 3, 2))),
        ("spectrogram", Geometry(channels=1, input=(6, 8), patch=(3, 2))),
    ],
)
def test_the_box_of_a_token_holds_the_values_of_its_patch(kind: str, geometry: Geometry) -> None:
    # Every token's patch has one value of its own, so its box must hold that value everywhere.
    T = geometry.tokens
    values = torch.arange(T).float() / T
    x = torch.zeros(1, *geometry.shape)
    for place in np.ndindex(*geometry.input):
        cell = [i // p for i, p in zip(place, geometry.patch, strict=True)]
        x[(0, 0, *place)] = values[int(np.ravel_multi_index(cell, geometry.grid))]
    assert torch.equal(patchify(x, geometry.patch)[0, :, 0], values)
    canvas = Canvas(geometry, kind=kind, limits=UNIT)  # type: ignore[arg-type]
    picture = canvas.draw(x[0])
    shades = [np.unique(picture[box].reshape(-1, 4), axis=0) for box in canvas.boxes]
    assert all(len(shade) == 1 for shade in shades)
    light = [int(shade[0, :3].sum()) for shade in shades]
    assert light == sorted(set(light)) and len(light) == T, "brighter from token to token"


def test_a_spectrogram_has_time_to_the_right_and_low_pitches_below() -> None:
    x = torch.zeros(1, 6, 8)
    x[0, 5, 0] = 1.0  # last frame, lowest band
    picture = Canvas(Geometry(channels=1, input=(6, 8), patch=(3, 2)), kind="spectrogram", limits=UNIT).draw(x)
    brightest = np.unravel_index(picture[..., :3].sum(-1).argmax(), picture.shape[:2])
    assert picture.shape == (8, 6, 4) and brightest == (7, 5)


def test_a_line_is_drawn_higher_where_values_are_larger() -> None:
    x = torch.linspace(0, 1, 40)[None]
    canvas = Canvas(Geometry(channels=1, input=(40,), patch=(10,)), kind="line", limits=UNIT)
    rows = canvas.draw(x)[..., 3].argmax(0)
    assert rows[0] > rows[-1] and (np.diff(rows.astype(int)) <= 0).all()
    assert len(canvas.boxes) == 4 and canvas.width == canvas.boxes[-1][1].stop


def test_patches_take_their_colour_and_padding_stays_faint() -> None:
    canvas = Canvas(Geometry(channels=1, input=(2, 4), patch=(2, 2)), kind="picture", limits=UNIT)
    picture = canvas.draw(torch.full((1, 2, 4), 0.0))
    red = np.array([[200, 0, 0], [200, 0, 0]], np.uint8)
    tinted = canvas.tint(picture, red, torch.tensor([True, False]))
    assert tinted[0, 0].tolist() == [110, 0, 0, 255]  # 0.55 of the colour on black
    assert tinted[0, 3].tolist() == [0, 0, 0, 63]
    assert picture[0, 0].tolist() == [0, 0, 0, 255], "the picture itself is not changed"


def test_codes_get_different_colours_always_the_same_and_neighbours_similar_ones() -> None:
    angle = torch.linspace(0, 2 * torch.pi, 33)[:-1]
    vectors = torch.stack([3 * angle.cos(), 2 * angle.sin(), torch.zeros(32)], 1)
    colors = code_colors(vectors)
    assert len(np.unique(colors, axis=0)) == 32 and np.array_equal(colors, code_colors(vectors))
    steps = np.abs(np.diff(colors.astype(int), axis=0)).sum(1)
    assert np.median(steps) < np.abs(colors.astype(int) - np.roll(colors, 16, axis=0)).sum(1).min()


def test_books_of_one_code_or_equal_codes_have_colours_too() -> None:
    assert code_colors(torch.ones(1, 4)).shape == (1, 3) and code_colors(torch.ones(5, 2)).shape == (5, 3)


def test_pictures_are_made_smaller_but_not_larger() -> None:
    big = np.full((300, 200, 4), 255, np.uint8)
    assert opened(data_uri(big, longest=150)).size == (100, 150)
    assert opened(data_uri(big[:8, :8], longest=150)).size == (8, 8)


def test_a_sound_is_a_wav_file_cut_to_the_limit() -> None:
    wave = 0.5 * torch.sin(torch.arange(4000) / 5)
    uri = sound_uri(wave, rate=8000, limit=2044)
    heard, rate = soundfile.read(io.BytesIO(base64.b64decode(uri.split(",")[1])))
    assert uri.startswith("data:audio/wav;base64,") and rate == 8000 and len(heard) == 1000
    np.testing.assert_allclose(heard, wave[:1000].numpy(), atol=1e-4)


def test_limits_are_zero_to_one_only_where_pictures_keep_to_it() -> None:
    assert limits_of(torch.rand(4, 1, 8, 8), "picture") == UNIT
    low, high = limits_of(torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(0)), "picture")
    assert low < -1.5 and high > 1.5
    assert limits_of(torch.zeros(2, 1, 4, 4) - 5, "spectrogram")[1] > -5


def test_inputs_with_four_axes_have_no_picture() -> None:
    geometry = Geometry(channels=1, input=(2, 2, 2, 2), patch=(1, 1, 1, 1))
    assert find_modality("images").drawing_of(geometry) is None


def test_distances_are_those_of_each_stage_to_its_code(small: Small) -> None:
    nets = build_nets(small())
    x = torch.randn(8, 1, 16, 16, generator=torch.Generator().manual_seed(0))
    z_tilde = nets.tokenizer.encode(x)
    nets.tokenizer.quantizer.start_codebooks(z_tilde, generator=torch.Generator().manual_seed(0))
    found = nets.tokenizer.quantizer(z_tilde)
    far = stage_distances(nets.tokenizer.quantizer, z_tilde, found.codes)
    torch.testing.assert_close(far.mean((0, 1)), found.commitment_by_stage.float(), rtol=1e-4, atol=1e-6)


def test_a_run_on_embedded_data_has_maps_codes_and_neighbours(tmp_path: Path, small: Small) -> None:
    run = write_run(tmp_path / "run", small())
    gallery = gallery_of(run)
    assert gallery.note == "" and "360 test samples" in gallery.about and gallery.crisp and not gallery.wide
    assert len(gallery.maps) == 4 and all(len(found.stages) == 4 for found in gallery.maps)
    assert len({found.sample.label for found in gallery.maps}) == 4, "samples of different labels"
    assert opened(gallery.maps[0].sample.picture).size == (16, 16)
    assert len(gallery.codes) == 4 and all(strip.share > 0 for stage in gallery.codes for strip in stage)
    for group in gallery.neighbours:
        scores = [hit.score for hit in group.hits if hit.score is not None]
        assert len(scores) == 5 and scores == sorted(scores, reverse=True)
        assert group.query.name not in [hit.name for hit in group.hits]
        assert [hit.same for hit in group.hits] == [hit.label == group.query.label for hit in group.hits]
    assert gallery == gallery_of(run), "nothing is random"


def test_only_encoder_and_tokenizer_are_built(tmp_path: Path, small: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write_run(tmp_path / "run", small())

    def built(*_: object, **__: object) -> None:
        raise AssertionError("the report needs no decoder")

    for name in ("models.build.build_decoder", "models.build.build_heads", "train.algorithm1.build_nets"):
        monkeypatch.setattr(f"bridle.{name}", built)
    assert gallery_of(run).note == ""


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("sounds")
    random = np.random.default_rng(0)
    for name in ("<b>hum", "hiss"):
        (root / name).mkdir()
        for i in range(8):
            soundfile.write(root / name / f"{i}.wav", 0.1 * random.standard_normal(8000), 8000)
    (root / "hiss" / "broken.wav").write_bytes(b"RIFF")
    return root


SOUND = ("geometry.input=[32, 16]", "geometry.patch=[8, 8]", "audio.sample_rate=8000", "size=tiny")


def test_recordings_can_be_heard_and_a_broken_one_is_passed_over(
    tmp_path: Path, recordings: Path, small: Small
) -> None:
    config = small(*SOUND, f"data.root={recordings}", recipe="audio")
    gallery = gallery_of(write_run(tmp_path / "run", config))
    assert gallery.note == "" and gallery.about.startswith("16 training samples")
    assert {found.sample.label for found in gallery.maps} == {"<b>hum", "hiss"}
    heard, rate = soundfile.read(io.BytesIO(base64.b64decode(gallery.maps[0].sample.sound.split(",")[1])))
    assert rate == 8000 and 2000 < len(heard) <= 8000
    assert {found.sample.name.split("/")[0] for found in gallery.maps} == {"<b>hum", "hiss"}, "below data.root"
    assert opened(gallery.maps[0].sample.picture).size == (32, 16)


def test_data_that_is_gone_leaves_a_sentence(tmp_path: Path, recordings: Path, small: Small) -> None:
    config = small(*SOUND, f"data.root={recordings}", recipe="audio")
    run = write_run(tmp_path / "run", config)
    text = (run / "config.yaml").read_text().replace(str(recordings), str(tmp_path / "gone"))
    (run / "config.yaml").write_text(text)
    gallery = gallery_of(run)
    assert gallery.note.startswith("No samples are shown: ") and "gone" in gallery.note and gallery.maps == []


def test_a_run_without_a_finished_phase_or_with_an_unknown_config_leaves_a_sentence(
    tmp_path: Path, small: Small
) -> None:
    assert "no encoder phase is finished" in gallery_of(write_run(tmp_path / "new", small(), ends=())).note
    old = write_run(tmp_path / "old", small())
    (old / "config.yaml").write_text("name: x\nunknown: 1\n")
    assert gallery_of(old).note.startswith("No samples are shown: ")


def test_unlabelled_signals_are_drawn_as_lines(tmp_path: Path, small: Small) -> None:
    root = tmp_path / "signals"
    root.mkdir()
    for i in range(12):
        np.save(root / f"{i}.npy", np.random.default_rng(i).standard_normal((1, 64)).astype(np.float32))
    config = load_config("signal", [f"data.root={root}", "geometry.channels=1",
        "geometry.input=[64]", "geometry.patch=[8]", "size=tiny", "quantizer.codes=8"])  # fmt: skip
    gallery = gallery_of(write_run(tmp_path / "run", config))
    assert gallery.note == "" and gallery.wide and not gallery.crisp
    assert gallery.neighbours[0].hits[0].same is None and gallery.maps[0].sample.label == ""
