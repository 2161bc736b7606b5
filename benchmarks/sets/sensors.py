"""Motion sensors: 8 activities, 6 channels (3 of acceleration, 3 of rotation) of 512 samples at 50 Hz, as .npy.

Frequency, strength, phase, orientation, drift and noise are drawn. In the test part the sensor is tilted more.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

NAMES = ["rest", "fidget", "walk", "stairs-up", "stairs-down", "cycle", "run", "sway"]
HARMONICS = [[0.0], [0.0], [1, 0.5, 0.2], [1, 0.2, 0.45], [1, 0.7, 0.05], [0.4, 1, 0.3], [1, 0.3, 0.5], [1, 0.1, 0.6]]
RATES = [0, 0, 1.6, 2.0, 1.7, 1.2, 2.6, 0.4]  # Hz
STRENGTHS = [0.02, 0.04, 0.5, 0.55, 0.45, 0.35, 1.2, 0.6]
LENGTH = 512
TILT = {"train": 0.25, "test": 0.5}  # of the axes, about half of it in radians
COUNTS = {"train": 120, "test": 60}


def activity(kind: int, draws: np.random.Generator, tilt: float = 0.25) -> NDArray[np.float32]:
    """One recording (6, 512) of an activity."""
    moved, turned = np.zeros((3, LENGTH)), np.zeros((3, LENGTH))
    rate = RATES[kind] * draws.uniform(0.85, 1.15)
    start, wander = draws.uniform(0, 2 * np.pi), np.cumsum(draws.normal(0, 0.02, LENGTH))
    phase = 2 * np.pi * rate * np.arange(LENGTH) / 50.0 + start + wander
    strength = STRENGTHS[kind] * draws.uniform(0.7, 1.3)
    for k, part in enumerate(HARMONICS[kind], 1):
        for axis in range(3):
            wave_of = np.sin(k * phase + axis * 0.7 + k * 0.4 * kind)
            moved[axis] += strength * part * draws.uniform(0.5, 1) * (0.3, 0.5, 1)[axis] * wave_of
            wave_of = np.cos(k * phase + axis * 0.5 + k * 0.3 * kind)
            turned[axis] += strength * part * 0.7 * draws.uniform(0.5, 1) * (1, 0.6, 0.3)[axis] * wave_of
    if kind == 1:  # fidgeting
        for _ in range(draws.integers(2, 6)):
            begin = draws.integers(0, 460)
            moved[:, begin : begin + 40] += draws.normal(0, 0.3, (3, 1)) * np.hanning(40)
    if kind == 7:
        turned *= np.sign(np.sin(phase))
    orientation, _ = np.linalg.qr(draws.normal(size=(3, 3)) * tilt + np.eye(3))
    both = np.concatenate([orientation @ (moved + np.array([[0.0], [0.0], [1.0]])), orientation @ turned])
    drift = np.cumsum(draws.normal(0, 0.004, (6, LENGTH)), 1)
    return (both + drift + draws.normal(0, 0.05, (6, LENGTH))).astype(np.float32)


def write(root: Path, share: float) -> None:
    """All recordings, class by class."""
    draws = np.random.default_rng(1)
    for split, count in COUNTS.items():
        for kind, name in enumerate(NAMES):
            folder = root / split / name
            folder.mkdir(parents=True, exist_ok=True)
            for i in range(round(count * share)):
                np.save(folder / f"{i:03}.npy", activity(kind, draws, TILT[split]))
