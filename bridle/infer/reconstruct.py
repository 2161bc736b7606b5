"""`bridle detokenize`: files of codes as pictures, sounds, clips or arrays again, one file at a time, window by window.

Codes of a long file are decoded in windows that overlap by half along the first axis and are cross-faded, so that no
seam is heard or seen where one window ends. Shapes: codes (rows, M) with positions (rows, rank); a decoded piece is
(C, n, *rest) in the input's own units, n along the first axis.
"""

from __future__ import annotations

import collections
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bridle.errors import DataError, UsageError, quoted
from bridle.evaluate.reconstruction.media import FRAME_RATE, ClipFormat, Media, media_writer
from bridle.files import replacing
from bridle.geometry import Geometry
from bridle.infer.model import Model, load
from bridle.infer.read import CodesFile

BATCH = 16  # windows decoded together

Array = NDArray[Any]
Decode = Callable[[Tensor, Tensor], Tensor]  # codes (B, T, m), valid (B, T) -> (B, C, *input)


class Grid(NamedTuple):
    """The codes of one file on its grid, in the type they are stored in."""

    codes: Array  # (length, rest, m): patches along the first axis, all other axes flattened
    valid: Array  # (length, rest)


def detokenize(
    model: Model | str | Path,
    codes: str | Path,
    out: str | Path,
    *,
    stages: int | None = None,
    clips: ClipFormat = "mp4",
) -> list[Path]:
    """Write one picture, sound, clip or array into `out` for every file in `codes`; returns their paths.

    `codes` is what `bridle tokenize` wrote with the same model; `stages` decodes only the first ones. Codes that the
    model cannot have made are refused before anything is written.
    """
    opened = model if isinstance(model, Model) else load(model)
    stored, folder, geometry = CodesFile(codes), Path(out), opened.geometry
    require_decodable(stored, opened, stages)
    ending, write = media_writer(opened.config, clips=clips)
    names = output_names(stored.files, ending)
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for (_, columns), name in zip(stored.rows(), names, strict=True):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        grid = on_grid(columns["codes"], columns["positions"], geometry)
        pieces = decoded_pieces(grid, geometry, lambda c, v: opened.decode_to_input(c, valid=v, stages=stages))
        with replacing(path) as temporary:
            write(pieces, temporary, Media(len(grid.codes) * geometry.patch[0], frame_rate(columns, geometry)))
        written.append(path)
    return written


def require_decodable(stored: CodesFile, model: Model, stages: int | None) -> None:
    """An error of one line if some of the codes cannot be decoded with this model; reads all of them."""
    path, sizes, held = quoted(stored.path), tuple(model.config.quantizer.sizes), stored.header.codebook_sizes
    if stored.header.model != model.fingerprint:  # they would decode to nonsense
        raise UsageError(
            f"{path}: these codes come from another model (fingerprint {stored.header.model}, this one has "
            f"{model.fingerprint}); decode them with the model that made them, or tokenize the files again."
        )
    if not held or held != sizes[: len(held)]:
        raise DataError(
            f"{path}: its codebooks have {list(held)} codes, those of the model {list(sizes)}; stages can be left out "
            "at the end only. Tokenize the files again."
        )
    if stages is not None and not 1 <= stages <= len(held):
        raise UsageError(f"--stages {stages}: {path} holds the codes of {len(held)} stages; give 1 to {len(held)}.")
    limits = np.array(held, dtype=np.int64)
    for name, columns in stored.rows():
        codes, where = columns["codes"], f"{path}: {quoted(name)}"
        if codes.dtype.kind not in "ui" or codes.shape[1] != len(held):
            raise DataError(
                f"{where}: expected whole numbers of {len(held)} stages, got {codes.dtype} {list(codes.shape)}; "
                "tokenize the file again."
            )
        if len(codes) == 0:
            raise DataError(f"{where} has no codes; tokenize it again.")
        wrong = (codes < 0) | (codes >= limits)
        if wrong.any():
            token, stage = (int(n) for n in np.argwhere(wrong)[0])
            raise DataError(
                f"{where}: code {codes[token, stage]} of stage {stage + 1} at token {token} is not below its "
                f"codebook's size, {held[stage]}; tokenize the file again."
            )
        require_positions(columns["positions"], model.geometry, where)
    _ = model.detokenizer  # an error names the command that trains one


def require_positions(positions: Array, geometry: Geometry, where: str) -> None:
    """DataError if a token lies outside the model's grid."""
    rest = np.array(geometry.grid[1:], dtype=np.int64)
    shape_fits = positions.ndim == 2 and positions.shape[1] == geometry.rank and positions.dtype.kind in "ui"
    if not shape_fits or positions.min() < 0 or (positions[:, 1:] >= rest).any():
        raise DataError(f"{where}: positions go beyond the grid {list(geometry.grid)} of the model; tokenize it again.")


def frame_rate(columns: Mapping[str, Array], geometry: Geometry) -> float:
    """Frames a second by the times of the first two steps along the first axis."""
    first, times = columns["positions"][:, 0], columns.get("times")
    if times is None or not (first == 1).any() or not (first == 0).any():
        return FRAME_RATE
    seconds = float(times[first == 1][0] - times[first == 0][0])
    return geometry.patch[0] / seconds if seconds > 0 else FRAME_RATE


def output_names(files: list[str], ending: str) -> list[Path]:
    """Paths below the output folder: the part of each name behind what all share, with a new ending, each once."""
    if not files:
        raise DataError("the file of codes holds no files, so there is nothing to decode.")
    own = [Path(*(part for part in Path(name.lstrip("/")).parts if part not in ("..", "."))) for name in files]
    shared = Path(os.path.commonpath([path.parent for path in own]))
    taken: collections.Counter[Path] = collections.Counter()
    names = []
    for path in own:
        name = path.relative_to(shared).with_suffix(ending)
        taken[name] += 1
        names.append(name if taken[name] == 1 else name.with_stem(f"{name.stem}-{taken[name]}"))
    return names


def on_grid(codes: Array, positions: Array, geometry: Geometry) -> Grid:
    """Rows of codes at their places; tokens that are missing, because they were padding, are marked."""
    shape = int(positions[:, 0].max()) + 1, *geometry.grid[1:]
    places = tuple(positions.astype(np.int64).T)
    grid, valid = np.zeros((*shape, codes.shape[1]), dtype=codes.dtype), np.zeros(shape, dtype=np.bool_)
    grid[places], valid[places] = codes, True
    return Grid(grid.reshape(shape[0], -1, codes.shape[1]), valid.reshape(shape[0], -1))


def decoded_pieces(grid: Grid, geometry: Geometry, decode: Decode) -> Iterator[Tensor]:
    """(C, n, *rest) pieces along the first axis that together are the whole file."""
    size, patch = geometry.grid[0], geometry.patch[0]
    length = len(grid.codes)
    hop = size if length <= size else max(1, size // 2)
    starts = list(range(0, max(1, length - size + hop), hop))
    fade = torch.linspace(0, 1, (size - hop) * patch + 2)[1:-1].reshape(1, -1, *[1] * (geometry.rank - 1))
    waiting: Tensor | None = None  # the end of the last window, which the next one overlaps
    for begin in range(0, len(starts), BATCH):
        some = starts[begin : begin + BATCH]
        windows = decode(*windows_at(grid, some, size))  # (B, C, *input)
        for start, window in zip(some, windows, strict=True):
            shown = window[:, : min(size, length - start) * patch]
            if waiting is not None:
                both = min(waiting.shape[1], shown.shape[1])
                blend = fade[:, :both]
                head = (1 - blend) * waiting[:, :both] + blend * shown[:, :both]
                shown = torch.cat([head, shown[:, both:]], dim=1)
            ends = start == starts[-1]
            keep = shown.shape[1] if ends else hop * patch
            yield shown[:, :keep]
            waiting = shown[:, keep:]


def windows_at(grid: Grid, starts: list[int], size: int) -> tuple[Tensor, Tensor]:
    """Codes (B, T, m) and marks (B, T) of the windows that begin at `starts`, padded at the end of the file."""
    length, width, stages = grid.codes.shape
    codes = torch.zeros(len(starts), size, width, stages, dtype=torch.int64)
    valid = torch.zeros(len(starts), size, width, dtype=torch.bool)
    for row, start in enumerate(starts):
        n = min(size, length - start)
        codes[row, :n] = torch.from_numpy(grid.codes[start : start + n].astype(np.int64))
        valid[row, :n] = torch.from_numpy(grid.valid[start : start + n])
    return codes.flatten(1, 2), valid.flatten(1)
