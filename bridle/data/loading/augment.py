"""Random changes of one training sample, each a pure function of its input and the generator it draws from.

Shapes: wave (N,) in ±1; features (frames, mels); pictures (C, H, W) and clips (C, T, H, W) in [0, 1]. A clip is changed
alike in all its frames, and whatever an operation measures (a mean, a histogram) it measures over the whole clip, so
that nothing flickers. No function changes its argument, which may live in a cache.

Magnitudes m of RandAugment go from 0 to 10, strength s = m/10; signs are drawn:
    rotate ±30°·s · shear ±0.3·s · translate ±0.45·s of the side · solarize from 1 − s
    posterize to 8 − round(4·s) bits · saturation, contrast, brightness, sharpness by 1 ± 0.9·s
    identity, autocontrast and equalize have no strength
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import cos, exp, log, radians, sin, sqrt

import torch
from torch import Tensor
from torch.nn.functional import affine_grid, conv2d, grid_sample

from bridle.config.data_schema import AugmentConfig

NOISE_RANGE = 20.0  # dB between the loudest noise and the softest
ERASED_AREA = (0.02, 0.33)  # share of the picture
ERASED_SHAPE = 3.3  # a box is up to this much taller than wide, or wider than tall
ERASE_TRIES = 10  # boxes drawn until one fits into the picture
GREY = (0.299, 0.587, 0.114)  # how bright red, green and blue look

Change = Callable[[Tensor], Tensor]


def roll(wave: Tensor, generator: torch.Generator) -> Tensor:
    """Start at a uniformly drawn sample; what came before it follows at the end."""
    if wave.shape[-1] == 0:
        return wave
    return wave.roll(int(torch.randint(wave.shape[-1], (), generator=generator)), dims=-1)


def change_wave(wave: Tensor, wanted: AugmentConfig, generator: torch.Generator) -> Tensor:
    """Gain and noise, where asked for."""
    if wanted.gain_beta > 0:
        wave = scale_wave(wave, concentration=wanted.gain_beta, generator=generator)
    if wanted.gain_db > 0:
        wave = change_gain(wave, db=wanted.gain_db, generator=generator)
    return wave if wanted.noise_db is None else add_noise(wave, snr_db=wanted.noise_db, generator=generator)


def change_gain(wave: Tensor, *, db: float, generator: torch.Generator) -> Tensor:
    """Louder or softer by a uniformly drawn −db … +db."""
    return wave * amplitude(uniform(-db, db, generator))


def scale_wave(wave: Tensor, *, concentration: float, generator: torch.Generator) -> Tensor:
    """Times 0.5 + Beta(a, a), between 0.5 and 1.5: with a = 10 the gain of the paper's released code."""
    return wave * (0.5 + draw_share(concentration, generator))


def add_noise(wave: Tensor, *, snr_db: float, generator: torch.Generator) -> Tensor:
    """White Gaussian noise, `snr_db` … `snr_db` + 20 dB below the clip's own power; silence stays silent."""
    if not wave.any():
        return wave
    loudness = sqrt(float(wave.double().square().mean()))
    ratio = uniform(snr_db, snr_db + NOISE_RANGE, generator)
    return wave + loudness * amplitude(-ratio) * torch.randn(wave.shape, generator=generator)


def mask_stripes(features: Tensor, *, frames: int, bands: int, fill: float, generator: torch.Generator) -> Tensor:
    """SpecAugment: one stripe of 0 … `frames` frames and one of 0 … `bands` mel bands are set to `fill`."""
    masked = features.clone()
    for axis, widest in enumerate((frames, bands)):
        size = features.shape[axis]
        width = int(torch.randint(min(widest, size) + 1, (), generator=generator))
        start = int(torch.randint(size - width + 1, (), generator=generator))
        masked.narrow(axis, start, width).fill_(fill)
    return masked


def change_picture(x: Tensor, wanted: AugmentConfig, generator: torch.Generator) -> Tensor:
    """RandAugment and erasing of a picture or clip, where asked for."""
    if wanted.randaugment:
        operations, magnitude = wanted.randaugment, wanted.randaugment_magnitude
        x = randaugment(x, operations=operations, magnitude=magnitude, generator=generator)
    return erase(x, probability=wanted.erase, generator=generator) if wanted.erase else x


def randaugment(x: Tensor, *, operations: int, magnitude: float, generator: torch.Generator) -> Tensor:
    """`operations` picture operations one after another, each drawn from all fourteen; stays in [0, 1]."""
    names = list(OPERATIONS)
    for _ in range(operations):
        name = names[int(torch.randint(len(names), (), generator=generator))]
        sign = 1.0 if torch.rand((), generator=generator) < 0.5 else -1.0
        x = OPERATIONS[name](sign * magnitude / 10)(x)
    return x


def erase(x: Tensor, *, probability: float, generator: torch.Generator) -> Tensor:
    """With `probability` a box of 2–33 % of the picture becomes the sample's own mean colour, in all its frames."""
    height, width = x.shape[-2:]
    if torch.rand((), generator=generator) >= probability:
        return x
    for _ in range(ERASE_TRIES):
        area = height * width * uniform(*ERASED_AREA, generator)
        shape = exp(uniform(-log(ERASED_SHAPE), log(ERASED_SHAPE), generator))  # height : width
        h, w = round(sqrt(area * shape)), round(sqrt(area / shape))
        if 1 <= h <= height and 1 <= w <= width:
            top = int(torch.randint(height - h + 1, (), generator=generator))
            left = int(torch.randint(width - w + 1, (), generator=generator))
            erased = x.clone()
            erased[..., top : top + h, left : left + w] = mean_colour(x)
            return erased
    return x


def draw_share(concentration: float, generator: torch.Generator) -> float:
    """λ ~ Beta(a, a) = g₁/(g₁ + g₂) with g ~ Gamma(a), as sigmoid(ln g₁ − ln g₂).

    ln g = ln g' + ln u / a with g' ~ Gamma(a + 1), u uniform: for small a the g themselves are too small for a float.
    """
    two = torch.full((2,), concentration + 1, dtype=torch.float64)
    u = 1 - torch.rand(2, generator=generator, dtype=torch.float64)  # in (0, 1]
    own, other = torch._standard_gamma(two, generator=generator).log() + u.log() / concentration
    return float(torch.sigmoid(own - other))


def uniform(low: float, high: float, generator: torch.Generator) -> float:
    return low + (high - low) * float(torch.rand((), generator=generator, dtype=torch.float64))


def amplitude(db: float) -> float:
    """The factor 10^(db/20)."""
    return exp(db * log(10) / 20)


def mean_colour(x: Tensor) -> Tensor:
    """(C, 1, 1) or (C, 1, 1, 1): the mean of each channel, which normalisation leaves unremarkable."""
    return x.mean(dim=tuple(range(1, x.dim())), keepdim=True)


# The fourteen operations. Each takes a signed strength −1 … 1 and gives a change; those without a direction use |s|.


def autocontrast(x: Tensor) -> Tensor:
    """Each channel stretched to reach from 0 to 1; a constant channel stays."""
    axes = tuple(range(1, x.dim()))
    low, high = x.amin(axes, keepdim=True), x.amax(axes, keepdim=True)
    return torch.where(high > low, (x - low) / (high - low).clamp_min(1e-12), x)


def equalize(x: Tensor) -> Tensor:
    """Each channel's 256-step histogram made as even as it can be."""
    steps = (x * 255).round().long().clamp_(0, 255)  # (C, …)
    return torch.stack([equal_share(channel) for channel in steps]) / 255


def equal_share(channel: Tensor) -> Tensor:
    """Values 0 … 255 to their rank among all values, 0 … 255; the brightest value does not count, as in Pillow."""
    histogram = torch.bincount(channel.flatten(), minlength=256)
    share = (int(histogram.sum()) - int(histogram[channel.max()])) // 255  # pixels for each step of the result
    if share == 0:
        return channel.float()
    below = histogram.cumsum(0) - histogram  # pixels darker than each value
    return ((below + share // 2) // share).clamp_(max=255)[channel].float()


def posterize(strength: float) -> Change:
    unit = 2 ** round(4 * abs(strength))  # 8-bit values become multiples of this
    return lambda x: ((x * 255).round() / unit).floor() * unit / 255


def solarize(strength: float) -> Change:
    threshold = 1 - abs(strength)
    return lambda x: torch.where(x >= threshold, 1 - x, x) if strength else x


def blend(towards: Change, strength: float) -> Change:
    """f·x + (1 − f)·towards(x) with f = 1 + 0.9·strength: nearer to `towards`, or away from it."""
    factor = 1 + 0.9 * strength
    return lambda x: (factor * x + (1 - factor) * towards(x)).clamp(0, 1)


def grey(x: Tensor) -> Tensor:
    """(1, …): how bright each pixel looks; the mean of the channels where they are not red, green and blue."""
    weights = torch.tensor(GREY) if x.shape[0] == 3 else torch.full((x.shape[0],), 1 / x.shape[0])
    return torch.einsum("c,c...->...", weights, x)[None]


def smooth(x: Tensor) -> Tensor:
    """A 3×3 blur with weight 5 in the middle and 1 around it; the outermost pixels stay."""
    if min(x.shape[-2:]) < 3:
        return x
    weights = torch.ones(1, 1, 3, 3)
    weights[..., 1, 1] = 5
    inner = conv2d(x.reshape(-1, 1, *x.shape[-2:]), weights / 13)  # (C·T, 1, H − 2, W − 2)
    blurred = x.clone()
    blurred[..., 1:-1, 1:-1] = inner.reshape(*x.shape[:-2], *inner.shape[-2:])
    return blurred


def warp(
    x: Tensor,
    *,
    turn: float = 0.0,
    shear: tuple[float, float] = (0.0, 0.0),
    move: tuple[float, float] = (0.0, 0.0),
) -> Tensor:
    """Turned counter-clockwise by `turn` degrees, sheared and moved (right, down, as a share of the side), bilinear.

    Everything turns about the centre. Where nothing is left to show comes the mean colour.
    """
    height, width = x.shape[-2:]
    across, down = cos(radians(turn)), sin(radians(turn))
    # From output to input: offsets from the centre, each axis in halves of its side.
    theta = torch.tensor(
        [
            [across, (-down + shear[0]) * height / width, -2 * move[0]],
            [(down + shear[1]) * width / height, across, -2 * move[1]],
        ]
    )
    frames = x.reshape(1, -1, height, width)  # (C, T, H, W) -> (1, C·T, H, W)
    grid = affine_grid(theta[None], list(frames.shape), align_corners=False)
    colour = mean_colour(x)
    inside = (x - colour).reshape(frames.shape)
    shown = grid_sample(inside, grid, mode="bilinear", padding_mode="zeros", align_corners=False)
    return (shown.reshape(x.shape) + colour).clamp(0, 1)


OPERATIONS: dict[str, Callable[[float], Change]] = {
    "identity": lambda s: lambda x: x,
    "autocontrast": lambda s: autocontrast,
    "equalize": lambda s: equalize,
    "rotate": lambda s: partial(warp, turn=30 * s),
    "solarize": solarize,
    "posterize": posterize,
    "saturation": partial(blend, grey),
    "contrast": partial(blend, lambda x: grey(x).mean().expand_as(x)),
    "brightness": partial(blend, torch.zeros_like),
    "sharpness": partial(blend, smooth),
    "shear x": lambda s: partial(warp, shear=(0.3 * s, 0.0)),
    "shear y": lambda s: partial(warp, shear=(0.0, 0.3 * s)),
    "translate x": lambda s: partial(warp, move=(0.45 * s, 0.0)),
    "translate y": lambda s: partial(warp, move=(0.0, 0.45 * s)),
}
