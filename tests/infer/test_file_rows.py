"""A model on files: the rows of a file are the tokens of its windows, padding left out, whatever goes together."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_models import Plane, plane_model, signal_model, write_signal

from bridle.data.sources import Window
from bridle.errors import DataError, UsageError
from bridle.nn.pooling import axis_pool
from bridle.seeding import generator


@pytest.fixture
def wav(tmp_path: Path) -> Path:
    path = tmp_path / "a.wav"
    path.touch()
    return path


def test_the_codes_of_a_file_are_those_of_its_windows(tmp_path: Path) -> None:
    model = signal_model()
    x = write_signal(tmp_path / "a.npy", 24)
    found = model.tokenize_file(tmp_path / "a.npy")
    expected = model.tokenize(torch.stack([x[:, :12], x[:, 12:]])).reshape(8, 2)
    assert found.codes.dtype == np.uint8
    assert found.codes.tolist() == expected.tolist()
    assert found.positions.tolist() == [[0], [1], [2], [3], [4], [5], [6], [7]]
    assert found.times is None
    assert found.name == str(tmp_path / "a.npy")


def test_the_end_of_a_file_that_does_not_fill_a_window_gives_only_real_tokens(tmp_path: Path) -> None:
    model = signal_model()
    write_signal(
        tmp_path / "a.npy", 17
    )  # the second window has 5 frames: a patch of 3 and one of 2, which is over half
    found = model.encode_file(tmp_path / "a.npy")
    assert found.z.shape == (6, 8)
    assert found.positions is not None
    assert found.positions[:, 0].tolist() == [0, 1, 2, 3, 4, 5]
    write_signal(tmp_path / "b.npy", 13)  # one frame of three is no token
    assert len(model.tokenize_file(tmp_path / "b.npy").codes) == 4


def test_times_count_frames_before_a_token_over_all_windows_time_first(wav: Path) -> None:
    content = torch.randn(2, 1, 4, 6, generator=generator("plane"))
    reader = Plane([Window(content[0], None, 0), Window(content[1], torch.tensor([True, True, False, False]), 4)])
    found = plane_model(reader).tokenize_file(wav)
    # Patches are 2 frames long and a frame takes half a second; 2 bands side by side begin at the same time.
    assert found.times is not None
    assert found.times.tolist() == [0.0, 0.0, 1.0, 1.0, 2.0, 2.0]
    assert found.positions.tolist() == [[0, 0], [0, 1], [1, 0], [1, 1], [2, 0], [2, 1]]


def test_times_that_only_the_file_knows_are_those_of_the_frames(wav: Path) -> None:
    uneven = Window(torch.zeros(1, 4, 6), None, 0, seconds=(0.0, 0.1, 0.7, 0.8))
    short = Window(torch.zeros(1, 4, 6), torch.tensor([True, True, False, False]), 4, seconds=(2.0,))
    found = plane_model(Plane([uneven, short], frame_seconds=None)).tokenize_file(wav)
    assert found.times is not None
    assert found.times.tolist() == [0.0, 0.0, 0.7, 0.7, 2.0, 2.0]


def test_what_padding_holds_changes_neither_codes_nor_features(wav: Path) -> None:
    x = torch.randn(1, 4, 6, generator=generator("pad"))
    valid = torch.tensor([True, True, False, False])
    other = torch.cat([x[:, :2], 100 * torch.ones(1, 2, 6)], dim=1)
    one, two = plane_model(Plane([Window(x, valid, 0)])), plane_model(Plane([Window(other, valid, 0)]))
    assert np.array_equal(one.tokenize_file(wav).codes, two.tokenize_file(wav).codes)
    assert np.array_equal(one.encode_file(wav).z, two.encode_file(wav).z)
    assert not np.allclose(one.encode_file(wav).z, one.encode(x)[0, :2])  # without the mark it does matter


def test_which_windows_go_together_does_not_change_the_codes(tmp_path: Path) -> None:
    model = signal_model()
    paths = []
    for number, frames in enumerate((12, 40, 7, 25)):
        write_signal(tmp_path / f"{number}.npy", frames)
        paths.append(tmp_path / f"{number}.npy")
    one_by_one = [model.tokenize_file(path, batch=1) for path in paths]
    together = list(model.tokenize_files(paths, batch=3))
    assert [found.name for found in together] == [str(path) for path in paths]
    for one, other in zip(one_by_one, together, strict=True):
        assert np.array_equal(one.codes, other.codes)
        assert np.array_equal(one.positions, other.positions)
    with pytest.raises(UsageError, match="at least one window"):
        list(model.tokenize_files(paths, batch=0))


def test_a_bad_file_between_good_ones_is_told_or_ends_it(tmp_path: Path) -> None:
    model = signal_model()
    write_signal(tmp_path / "a.npy", 24)
    (tmp_path / "b.npy").write_text("no array")
    np.save(tmp_path / "c.npy", np.full((2, 36), [1.0] * 30 + [np.nan] * 6))  # good windows before the bad one
    write_signal(tmp_path / "d.npy", 12)
    paths = [tmp_path / f"{name}.npy" for name in "abcd"]
    told: list[tuple[str, str]] = []
    found = list(model.encode_files(paths, batch=2, on_error=lambda name, error: told.append((name, str(error)))))
    assert [len(f.z) for f in found] == [8, 4]
    assert [name for name, _ in told] == [str(paths[1]), str(paths[2])]
    assert "cannot be read as a .npy array" in told[0][1]
    assert "not finite" in told[1][1]
    with pytest.raises(DataError, match=r"b\.npy"):
        list(model.tokenize_files(paths))


def test_a_file_without_a_whole_token_is_an_error(wav: Path) -> None:
    for windows in ([], [Window(torch.zeros(1, 4, 6), torch.zeros(4, dtype=torch.bool), 0)]):
        with pytest.raises(DataError, match="nothing that fills a token"):
            plane_model(Plane(windows)).tokenize_file(wav)


def test_a_wrong_path_is_told_before_anything_is_read(tmp_path: Path) -> None:
    model = signal_model()
    (tmp_path / "song.mp3").touch()
    for name, expected in (("no.npy", "does not exist"), (".", "is a folder"), ("song.mp3", r"it reads \.npy")):
        with pytest.raises(UsageError, match=expected):
            model.tokenize_file(tmp_path / name)
    np.save(tmp_path / "three.npy", np.zeros((3, 24)))
    with pytest.raises(DataError, match=r"shape \[3, 24\]; expected \(2, length\)"):
        model.encode_file(tmp_path / "three.npy")
    with pytest.raises(UsageError, match=r"\(B, 2, 12\) or \(2, 12\), got \(1, 2, 10\); crop, pad or resize"):
        model.encode(torch.zeros(1, 2, 10))


def test_codes_come_in_the_smallest_type_and_stages_are_a_prefix(tmp_path: Path) -> None:
    write_signal(tmp_path / "a.npy", 24)
    model = signal_model("quantizer.codes=300")
    whole, first = model.tokenize_file(tmp_path / "a.npy"), model.tokenize_file(tmp_path / "a.npy", stages=1)
    assert whole.codes.dtype == np.uint16
    assert first.codes.shape == (8, 1)
    assert np.array_equal(first.codes, whole.codes[:, :1])
    q = model.decode_codes(whole.codes, stages=1)
    assert torch.equal(q, model.tokenizer.quantizer.books[0].code[whole.codes[:, 0].astype(int)])
    with pytest.raises(UsageError, match="2 codebooks, so 1 to 2"):
        model.tokenize_file(tmp_path / "a.npy", stages=3)


def test_pooling_a_file_is_the_mean_over_all_its_real_tokens(tmp_path: Path) -> None:
    model = signal_model()
    write_signal(tmp_path / "a.npy", 29)
    rows = model.encode_file(tmp_path / "a.npy").z
    pooled = model.encode_file(tmp_path / "a.npy", pool="mean", batch=2)
    np.testing.assert_allclose(pooled.z, rows.mean(axis=0), atol=1e-6)
    assert pooled.times is None
    assert pooled.positions is None
    # Position by position of the window, as the probe averages views: 12, 12 and 5 frames, 4 + 4 + 2 tokens.
    kept = np.concatenate([rows[0::4].mean(0), rows[1::4].mean(0), rows[2::4].mean(0), rows[3::4].mean(0)])
    np.testing.assert_allclose(model.encode_file(tmp_path / "a.npy", pool="axis").z, kept, atol=1e-6)


def test_pooling_by_axis_keeps_one_mean_per_band_over_all_windows(wav: Path) -> None:
    content = torch.randn(2, 1, 4, 6, generator=generator("bands"))
    valid = torch.tensor([[True] * 4, [True, True, False, False]])
    reader = Plane([Window(content[0], None, 0), Window(content[1], valid[1], 4)])
    model = plane_model(reader)
    found = model.encode_file(wav, pool="axis")  # the last axis: bands
    z = model.encode(content, valid=valid)  # (2, 4, 8); bands alternate
    bands = [torch.cat([z[0, b::2], z[1, b:2:2]]).mean(0) for b in (0, 1)]
    np.testing.assert_allclose(found.z, torch.cat(bands).numpy(), atol=1e-6)
    # One window: the same as the pooling of arrays.
    model.reader = Plane([Window(content[0], None, 0)])
    for axis in (0, 1):
        expected = axis_pool(model.encode(content[0]), (2, 2), axis)[0]
        np.testing.assert_allclose(model.encode_file(wav, pool="axis", axis=axis).z, expected, atol=1e-6)
        assert torch.equal(model.encode(content[0], pool="axis", axis=axis)[0], expected)


def test_pool_and_layer_words_are_checked() -> None:
    model = signal_model()
    x = torch.zeros(1, 2, 12)
    for wrong, expected in (
        ({"pool": "max"}, "'mean', 'axis' or 'class'"),
        ({"deviation": True}, "only pools 'mean' and 'axis'"),
        ({"pool": "probe", "axis": 0}, "what the run's probe used"),
        ({"pool": "class"}, "class_token"),
        ({"axis": 0}, "only pool 'axis'"),
        ({"pool": "axis", "axis": 1}, r"not an axis of the grid \[4\]"),
        ({"layers": 4}, "a block from 1 to 3"),
        ({"layers": (0, 1)}, "a block from 1 to 3"),
    ):
        with pytest.raises(UsageError, match=expected):
            model.encode(x, **wrong)  # type: ignore[call-overload]
    with pytest.raises(UsageError, match="a block from 1 to 3"):
        model.features(layer=9)


def test_layers_give_what_each_block_puts_out_and_the_norm_only_at_the_end() -> None:
    model = signal_model("encoder.class_token=true")
    x = torch.randn(2, 2, 12, generator=generator("layers"))
    encoder = model.encoder
    steps = [torch.cat([encoder.class_token.expand(2, 1, -1), encoder.embed((x - 0.5) / 2) + encoder.position], dim=1)]
    for block in encoder.trunk.blocks:
        steps.append(block(steps[-1]))
    first, last = model.encode(x, layers=(1, 3))
    assert torch.equal(first, steps[1][:, 1:])
    assert torch.equal(last, encoder.norm(steps[3])[:, 1:])
    assert torch.equal(last, model.encode(x))
    assert torch.equal(model.encode(x, layers=2), steps[2][:, 1:])
    assert torch.equal(model.encode(x, pool="class"), encoder.norm(steps[3])[:, 0])
    assert torch.equal(model.encode(x, layers=2, pool="class"), steps[2][:, 0])
    torch.testing.assert_close(model.encode(x, layers=2, pool="mean"), steps[2][:, 1:].mean(1))


def test_the_class_token_of_a_file_is_the_mean_over_its_windows(tmp_path: Path) -> None:
    model = signal_model("encoder.class_token=true")
    x = write_signal(tmp_path / "a.npy", 24)
    expected = model.encode(torch.stack([x[:, :12], x[:, 12:]]), pool="class").mean(0)
    np.testing.assert_allclose(model.encode_file(tmp_path / "a.npy", pool="class").z, expected, atol=1e-6)


def test_a_stream_brings_the_same_rows_in_pieces(tmp_path: Path) -> None:
    model = signal_model()
    write_signal(tmp_path / "a.npy", 65)  # 6 windows
    whole = model.tokenize_file(tmp_path / "a.npy")
    pieces = list(model.stream_codes(tmp_path / "a.npy", batch=4))
    assert [len(piece.codes) for piece in pieces] == [16, 6]
    assert np.array_equal(np.concatenate([piece.codes for piece in pieces]), whole.codes)
    assert np.array_equal(np.concatenate([piece.positions for piece in pieces]), whole.positions)
    z = np.concatenate([piece.z for piece in model.stream_features(tmp_path / "a.npy", batch=4, layer=2)])
    np.testing.assert_allclose(z, model.encode_file(tmp_path / "a.npy", layer=2).z, atol=1e-6)


def test_memory_does_not_grow_with_the_length_of_a_file(wav: Path) -> None:
    class Endless(Plane):
        def __init__(self, count: int) -> None:
            self.count, self.frame_seconds = count, 0.5

        def windows(self, path: Path) -> Iterator[Window]:
            for number in range(self.count):
                yield Window(torch.full((1, 4, 6), float(number % 7)), None, 4 * number)

    def peak(windows: int) -> int:
        model = plane_model(Endless(windows))
        tracemalloc.start()
        rows = sum(len(piece.codes) for piece in model.stream_codes(wav))
        pooled = model.encode_file(wav, pool="mean")
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert rows == 4 * windows
        assert pooled.z.shape == (8,)
        return most

    peak(8)  # what is made once
    assert peak(4000) < peak(400) + 150_000  # what is kept of 16,000 tokens would be 290,000 bytes


def test_the_fingerprint_changes_with_weights_and_settings() -> None:
    model: Callable[..., Any] = signal_model
    same = model().fingerprint
    assert same == model().fingerprint
    assert len(same) == 16
    assert model("data.mean=[0.25]").fingerprint != same
    assert model("seed=1").fingerprint != same
    assert model(trained=False).fingerprint != same
