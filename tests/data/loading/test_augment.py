"""Each random change does what it says, and draws only from its generator. Oracles: arithmetic and Pillow."""

from __future__ import annotations

from collections.abc import Callable
from math import log10

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageOps
from torch import Tensor

from bridle.data.loading.augment import (
    OPERATIONS,
    add_noise,
    change_gain,
    erase,
    mask_stripes,
    randaugment,
    roll,
    scale_wave,
    warp,
)
from bridle.seeding import generator

DRAWS = range(200)


def wave(samples: int = 4000) -> Tensor:
    return 0.3 * torch.randn(samples, generator=generator("wave"))


def picture(channels: int = 3, height: int = 40, width: int = 56) -> np.ndarray:
    """Smooth shapes and some noise, (H, W, 3) or (H, W) uint8, not using the whole range."""
    y, x = np.mgrid[:height, :width]
    layers = [60 + 70 * np.sin(x / 9 + c) + 50 * np.cos(y / 7 - c) for c in range(channels)]
    noise = np.random.default_rng(0).normal(0, 4, (height, width, channels))
    full = np.clip(np.stack(layers, -1) + 40 + noise, 12, 240).astype(np.uint8)
    return full if channels == 3 else full[..., 0]


def as_tensor(shown: np.ndarray | Image.Image) -> Tensor:
    values = torch.tensor(np.array(shown), dtype=torch.float32) / 255
    return values.permute(2, 0, 1) if values.dim() == 3 else values[None]


# Sound


def test_roll_keeps_every_sample_and_starts_anywhere() -> None:
    x = torch.arange(8.0)
    starts = set()
    for draw in DRAWS:
        rolled = roll(x, generator("roll", draw))
        first = int(rolled[0])
        assert torch.equal(rolled, torch.cat([x[first:], x[:first]]))
        starts.add(first)
    assert starts == set(range(8))


def test_the_released_gain_is_a_half_and_a_beta_draw() -> None:
    gains = [float(scale_wave(torch.ones(1), concentration=10.0, generator=generator("gain", d))) for d in DRAWS]
    assert 0.5 < min(gains) < 1 < max(gains) < 1.5
    assert abs(np.mean(gains) - 1) < 0.03
    assert abs(np.std(gains) - 0.109) < 0.03  # of Beta(10, 10)


def test_gain_is_uniform_in_decibels_and_within_its_limit() -> None:
    gains = [20 * log10(float(change_gain(torch.ones(1), db=6.0, generator=generator("gain", d)))) for d in DRAWS]
    assert -6.0 <= min(gains) < -5.5
    assert 5.5 < max(gains) <= 6.0
    assert abs(np.mean(gains)) < 0.8
    x = wave()
    changed = change_gain(x, db=6.0, generator=generator("one"))
    assert torch.allclose(changed / x, (changed / x)[0].expand(len(x)), rtol=1e-5)


def test_noise_has_the_ratio_it_promises() -> None:
    x = wave(20_000)
    ratios = []
    for draw in range(40):
        noise = add_noise(x, snr_db=10.0, generator=generator("noise", draw)) - x
        ratios.append(10 * log10(float(x.square().mean() / noise.square().mean())))
        assert abs(float((noise * x).mean())) < 0.05 * float(noise.std() * x.std())
    assert 9.8 <= min(ratios) < 13
    assert 27 < max(ratios) <= 30.2


def test_noise_leaves_silence_and_nothing_alone() -> None:
    for silent in (torch.zeros(100), torch.zeros(0)):
        assert torch.equal(add_noise(silent, snr_db=0.0, generator=generator("noise")), silent)
    assert roll(torch.zeros(0), generator("roll")).shape == (0,)


def test_stripes_cover_up_to_so_many_frames_and_bands() -> None:
    features = torch.ones(30, 20)
    widths = set()
    for draw in range(400):
        masked = mask_stripes(features, frames=4, bands=3, fill=-7.0, generator=generator("stripes", draw))
        hidden = masked == -7.0
        rows, columns = hidden.all(1).nonzero().flatten(), hidden.all(0).nonzero().flatten()
        for stripe in (rows, columns):
            assert torch.equal(stripe, torch.arange(len(stripe)) + (stripe[0] if len(stripe) else 0))  # in one piece
        assert int(hidden.sum()) == 20 * len(rows) + 30 * len(columns) - len(rows) * len(columns)
        assert torch.all(masked[~hidden] == 1.0)
        widths.add((len(rows), len(columns)))
    assert widths == {(t, f) for t in range(5) for f in range(4)}
    assert torch.all(features == 1.0)  # the argument is left alone


def test_stripes_wider_than_the_clip_may_cover_it() -> None:
    masked = [mask_stripes(torch.ones(3, 2), frames=9, bands=0, fill=0.0, generator=generator(d)) for d in range(50)]
    assert {int((m == 0).all(1).sum()) for m in masked} == {0, 1, 2, 3}


# Pictures


def pillow(operation: Callable[[Image.Image], Image.Image], channels: int) -> Tensor:
    return as_tensor(operation(Image.fromarray(picture(channels))))


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(
    ("name", "strength", "operation", "tolerance"),
    [
        ("autocontrast", 0.5, ImageOps.autocontrast, 1.01 / 255),
        ("equalize", 0.5, ImageOps.equalize, 0.01 / 255),
        ("posterize", 0.9, lambda image: ImageOps.posterize(image, 4), 0.01 / 255),
        ("posterize", 0.3, lambda image: ImageOps.posterize(image, 7), 0.01 / 255),
        ("solarize", 0.6, lambda image: ImageOps.solarize(image, 102), 0.01 / 255),
        ("saturation", -1.0, lambda image: ImageEnhance.Color(image).enhance(0.1), 1.6 / 255),
        ("saturation", 1.0, lambda image: ImageEnhance.Color(image).enhance(1.9), 2.1 / 255),
        ("contrast", 0.5, lambda image: ImageEnhance.Contrast(image).enhance(1.45), 1.6 / 255),
        ("brightness", -0.5, lambda image: ImageEnhance.Brightness(image).enhance(0.55), 1.01 / 255),
        ("sharpness", 1.0, lambda image: ImageEnhance.Sharpness(image).enhance(1.9), 2.1 / 255),
        ("sharpness", -1.0, lambda image: ImageEnhance.Sharpness(image).enhance(0.1), 2.1 / 255),
    ],
)
def test_colours_change_as_in_pillow(
    name: str,
    strength: float,
    operation: Callable[[Image.Image], Image.Image],
    tolerance: float,
    channels: int,
) -> None:
    ours = OPERATIONS[name](strength)(as_tensor(picture(channels)))
    assert (ours - pillow(operation, channels)).abs().max() <= tolerance


def test_equalize_leaves_the_brightest_value_out_of_its_count_as_pillow_does() -> None:
    bright = picture()
    bright[:20] = 250  # half of all pixels
    ours = OPERATIONS["equalize"](1.0)(as_tensor(bright))
    assert torch.allclose(ours, as_tensor(ImageOps.equalize(Image.fromarray(bright))), atol=1e-6)


def affine(a: float, b: float, d: float, e: float, right: float = 0.0, down: float = 0.0) -> Callable[..., Image.Image]:
    """Pillow's transform about the centre of a 56 × 40 picture: the input offset is ((a b) (d e)) · output offset."""
    centre_x, centre_y = 28 - right, 20 - down
    c, f = centre_x - a * 28 - b * 20, centre_y - d * 28 - e * 20
    return lambda image: image.transform(
        image.size, Image.Transform.AFFINE, (a, b, c, d, e, f), Image.Resampling.BILINEAR
    )


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(
    ("name", "strength", "operation"),
    [
        ("rotate", 1.0, lambda image: image.rotate(30, Image.Resampling.BILINEAR)),
        ("rotate", -0.5, lambda image: image.rotate(-15, Image.Resampling.BILINEAR)),
        ("shear x", 1.0, affine(1, 0.3, 0, 1)),
        ("shear y", -1.0, affine(1, 0, -0.3, 1)),
        ("translate x", 1.0, affine(1, 0, 0, 1, right=0.45 * 56)),
        ("translate y", -0.5, affine(1, 0, 0, 1, down=-0.225 * 40)),
    ],
)
def test_shapes_change_as_in_pillow_where_both_show_the_picture(
    name: str, strength: float, operation: Callable[[Image.Image], Image.Image], channels: int
) -> None:
    x = as_tensor(picture(channels))
    shown = pillow(operation, channels)
    whole = as_tensor(operation(Image.new("L", (56, 40), 255)))[0] == 1.0  # elsewhere Pillow shows black
    whole[1:-1, 1:-1] &= whole[:-2, 1:-1] & whole[2:, 1:-1] & whole[1:-1, :-2] & whole[1:-1, 2:]  # nor half of it
    assert 0.3 < float(whole.float().mean()) < 1
    ours = OPERATIONS[name](strength)(x)
    inner = whole[1:-1, 1:-1]
    assert (ours - shown)[:, 1:-1, 1:-1][:, inner].abs().max() <= 2.5 / 255


def test_what_moved_out_leaves_the_mean_colour() -> None:
    x = as_tensor(picture())
    moved = warp(x, move=(0.5, 0.0))
    assert torch.allclose(moved[..., :27], x.mean((1, 2), keepdim=True).expand(-1, 40, 27), atol=1e-6)
    assert torch.allclose(moved[..., 28:], x[..., :28], atol=1e-5)


@pytest.mark.parametrize("name", sorted(OPERATIONS))
def test_every_operation_is_gentle_at_strength_zero(name: str) -> None:
    x = as_tensor(picture())
    if name not in ("autocontrast", "equalize"):
        assert torch.allclose(OPERATIONS[name](0.0)(x), x, atol=1e-5)


@pytest.mark.parametrize("name", sorted(OPERATIONS))
@pytest.mark.parametrize("shape", [(1, 9, 7), (3, 9, 7), (3, 4, 9, 7), (1, 1, 1), (3, 2, 1), (2, 3, 5)])
def test_every_operation_takes_every_picture_and_stays_in_range(name: str, shape: tuple[int, ...]) -> None:
    x = torch.rand(shape, generator=generator("range"))
    before = x.clone()
    for strength in (-1.0, 0.35, 1.0):
        changed = OPERATIONS[name](strength)(x)
        assert changed.shape == x.shape
        assert changed.dtype == torch.float32
        assert 0 <= float(changed.min()) <= float(changed.max()) <= 1
    assert torch.equal(x, before)


@pytest.mark.parametrize("name", sorted(OPERATIONS))
def test_a_clip_of_one_picture_changes_like_the_picture(name: str) -> None:
    x = as_tensor(picture())
    clip = x[:, None].expand(-1, 3, -1, -1)  # the same frame three times
    changed = OPERATIONS[name](0.7)(clip)
    assert torch.equal(changed, changed[:, :1].expand_as(clip))
    if name != "equalize":  # which counts pixels in whole numbers, more finely in a clip
        assert torch.allclose(changed[:, 0], OPERATIONS[name](0.7)(x), atol=1e-5)


def test_statistics_are_those_of_the_whole_clip_so_that_nothing_flickers() -> None:
    clip = torch.stack([torch.full((3, 5, 5), 0.25), torch.full((3, 5, 5), 0.5)], dim=1)  # a dark, then a bright frame
    stretched = OPERATIONS["autocontrast"](1.0)(clip)
    assert torch.all(stretched[:, 0] == 0.0)
    assert torch.all(stretched[:, 1] == 1.0)


@pytest.mark.parametrize("name", ["autocontrast", "equalize"])
def test_a_constant_picture_stays_as_it_is(name: str) -> None:
    x = torch.full((3, 6, 6), 51 / 255)
    assert torch.allclose(OPERATIONS[name](1.0)(x), x)


def test_randaugment_applies_so_many_operations_from_the_whole_set() -> None:
    x = as_tensor(picture())
    singles = {name: [OPERATIONS[name](sign * 0.9)(x) for sign in (1.0, -1.0)] for name in OPERATIONS}
    seen = set()
    for draw in range(150):
        changed = randaugment(x, operations=1, magnitude=9.0, generator=generator("rand", draw))
        names = [name for name, both in singles.items() if any(torch.equal(changed, one) for one in both)]
        assert len(names) == 1
        seen.update(names)
    assert seen == set(OPERATIONS)
    assert torch.equal(randaugment(x, operations=0, magnitude=9.0, generator=generator("none")), x)


def test_an_erased_box_has_the_promised_size_and_the_mean_colour() -> None:
    x = torch.rand(3, 40, 50, generator=generator("erase"))
    areas, shapes = [], []
    for draw in DRAWS:
        changed = erase(x, probability=1.0, generator=generator("erase", draw))
        rows, columns = (changed != x).all(0).nonzero().T
        h, w = int(rows.max() - rows.min()) + 1, int(columns.max() - columns.min()) + 1
        assert len(rows) == h * w  # a full box
        box = changed[:, rows.min() : rows.max() + 1, columns.min() : columns.max() + 1]
        assert torch.allclose(box, x.mean((1, 2))[:, None, None].expand_as(box))
        areas.append(h * w / 2000)
        shapes.append(h / w)
    assert 0.015 < min(areas) < 0.05
    assert 0.28 < max(areas) < 0.34
    assert 0.25 < min(shapes) < 0.5
    assert 2 < max(shapes) < 4


def test_a_box_is_erased_as_often_as_asked_and_in_all_frames() -> None:
    clip = torch.rand(3, 4, 20, 20, generator=generator("clip"))
    changed = [erase(clip, probability=0.25, generator=generator("often", draw)) for draw in DRAWS]
    often = [not torch.equal(x, clip) for x in changed]
    assert 0.15 < np.mean(often) < 0.35
    hidden = (changed[often.index(True)] != clip).all(0)  # (T, H, W)
    assert 0.015 < float(hidden.float().mean()) < 0.34
    assert torch.equal(hidden, hidden[:1].expand_as(hidden))


@pytest.mark.parametrize(
    "change",
    [
        lambda g: roll(wave(), g),
        lambda g: change_gain(wave(), db=6.0, generator=g),
        lambda g: add_noise(wave(), snr_db=10.0, generator=g),
        lambda g: mask_stripes(wave(4000).reshape(100, 40), frames=40, bands=20, fill=0.0, generator=g),
        lambda g: randaugment(as_tensor(picture()), operations=2, magnitude=9.0, generator=g),
        lambda g: erase(as_tensor(picture()), probability=1.0, generator=g),
    ],
)
def test_the_generator_alone_decides(change: Callable[[torch.Generator], Tensor]) -> None:
    before = torch.get_rng_state()
    once, again, other = (change(generator("decides", seed)) for seed in (1, 1, 2))
    assert torch.equal(once, again)
    assert not torch.equal(once, other)
    assert torch.equal(torch.get_rng_state(), before)
