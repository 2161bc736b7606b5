"""Signals out of .npy and .npz files, text tables and WFDB records, or out of files that a given function reads.

Shapes: a file holds (C, length), or (length,) for one channel.
"""

from __future__ import annotations

import io
import os
import stat
from collections.abc import Callable
from errno import EINVAL
from typing import IO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bridle.data.arrays.text_formats import read_table, read_wfdb
from bridle.data.loading.watchdog import decoding
from bridle.data.shards.tar_member import Location, TarMember, open_regular
from bridle.errors import DataError, quoted

EXTENSIONS = (".npy", ".npz", ".csv", ".tsv", ".hea")
RATE = "sample_rate"  # the entry of a .npz file that tells it


class Signal(NamedTuple):
    """What a file holds."""

    values: NDArray[np.generic]  # (C, length) or (length,), real numbers
    rate: float | None = None  # samples per second, where the file tells


ReadSignal = Callable[[Location], Signal]
ParseSignal = Callable[[IO[bytes]], Signal | NDArray[np.generic]]  # what a plug-in gives


def read_array(path: Location) -> Signal:
    """The array of a .npy file, mapped from disk and not read, or of one of the other formats; DataError if none."""
    kind = path.suffix.lower()
    with decoding(path, f"a {kind or '.npy'} array"):
        if kind in (".csv", ".tsv"):
            return Signal(*read_table(path))
        if kind == ".hea":
            return Signal(*read_wfdb(path))
        return read_npz(path) if kind == ".npz" else Signal(read_npy(path))


def read_npy(path: Location) -> NDArray[np.generic]:
    """One inside a shard is read."""
    found: NDArray[np.generic]
    if isinstance(path, TarMember):
        found = np.lib.format.read_array(path.open(), allow_pickle=False)
        return found
    if not stat.S_ISREG(os.stat(path).st_mode):  # opening a pipe would wait for somebody to write into it
        raise OSError(EINVAL, "it is not a file")
    found = np.lib.format.open_memmap(path, mode="r")  # refuses pickled objects and archives
    return found


def read_npz(path: Location) -> Signal:
    """The one array of an archive; beside it may stand its `sample_rate`."""
    with open_regular(path) as file, np.load(file, allow_pickle=False) as archive:
        names = [name for name in archive.files if name != RATE]
        if len(names) != 1:
            listed = quoted(", ".join(names)) if names else "none"
            raise DataError(f"{quoted(path)} should hold one array (and perhaps {RATE}); its arrays: {listed}.")
        rate = float(archive[RATE]) if RATE in archive.files else None
        return Signal(archive[names[0]], rate)


def read_parsed(path: Location, *, parse: ParseSignal, kind: str) -> Signal:
    """The signal that `parse` makes of an opened file; whatever it raises becomes a DataError."""
    with decoding(path, f"a file of the kind {kind}"), open_regular(path) as file:
        found = parse(io.BufferedReader(file))
    return found if isinstance(found, Signal) else Signal(np.asarray(found))


def as_channels(signal: NDArray[np.generic], path: Location, *, channels: int) -> NDArray[np.generic]:
    """An array as (C, length), if it can be one."""
    require_numbers(signal, path)
    shape = list(signal.shape)
    if signal.ndim == 1 and channels == 1:
        signal = signal[None]
    if signal.ndim != 2 or signal.shape[0] != channels:
        expected = f"({channels}, length)" + (" or (length,)" if channels == 1 else "")
        turned = signal.ndim == 2 and signal.shape[1] == channels
        hint = "it looks transposed, save array.T" if turned else "or set geometry.channels to fit"
        raise DataError(f"{quoted(path)} has shape {shape}; expected {expected}; {hint}.")
    if signal.shape[1] == 0:
        raise DataError(f"{quoted(path)} is empty: shape {shape}.")
    return signal


def require_numbers(signal: NDArray[np.generic], path: Location) -> None:
    """DataError for text, dates, records and complex numbers."""
    if signal.dtype.kind not in "iufb":
        raise DataError(f"{quoted(path)} holds {quoted(signal.dtype)}; expected real numbers (int or float).")
