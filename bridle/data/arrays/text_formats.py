"""Signals in text tables (.csv, .tsv) and in WFDB records (.hea beside their data files), with the rate if it is told.

Shapes: both give (C, length). A table has a row per sample and a column per channel; a WFDB data file holds the samples
of its channels in turn.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bridle.data.shards.tar_member import Location, TarMember, open_regular
from bridle.errors import DataError, quoted

RATE_LINE = re.compile(r"#.*?\b(?:sample_?rate|sampling_?rate|rate|fs)\b\s*[:=]\s*([0-9.eE+]+)", re.IGNORECASE)
CLOCK = re.compile(r"(time|timestamp|t|seconds?|secs?|s|ms|milliseconds?)([ _\[(]*(s|sec|ms)?[\])]*)?", re.IGNORECASE)
COUNTERS = ("", "index", "sample", "samples", "frame", "row", "n", "i")  # names of columns that count
EVEN = 0.02  # of a step: how much the steps of a clock may differ


def read_table(path: Location) -> tuple[NDArray[np.float64], float | None]:
    """The columns of a table of numbers as (C, length), and the rate that a comment or a clock column tells.

    Comma, semicolon, tab or space part the columns. The first line may name them. A first column that counts or tells
    the time is no channel. `# sample_rate: 250` in a comment tells the rate.
    """
    with open_regular(path) as file:
        text = io.BufferedReader(file).read().decode("utf-8-sig")
    lines = [line for line in text.splitlines() if line.strip()]
    told = next((float(found[1]) for line in lines if (found := RATE_LINE.match(line))), None)
    rows = [line for line in lines if not line.startswith("#")]
    if not rows:
        raise DataError(f"{quoted(path)} holds no rows.")
    parted = next((mark for mark in ("\t", ";", ",") if mark in rows[0]), None)
    names = [name.strip(" \"'") for name in rows[0].split(parted)]
    headed = not all(map(is_number, names))
    values = np.loadtxt(rows[headed:], delimiter=parted, ndmin=2, comments=None, dtype=np.float64).T
    step = even_step(values[0]) if len(values) > 1 else None
    is_clock = CLOCK.fullmatch(names[0]) is not None or (not headed and step != 1)
    if step is None or not (is_clock or not headed or names[0].lower() in COUNTERS):
        return values, told
    unit = 1000 if names[0].lower().rstrip("])").endswith(("ms", "milliseconds", "millisecond")) else 1
    return values[1:], told or (float(f"{unit / step:.6g}") if is_clock else None)


def is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def even_step(column: NDArray[np.float64]) -> float | None:
    """The step of a column of three or more that rises evenly, as a clock or a counter does; else None."""
    steps = np.diff(column)
    if len(steps) < 2:
        return None
    step = float(np.median(steps))
    return step if step > 0 and bool((np.abs(steps - step) <= EVEN * step).all()) else None


class Channel:
    """One signal line of a WFDB header: data file, format, bytes before the samples, gain and baseline."""

    def __init__(self, line: str, path: Path) -> None:
        fields = line.split()
        self.file, kind = fields[0], re.fullmatch(r"(\d+)(?:x1)?(?::\d+)?(?:\+(\d+))?", fields[1])
        if kind is None or int(kind[1]) not in WFDB_FORMATS:
            known = ", ".join(map(str, WFDB_FORMATS))
            raise DataError(f"{quoted(path)}: format {quoted(fields[1])} of a WFDB signal is not read; known: {known}.")
        if os.path.basename(self.file) != self.file or self.file.startswith("."):
            raise DataError(f"{quoted(path)}: its data file {quoted(self.file)} is not a plain name beside it.")
        self.format, self.offset = int(kind[1]), int(kind[2] or 0)
        gain = re.match(r"([0-9.eE+-]+)(?:\((-?\d+)\))?", fields[2] if len(fields) > 2 else "")
        self.gain = float(gain[1]) if gain and float(gain[1]) else 200.0
        zero = fields[4] if len(fields) > 4 else "0"
        self.baseline = float(gain[2] if gain and gain[2] else zero)


def read_wfdb(path: Location) -> tuple[NDArray[np.float32], float | None]:
    """The channels of a WFDB record in physical units (C, length), and its rate, by the header `path`.

    A single segment whose channels have one rate, in formats 16, 24, 32, 61, 80 or 212.
    """
    if isinstance(path, TarMember):
        raise DataError(f"{quoted(path)}: the data file of a WFDB header cannot be read from a shard.")
    lines = [line for line in path.read_text("utf-8").splitlines() if line.strip() and not line.startswith("#")]
    record = lines[0].split()
    if "/" in record[0]:
        raise DataError(f"{quoted(path)} has several segments; only records of one segment are read.")
    rate = float(re.split(r"[/(]", record[2])[0]) if len(record) > 2 else 250.0  # as the format says
    channels = [Channel(line, path) for line in lines[1 : 1 + int(record[1])]]
    if not channels:
        raise DataError(f"{quoted(path)} names no signals.")
    found: dict[str, NDArray[np.int64]] = {}
    for file in dict.fromkeys(channel.file for channel in channels):
        group = [channel for channel in channels if channel.file == file]
        with open_regular(path.with_name(file)) as opened:
            raw = io.BufferedReader(opened).read()[group[0].offset :]
        samples = WFDB_FORMATS[group[0].format](np.frombuffer(raw, np.uint8))
        found[file] = samples[: len(samples) // len(group) * len(group)].reshape(-1, len(group)).T
    used = dict.fromkeys(found, 0)
    rows = []
    for channel in channels:
        digital = found[channel.file][used[channel.file]]
        used[channel.file] += 1
        rows.append(((digital - channel.baseline) / channel.gain).astype(np.float32))
    length = int(record[3]) if len(record) > 3 and int(record[3]) else min(map(len, rows))
    if min(map(len, rows)) < length:
        raise DataError(f"{quoted(path)} promises {length} samples; its data has {min(map(len, rows))}.")
    return np.stack([row[:length] for row in rows]), rate


def whole(raw: NDArray[np.uint8], size: int) -> NDArray[np.uint8]:
    """Without the bytes of a sample that is not whole."""
    return raw[: len(raw) // size * size]


def twelve_bits(raw: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Format 212: two samples of 12 bits in three bytes."""
    low, middle, high = whole(raw, 3).reshape(-1, 3).astype(np.int64).T
    pairs: NDArray[np.int64] = np.stack([low | (middle & 0x0F) << 8, high | (middle & 0xF0) << 4], 1).reshape(-1)
    return pairs - ((pairs & 0x800) << 1)


def three_bytes(raw: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Format 24: little-endian, two's complement."""
    low, middle, high = whole(raw, 3).reshape(-1, 3).astype(np.int64).T
    found: NDArray[np.int64] = low | middle << 8 | high << 16
    return found - ((found & 0x800000) << 1)


WFDB_FORMATS: dict[int, Callable[[NDArray[np.uint8]], NDArray[np.int64]]] = {
    16: lambda raw: whole(raw, 2).view("<i2").astype(np.int64),
    24: three_bytes,
    32: lambda raw: whole(raw, 4).view("<i4").astype(np.int64),
    61: lambda raw: whole(raw, 2).view(">i2").astype(np.int64),
    80: lambda raw: raw.astype(np.int64) - 128,
    212: twelve_bits,
}
