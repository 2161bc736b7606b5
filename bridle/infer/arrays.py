"""What a user hands to a model from memory: arrays (checked and cut into batches), bytes, open files, waveforms.

Shapes: x (B, C, *input), or (C, *input) for a single one; valid (B, T) or (T,).

Any real numbers will do. `uint8` given to a model of pictures or videos is taken as 0 … 255 and divided by 255; all
else is in the units of the data the model was trained on. Bytes and open files are read through a temporary file, so
that every reader and its protection against bad content serve them as well.
"""

from __future__ import annotations

import io
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any, TypeGuard

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bridle.data.sources import Reader
from bridle.errors import DataError, UsageError, needs, quoted
from bridle.geometry import Geometry
from bridle.machine import choose_precision

ArrayLike = Tensor | NDArray[Any]
FileLike = str | Path | bytes | IO[bytes]

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def batches(
    x: ArrayLike, valid: ArrayLike | None, geometry: Geometry, *, size: int, bytes_as_unit: bool
) -> Iterator[tuple[Tensor, Tensor | None]]:
    """x (B, C, *input) float32 and valid (B, T) of the rows in order, `size` at a time; at least once, maybe empty."""
    if size < 1:
        raise UsageError(f"batch is {size}; at least one input must be computed at a time.")
    if not isinstance(x, Tensor | np.ndarray):
        raise UsageError(f"expected a torch tensor or a numpy array, got {type(x).__name__}.")
    require_shape(tuple(x.shape), geometry)
    rows = x[None] if x.ndim == len(geometry.shape) else x
    marks = None if valid is None else _marks(valid, len(rows), geometry)
    for start in range(0, max(len(rows), 1), size):
        piece = _tensor(rows[start : start + size], bytes_as_unit=bytes_as_unit)
        yield piece, None if marks is None else marks[start : start + size]


def _tensor(x: ArrayLike, *, bytes_as_unit: bool) -> Tensor:
    """(B, C, *input) float32; only these rows are copied, so that a mapped file is read as it is needed."""
    if isinstance(x, np.ndarray):
        if x.dtype.kind not in "biuf":
            raise UsageError(f"expected real numbers, got an array of {quoted(x.dtype)}.")
        with np.errstate(over="ignore"):  # what float32 cannot hold becomes infinite, and is refused below
            x = torch.from_numpy(np.array(x, dtype=np.uint8 if x.dtype == np.uint8 else np.float32))
    if x.is_complex():
        raise UsageError(f"expected real numbers, got a tensor of {x.dtype}.")
    numbers = x.detach().to(torch.float32)
    if not torch.isfinite(numbers).all():
        raise DataError("the input holds numbers that are not finite (NaN or infinity) as float32; replace them first.")
    return numbers / 255 if bytes_as_unit and x.dtype == torch.uint8 else numbers


def code_tensor(codes: ArrayLike, sizes: Sequence[int]) -> Tensor:
    """Codes (…, M or fewer stages) as int64; UsageError for what no codebook holds, which would crash a GPU."""
    found = torch.as_tensor(np.asarray(codes)) if not isinstance(codes, Tensor) else codes
    if found.is_floating_point() or found.is_complex() or found.dtype == torch.bool or found.dim() == 0:
        raise UsageError(f"expected integer codes (…, {len(sizes)}), got {found.dtype} {list(found.shape)}.")
    found = found.to(torch.int64)
    if found.shape[-1] <= len(sizes) and found.numel():
        limits = torch.tensor(list(sizes[: found.shape[-1]]), device=found.device)
        wrong = (found < 0) | (found >= limits)
        if bool(wrong.any()):
            stage = int(wrong.reshape(-1, found.shape[-1]).any(0).int().argmax()) + 1
            raise UsageError(
                f"a code of stage {stage} is not below its codebook's size, or negative; the sizes are {list(sizes)}."
            )
    return found


def _marks(valid: ArrayLike, rows: int, geometry: Geometry) -> Tensor:
    marks = torch.as_tensor(valid).bool()
    marks = marks[None] if marks.dim() == 1 else marks
    if tuple(marks.shape) != (rows, geometry.tokens):
        raise UsageError(
            f"valid has shape {tuple(marks.shape)}; expected {(rows, geometry.tokens)}, a mark for each of the "
            f"{geometry.tokens} tokens (grid {list(geometry.grid)}) of every input."
        )
    return marks


def require_shape(given: tuple[int, ...], geometry: Geometry) -> None:
    """UsageError with the likely mistake, if the shape is not (B, C, *input) or (C, *input)."""
    wanted = geometry.shape
    if given == wanted or (len(given) == len(wanted) + 1 and given[1:] == wanted):
        return
    expected = ", ".join(map(str, wanted))
    raise UsageError(
        f"expected an input of shape (B, {expected}) or ({expected}), got {given}; {_remedy(given, geometry)}"
    )


def _remedy(given: tuple[int, ...], geometry: Geometry) -> str:
    channels, size = geometry.channels, geometry.input
    last = (*size, channels)
    if given == last or given[1:] == last:
        return f"channels come last here: move them, x.movedim(-1, -{geometry.rank + 1})."
    if channels == 1 and (given == size or given[1:] == size):
        return f"the axis of channels is missing: add it, x.unsqueeze(-{geometry.rank + 1})."
    sample = given[-geometry.rank - 1 :]
    if len(sample) == geometry.rank + 1 and sample[1:] == size:
        hint = "average them" if channels == 1 else "choose or repeat them"
        return f"it has {sample[0]} channels and the model {channels}: {hint}."
    if len(sample) == geometry.rank + 1 and sample[1:] == size[::-1]:
        return "its axes are in another order: swap the last two."
    return "crop, pad or resize it, or train a model with this geometry.input."


def token_positions(geometry: Geometry) -> NDArray[np.int64]:
    """(T, rank): the grid position of each token, first axis slowest."""
    return np.indices(geometry.grid, dtype=np.int64).reshape(geometry.rank, -1).T


def require_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """A number format that encoders can have here."""
    if dtype not in DTYPES.values():
        raise UsageError(f"dtype is {dtype}; expected one of {', '.join(map(str, DTYPES.values()))}.")
    if dtype == torch.bfloat16:
        choose_precision("bf16", device)  # some CPUs die of it
    return dtype


def is_file(value: object) -> TypeGuard[FileLike]:
    """Is this a path, the content of a file, or an open binary file?"""
    return isinstance(value, str | Path | bytes) or hasattr(value, "read")


@contextmanager
def as_paths(files: Iterable[FileLike], reader: Reader) -> Iterator[list[Path]]:
    """Paths of all files for the length of the block; bytes and open files are written to a temporary folder."""
    with TemporaryDirectory(prefix="bridle-") as folder:
        paths = []
        for number, file in enumerate(files):
            if not is_file(file):
                raise UsageError(f"expected a path, bytes or an open binary file, got {type(file).__name__}.")
            if isinstance(file, str | Path):
                paths.append(Path(file))
                continue
            suffix = Path(str(getattr(file, "name", ""))).suffix
            known = suffix if suffix.lower() in reader.extensions else reader.extensions[0]
            paths.append(Path(folder) / f"{number:08}{known}")
            with paths[-1].open("wb") as out:
                shutil.copyfileobj(io.BytesIO(file) if isinstance(file, bytes) else file, out)
        yield paths


@contextmanager
def waveform_file(x: ArrayLike, rate: int, reader: Reader) -> Iterator[Path]:
    """A temporary WAV file of a waveform (N,) or (channels, N); integers are taken as parts of their type's range."""
    with needs("audio"):
        import soundfile

    if ".wav" not in reader.extensions:
        raise UsageError(f"this model reads {' '.join(reader.extensions)} files, not recordings; use encode.")
    wave = np.asarray(x.detach().cpu() if isinstance(x, Tensor) else x)
    if wave.ndim not in (1, 2) or wave.size == 0 or wave.dtype.kind not in "if" or rate < 1:
        raise UsageError(
            f"expected floating-point or signed samples (N,) or (channels, N) and a rate in Hz, got {wave.dtype} "
            f"{wave.shape} and {rate}."
        )
    if wave.dtype.kind == "i":
        wave = wave / -float(np.iinfo(wave.dtype).min)
    with TemporaryDirectory(prefix="bridle-") as folder:
        path = Path(folder) / "waveform.wav"
        soundfile.write(path, wave.T.astype(np.float32), rate, subtype="FLOAT")
        yield path
