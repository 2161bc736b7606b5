"""`bridle data stats`: counts, and moments equal to numpy's over the same files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from PIL import Image
from typer.testing import CliRunner

from bridle.cli import app
from bridle.config import load_config
from bridle.data.audio.logmel import LogMel
from bridle.data.inspect.check import Lengths
from bridle.data.inspect.statistics import ClassSizes, count_classes, guess_modality, measure_data, numbers
from bridle.errors import DataError, UsageError
from bridle.report.data_tables import availability_table, statistics_lines

IMAGE = ("geometry.input=[8,8]", "geometry.patch=[4,4]")
SOUND = ("geometry.input=[48,16]", "geometry.patch=[16,16]")


def pictures(root: Path, counts: dict[str, int]) -> np.ndarray:
    random = np.random.default_rng(0)
    made = []
    for name, count in counts.items():
        (root / name).mkdir(parents=True)
        for number in range(count):
            made.append(random.integers(0, 255, (8, 8, 3), dtype=np.uint8))
            Image.fromarray(made[-1]).save(root / name / f"{number}.png")
    return np.stack(made)


def hiss(path: Path, seconds: float, seed: int = 0) -> np.ndarray:
    path.parent.mkdir(parents=True, exist_ok=True)
    x = np.random.default_rng(seed).uniform(-0.5, 0.5, round(seconds * 16_000)).astype(np.float32)
    soundfile.write(path, x, 16_000, subtype="FLOAT")
    return x


def test_pictures_are_counted_by_class_and_measured_by_channel(tmp_path: Path) -> None:
    made = pictures(tmp_path / "train", {"cat": 3, "dog": 5}) / 255
    pictures(tmp_path / "test", {"cat": 2})
    found = measure_data(load_config("image", [*IMAGE, f"data.root={tmp_path}"]))
    assert (found.train, found.test, found.folds, found.lengths, found.available) == (8, 2, None, None, None)
    assert found.classes == ClassSizes(2, 3, 4.0, 5, 0)
    assert found.moments.mean == pytest.approx(made.mean((0, 1, 2)), abs=1e-6)
    assert found.moments.std == pytest.approx(made.std((0, 1, 2)), abs=1e-6)
    assert found.std == found.moments.std


def test_sound_is_measured_after_the_front_end_and_pasted_with_twice_its_std(tmp_path: Path) -> None:
    waves = [hiss(tmp_path / f"{seed}.wav", 0.5, seed) for seed in range(3)]
    hiss(tmp_path / "long.wav", 2.0, 3)
    found = measure_data(load_config("audio", [*SOUND, f"data.root={tmp_path}"]))
    assert found.lengths == Lengths(0.5, 0.5, 2.0, 3.5)
    assert found.std == (2 * found.moments.std[0],)
    (tmp_path / "long.wav").unlink()
    found = measure_data(load_config("audio", [*SOUND, f"data.root={tmp_path}"]))
    features = LogMel(mels=16)(torch.tensor(np.stack(waves))).numpy()  # (3, 48, 16): exactly one sample each
    assert features.shape == (3, 48, 16)
    assert found.moments.mean == pytest.approx([features.mean()], abs=1e-4)
    assert found.moments.std == pytest.approx([features.std()], abs=1e-4)


def test_the_lines_to_paste_give_inputs_with_mean_zero_and_spread_one_half(tmp_path: Path) -> None:
    for seed in range(3):
        hiss(tmp_path / f"{seed}.wav", 0.5, seed)
    found = measure_data(load_config("audio", [*SOUND, f"data.root={tmp_path}"]))
    config = load_config("audio", [*SOUND, *found.overrides()])
    assert config.data.mean == pytest.approx(found.moments.mean, abs=1e-4)
    assert config.data.std == pytest.approx([2 * found.moments.std[0]], abs=1e-4)


def test_what_cannot_be_used_is_counted_and_left_out(tmp_path: Path) -> None:
    made = pictures(tmp_path, {"cat": 4}) / 255
    (tmp_path / "cat" / "text.png").write_text("hello")
    found = measure_data(load_config("image", [*IMAGE, f"data.root={tmp_path}"]), workers=1)
    assert (found.tried, found.moments.count) == (5, 4)
    assert found.moments.mean == pytest.approx(made.mean((0, 1, 2)), abs=1e-6)
    assert "measured  4 items; 1 cannot be used" in list(statistics_lines(found))


def test_the_limit_bounds_what_is_read(tmp_path: Path) -> None:
    pictures(tmp_path, {"cat": 9})
    told: list[tuple[int, int]] = []
    config = load_config("image", [*IMAGE, f"data.root={tmp_path}"])
    found = measure_data(config, limit=4, tell=lambda done, total: told.append((done, total)))
    assert (found.train, found.tried, found.moments.count) == (9, 4, 4)
    assert told == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_several_labels_count_for_each_class_and_empty_classes_are_told() -> None:
    labels = [(0, 1), (1,), (), (1, 3)]
    assert count_classes(labels, ["a", "b", "c", "d"]) == ClassSizes(4, 1, 1.0, 3, 1)
    assert count_classes([1, 1], ["a", "b"]) == ClassSizes(2, 2, 2.0, 2, 1)
    assert count_classes(None, None) is None


def test_the_recipe_is_guessed_by_most_of_the_files(tmp_path: Path) -> None:
    pictures(tmp_path / "p", {"cat": 2})
    assert guess_modality(tmp_path / "p").kind == "image"
    np.save(tmp_path / "p" / "a.npy", np.zeros(3))
    assert guess_modality(tmp_path / "p").kind == "image"
    for number in range(3):
        hiss(tmp_path / "p" / f"{number}.wav", 0.1)
    assert guess_modality(tmp_path / "p").kind == "audio"
    (tmp_path / "s").mkdir()
    np.save(tmp_path / "s" / "a.npy", np.zeros(3))
    assert guess_modality(tmp_path / "s").kind == "signal"
    (tmp_path / "list.csv").write_text("path\np/0.wav\n")
    assert guess_modality(tmp_path / "list.csv").kind == "audio"


def test_nothing_to_guess_from_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("hello")
    with pytest.raises(DataError, match="1 files of other"):
        guess_modality(tmp_path)
    with pytest.raises(UsageError, match="does not exist"):
        guess_modality(tmp_path / "nowhere")
    with pytest.raises(UsageError, match="is one file"):
        guess_modality(tmp_path / "a.txt")
    (tmp_path / "list.csv").write_text("path\na.txt\n")
    with pytest.raises(DataError, match=r"no media files in .*list.csv' \(1 files of other kinds\)"):
        guess_modality(tmp_path / "list.csv")


def test_audioset_folders_say_how_much_of_the_lists_is_there(tmp_path: Path) -> None:
    classes = 'index,mid,display_name\n0,/m/a,"Speech"\n1,/m/b,"Bird, song"\n2,/m/c,"Rain"\n'
    (tmp_path / "class_labels_indices.csv").write_text(classes)
    rows = ["aaaaaaaaaaa, 0.000, 10.000, \"/m/a,/m/b\"", "bbbbbbbbbbb, 0.000, 10.000, \"/m/c\""]  # fmt: skip
    header = "# YTID, start_seconds, end_seconds, positive_labels\n"
    (tmp_path / "balanced_train_segments.csv").write_text(header + "\n".join(rows) + "\n")
    hiss(tmp_path / "audio" / "aaaaaaaaaaa.wav", 0.5)
    found = measure_data(load_config("audio", [*SOUND, f"data.root={tmp_path}"]))
    assert found.available is not None
    assert [tuple(share) for share in found.available.segments] == [("balanced_train", 2, 1)]
    assert found.classes == ClassSizes(3, 1, 1.0, 1, 1)
    table = availability_table(found)
    assert table is not None
    assert table.row_count == 1
    assert table.caption == "classes without a clip: Rain"


def test_the_command_prints_counts_and_a_command_to_run_next(tmp_path: Path) -> None:
    pictures(tmp_path / "my pictures", {"cat": 3, "dog": 5})
    command = ["data", "stats", str(tmp_path / "my pictures"), *IMAGE, "--workers", "0"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0
    assert "recipe    image (by the names of the files)" in done.output
    assert "classes   2, with 3 to 5 items (median 4)" in done.output
    next_command = done.output.splitlines()[-1]
    assert next_command.startswith("Next:  bridle pretrain image 'geometry.input=[8,8]'")
    assert f"'data.root={tmp_path}/my pictures' 'data.mean=[" in next_command


def test_numbers_keep_enough_digits_also_when_small() -> None:
    assert numbers([0.123456, -7.1, 0.00012345]) == "[0.1235,-7.1000,0.000123]"


def test_arrays_of_several_channels_are_checked_and_measured_without_a_recipe(tmp_path: Path) -> None:
    for i in range(3):
        np.save(tmp_path / f"{i}.npy", np.random.default_rng(i).normal(5.0, 1.0, (4, 50)))
    checked = CliRunner().invoke(app, ["data", "check", str(tmp_path), "--workers", "1"], catch_exceptions=False)
    assert "3 signal" in checked.output and "4 channels 3×" in checked.output
    measured = CliRunner().invoke(app, ["data", "stats", str(tmp_path), "--workers", "0"], catch_exceptions=False)
    assert "geometry.channels=4" in measured.output and "3 items" in measured.output
