"""Facts about the embedded data sets."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression, RidgeClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from threadpoolctl import threadpool_limits
from torch import Tensor

from bridle.data.arrays.memory import TensorSource
from bridle.data.embedded import sets as embedded_sets
from bridle.data.embedded.patterns import COURSES, PATTERNS

MAKERS = (
    embedded_sets.digits,
    embedded_sets.moving_digits,
    embedded_sets.patterns,
    embedded_sets.moving_patterns,
    embedded_sets.sounds,
)


def sources(make: object) -> tuple[TensorSource, TensorSource]:
    splits = make()  # type: ignore[operator]
    return splits.train, splits.test


def score(classifier: object, features: Callable[[Tensor], Tensor], make: object) -> float:
    """Test accuracy of a linear classifier on standardised features."""
    train, test = sources(make)
    model = make_pipeline(StandardScaler(), classifier)
    with threadpool_limits(1):  # many BLAS threads on few busy cores take a hundred times as long
        model.fit(features(train.x).flatten(1), train.labels)
        return float(model.score(features(test.x).flatten(1), test.labels))


@pytest.mark.parametrize(
    ("make", "shape", "counts", "classes"),
    [
        (embedded_sets.digits, (1, 16, 16), (1437, 360), 10),
        (embedded_sets.moving_digits, (1, 8, 24, 24), (2400, 600), 8),
        (embedded_sets.patterns, (1, 32, 32), (4000, 600), 10),
        (embedded_sets.moving_patterns, (1, 12, 24, 24), (4000, 600), 8),
        (embedded_sets.sounds, (1, 96, 64), (2000, 500), 10),
    ],
)
def test_sizes_and_balance(make: object, shape: tuple[int, ...], counts: tuple[int, int], classes: int) -> None:
    for source, count in zip(sources(make), counts, strict=True):
        assert (len(source), tuple(source.load(0, None).x.shape)) == (count, shape)
        assert source.x.dtype == torch.float32
        assert torch.isfinite(source.x).all()
        assert source.classes is not None
        assert len(source.classes) == classes
        per_class = np.bincount(source.labels, minlength=classes)
        assert per_class.max() - per_class.min() <= (0 if make is not embedded_sets.digits else 7)


@pytest.mark.parametrize("make", MAKERS)
def test_a_second_making_gives_the_same_bits(make: object) -> None:
    first = sources(make)
    embedded_sets.digit_pictures.cache_clear()
    make.cache_clear()  # type: ignore[attr-defined]
    torch.manual_seed(99)  # whatever the global generator says
    for a, b in zip(first, sources(make), strict=True):
        assert a is not b
        assert torch.equal(a.x, b.x)
        assert a.labels == b.labels


@pytest.mark.parametrize("make", MAKERS)
def test_no_test_sample_is_in_train(make: object) -> None:
    train, test = sources(make)
    known = {x.numpy().tobytes() for x in train.x}
    assert len(known) == len(train)
    assert not any(x.numpy().tobytes() in known for x in test.x)


@pytest.mark.parametrize("make", MAKERS)
def test_augmentation_is_a_function_of_the_generator(make: object) -> None:
    train, _ = sources(make)
    loaded = [train.load(3, torch.Generator().manual_seed(seed)).x for seed in (1, 1, 2, 3)]
    assert torch.equal(loaded[0], loaded[1])
    assert not torch.equal(loaded[0], loaded[2]) or not torch.equal(loaded[0], loaded[3])
    assert loaded[0].shape == train.load(3, None).x.shape
    assert torch.equal(train.load(3, None).x, train.x[3])


def test_digits_are_the_scanned_ones_and_split_evenly() -> None:
    real = load_digits()
    train, test = sources(embedded_sets.digits)
    halved = torch.nn.functional.avg_pool2d(torch.cat([train.x, test.x]), 2)[:, 0].flatten(1)  # back to 8×8
    truth = torch.from_numpy(real.images / 16).float().flatten(1)
    nearest = torch.cdist(halved, truth).argmin(1)
    assert len(set(nearest.tolist())) > 1790  # enlarging blurs; a few twins are mistaken for one another
    assert np.mean(real.target[nearest] == [*train.labels, *test.labels]) > 0.999  # type: ignore[misc]
    share = np.bincount(test.labels) / np.bincount(real.target)
    assert share.min() > 0.19
    assert share.max() < 0.21


def test_a_shifted_digit_moves_by_up_to_two_pixels() -> None:
    dot = torch.zeros(1, 16, 16)
    dot[0, 8, 8] = 1
    places = {
        tuple(torch.nonzero(embedded_sets.shift(dot, torch.Generator().manual_seed(s))[0])[0].tolist())
        for s in range(300)
    }
    assert places == {(y, x) for y in range(6, 11) for x in range(6, 11)}


def test_digits_move_where_the_label_says() -> None:
    train, _ = sources(embedded_sets.moving_digits)
    headings = {"east": (0, 1), "southeast": (1, 1), "south": (1, 0), "southwest": (1, -1)}
    headings |= {"west": (0, -1), "northwest": (-1, -1), "north": (-1, 0), "northeast": (-1, 1)}
    assert train.labels is not None
    for i in range(80):
        clip = train.x[i, 0]
        # The shift between the first frame and the fourth, by circular correlation: at most 7.5 pixels.
        spectra = torch.fft.fft2(clip[[0, 3]])
        peak = int(torch.fft.ifft2(spectra[1] * spectra[0].conj()).real.argmax())
        moved = torch.tensor([peak // 24, peak % 24])
        moved = torch.where(moved > 12, moved - 24, moved).float()
        heading = torch.tensor(headings[embedded_sets.DIRECTIONS[train.labels[i]]]).float()
        assert torch.cosine_similarity(moved, heading, dim=0) > 0.9
        assert 2 <= moved.norm() <= 8.5


def test_moving_digits_keep_their_ink_around_the_edges() -> None:
    train, _ = sources(embedded_sets.moving_digits)
    ink = train.x.sum(dim=(1, 3, 4))  # (N, frames)
    torch.testing.assert_close(ink, ink[:, :1].expand_as(ink), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("frame", [0, 7])
def test_a_single_frame_does_not_tell_the_direction(frame: int) -> None:
    found = score(RidgeClassifier(100.0), lambda x: x[:, :, frame], embedded_sets.moving_digits)
    assert found < 0.125 + 3.5 * 0.0135  # chance and its standard error over 600 clips


def test_the_change_between_frames_tells_the_direction() -> None:
    def correlation(x: Tensor) -> Tensor:
        spectra = torch.fft.fft2(x[:, 0, [0, 3]])
        peaks = torch.fft.fftshift(torch.fft.ifft2(spectra[:, 1] * spectra[:, 0].conj()).real, dim=(-2, -1))
        return peaks / peaks.amax(dim=(-2, -1), keepdim=True)

    assert score(RidgeClassifier(100.0), correlation, embedded_sets.moving_digits) > 0.95


def test_pixels_do_not_tell_the_pattern() -> None:
    assert score(RidgeClassifier(1000.0), lambda x: x, embedded_sets.patterns) < 0.25


def test_patterns_are_in_the_range_of_pictures_and_use_it() -> None:
    for make in (embedded_sets.patterns, embedded_sets.moving_patterns):
        x = sources(make)[0].x
        assert x.min() >= 0
        assert x.max() <= 1
        assert 0.3 < x.mean() < 0.5
        assert x.std() > 0.15


def test_stripes_change_along_one_axis_and_a_grid_along_both() -> None:
    lines = torch.arange(32.0)
    u, v = (lines / 8).expand(1, 1, 32, 32), (lines / 8)[:, None].expand(1, 1, 32, 32)
    for name, axes in (("stripes", (True, False)), ("grid", (True, True)), ("weave", (True, True))):
        x = PATTERNS[name](u, v)
        assert x.abs().max() <= 1
        assert (bool(x.diff(dim=-1).abs().max() > 0.1), bool(x.diff(dim=-2).abs().max() > 0.1)) == axes


def test_clips_take_the_course_that_the_label_says() -> None:
    train, _ = sources(embedded_sets.moving_patterns)
    contrast = train.x[:, 0].std(dim=(-2, -1))  # (N, frames)
    unsteady = (contrast.std(dim=1) / contrast.mean(dim=1)).reshape(-1, len(COURSES)).mean(0)  # by class
    fading = {COURSES[i] for i in unsteady.argsort(descending=True)[:2]}
    assert fading == {"pulse", "flicker"}
    still = (train.x.diff(dim=2).abs().amax(dim=(1, 3, 4)) < 1e-6).float().mean(1).reshape(-1, len(COURSES)).mean(0)
    assert {COURSES[i] for i in still.argsort(descending=True)[:2]} == {"jerk", "flicker"}  # frames like the one before
    assert still[COURSES.index("drift")] == 0


def test_sounds_are_neither_trivial_nor_hopeless_for_averages() -> None:
    def averages(x: Tensor) -> Tensor:
        return torch.cat([x[:, 0].mean(1), x[:, 0].std(1)], dim=1)  # (N, 2·mels)

    assert 0.5 <= score(LogisticRegression(C=0.1, max_iter=200), averages, embedded_sets.sounds) <= 0.85


def test_a_rolled_sound_holds_the_same_frames() -> None:
    x = torch.arange(6.0).reshape(1, 3, 2)
    rolled = {
        tuple(embedded_sets.roll_time(x, torch.Generator().manual_seed(seed)).flatten().tolist()) for seed in range(40)
    }
    assert rolled == {(0, 1, 2, 3, 4, 5), (4, 5, 0, 1, 2, 3), (2, 3, 4, 5, 0, 1)}
