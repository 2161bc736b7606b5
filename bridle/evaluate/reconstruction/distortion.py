"""How far a reconstruction is from the original.

Shapes: pictures (C, H, W) in 0 … 1; log-mel features (frames, mels); waveforms (N,). All values are in decibels but
`ssim`.

    PSNR     −10·log10(mean squared error), for values in 0 … 1
    SSIM     mean structural similarity (Wang et al. 2004) with a Gaussian window of 11 points, σ = 1.5
    LSD      log-spectral distance: root mean square difference of the log-mel features
    SI-SDR   scale-invariant signal-to-distortion ratio (Le Roux et al. 2019)
"""

from __future__ import annotations

from math import log, log10

import torch
from torch import Tensor
from torch.nn.functional import conv2d

DECIBEL = 10 / log(10)  # of one unit of natural logarithm of power
RANGE = 80.0  # dB below the loudest value; what is softer counts as that soft
SSIM_WINDOW, SSIM_SIGMA = 11, 1.5
SMALLEST = 1e-12


def psnr(guess: Tensor, x: Tensor) -> float:
    """Peak signal-to-noise ratio of any shape of values in 0 … 1; at most 120 dB."""
    return -10 * log10(max(float((guess.double() - x.double()).square().mean()), SMALLEST))


def ssim(guess: Tensor, x: Tensor) -> float:
    """Structural similarity of two pictures (C, H, W), mean over channels and all places where the window fits."""
    window = gaussian(min(SSIM_WINDOW, *x.shape[-2:]))
    a, b = guess.double()[:, None], x.double()[:, None]  # (C, 1, H, W)

    def local(values: Tensor) -> Tensor:
        return conv2d(conv2d(values, window[None, None, :, None]), window[None, None, None, :])

    mean_a, mean_b = local(a), local(b)
    spread_a, spread_b = local(a * a) - mean_a.square(), local(b * b) - mean_b.square()
    shared = local(a * b) - mean_a * mean_b
    low, high = 0.01**2, 0.03**2
    similar = (2 * mean_a * mean_b + low) * (2 * shared + high)
    return float((similar / ((mean_a.square() + mean_b.square() + low) * (spread_a + spread_b + high))).mean())


def gaussian(size: int) -> Tensor:
    """(size,) weights that sum to one."""
    at = torch.arange(size, dtype=torch.float64) - (size - 1) / 2
    weights = torch.exp(-at.square() / (2 * SSIM_SIGMA**2))
    return weights / weights.sum()


def log_spectral_distance(guess: Tensor, x: Tensor) -> float:
    """LSD of natural-logarithm features; what is more than RANGE below the loudest value of `x` counts as that soft."""
    floor = x.max() - RANGE / DECIBEL
    difference = guess.clamp_min(floor).double() - x.clamp_min(floor).double()
    return float(DECIBEL * difference.square().mean().sqrt())


def si_sdr(guess: Tensor, x: Tensor) -> float:
    """Scale-invariant signal-to-distortion ratio of two waveforms of the same length."""
    a, b = (wave.double() - wave.double().mean() for wave in (guess, x))
    target = b * (a @ b) / (b @ b).clamp_min(SMALLEST)
    return 10 * log10(max(float(target @ target), SMALLEST) / max(float((a - target) @ (a - target)), SMALLEST))
