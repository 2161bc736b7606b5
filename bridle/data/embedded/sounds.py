"""A small synthesizer: ten kinds of sounds, one second each, with random parameters, in random background noise.

    tone      one sine                               tremolo  a sine swelling 6 to 16 times a second
    harmonic  a sine with seven overtones            clicks   short clicks, 10 to 30 a second
    rise      a sine gliding up by 1 to 2 octaves    burst    white noise
    fall      the same, gliding down                 band     noise in a band of half an octave
    vibrato   a sine waving 4 to 8 times a second    pluck    a string: overtones, the high ones dying first

Random for each sound: pitch, level, onset, length, attack; for its background: colour of the noise (white to brown),
level, and mains hum. The level of the sound against the noise decides how hard the set is.
Shapes: (n, 1) for parameters, (n, RATE) for waveforms in ±1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import pi

import torch
from torch import Tensor

RATE = 16_000  # samples per second, and samples per sound
PITCH = (300.0, 1200.0)  # Hz, even on a logarithmic scale
LENGTH = (0.25, 0.8)  # seconds
SNR = (0.0, 20.0)  # dB of the sound, while it lasts, over the noise


class Draw:
    """Random parameters for n sounds, all from one generator."""

    def __init__(self, n: int, randomness: torch.Generator) -> None:
        self.n, self.randomness = n, randomness

    def uniform(self, low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(self.n, 1, generator=self.randomness)  # (n, 1)

    def log_uniform(self, low: float, high: float) -> Tensor:
        return low * (high / low) ** torch.rand(self.n, 1, generator=self.randomness)  # (n, 1)

    def noise(self) -> Tensor:
        return torch.randn(self.n, RATE, generator=self.randomness)  # (n, RATE)


# (parameters, seconds since onset (n, RATE), length in seconds (n, 1)) -> (n, RATE)
Voice = Callable[[Draw, Tensor, Tensor], Tensor]


def phase(frequency: Tensor) -> Tensor:
    """The angle (n, RATE) that a wave of the (moving) frequency in Hz, (n, RATE) or (n, 1), has reached."""
    cycles = torch.cumsum(frequency.double().expand(-1, RATE) / RATE, dim=1)  # float32 would drift out of tune
    return (2 * pi) * (cycles - cycles.floor()).float()


def sine(frequency: Tensor) -> Tensor:
    return phase(frequency).sin_()


def tone(draw: Draw, time: Tensor, length: Tensor) -> Tensor:
    return sine(draw.log_uniform(*PITCH))


def harmonic(draw: Draw, time: Tensor, length: Tensor) -> Tensor:
    pitch = draw.log_uniform(PITCH[0] / 2, PITCH[1] / 2)
    angle = phase(pitch)
    return sum(((h * angle).sin_() / h for h in range(2, 9)), angle.sin())


def rise(draw: Draw, time: Tensor, length: Tensor) -> Tensor:
    octaves = draw.uniform(1, 2)
    return sine(draw.log_uniform(*PITCH) * 2 ** (octaves * ((time / length).clamp(0, 1) - 0.5)))


def fall(draw: Draw, time: Tensor, length: Tensor) -> Tensor:
    octaves = draw.uniform(1, 2)
    return sine(draw.log_uniform(*PITCH) * 2 ** (octaves * (0.5 - (time / length).clamp(0, 1))))


def vibrato(draw: Draw, time: Tensor, length: Tensor) -> Tensor:
    wave = torch.sin(2 * pi * (draw.uniform(4, 8) * time + draw.uniform(0, 1)))
    return sine(draw.log_uniform(*PITCH) * 2 ** (draw.uniform(0.15, 0.6) * wave))


def tremolo(draw: Draw, time: Tensor, length: Tensor) -> Tensor:
    swell = 0.5 + 0.5 * torch.sin(2 * pi * (draw.uniform(6, 16) * time + draw.uniform(0, 1)))
    return sine(draw.log_uniform(*PITCH)) * swell


def clicks(draw: Draw, time: Tensor, length: Tensor) -> Tensor:
    rate = draw.uniform(10, 30)
    since = (time * rate).remainder(1) / rate  # seconds since the last click
    return torch.exp(-since / 0.002) * sine(draw.log_uniform(800, 4000))


def burst(draw: Draw, time: Tensor, length: Tensor) -> Tensor:
    return draw.noise()


def band(draw: Draw, time: Tensor, length: Tensor) -> Tensor:
    centre = draw.log_uniform(PITCH[0] * 1.5, PITCH[1] * 1.5)
    octaves = torch.log2(frequencies().clamp_min(1) / centre)  # (n, bins)
    return filtered(draw.noise(), torch.exp(-0.5 * (octaves / 0.25) ** 2))


def pluck(draw: Draw, time: Tensor, length: Tensor) -> Tensor:
    pitch, decay = draw.log_uniform(PITCH[0] / 2, PITCH[1] / 2), draw.log_uniform(4, 10)
    angle, age = phase(pitch), time.clamp_min(0)
    dying = ((h * angle).sin_() / h * torch.exp(-decay * h**0.7 * age) for h in range(1, 9))
    return sum(dying, torch.zeros_like(time))


KINDS: dict[str, Voice] = {
    voice.__name__: voice for voice in (tone, harmonic, rise, fall, vibrato, tremolo, clicks, burst, band, pluck)
}


def make_sounds(count: int, *, randomness: torch.Generator) -> Iterator[Tensor]:
    """For each kind, in order, `count` / 10 waveforms (count/10, RATE)."""
    for voice in KINDS.values():
        draw = Draw(count // len(KINDS), randomness)
        length = draw.uniform(*LENGTH)
        onset = draw.uniform(0, 1) * (1 - length)
        time = torch.arange(RATE) / RATE - onset  # (n, RATE) seconds since onset
        sound = voice(draw, time, length) * envelope(draw, time, length)
        power = sound.square().sum(1, keepdim=True) / (length * RATE)  # while it lasts
        sound = sound / power.sqrt().clamp_min(1e-6) * 10 ** (draw.uniform(*SNR) / 20)
        mixed = (sound + background(draw)) * draw.log_uniform(0.005, 0.05)  # level of the recording
        yield mixed.clamp(-1, 1)


def envelope(draw: Draw, time: Tensor, length: Tensor) -> Tensor:
    """1 while the sound lasts, with a soft attack and end, 0 outside."""
    attack, release = draw.log_uniform(0.004, 0.03), draw.log_uniform(0.01, 0.05)
    return (time / attack).clamp(0, 1) * ((length - time) / release).clamp(0, 1)


def background(draw: Draw) -> Tensor:
    """Noise of power 1 falling by 0 to 6 dB per octave, and hum of up to the same power."""
    slope = draw.uniform(0, 1)
    noise = filtered(draw.noise(), (frequencies().clamp_min(40) / 40) ** -slope)
    mains = phase(draw.uniform(49, 61))
    hum = mains.sin() + (3 * mains).sin_() / 3
    return noise / noise.square().mean(1, keepdim=True).sqrt() + hum * draw.uniform(0, 1)


def frequencies() -> Tensor:
    """(1, RATE/2 + 1) in Hz."""
    return torch.arange(RATE // 2 + 1, dtype=torch.float32)[None]


def filtered(x: Tensor, gain: Tensor) -> Tensor:
    """x (n, RATE) with its spectrum multiplied by `gain` (n, RATE/2 + 1)."""
    y: Tensor = torch.fft.irfft(torch.fft.rfft(x) * gain, n=RATE)
    return y
