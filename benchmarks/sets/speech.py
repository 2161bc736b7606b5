"""Spoken words: 20 words by espeak-ng, .wav of 22,050 Hz.

Speed, pitch and loudness are drawn, white or smoothed noise is added at 5 to 25 dB. The test voices are not heard in
training.
"""

from __future__ import annotations

import random
import subprocess
import wave
from pathlib import Path

import numpy as np

WORDS = [
    *("yes", "no", "up", "down", "left", "right", "on", "off", "stop", "go"),
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"),
]
VOICES = {
    "train": [
        *("en-us", "en-gb", "en-gb-scotland", "en-gb-x-rp", "en-029", "en-us+f1", "en-us+f2", "en-us+f3", "en-us+f4"),
        *("en-gb+m1", "en-gb+m2", "en-gb+m3", "en-us+m4", "en-us+m5"),
    ],
    "test": ["en-gb-x-gbclan+f5", "de", "fr", "es", "it", "pl"],
}
COUNTS = {"train": 60, "test": 20}


def write(root: Path, share: float) -> None:
    """Utterances of espeak-ng, then noise on all of them."""
    draws = random.Random(0)
    for split, count in COUNTS.items():
        for word in WORDS:
            (root / split / word).mkdir(parents=True, exist_ok=True)
            for i in range(round(count * share)):
                path, voice = root / split / word / f"{word}{i:03}.wav", draws.choice(VOICES[split])
                settings = {"-s": draws.randint(110, 210), "-p": draws.randint(20, 80), "-a": draws.randint(60, 140)}
                options = [str(part) for pair in settings.items() for part in pair]
                command = ["espeak-ng", "-v", voice, *options, "-w", str(path), word]
                subprocess.run(command, check=True, capture_output=True)
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
