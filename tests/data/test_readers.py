"""Single files as windows that follow one another."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from bridle.data.arrays.source import SignalFormat, SignalReader
from bridle.data.image.source import ImageReader
from bridle.errors import ConfigError, DataError
from bridle.geometry import Geometry

SIGNAL = Geometry(1, (8,), (4,))


def test_windows_of_a_signal_follow_one_another_and_the_last_one_is_continued(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(19.0))
    windows = list(SignalReader(format=SignalFormat(SIGNAL)).windows(tmp_path / "a.npy"))
    assert [window.start for window in windows] == [0, 8, 16]
    assert windows[1].x.tolist() == [[8, 9, 10, 11, 12, 13, 14, 15]]
    assert windows[1].valid is None
    assert windows[2].x.tolist() == [[16, 17, 18, 18, 18, 18, 18, 18]]
    assert windows[2].valid is not None
    assert windows[2].valid.tolist() == [True, False]


def test_an_end_of_less_than_half_a_patch_is_left_out_and_so_little_alone_is_an_error(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(17.0))
    assert [window.start for window in SignalReader(format=SignalFormat(SIGNAL)).windows(tmp_path / "a.npy")] == [0, 8]
    np.save(tmp_path / "b.npy", np.arange(1.0))
    with pytest.raises(DataError, match="too short: 1 frames, but half a patch of 4 needs 2"):
        list(SignalReader(format=SignalFormat(SIGNAL)).windows(tmp_path / "b.npy"))


def test_damage_far_into_a_signal_shows_when_it_is_reached(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.array([0.0] * 20 + [np.nan]))
    windows = SignalReader(format=SignalFormat(SIGNAL)).windows(tmp_path / "a.npy")
    assert [next(windows).start, next(windows).start] == [0, 8]
    with pytest.raises(DataError, match="not finite"):
        next(windows)


def test_a_picture_is_the_one_window_that_evaluation_sees(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 255, (20, 30, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    (window,) = ImageReader(geometry=Geometry(3, (8, 8), (4, 4))).windows(tmp_path / "a.png")
    # Of 30 by 20 pixels the middle 20 by 20, scaled by bicubic interpolation.
    middle = Image.fromarray(pixels).resize((8, 8), Image.Resampling.BICUBIC, box=(5, 0, 25, 20))
    assert torch.equal(window.x, torch.from_numpy(np.array(middle)).permute(2, 0, 1) / 255)
    assert window.start == 0
    assert window.valid is None
    (tmp_path / "b.png").write_bytes(b"\x89PNG")
    with pytest.raises(DataError, match="cannot be read as an image"):
        list(ImageReader(geometry=Geometry(3, (8, 8), (4, 4))).windows(tmp_path / "b.png"))


def test_readers_refuse_a_geometry_of_another_kind() -> None:
    with pytest.raises(ConfigError, match="length"):
        SignalReader(format=SignalFormat(Geometry(1, (8, 8), (4, 4))))
    with pytest.raises(ConfigError, match="height, width"):
        ImageReader(geometry=SIGNAL)
    with pytest.raises(ConfigError, match="1 or 3"):
        ImageReader(geometry=Geometry(2, (8, 8), (4, 4)))
