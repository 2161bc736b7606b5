"""Arrays as modalities: signals in files, in formats that a user's own function reads, and in torch Datasets."""

from __future__ import annotations

from functools import partial

import numpy as np
from pydantic import create_model

from bridle.config import Config
from bridle.config.data_schema import SignalsConfig
from bridle.data.arrays.decode import EXTENSIONS, ParseSignal, ReadSignal, read_array, read_parsed, require_numbers
from bridle.data.arrays.source import Change, SignalFormat, SignalReader, Signals
from bridle.data.file_source import open_splits
from bridle.data.inspect.findings import CheckOptions, Facts
from bridle.data.listing.table import DataListing
from bridle.data.modality import Modality
from bridle.data.shards.tar_member import Location
from bridle.data.sources import Reader, Splits

BLOCK = 1 << 20  # frames looked at in one go


def array_modality(
    *,
    name: str,
    items: str,
    extensions: tuple[str, ...],
    parse: ParseSignal,
    sample_rate: float | None = None,
    change: Change | None = None,
) -> Modality:
    """A modality of signals in files of one's own format.

    `parse` makes an array (C, length), or a `Signal` with its rate, of a file opened for reading bytes. `sample_rate`
    is the default of the config key NAME.sample_rate. `change` augments a training sample (C, L). Everything else
    (cutting, padding, lists, shards, times, pictures) is as for the recipe `signal`, which is also its recipe.
    """
    read = partial(read_parsed, parse=parse, kind=name)
    section = create_model(f"{name}_config", __base__=SignalsConfig, sample_rate=(float | None, sample_rate))
    return Modality(
        name=name,
        kind=name,
        items=items,
        recipe="signal",
        extensions=extensions,
        section=section,
        open_files=partial(open_files, name, read, change),
        open_reader=partial(open_reader, name, read, extensions),
        check_file=partial(check_signal, name, read),
        can_be_padded=True,
    )


def format_of(config: Config, section: str, read: ReadSignal) -> SignalFormat:
    """How a config says that files become arrays."""
    return SignalFormat(config.geometry.build(), read, getattr(config, section).sample_rate)


def open_files(section: str, read: ReadSignal, change: Change | None, config: Config, found: DataListing) -> Splits:
    """The listed arrays as train and test."""
    signals = partial(Signals, format=format_of(config, section, read), augment=config.augment, change=change)
    return open_splits(found, partial(signals, views=config.data.views), cache_mb=config.data.cache_mb)


def open_reader(section: str, read: ReadSignal, extensions: tuple[str, ...], config: Config) -> Reader:
    """Single arrays as windows."""
    return SignalReader(format=format_of(config, section, read), extensions=extensions)


def check_signal(kind: str, read: ReadSignal, path: Location, options: CheckOptions) -> Facts:
    """All numbers of a file, in blocks."""
    values, rate = read(path)
    require_numbers(values, path)
    if values.size == 0 or values.ndim not in (1, 2):
        found = "empty" if values.size == 0 else "undecodable"
        return Facts(kind).found(found, f"shape {list(values.shape)}; expected (channels, length)")
    signal = values[None] if values.ndim == 1 else values
    channels, length = signal.shape
    broken, low, high = 0, np.full(channels, np.inf), np.full(channels, -np.inf)
    for start in range(0, length, BLOCK):
        block = np.asarray(signal[:, start : start + BLOCK], dtype=np.float64)
        broken += block.size - int(np.isfinite(block).sum())
        low, high = np.minimum(low, block.min(1)), np.maximum(high, block.max(1))
    seconds = None if rate is None else length / rate
    size = f"{channels} channel{'s' if channels > 1 else ''}"
    facts = Facts(
        kind, seconds=seconds, rate=None if rate is None else round(rate), size=size, shape=(channels, length)
    )
    if broken:
        facts = facts.found("not finite", f"{broken} of {signal.size} numbers are NaN or infinite")
    elif length > 1 and bool((low == high).all()):
        facts = facts.found("blank", "no channel ever changes")
    return facts


MODALITIES = (
    Modality(
        name="signals",
        kind="signal",
        items="signals",
        extensions=EXTENSIONS,
        open_files=partial(open_files, "signals", read_array, None),
        open_reader=partial(open_reader, "signals", read_array, EXTENSIONS),
        check_file=partial(check_signal, "signal", read_array),
        can_be_padded=True,
    ),
    Modality(name="dataset", kind="dataset", items="a Dataset given from Python"),
)
