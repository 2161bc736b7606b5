"""The sections of a config that say where samples come from and what is done to them before a network sees them.

`SOURCES` are the values of data.source; the record behind each is a `bridle.data.modality.Modality`.
"""

from __future__ import annotations

import difflib
from typing import Annotated, Literal, NamedTuple, Self

from pydantic import Field, field_validator, model_validator

from bridle.config.section import Above0, Natural, NonNegative, Positive, Section
from bridle.errors import quoted


class SourceEntry(NamedTuple):
    """What a config needs to know of a data source without loading its code."""

    module: str  # holds MODALITIES, a tuple of Modality records; "" for one that was registered from outside
    section: str | None = None  # the config section with its settings
    can_trim: bool = False  # does data.trim apply to it


# An ending that two kinds of files share (.mp4) belongs to the first of them.
SOURCES: dict[str, SourceEntry] = {
    "digits": SourceEntry("bridle.data.embedded.modality"),
    "moving-digits": SourceEntry("bridle.data.embedded.modality"),
    "patterns": SourceEntry("bridle.data.embedded.modality"),
    "moving-patterns": SourceEntry("bridle.data.embedded.modality"),
    "sounds": SourceEntry("bridle.data.embedded.modality"),
    "video": SourceEntry("bridle.data.video.modality", section="video"),
    "images": SourceEntry("bridle.data.image.modality"),
    "audio": SourceEntry("bridle.data.audio.modality", section="audio", can_trim=True),
    "signals": SourceEntry("bridle.data.arrays.modality", section="signals"),
    "dataset": SourceEntry("bridle.data.arrays.modality"),
}


class DataConfig(Section):
    """Where samples come from. Either `root` (a folder) or `manifest` (a list of files) names your own data."""

    source: str  # one of SOURCES
    root: str | None = None
    manifest: str | None = None  # CSV, TSV or JSONL: path, optional start, end, label or labels, split, fold
    layout: Literal["auto", "folders", "lists", "shards", "esc50", "audioset"] = "auto"  # auto: by what root holds
    segments: tuple[str, ...] | None = None  # audioset: which segment lists make up train; None: all but eval
    # Hugging Face datasets: [input, label], or only [input]; None: by their types and names.
    columns: Annotated[tuple[str, ...], Field(min_length=1, max_length=2)] | None = None
    test_fold: Natural | None = None  # data with folds: hold this one out; None pretrains on all, scores over folds
    mean: tuple[float, ...] | None = None  # per channel; None: measured at first use and written to the run's config
    std: tuple[Above0, ...] | None = None
    views: Positive = 1  # windows (audio) or clips (video) of an item at evaluation, spread evenly, then averaged
    trim: bool = False  # audio: digital silence at both ends of a recording, as padding is, is not shown
    cache_mb: Natural = 0  # decoded items kept in memory, for all workers together; 0 decodes every time
    workers: Natural = 0
    bad_share: Annotated[float, Field(ge=0.0, le=1.0)] = 0.1  # stop pretraining when more of the samples are unusable

    @property
    def statistics(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Mean and std per channel; the config of a run always has them."""
        assert self.mean is not None
        assert self.std is not None
        return self.mean, self.std

    @field_validator("source")
    @classmethod
    def _check_source(cls, source: str) -> str:
        if source not in SOURCES:
            near = difflib.get_close_matches(source, SOURCES, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"expected one of {', '.join(SOURCES)}."
            raise ValueError(
                f"data.source: {quoted(source)} is not a known source; {hint} A modality of your own is known after "
                "its file is loaded: bridle --plugin FILE"
            )
        return source

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.mean is None) != (self.std is None):
            raise ValueError("data.mean: give data.mean and data.std together, or neither to have them measured")
        if self.trim and not SOURCES[self.source].can_trim:
            raise ValueError(f"data.trim: only recordings can be trimmed, not data.source '{self.source}'")
        return self


class AudioConfig(Section):
    """Log-mel front end of recordings; the mel bands are the geometry's second size, its first counts frames."""

    sample_rate: Annotated[int, Field(ge=1_000, le=384_000)] = 16_000
    window_ms: Annotated[float, Field(gt=0.0, le=1_000.0)] = 25.0
    shift_ms: Annotated[float, Field(gt=0.0, le=1_000.0)] = 10.0
    low_hz: NonNegative = 20.0

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.low_hz >= self.sample_rate / 2:
            raise ValueError(f"audio.low_hz: {self.low_hz} is not below half the sample rate {self.sample_rate}")
        if self.sample_rate * min(self.window_ms, self.shift_ms) < 2_000:
            raise ValueError("audio.shift_ms: window and shift must cover at least two samples")
        return self


class VideoConfig(Section):
    """Clips of a video: every `stride`-th frame; the short side is scaled to `short_side` before cropping."""

    stride: Positive = 4
    short_side: Positive | None = None  # None: the larger side of the geometry's picture
    crops: Positive = 1  # pictures cut from a clip at evaluation, spread along its long side, then averaged
    timeout: Above0 = 60.0  # seconds a file may take to decode


class SignalsConfig(Section):
    """Signals in arrays of numbers."""

    sample_rate: Above0 | None = None  # Hz; gives times to tokens; None: not known


class AugmentConfig(Section):
    """Random changes of a training sample; each kind of data uses those that concern it."""

    enabled: bool = True
    # Pictures and clips.
    crop_scale: tuple[float, float] = (0.2, 1.0)  # random resized crop, share of the area
    flip: bool = True  # mirror left-right
    time_flip: bool = False  # play clips backwards half of the time
    randaugment: Natural = 0  # operations per picture
    randaugment_magnitude: Annotated[float, Field(ge=0.0, le=10.0)] = 9.0
    erase: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0  # probability of erasing a random box
    # Sound and signals.
    roll: bool = False  # start at a random time, what falls off the end comes first
    gain_db: NonNegative = 0.0  # louder or softer by up to this much
    gain_beta: NonNegative = 0.0  # times 0.5 + Beta(a, a); 0 is off
    noise_db: float | None = None  # white noise at this signal-to-noise ratio or better
    time_mask: Natural = 0  # SpecAugment: widest stripe of frames set to the mean
    band_mask: Natural = 0  # SpecAugment: widest stripe of mel bands set to the mean
    # Two samples in one.
    mixup: NonNegative = 0.0  # Beta(a, a) of the shares; 0 is off
    cutmix: NonNegative = 0.0  # Beta(a, a) of the area; with both on, either is drawn
    mix_probability: Annotated[float, Field(ge=0.0, le=1.0)] = 1.0
    mix_space: Literal["features", "waveform"] = "features"

    @model_validator(mode="after")
    def _check(self) -> Self:
        low, high = self.crop_scale
        if not 0.0 < low <= high <= 1.0:
            raise ValueError(f"crop_scale: expected 0 < low <= high <= 1, got [{low}, {high}]")
        return self
