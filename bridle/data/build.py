"""The one place where a config becomes a data set."""

from __future__ import annotations

from bridle.config import Config
from bridle.data import demo
from bridle.data.image import open_images
from bridle.data.loader import load_sound
from bridle.data.signal import open_signals
from bridle.data.sources import Source, Splits
from bridle.errors import ConfigError, DataError, UsageError

EMBEDDED = {"digits": demo.digits, "moving-digits": demo.moving_digits, "sounds": demo.sounds}


def open_data(config: Config) -> Splits:
    """The data set of a config; its samples have the shape the geometry says, or a ConfigError tells how to mend it."""
    data, geometry = config.data, config.geometry.build()
    if data.source == "dataset":
        raise UsageError(
            "this run was trained on a Dataset given from Python, which a command cannot open; "
            "its results are in results.json."
        )
    if data.source in EMBEDDED:
        splits = EMBEDDED[data.source]()
        shape = tuple(splits.train.load(0, None).x.shape)
        if shape != geometry.shape:
            raise ConfigError(f"geometry.input: {geometry.shape} given, but the embedded {data.source} are {shape}.")
        return splits
    if data.root is None:
        raise ConfigError(f"data.root: recipe {config.name!r} needs the folder of your data; give data.root=PATH.")
    if data.source == "images":
        return open_images(data.root, geometry=geometry, crop_scale=config.augment.crop_scale, flip=config.augment.flip)
    return open_signals(data.root, geometry=geometry)


def is_labelled(source: Source) -> bool:
    """Does every sample have a label, as far as can be told without reading them all?"""
    if source.labels is not None:
        return True
    try:
        return load_sound(source, 0, None).label is not None
    except DataError:
        return False
