"""`bridle detokenize`: files of codes as pictures, sounds, clips or arrays again, window by window in constant memory.

Codes of a long file are decoded in windows that overlap by half along the first axis and are cross-faded, so that no
seam is heard or seen where one window ends. Shapes: codes (rows, M) with positions (rows, rank), ordered along the
first axis; a decoded piece is (C, n, *rest) in the input's own units, n along the first axis.
"""

from __future__ import annotations

import itertools
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
Columns = Mapping[str, Array]  # by name, some rows of one file
Decode = Callable[[Tensor, Tensor], Tensor]  # codes (B, T, m), valid (B, T) -> (B, C, *input)


class Window(NamedTuple):
    """The codes of one window of a file on the model's grid; tokens that are missing, being padding, are not valid."""

    start: int  # its first patch along the first axis
    codes: Tensor  # (T, m)
    valid: Tensor  # (T,)


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
    lengths = require_decodable(stored, opened, stages)
    ending, write = media_writer(opened.config, clips=clips)
    paths = [folder / name for name in output_names(stored.files, ending)]
    for number, some in itertools.groupby(numbered_blocks(stored, geometry), key=lambda block: block[0]):
        path, rest = paths[number], (columns for _, columns in some)
        first = next(rest)
        path.parent.mkdir(parents=True, exist_ok=True)
        pieces = decoded_pieces(
            itertools.chain([first], rest),
            lengths[number],
            geometry,
            lambda c, v: opened.decode_to_input(c, valid=v, stages=stages),
        )
        with replacing(path) as temporary:
            write(pieces, temporary, Media(lengths[number] * geometry.patch[0], frame_rate(first, geometry)))
    return paths


def numbered_blocks(stored: CodesFile, geometry: Geometry) -> Iterator[tuple[int, Columns]]:
    """The codes of all files, two windows at a time: a block begins with two steps of the first axis at least."""
    return stored.blocks(2 * geometry.tokens)


def require_decodable(stored: CodesFile, model: Model, stages: int | None) -> list[int]:
    """How many patches each file has along the first axis; reads all codes, window by window.

    An error of one line if some of them cannot be decoded with this model.
    """
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
    lengths, names = [0] * len(stored.files), stored.files
    for number, columns in numbered_blocks(stored, model.geometry):
        where = f"{path}: {quoted(names[number])}"
        if len(columns["codes"]) == 0:
            raise DataError(f"{where} has no codes; tokenize it again.")
        lengths[number] = 1 + last_position(columns["positions"], lengths[number], model.geometry, where)
    _ = model.detokenizer  # an error names the command that trains one
    return lengths


def last_position(positions: Array, before: int, geometry: Geometry, where: str) -> int:
    """The last position of a block along the first axis, `before` patches of which came with earlier blocks.

    DataError if a token lies outside the model's grid, or tokens are not in order.
    """
    rest = np.array(geometry.grid[1:], dtype=np.int64)
    shape_fits = positions.ndim == 2 and positions.shape[1] == geometry.rank and positions.dtype.kind in "ui"
    if not shape_fits or positions.min() < 0 or (positions[:, 1:] >= rest).any():
        raise DataError(f"{where}: positions go beyond the grid {list(geometry.grid)} of the model; tokenize it again.")
    along = np.concatenate([[max(before - 1, 0)], positions[:, 0].astype(np.int64)])
    steps = np.diff(along)
    if (steps < 0).any() or (steps > geometry.grid[0]).any():
        raise DataError(f"{where}: its tokens are not in order, or a window of them is missing; tokenize it again.")
    return int(along[-1])


def frame_rate(columns: Columns, geometry: Geometry) -> float:
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
    names: dict[Path, None] = {}
    for path in own:
        file, mark, part = path.name.partition("#t=")  # a part of a file keeps its times
        name = path.relative_to(shared).with_name(f"{Path(file).stem}{mark}{part}{ending}")
        numbered = (name.with_stem(f"{name.stem}-{number}") for number in itertools.count(2))
        names[next(free for free in itertools.chain([name], numbered) if free not in names)] = None
    return list(names)


def decoded_pieces(blocks: Iterator[Columns], length: int, geometry: Geometry, decode: Decode) -> Iterator[Tensor]:
    """(C, n, *rest) pieces along the first axis that together are the whole file of `length` patches."""
    size, patch, hop = geometry.grid[0], geometry.patch[0], hop_of(length, geometry)
    fade = torch.linspace(0, 1, (size - hop) * patch + 2)[1:-1].reshape(1, -1, *[1] * (geometry.rank - 1))
    waiting: Tensor | None = None  # the end of the last window, which the next one overlaps
    windows = windows_of(blocks, length, geometry)
    while some := list(itertools.islice(windows, BATCH)):
        decoded = decode(torch.stack([window.codes for window in some]), torch.stack([window.valid for window in some]))
        for (start, _, _), window in zip(some, decoded, strict=True):  # (C, *input)
            shown = window[:, : min(size, length - start) * patch]
            if waiting is not None:
                both = min(waiting.shape[1], shown.shape[1])
                blend = fade[:, :both]
                head = (1 - blend) * waiting[:, :both] + blend * shown[:, :both]
                shown = torch.cat([head, shown[:, both:]], dim=1)
            keep = shown.shape[1] if start + size >= length else hop * patch
            yield shown[:, :keep]
            waiting = shown[:, keep:]


def hop_of(length: int, geometry: Geometry) -> int:
    """Patches from one window to the next: half a window, or a whole one where there is but one."""
    size = geometry.grid[0]
    return size if length <= size else max(1, size // 2)


def windows_of(blocks: Iterator[Columns], length: int, geometry: Geometry) -> Iterator[Window]:
    """The windows of a file of `length` patches whose rows come in order; a window of rows is held at a time."""
    (size, *rest), hop = geometry.grid, hop_of(length, geometry)
    first = next(blocks)
    codes, places = first["codes"], first["positions"].astype(np.int64)
    for start in range(0, max(1, length - size + hop), hop):
        while places[-1, 0] < start + size and (block := next(blocks, None)) is not None:
            codes = np.concatenate([codes, block["codes"]])
            places = np.concatenate([places, block["positions"].astype(np.int64)])
        begin, end = np.searchsorted(places[:, 0], [start, start + size])
        own = (places[begin:end, 0] - start, *places[begin:end, 1:].T)
        grid = torch.zeros(size, *rest, codes.shape[1], dtype=torch.int64)
        valid = torch.zeros(size, *rest, dtype=torch.bool)
        grid[own], valid[own] = torch.from_numpy(codes[begin:end].astype(np.int64)), True
        yield Window(start, grid.flatten(0, -2), valid.flatten())
        codes, places = codes[begin:], places[begin:]
