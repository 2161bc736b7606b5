"""Multi-channel signals in .npy files as a source.

Shapes: a file holds (C, length), or (length,) for one channel; one sample is (C, L), L the geometry's input size.

Pretraining cuts L frames out at a random place, evaluation at the centre. A shorter file is continued with its last
values, and `valid` (T,) is False for patches of which less than half is real. `SignalReader` covers a file of any
length with windows.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from errno import EINVAL

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bridle.data.listing.folders import find_splits, printable
from bridle.data.loading.keeper import kept
from bridle.data.shards.tar_member import Member, Place
from bridle.data.sources import Labels, Sample, Splits, Window, label_of
from bridle.errors import ConfigError, DataError, quoted
from bridle.geometry import Geometry

EXTENSIONS = (".npy",)


class SignalFolder:
    """`.npy` files as samples (C, L)."""

    from_files = True

    def __init__(
        self,
        *,
        paths: Sequence[Place],
        labels: Labels | None,
        classes: Sequence[str] | None,
        geometry: Geometry,
    ) -> None:
        if geometry.rank != 1:
            raise ConfigError(f"geometry.input {list(geometry.input)} is not a length; signals need one size.")
        self.paths, self.labels, self.classes = paths, labels, classes
        self.geometry = geometry

    def __len__(self) -> int:
        return len(self.paths)

    @kept
    def load(self, index: int, generator: torch.Generator | None) -> Sample:
        path, wanted = self.paths[index], self.geometry.input[0]
        signal = open_signal(path, channels=self.geometry.channels)  # (C, length), on disk
        spare = max(signal.shape[1] - wanted, 0)
        start = spare // 2 if generator is None else int(torch.randint(spare + 1, (), generator=generator))
        x = read_frames(signal, start=start, count=wanted, path=path)
        label = label_of(self.labels, index, self.classes)
        if x.shape[1] == wanted:
            return Sample(x, label)
        padded, valid = continued(x, geometry=self.geometry)
        if not valid.any():
            raise too_short(path, frames=x.shape[1], geometry=self.geometry)
        return Sample(padded, label, valid)

    def describe(self, index: int) -> str:
        return printable(self.paths[index])


class SignalReader:
    """`.npy` files of any length as windows (C, L) that follow one another; the last one is continued and marked."""

    extensions = EXTENSIONS
    frame_seconds = None
    timed = False  # a .npy file does not tell its rate

    def __init__(self, *, geometry: Geometry) -> None:
        if geometry.rank != 1:
            raise ConfigError(f"geometry.input {list(geometry.input)} is not a length; signals need one size.")
        self.geometry = geometry

    def windows(self, path: Place) -> Iterator[Window]:
        """All windows of a file, read one at a time; an end that fills less than half a patch is left out."""
        signal = open_signal(path, channels=self.geometry.channels)  # (C, length), on disk
        wanted, length = self.geometry.input[0], signal.shape[1]
        for start in range(0, length, wanted):
            x = read_frames(signal, start=start, count=wanted, path=path)
            if x.shape[1] == wanted:
                yield Window(x, None, start)
                continue
            padded, valid = continued(x, geometry=self.geometry)
            if valid.any():
                yield Window(padded, valid, start)
            elif start == 0:
                raise too_short(path, frames=length, geometry=self.geometry)


def read_frames(signal: NDArray[np.generic], *, start: int, count: int, path: Place) -> Tensor:
    """Up to `count` frames of a mapped signal as (C, n) float32; reads only this part of the file."""
    with np.errstate(over="ignore"):  # what float32 cannot hold becomes infinite, and is refused below
        x = torch.from_numpy(np.array(signal[:, start : start + count], dtype=np.float32))
    if not torch.isfinite(x).all():
        raise DataError(f"{quoted(path)} holds numbers that are not finite (NaN or infinity) as float32.")
    return x


def continued(x: Tensor, *, geometry: Geometry) -> tuple[Tensor, Tensor]:
    """x (C, n) with n < L, continued with its last values to (C, L), and valid (T,)."""
    n, wanted, patch = x.shape[1], geometry.input[0], geometry.patch[0]
    real = (n - torch.arange(0, wanted, patch)).clamp(0, patch)  # (T,) real frames in each patch
    return torch.cat([x, x[:, -1:].expand(-1, wanted - n)], dim=1), 2 * real >= patch


def too_short(path: Place, *, frames: int, geometry: Geometry) -> DataError:
    return DataError(
        f"{quoted(path)} holds {frames} frames, less than half a patch of {geometry.patch[0]}; "
        "it is too short to be used."
    )


def open_signals(root: str | os.PathLike[str], *, geometry: Geometry) -> Splits:
    """The `.npy` files below `root` as train and test, see `folders`."""
    found = find_splits(root, extensions=EXTENSIONS)
    train, test = (
        None
        if listing is None
        else SignalFolder(paths=listing.paths, labels=listing.labels, classes=found.classes, geometry=geometry)
        for listing in (found.train, found.test)
    )
    assert train is not None
    return Splits(train=train, test=test)


def open_signal(path: Place, *, channels: int) -> NDArray[np.generic]:
    """The array of a file as (C, length), mapped from disk, not read; one inside a shard is read."""
    signal: NDArray[np.generic]
    try:
        if isinstance(path, Member):
            return as_channels(np.lib.format.read_array(path.open(), allow_pickle=False), path, channels=channels)
        if not stat.S_ISREG(path.stat().st_mode):  # opening a pipe would wait for somebody to write into it
            raise OSError(EINVAL, "it is not a file")
        signal = np.lib.format.open_memmap(path, mode="r")  # refuses pickled objects and archives
    except DataError:
        raise
    except Exception as error:  # a damaged header fails in many ways
        why = error.strerror if isinstance(error, OSError) and error.strerror else quoted(error)
        raise DataError(f"{quoted(path)} cannot be read as a .npy array: {why}.") from error
    return as_channels(signal, path, channels=channels)


def as_channels(signal: NDArray[np.generic], path: Place, *, channels: int) -> NDArray[np.generic]:
    """An array as (C, length), if it can be one."""
    if signal.dtype.kind not in "iufb":
        raise DataError(f"{quoted(path)} holds {quoted(signal.dtype)}; expected real numbers (int or float).")
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
