"""Two small labelled sets that no setting was tuned for: spoken words and motion sensors.

    python benchmarks/synthetic_sets.py OUT        # writes OUT/speech (needs espeak-ng) and OUT/sensors

speech: 20 words, 50 training and 20 test utterances each, with drawn speed, pitch and loudness and noise at 5 to 25 dB;
the test voices are not heard in training.
sensors: 8 activities, 120 and 60 recordings of 6 channels (3 of acceleration, 3 of
rotation) of 512 samples, with drawn frequency, orientation, drift and noise.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import wave
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

WORDS = [
    *("yes", "no", "up", "down", "left", "right", "on", "off", "stop", "go"),
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"),
]
VOICES = [
    *("en-us", "en-gb", "en-gb-scotland", "en-gb-x-rp", "en-029", "en-us+f1", "en-us+f2", "en-us+f3", "en-us+f4"),
    *("en-gb+m1", "en-gb+m2", "en-gb+m3", "en-us+m4", "en-us+m5"),  # so far training
    *("en-gb-x-gbclan+f5", "de", "fr", "es", "it", "pl"),
]
HARMONICS = [[0.0], [0.0], [1, 0.5, 0.2], [1, 0.2, 0.45], [1, 0.7, 0.05], [0.4, 1, 0.3], [1, 0.3, 0.5], [1, 0.1, 0.6]]
RATES = [0, 0, 1.6, 2.0, 1.7, 1.2, 2.6, 0.4]  # Hz
STRENGTHS = [0.02, 0.04, 0.5, 0.55, 0.45, 0.35, 1.2, 0.6]
LENGTH = 512


def write_speech(root: Path) -> None:
    """Utterances of espeak-ng, then noise on all of them."""
    draws = random.Random(0)
    for word in WORDS:
        for i in range(70):
            split, pool = ("train", VOICES[:14]) if i < 50 else ("test", VOICES[14:])
            voice, path = draws.choice(pool), root / split / word / f"{word}{i:03}.wav"
            path.parent.mkdir(parents=True, exist_ok=True)
            settings = {"-s": draws.randint(110, 210), "-p": draws.randint(20, 80), "-a": draws.randint(60, 140)}
            options = [str(part) for pair in settings.items() for part in pair]
            subprocess.run(["espeak-ng", "-v", voice, *options, "-w", str(path), word], check=True, capture_output=True)
    noise = np.random.default_rng(0)
    for path in sorted(root.rglob("*.wav")):
        add_noise(path, noise)


def add_noise(path: Path, draws: np.random.Generator) -> None:
    """White noise, or smoothed over up to five samples, at 5 to 25 dB."""
    with wave.open(str(path)) as file:
        form = file.getparams()
        x = np.frombuffer(file.readframes(form.nframes), np.int16).astype(float)
    ratio, added = draws.uniform(5, 25), draws.normal(size=len(x))
    added = np.convolve(added, np.ones(draws.integers(1, 6)), "same")
    added *= np.sqrt((x**2).mean() / (added**2).mean()) * 10 ** (-ratio / 20)
    with wave.open(str(path), "w") as file:
        file.setparams(form)
        file.writeframes(np.clip(x + added, -32767, 32767).astype(np.int16).tobytes())


def activity(kind: int, draws: np.random.Generator) -> NDArray[np.float32]:
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
    orientation, _ = np.linalg.qr(draws.normal(size=(3, 3)) * 0.25 + np.eye(3))
    both = np.concatenate([orientation @ (moved + np.array([[0.0], [0.0], [1.0]])), orientation @ turned])
    drift = np.cumsum(draws.normal(0, 0.004, (6, LENGTH)), 1)
    return (both + drift + draws.normal(0, 0.05, (6, LENGTH))).astype(np.float32)


def write_sensors(root: Path) -> None:
    """All recordings, class by class."""
    draws = np.random.default_rng(1)
    for split, count in (("train", 120), ("test", 60)):
        for kind in range(8):
            folder = root / split / f"act{kind}"
            folder.mkdir(parents=True, exist_ok=True)
            for i in range(count):
                np.save(folder / f"{i:03}.npy", activity(kind, draws))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    out = parser.parse_args().out
    write_sensors(out / "sensors")
    write_speech(out / "speech")
