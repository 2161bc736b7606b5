"""The one place where a config becomes a data set, or a reader of single files."""

from __future__ import annotations

from collections.abc import Sequence

from bridle.config import Config
from bridle.config.schema import DataConfig
from bridle.data.arrays.source import SignalReader, open_signals
from bridle.data.audio.logmel import LogMel
from bridle.data.audio.source import RecordingReader, open_recordings
from bridle.data.embedded import sets as embedded_sets
from bridle.data.image.source import ImageReader, open_images
from bridle.data.listing.folders import existing_folder
from bridle.data.listing.layouts import DataListing, find_data, tell_layout
from bridle.data.loading.loader import load_sound
from bridle.data.shards.reader import find_shards
from bridle.data.sources import Reader, Source, Splits
from bridle.data.video.source import VideoReader, open_videos
from bridle.errors import ConfigError, DataError, UsageError

EMBEDDED = {
    "digits": embedded_sets.digits,
    "moving-digits": embedded_sets.moving_digits,
    "sounds": embedded_sets.sounds,
}


def open_data(config: Config) -> Splits:
    """The data set of a config; its samples have the shape the geometry says, or a ConfigError tells how to mend it."""
    data = config.data
    if data.source == "dataset":
        raise UsageError(
            "this run was trained on a Dataset given from Python, which a command cannot open; "
            "its results are in results.json."
        )
    if data.source in EMBEDDED:
        return _embedded(config)
    if data.root is None and data.manifest is None:
        raise ConfigError(f"data.root: recipe {config.name!r} needs the folder of your data; give data.root=PATH.")
    return _own_files(config)


def open_reader(config: Config) -> Reader:
    """Reads files of the kind a config was trained on, of any length or size."""
    geometry, video = config.geometry.build(), config.video
    match config.data.source:
        case "audio":
            return RecordingReader(geometry=geometry, front=_front(config))
        case "video":
            return VideoReader(
                geometry=geometry, stride=video.stride, short_side=video.short_side, timeout=video.timeout
            )
        case "images":
            return ImageReader(geometry=geometry)
        case "signals":
            return SignalReader(geometry=geometry)
        case "digits":
            return embedded_sets.DigitReader(geometry=geometry)
        case source:
            raise UsageError(
                f"a model trained on {source!r} knows no kind of file; give arrays to its tokenize or encode instead."
            )


def _embedded(config: Config) -> Splits:
    splits = EMBEDDED[config.data.source]()
    shape, wanted = tuple(splits.train.load(0, None).x.shape), config.geometry.build().shape
    if shape != wanted:
        raise ConfigError(f"geometry.input: {wanted} given, but the embedded {config.data.source} are {shape}.")
    return splits


def _own_files(config: Config) -> Splits:
    """Files of a folder, a list or shards."""
    data, video, geometry = config.data, config.video, config.geometry.build()
    if data.source == "signals":
        if data.root is None:
            raise ConfigError("data.root: signals are read from a folder; give data.root=PATH.")
        return open_signals(data.root, geometry=geometry)
    if data.source == "images":
        found = find_samples(data, ImageReader.extensions)
        return open_images(found=found, geometry=geometry, augment=config.augment, cache_mb=data.cache_mb)
    if data.source == "audio":
        return open_recordings(
            found=find_samples(data, RecordingReader.extensions),
            geometry=geometry,
            front=_front(config),
            augment=config.augment,
            views=data.views,
            trim=data.trim,
            cache_mb=data.cache_mb,
        )
    return open_videos(
        found=find_samples(data, VideoReader.extensions),
        geometry=geometry,
        stride=video.stride,
        short_side=video.short_side,
        crops=video.crops,
        timeout=video.timeout,
        augment=config.augment,
        views=data.views,
        cache_mb=data.cache_mb,
    )


def _front(config: Config) -> LogMel:
    audio, geometry = config.audio, config.geometry.build()
    if geometry.rank != 2:
        raise ConfigError(f"geometry.input: {list(geometry.input)} given; recordings need frames and mel bands.")
    return LogMel(
        sample_rate=audio.sample_rate,
        mels=geometry.input[1],
        low=audio.low_hz,
        window_ms=audio.window_ms,
        shift_ms=audio.shift_ms,
    )


def find_samples(data: DataConfig, extensions: Sequence[str]) -> DataListing:
    """The files of a folder or a list, or the members of tar shards."""
    if data.root is not None and data.manifest is None and data.layout in ("auto", "shards"):
        root = existing_folder(data.root)
        if data.layout == "shards" or tell_layout(root) == "shards":
            return find_shards(root, extensions=extensions, test_fold=data.test_fold)
    return find_data(
        root=data.root,
        manifest=data.manifest,
        layout=data.layout,
        extensions=extensions,
        test_fold=data.test_fold,
        segments=data.segments,
    )


def is_labelled(source: Source) -> bool:
    """Does every sample have a label, as far as can be told without reading them all?"""
    if source.labels is not None:
        return True
    try:
        return load_sound(source, 0, None).label is not None
    except DataError:
        return False
