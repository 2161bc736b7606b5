"""Recordings as a modality: log-mel features of sound files and of the sound tracks of videos."""

from __future__ import annotations

from functools import partial

from bridle.config import Config
from bridle.data.audio.check import check_sound
from bridle.data.audio.decode import EXTENSIONS, read_waveform
from bridle.data.audio.logmel import LogMel, LogMelGraph
from bridle.data.audio.source import RecordingReader, Recordings
from bridle.data.file_source import open_splits
from bridle.data.listing.table import DataListing
from bridle.data.modality import Modality, VitInput
from bridle.data.shards.tar_member import Location
from bridle.data.sources import Reader, Sound, Splits, require_axes


def open_files(config: Config, found: DataListing) -> Splits:
    """The listed recordings as train and test."""
    data = config.data
    recordings = partial(Recordings, geometry=config.geometry.build(), front=front_end(config), augment=config.augment)
    return open_splits(found, partial(recordings, views=data.views, trim=data.trim), cache_mb=data.cache_mb)


def open_reader(config: Config) -> Reader:
    """Single recordings as windows."""
    return RecordingReader(geometry=config.geometry.build(), front=front_end(config))


def front_end(config: Config) -> LogMel:
    """Waveform to log-mel features, as a config has it."""
    audio, geometry = config.audio, config.geometry.build()
    require_axes(geometry, "recordings", "frames", "mel bands")
    return LogMel(
        sample_rate=audio.sample_rate,
        mels=geometry.input[1],
        low=audio.low_hz,
        window_ms=audio.window_ms,
        shift_ms=audio.shift_ms,
    )


def read_sound(config: Config, place: Location, start: float, seconds: float) -> Sound:
    """`seconds` of a recording from `start` on."""
    rate = config.audio.sample_rate
    return Sound(read_waveform(place, rate=rate, start=start, seconds=seconds), rate)


MODALITIES = (
    Modality(
        name="audio",
        kind="audio",
        items="recordings",
        extensions=EXTENSIONS,
        open_files=open_files,
        open_reader=open_reader,
        check_file=check_sound,
        read_sound=read_sound,
        open_front_end=lambda config: LogMelGraph(front_end(config)),
        drawing="spectrogram",
        can_be_padded=True,
        std_factor=2.0,
        # What AudioMAE was trained with; the field divides by twice the 4.5689974 it states.
        vit_input=VitInput(axes=2, channels=1, mean=(-4.2677393,), std=(9.1379948,), bands=128),
    ),
)
