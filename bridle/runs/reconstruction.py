"""What a detokenizer loses, as typed records, and the JSON files of RUN/detokenizer/iterR that hold them.

result.json    the error for every number of stages, written when the detokenizer is trained
rate.json      rates and distortions beside those of known codecs, written by `bridle codebooks --reconstruct`
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from bridle.runs.folder import RunFolder
from bridle.runs.results import Record, read_record

RESULT, RATE = "result.json", "rate.json"


class StageError(Record):
    """What is lost when the first `stages` stages are decoded, over all real values of the held-out items."""

    stages: int
    bits_per_token: float
    explained: float  # 1 − mean squared error / variance of the input
    psnr: float | None = None  # dB, for inputs in 0 … 1
    log_spectral_distance: float | None = None  # dB, for log-mel features


class Reconstruction(Record):
    """result.json of a detokenizer."""

    iteration: int
    items: int
    held_out: str  # where the measured items come from: test, or train items that were held back
    by_stages: tuple[StageError, ...]


class Distortion(Record):
    """How far reconstructions are from their originals, mean over items; None where it does not apply."""

    psnr: float | None = None  # dB, pictures and frames
    ssim: float | None = None
    log_spectral_distance: float | None = None  # dB, of the log-mel features of the sound
    feature_distance: float | None = None  # dB, of decoded log-mel features before they are made a sound
    si_sdr: float | None = None  # dB, of the waveform


class RatePoint(Distortion):
    """The first `stages` stages of the codes."""

    stages: int
    bits_per_token: float
    rate: float  # in the unit of the `RateDistortion`


class AnchorPoint(Distortion):
    """A codec at one of its settings."""

    codec: str  # JPEG, H.264, Opus, MP3
    setting: str  # as its users write it: "quality 12", "16 kbit/s"
    rate: float


class RateDistortion(Record):
    """rate.json of a detokenizer."""

    ALWAYS = ("inversion", "anchors", "notes")

    iteration: int
    items: int
    held_out: str
    unit: Literal["bits per pixel", "bits per second", "bits per value"]
    by_stages: tuple[RatePoint, ...]
    inversion: Distortion | None = None  # original log-mel features made a sound: the loss that is not the codes'
    anchors: tuple[AnchorPoint, ...] = ()
    notes: tuple[str, ...] = ()  # what could not be measured, and why


def read_rates(folder: Path) -> list[RateDistortion]:
    """All that `bridle codebooks --reconstruct` measured of a run, by iteration."""
    found = sorted(RunFolder(folder).detokenizers().glob(f"iter*/{RATE}"))
    return sorted((read_record(RateDistortion, path) for path in found), key=lambda one: one.iteration)


def is_as_good(point: Distortion, other: Distortion) -> bool:
    """Is `point` no further from the original than `other`, by PSNR or else by log-spectral distance?"""
    if point.psnr is not None and other.psnr is not None:
        return point.psnr >= other.psnr
    near, far = point.log_spectral_distance, other.log_spectral_distance
    return near is not None and far is not None and near <= far


def cheapest(anchors: tuple[AnchorPoint, ...], codec: str, wanted: Distortion) -> AnchorPoint | None:
    """The setting of a codec with the lowest rate that is as good as `wanted`; None if none of them is."""
    good = [point for point in anchors if point.codec == codec and is_as_good(point, wanted)]
    return min(good, key=lambda point: point.rate, default=None)
