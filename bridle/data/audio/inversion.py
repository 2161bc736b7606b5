"""From log-mel features back to a waveform: non-negative mel inversion, then Griffin–Lim for the phases.

Shapes: features (frames, mels) as `LogMel` computes them -> waveform (N,), N = window + (frames − 1) · shift.

The power spectrum p ≥ 0 solves p·T ≈ exp(features), T the mel triangles, by multiplicative updates (Lee and Seung
2001); phases are found by the fast Griffin–Lim iteration (Perraudin, Balazs and Søndergaard 2013); pre-emphasis is
undone last.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import fold

from bridle.data.audio.logmel import FLOOR, PREEMPHASIS, LogMel, hann, triangles
from bridle.errors import needs
from bridle.seeding import generator

MEL_ITERATIONS = 60
MOMENTUM = 0.99
HIGH_PASS = 0.992  # pole; −3 dB at 20 Hz where there are 16,000 samples a second


def invert_logmel(features: Tensor, front: LogMel, *, iterations: int = 60) -> Tensor:
    """A waveform whose log-mel features are close to `features`; the same features give the same waveform."""
    power = invert_mel((features.float().exp() - FLOOR).clamp_min(0), front)  # (frames, fft/2)
    magnitude = torch.nn.functional.pad(power.sqrt(), (0, 1))  # the Nyquist bin, which features leave out, is 0
    return undo_preemphasis(griffin_lim(magnitude, front, iterations=iterations))


def invert_mel(energy: Tensor, front: LogMel) -> Tensor:
    """Non-negative power (frames, fft/2) whose mel energies are close to `energy` (frames, mels)."""
    weights = triangles(front.fft, front.sample_rate, front.mels, front.low, energy.device)  # (fft/2, mels)
    share = weights / weights.sum(0).clamp_min(1e-8)
    power = energy @ share.t() + 1e-10
    for _ in range(MEL_ITERATIONS):
        power = power * (energy @ weights.t()) / (power @ (weights @ weights.t()) + 1e-10)
    return power


def griffin_lim(magnitude: Tensor, front: LogMel, *, iterations: int) -> Tensor:
    """(frames, fft/2 + 1) magnitudes -> (N,) waveform with phases that fit the overlap of the frames."""
    angle = torch.rand(magnitude.shape, generator=generator("griffin-lim")).to(magnitude.device) * 2 * torch.pi
    estimate = torch.polar(magnitude, angle)
    before = torch.zeros_like(estimate)
    for _ in range(iterations):
        rebuilt = analyse(synthesise(estimate, front), front)
        moved = rebuilt + MOMENTUM * (rebuilt - before)
        before = rebuilt
        estimate = magnitude * moved / moved.abs().clamp_min(1e-12)
    return synthesise(estimate, front)


def analyse(wave: Tensor, front: LogMel) -> Tensor:
    """(N,) -> (frames, fft/2 + 1) spectrum of windowed frames."""
    frames = wave.unfold(0, front.window, front.shift) * hann(front.window, wave.device)
    spectrum: Tensor = torch.fft.rfft(frames, n=front.fft)
    return spectrum


def synthesise(spectrum: Tensor, front: LogMel) -> Tensor:
    """(frames, fft/2 + 1) -> (N,): the waveform whose windowed frames are closest to the spectrum in least squares."""
    window = hann(front.window, spectrum.device)
    frames = torch.fft.irfft(spectrum, n=front.fft)[:, : front.window] * window
    weight = window.square().expand_as(frames)
    size = front.window + (len(frames) - 1) * front.shift

    def add(rows: Tensor) -> Tensor:
        return fold(rows.t()[None], (1, size), (1, front.window), stride=(1, front.shift)).flatten()

    return add(frames) / add(weight).clamp_min(0.1)  # at the ends of the waveform windows are close to 0


def undo_preemphasis(wave: Tensor) -> Tensor:
    """y_n = x_n + 0.97·y_{n−1}, then a high-pass: what lies below the lowest mel band is not known."""
    with needs("audio"):
        from scipy.signal import lfilter

    restored = lfilter([1.0], [1.0, -PREEMPHASIS], wave.double().cpu().numpy())
    return torch.from_numpy(lfilter([1.0, -1.0], [1.0, -HIGH_PASS], restored)).float()
