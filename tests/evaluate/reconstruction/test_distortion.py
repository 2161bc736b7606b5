"""Distortions against values worked out by hand or by loops in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from bridle.evaluate.reconstruction.distortion import DECIBEL, log_spectral_distance, psnr, si_sdr, ssim
from bridle.seeding import generator


def test_psnr_of_an_error_of_a_tenth_is_twenty_decibels() -> None:
    x = torch.zeros(1, 4, 4)
    assert psnr(x + 0.1, x) == pytest.approx(20.0, abs=1e-5)
    assert psnr(x, x) == 120.0


def ssim_by_loops(a: np.ndarray, b: np.ndarray) -> float:
    """One channel (H, W), straight from the formula."""
    at = np.arange(11) - 5
    line = np.exp(-(at**2) / (2 * 1.5**2))
    weights = np.outer(line, line) / line.sum() ** 2
    found = []
    for i in range(a.shape[0] - 10):
        for j in range(a.shape[1] - 10):
            p, q = a[i : i + 11, j : j + 11], b[i : i + 11, j : j + 11]
            mp, mq = (weights * p).sum(), (weights * q).sum()
            vp, vq = (weights * (p - mp) ** 2).sum(), (weights * (q - mq) ** 2).sum()
            shared = (weights * (p - mp) * (q - mq)).sum()
            top = (2 * mp * mq + 1e-4) * (2 * shared + 9e-4)
            found.append(top / ((mp**2 + mq**2 + 1e-4) * (vp + vq + 9e-4)))
    return float(np.mean(found))


def test_ssim_is_that_of_the_formula_and_one_for_equal_pictures() -> None:
    x = torch.rand(2, 14, 13, generator=generator("ssim"), dtype=torch.float64)
    y = (x + 0.2 * torch.randn(x.shape, generator=generator("ssim noise"))).clamp(0, 1)
    expected = np.mean([ssim_by_loops(y[c].numpy(), x[c].numpy()) for c in range(2)])
    assert ssim(y, x) == pytest.approx(expected, abs=1e-9)
    assert ssim(x, x) == pytest.approx(1.0)


def test_pictures_smaller_than_the_window_have_a_ssim() -> None:
    x = torch.rand(1, 8, 8, generator=generator("small"))
    assert ssim(x, x) == pytest.approx(1.0)


def test_ten_times_the_power_everywhere_is_ten_decibels() -> None:
    x = torch.randn(5, 4, generator=generator("features"))
    assert log_spectral_distance(x + math.log(10), x) == pytest.approx(10.0, abs=1e-4)


def test_what_is_eighty_decibels_below_the_loudest_does_not_count() -> None:
    x = torch.tensor([[0.0, -100.0 / DECIBEL]])
    assert log_spectral_distance(torch.tensor([[0.0, -85.0 / DECIBEL]]), x) == 0.0
    assert log_spectral_distance(torch.tensor([[0.0, -78.0 / DECIBEL]]), x) == pytest.approx(2 / math.sqrt(2), abs=1e-4)


def test_si_sdr_ignores_the_scale_and_measures_orthogonal_noise() -> None:
    time = torch.arange(1000) / 1000
    wave, noise = torch.sin(2 * torch.pi * 10 * time), torch.cos(2 * torch.pi * 10 * time)
    assert si_sdr(3 * wave, wave) > 100
    assert si_sdr(5 * (wave + 0.1 * noise), wave) == pytest.approx(20.0, abs=1e-3)
