"""`bridle codebooks --reconstruct`: rate and distortion of the codes for every number of stages, beside known codecs.

Held-out items are tokenized, decoded from their first m stages and compared with what they were; then JPEG and H.264,
or Opus and MP3, code the same items at several settings. Sound is compared by the log-mel features of the waveform;
what the inversion of the features loses alone, without any codes, stands beside it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import log2, prod
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from bridle.config import Config
from bridle.data.audio.inversion import invert_logmel
from bridle.data.audio.logmel import LogMel
from bridle.data.audio.modality import front_end
from bridle.data.build import open_data
from bridle.data.loading.loader import load_samples, moments_tensors, normalise
from bridle.data.loading.worker_pool import map_in_order
from bridle.data.modality import modality_of
from bridle.data.sources import Audible, Sample, Sound
from bridle.errors import DataError
from bridle.evaluate.reconstruction import anchors
from bridle.evaluate.reconstruction.distortion import log_spectral_distance, psnr, si_sdr, ssim
from bridle.evaluate.reconstruction.measure import Held, is_spectrogram, split_for_measuring
from bridle.geometry import Geometry
from bridle.models.detokenizer import Detokenizer, decode_prefix
from bridle.models.tokenizer import Tokenizer
from bridle.runs.folder import RunFolder
from bridle.runs.reconstruction import RATE, AnchorPoint, Distortion, RateDistortion, RatePoint
from bridle.runs.results import write_record
from bridle.train.detokenizer_phase import read_detokenizer

ITEMS, SOUND_ITEMS = 128, 12  # measured without --items; finding the phases of a sound takes long
NO_WAVEFORM = "These sounds exist as features only; Opus and MP3 need a waveform."
GUESSED_PHASES = "SI-SDR is in rate.json, for Opus and MP3 only: codes do not keep phases."


class Item(NamedTuple):
    """A held-out item and its reconstructions, in the input's own units."""

    x: Tensor  # (C, *input), real part only
    decoded: list[Tensor]  # M of the same shape, from the first 1 … M stages
    wave: Tensor | None  # (N,) what a sound was before it was features


class Codec:
    """Tokenizer and detokenizer of a run's iteration as one: items to codes and back, in the units of the data."""

    def __init__(self, config: Config, tokenizer: Tokenizer, detokenizer: Detokenizer) -> None:
        self.geometry: Geometry = config.geometry.build()
        self.tokenizer, self.detokenizer = tokenizer, detokenizer
        self.mean, self.std = moments_tensors(*config.data.statistics)
        self.stages = len(config.quantizer.sizes)

    @torch.no_grad()
    def codes(self, sample: Sample) -> Tensor:
        """(1, T, M)."""
        x = normalise(sample.x[None], mean=self.mean, std=self.std)
        return self.tokenizer.tokenize(x, valid=None if sample.valid is None else sample.valid[None])

    @torch.no_grad()
    def decode(self, codes: Tensor, m: int, valid: Tensor | None = None) -> Tensor:
        """codes (B, T, M) -> (B, C, *input) from the first m stages, in the data's own units."""
        rebuilt = decode_prefix(self.detokenizer, self.tokenizer.quantizer, codes, m, valid=valid)
        return self.own_units(rebuilt)

    def own_units(self, x: Tensor) -> Tensor:
        """Normalised inputs (B, C, *input) in the units of the data."""
        shape = (-1, *[1] * self.geometry.rank)
        return x * self.std.reshape(shape) + self.mean.reshape(shape)

    def prefixes(self, sample: Sample) -> list[Tensor]:
        """A sample (C, *input) rebuilt from its first 1 … M stages, each without padding."""
        codes, valid = self.codes(sample), None if sample.valid is None else sample.valid[None]
        return [self.real(self.decode(codes, m, valid)[0], sample.valid) for m in range(1, self.stages + 1)]

    def real(self, x: Tensor, valid: Tensor | None) -> Tensor:
        """(C, *input) cut along the first axis to the part that has real tokens."""
        if valid is None:
            return x
        rows = int(valid.reshape(self.geometry.grid[0], -1).any(1).sum())
        return x[:, : rows * self.geometry.patch[0]]


def open_codec(folder: Path, config: Config, tokenizer: Tokenizer, iteration: int) -> Codec:
    """The codec of a run's iteration, on the CPU; UsageError if no detokenizer is trained."""
    detokenizer = read_detokenizer(folder, config, iteration, device=torch.device("cpu"))
    return Codec(config, tokenizer.cpu().eval(), detokenizer)


def rate_run(folder: Path, config: Config, tokenizer: Tokenizer, *, iteration: int, items: int | None = None) -> Path:
    """Measure the detokenizer of an iteration on held-out items and write rate.json; returns its path."""
    codec = open_codec(folder, config, tokenizer, iteration)
    plain = config.model_copy(update={"augment": config.augment.model_copy(update={"enabled": False})})
    held = split_for_measuring(open_data(plain))
    wanted = items or (SOUND_ITEMS if is_spectrogram(config) else ITEMS)
    found = measure_rates(codec, config, held, iteration=iteration, items=wanted)
    path = RunFolder(folder).detokenizer(iteration).path / RATE
    write_record(path, found)
    return path


def measure_rates(codec: Codec, config: Config, held: Held, *, iteration: int, items: int) -> RateDistortion:
    """Rates and distortions of `items` held-out items, spread evenly over them; unreadable ones are left out."""
    chosen = list(load_items(codec, config, held, held.spread(items)))
    if not chosen:
        raise DataError("none of the held-out items can be read.")
    kind = "sound" if is_spectrogram(config) else "picture" if modality_of(config).is_unit_range else "array"
    front = front_end(config) if kind == "sound" else None
    unit, units = rate_unit(config, front)
    tokens = codec.geometry.tokens
    rows = []
    for m in range(1, codec.stages + 1):
        bits = sum(log2(size) for size in config.quantizer.sizes[:m])
        lost = mean_of([distortion(item.decoded[m - 1], item, front, kind) for item in chosen])
        rows.append(RatePoint(stages=m, bits_per_token=bits, rate=bits * tokens / units, **lost.model_dump()))
    alone = None if front is None else mean_of([distortion(item.x, item, front, kind) for item in chosen])
    anchored, notes = anchor_points(chosen, front, kind)
    return RateDistortion(
        iteration=iteration, items=len(chosen), held_out=held.name, unit=unit, by_stages=tuple(rows), inversion=alone,
        anchors=tuple(anchored), notes=tuple(notes),
    )  # fmt: skip


def load_items(codec: Codec, config: Config, held: Held, indices: Sequence[int]) -> Iterator[Item]:
    """The items at these indices that can be read, with their reconstructions and waveforms."""
    source = held.source
    samples = load_samples(source, indices, workers=config.data.workers)
    heard = isinstance(source, Audible) and is_spectrogram(config)
    waves: Iterator[Sound | None] = iter([None] * len(indices))
    readable = []
    for index, sample in zip(indices, samples, strict=True):
        if isinstance(sample, Sample):
            readable.append((index, sample))
    if heard and isinstance(source, Audible):
        waves = map_in_order(source.listen, [index for index, _ in readable], workers=1, records=(Sound,))
    for (_, sample), sound in zip(readable, waves, strict=False):
        wave = None if sound is None else sound.wave
        yield Item(codec.real(sample.x, sample.valid), codec.prefixes(sample), wave)


def rate_unit(config: Config, front: LogMel | None) -> tuple[str, float]:
    """The unit of rates, and how many units one input of the model has."""
    if front is not None:
        return "bits per second", config.geometry.input[0] * front.shift / front.sample_rate
    values = prod(config.geometry.input)
    return ("bits per pixel" if modality_of(config).is_unit_range else "bits per value"), values


def distortion(guess: Tensor, item: Item, front: LogMel | None, kind: str) -> Distortion:
    """How far a reconstruction (C, *input) is from its item."""
    if kind == "picture":
        return picture_distortion(guess.clamp(0, 1), item.x)
    if front is None:
        return Distortion()
    features = log_spectral_distance(guess[0], item.x[0])
    heard = sound_distance(invert_logmel(guess[0], front), item, front)
    return Distortion(log_spectral_distance=heard, feature_distance=features)


def picture_distortion(guess: Tensor, x: Tensor) -> Distortion:
    """PSNR over all values, and SSIM, mean over frames; (C, H, W) or (C, frames, H, W)."""
    frames = [(guess, x)] if x.ndim == 3 else [(guess[:, t], x[:, t]) for t in range(x.shape[1])]
    return Distortion(psnr=psnr(guess, x), ssim=sum(ssim(a, b) for a, b in frames) / len(frames))


def sound_distance(wave: Tensor, item: Item, front: LogMel) -> float:
    """LSD of the features of a waveform."""
    features = front(wave)
    count = min(len(features), item.x.shape[1])
    return log_spectral_distance(features[:count], item.x[0, :count])


def coded_distortion(decoded: Tensor, wave: Tensor, item: Item, front: LogMel) -> Distortion:
    """LSD and SI-SDR of what a codec made of an item's waveform."""
    length = min(len(decoded), len(wave))
    lost = sound_distance(decoded, item, front)
    return Distortion(log_spectral_distance=lost, si_sdr=si_sdr(decoded[:length], wave[:length]))


def mean_of(found: Sequence[Distortion]) -> Distortion:
    """The mean of every measure that all items have."""
    columns = {key: [getattr(one, key) for one in found] for key in Distortion.model_fields}
    return Distortion(
        **{key: sum(values) / len(values) for key, values in columns.items() if all(v is not None for v in values)}
    )


def anchor_points(items: Sequence[Item], front: LogMel | None, kind: str) -> tuple[list[AnchorPoint], list[str]]:
    """The codecs that fit the data at every setting, and what is to be said about them."""
    if kind == "array":
        return [], []
    if front is not None:
        return sound_points(items, front)
    is_clip = items[0].x.ndim == 4
    if items[0].x.shape[0] not in (1, 3):
        return [], [f"JPEG has no pictures of {items[0].x.shape[0]} channels."]
    found = [
        picture_point(items, "JPEG", f"quality {quality}", [code(item.x, quality) for item in items])
        for code in (anchors.jpeg_frames if is_clip else anchors.jpeg,)
        for quality in anchors.QUALITIES
    ]
    usable, notes = anchors.available(["libx264"] if is_clip else [])
    if usable:
        found += [
            picture_point(items, "H.264", f"crf {factor}", [anchors.h264(item.x, factor) for item in items])
            for factor in anchors.RATE_FACTORS
        ]
    return found, notes


def picture_point(items: Sequence[Item], name: str, setting: str, coded: Sequence[anchors.Coded]) -> AnchorPoint:
    """A codec's mean rate in bits per pixel and mean distortion."""
    lost = mean_of([picture_distortion(one.decoded, item.x) for one, item in zip(coded, items, strict=True)])
    pixels = sum(item.x[0].numel() for item in items)
    rate = sum(one.bits for one in coded) / pixels
    return AnchorPoint(codec=name, setting=setting, rate=rate, **lost.model_dump())


def sound_points(items: Sequence[Item], front: LogMel) -> tuple[list[AnchorPoint], list[str]]:
    """Opus and MP3 at several bit rates; the rate is what they really used."""
    heard = [(item, item.wave) for item in items if item.wave is not None]
    if not heard:
        return [], [NO_WAVEFORM]
    usable, notes = anchors.available(list(anchors.BITRATES))
    found, seconds = [], sum(len(wave) for _, wave in heard) / front.sample_rate
    for codec in usable:
        for kbits in anchors.BITRATES[codec]:
            coded = [anchors.sound(wave, front.sample_rate, codec, kbits) for _, wave in heard]
            pairs = zip(coded, heard, strict=True)
            lost = mean_of([coded_distortion(one.decoded, wave, item, front) for one, (item, wave) in pairs])
            rate = sum(one.bits for one in coded) / seconds
            name, setting = anchors.NAMES[codec], f"{kbits} kbit/s"
            found.append(AnchorPoint(codec=name, setting=setting, rate=rate, **lost.model_dump()))
    return found, [*notes, GUESSED_PHASES]
