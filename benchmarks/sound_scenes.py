"""Write generated sound scenes of 5 s, as varied as can be, as .wav at 16 kHz.

    python benchmarks/sound_scenes.py OUT [--count 2000] [--seed 0]

A scene has a background of coloured noise and one to six events. An event is one of the ten kinds of sounds of
bridle/data/embedded/sounds.py, slowed down or sped up, filtered, with an attack and a decay, once or repeated, in a
room. Everything is drawn; nothing is recorded.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import soundfile
import torch
from numpy.typing import NDArray
from scipy.signal import fftconvolve

from bridle.data.embedded.sounds import KINDS, RATE, Draw

SECONDS = 5
Wave = NDArray[np.float64]


def event(draws: np.random.Generator) -> Wave:
    """One sound, at most 3 s long, of largest value 1."""
    voice = list(KINDS.values())[draws.integers(len(KINDS))]
    randomness = torch.Generator().manual_seed(int(draws.integers(2**62)))
    length = torch.full((1, 1), draws.uniform(0.2, 1.0))
    wave = voice(Draw(1, randomness), torch.arange(RATE)[None] / RATE, length)[0].double().numpy()
    speed = 2 ** draws.uniform(-1.5, 1.5)  # changes pitch and length together, as a tape does
    places = np.arange(0, RATE - 1, speed)[: 3 * RATE]
    wave = np.interp(places, np.arange(RATE), wave)[: int(float(length) * RATE / speed)]
    age = np.arange(len(wave)) / RATE
    attack, decay = 10 ** draws.uniform(-3, -0.7), 10 ** draws.uniform(-1.5, 1)
    wave = wave * np.minimum(age / attack, 1) * np.exp(-age / decay) * np.minimum((len(wave) / RATE - age) / 0.01, 1)
    return wave / (np.abs(wave).max() + 1e-9)


def coloured(wave: Wave, draws: np.random.Generator) -> Wave:
    """The wave through a filter whose gain is a random smooth curve over log frequency, up to ±20 dB."""
    spectrum = np.fft.rfft(wave)
    octaves = np.log2(np.maximum(np.fft.rfftfreq(len(wave), 1 / RATE), 30) / 30)  # 0 to 8
    gain = np.interp(octaves, np.linspace(0, 8.1, 6), draws.uniform(-20, 0, 6))
    return np.fft.irfft(spectrum * 10 ** (gain / 20), len(wave))


def scene(draws: np.random.Generator) -> Wave:
    """(80000,) in ±1."""
    size = SECONDS * RATE
    mixed = 10 ** draws.uniform(-4, -1.3) * coloured(draws.normal(size=size), draws)
    for _ in range(draws.integers(1, 7)):
        sound, level = coloured(event(draws), draws), 10 ** draws.uniform(-1.5, 0)
        repeats, period = (1, 1.0) if draws.uniform() < 0.5 else (draws.integers(2, 20), 10 ** draws.uniform(-1, 0))
        first = draws.integers(size)
        for n in range(repeats):
            start = first + int(n * period * RATE * draws.uniform(0.95, 1.05))
            part = sound[: max(0, size - start)]
            mixed[start : start + len(part)] += level * draws.uniform(0.7, 1) * part
    if draws.uniform() < 0.5:  # a room
        tail = draws.normal(size=int(RATE * draws.uniform(0.1, 0.8)))
        tail *= np.exp(-np.linspace(0, 7, len(tail))) * draws.uniform(0.02, 0.2)
        mixed = mixed + fftconvolve(mixed, tail)[:size]
    return mixed / (np.abs(mixed).max() + 1e-9) * 10 ** draws.uniform(-1.5, -0.05)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    for i in range(given.count):
        soundfile.write(given.out / f"{i:05}.wav", scene(np.random.default_rng([given.seed, i])), RATE)
