"""`bridle init` and `bridle pretrain FOLDER`: what is seen in a folder, what is chosen for it, and that it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from PIL import Image
from typer.testing import CliRunner
from video_files import write_numbered

import bridle
from bridle.cli import app
from bridle.config import load_config
from bridle.data.inspect.survey import survey_data
from bridle.errors import DataError, UsageError
from bridle.propose import Proposal, propose
from bridle.runs.folder import RunFolder

QUICK = 0.01  # CPU-minutes: the fewest steps


def sounds(root: Path, *, seconds: float, rate: int, count: int = 6, classes: str = "ab", silence: float = 0.0) -> Path:
    """Class folders of noise that follows digital silence."""
    rng = np.random.default_rng(0)
    for name in classes:
        (root / name).mkdir(parents=True, exist_ok=True)
        for i in range(count):
            wave = 0.3 * rng.standard_normal(round(seconds * rate))
            soundfile.write(root / name / f"{i}.wav", np.concatenate([np.zeros(round(silence * rate)), wave]), rate)
    return root


def pictures(root: Path, size: tuple[int, int], *, mode: str = "RGB", count: int = 8) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    for i in range(count):
        pixels = rng.integers(0, 255, (size[1], size[0], 3), dtype=np.uint8)
        Image.fromarray(pixels).convert(mode).save(root / f"{i}.png")
    return root


def arrays(root: Path, shape: tuple[int, ...], count: int = 8) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    for i in range(count):
        np.save(root / f"{i}.npy", rng.standard_normal(shape))
    return root


def proposed(path: Path, minutes: float = QUICK) -> Proposal:
    return propose(survey_data(path), minutes=minutes)


def value(found: Proposal, key: str) -> Any:
    return next(choice.value for choice in found.choices if choice.key == key)


def warned(found: Proposal, words: str) -> bool:
    return any(words in warning for warning in found.warnings)


def test_short_8_khz_sounds_keep_their_rate_and_get_a_short_input_of_small_patches(tmp_path: Path) -> None:
    found = proposed(sounds(tmp_path, seconds=0.4, rate=8000))
    geometry = found.config().geometry
    assert value(found, "audio.sample_rate") == 8000
    assert (geometry.input, geometry.patch) == ((40, 64), (4, 16))
    assert warned(found, "read at the default 16,000 Hz") and warned(found, "84 % padding")


def test_long_recordings_keep_the_default_window_and_more_views(tmp_path: Path) -> None:
    found = proposed(sounds(tmp_path, seconds=6.0, rate=16_000, count=2))
    geometry = found.config().geometry
    assert (geometry.input, geometry.patch, value(found, "data.views")) == ((256, 64), (16, 16), 3)
    assert not warned(found, "padding")


def test_silence_at_the_ends_does_not_count_as_length(tmp_path: Path) -> None:
    found = proposed(sounds(tmp_path, seconds=0.8, rate=16_000, silence=2.4))
    assert found.survey.silence == pytest.approx(0.75, abs=0.01)
    assert value(found, "geometry.input") == [80, 64]


def test_a_very_low_rate_has_no_more_bands_than_its_spectrum_can_fill(tmp_path: Path) -> None:
    assert value(proposed(sounds(tmp_path, seconds=1.0, rate=2000)), "geometry.input")[1] < 64


@pytest.mark.parametrize(
    ("size", "mode", "channels", "side", "patch"),
    [((32, 32), "RGB", 3, 32, 4), ((28, 28), "L", 1, 28, 4), ((300, 200), "RGB", 3, 64, 8), ((16, 16), "L", 1, 16, 2)],
)
def test_pictures_keep_their_size_up_to_64_and_give_about_64_tokens(
    tmp_path: Path, size: tuple[int, int], mode: str, channels: int, side: int, patch: int
) -> None:
    geometry = proposed(pictures(tmp_path, size, mode=mode)).config().geometry
    assert (geometry.channels, geometry.input, geometry.patch) == (channels, (side, side), (patch, patch))


@pytest.mark.parametrize(("shape", "length", "patch"), [((6, 500), 504, 8), ((3000,), 1024, 16), ((2, 60), 60, 1)])
def test_signals_keep_their_channels_and_short_ones_fit_whole(
    tmp_path: Path, shape: tuple[int, ...], length: int, patch: int
) -> None:
    geometry = proposed(arrays(tmp_path, shape)).config().geometry
    channels = shape[0] if len(shape) == 2 else 1
    assert (geometry.channels, geometry.input, geometry.patch) == (channels, (length,), (patch,))


def test_clips_shorter_than_the_default_span_are_read_frame_by_frame(tmp_path: Path) -> None:
    for i in range(4):
        write_numbered(tmp_path / f"{i}.mkv", 9, size=(48, 64))
    found = proposed(tmp_path)
    assert (value(found, "video.stride"), value(found, "geometry.input")) == (1, [8, 48, 48])
    assert warned(found, "9 frames or fewer")
    assert value(found, "geometry.patch") == [2, 8, 8]  # 4 × 6 × 6 = 144 tokens; patches of 4 would give 576


def test_what_makes_scores_doubtful_is_said(tmp_path: Path) -> None:
    sounds(tmp_path / "train", seconds=0.3, rate=8000, count=3, classes="a")
    sounds(tmp_path / "train", seconds=0.35, rate=8000, count=31, classes="b")
    sounds(tmp_path / "test", seconds=0.3, rate=8000, count=2)  # the first three are those of train/a
    (tmp_path / "train" / "a" / "broken.wav").write_bytes(b"RIFF but no sound")
    found = proposed(tmp_path)
    for words in ("1 of 39 files", "3 of 4 test files are in train", "4 test items", "smallest class has 4",
                  "35 items to train on"):  # fmt: skip
        assert warned(found, words), words
    assert value(found, "probe.on") == "folds"
    assert value(found, "quantizer.codes") <= 35 * 32 // 32


def test_steps_follow_the_minutes_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bridle.propose.measure_step", lambda config: 0.06)  # whatever else this machine does
    monkeypatch.setattr("bridle.propose.measure_load", lambda source: 0.0)
    survey = survey_data(arrays(tmp_path, (1, 512), count=64))
    few, more, most = (propose(survey, minutes=minutes) for minutes in (QUICK, 0.5, 60.0))
    steps = [value(found, "encoder_phase.steps") for found in (few, more, most)]
    assert steps[0] == 200
    assert 300 <= steps[1] <= 500  # half a minute of 0.06 s steps, less what is spent once
    assert steps[2] == 600  # 300 passes of 2 steps
    assert warned(few, "more than the 0.01 asked for")


def test_a_folder_without_a_usable_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.wav").write_bytes(b"no sound")
    with pytest.raises(DataError, match=r"none of the 1 recordings looked at can be used.*a\.wav"):
        survey_data(tmp_path)


def run(*arguments: object) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, (result.output, result.exception)
    return result.output


def test_the_written_recipe_has_reasons_and_trains_as_it_is(tmp_path: Path) -> None:
    data, recipe, out = sounds(tmp_path / "data", seconds=0.4, rate=8000), tmp_path / "r.yaml", tmp_path / "run"
    shown = run("init", data, "--out", recipe, "--minutes", QUICK)
    for words in ("12 recordings", "8,000 Hz 12×", "2, with 6 to 6 items", "cost", f"bridle pretrain {recipe}"):
        assert words in shown
    text = recipe.read_text()
    assert "extends: audio" in text and "sample_rate: 8000  # the files' own rate" in text
    assert load_config(recipe) == proposed(data).config()
    run("pretrain", recipe, "--out", out, "--max-steps", 2)
    assert RunFolder(out).config().audio.sample_rate == 8000


def test_a_recipe_is_not_replaced_unless_forced(tmp_path: Path) -> None:
    arrays(tmp_path / "data", (1, 64))
    (tmp_path / "r.yaml").write_text("mine")
    result = CliRunner().invoke(app, ["init", str(tmp_path / "data"), "--out", str(tmp_path / "r.yaml")])
    assert isinstance(result.exception, UsageError) and (tmp_path / "r.yaml").read_text() == "mine"


def test_pretrain_takes_a_folder_and_continues_with_the_choices_it_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = arrays(tmp_path / "data", (2, 64))
    first = bridle.pretrain(data, out=tmp_path / "run", max_steps=2)
    said = capsys.readouterr().err
    assert "8 signals; no recipe given" in said and "geometry.channels=2" in said and "no labels" in said
    again = bridle.pretrain(data, out=tmp_path / "run", max_steps=2)
    assert not first.was_finished and again.was_finished
    with pytest.raises(UsageError, match="holds a run on"):
        bridle.pretrain(arrays(tmp_path / "other", (2, 64)), out=tmp_path / "run", max_steps=2)
