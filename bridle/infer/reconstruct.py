"""`bridle detokenize`: files of codes as pictures, sounds, clips or arrays again, one file at a time, window by window.

Codes of a long file are decoded in windows that overlap by half along the first axis and are cross-faded, so that no
seam is heard or seen where one window ends. Shapes: codes (rows, M) with positions (rows, rank); a decoded piece is
(C, n, *rest) in the input's own units, n along the first axis.
"""

from __future__ import annotations

import collections
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bridle.data.audio.inversion import invert_logmel
from bridle.data.audio.logmel import LogMel
from bridle.data.audio.modality import front_end
from bridle.data.modality import modality_of
from bridle.errors import DataError, UsageError, quoted
from bridle.evaluate.reconstruction.measure import is_spectrogram
from bridle.files import replacing
from bridle.geometry import Geometry
from bridle.infer.model import Model
from bridle.infer.read import CodesFile

BATCH = 16  # windows decoded together
SOUND_FRAMES, SOUND_OVERLAP = 1024, 64  # frames whose phases are found together, and of which two neighbours share
FRAME_RATE = 8  # pictures a second of a clip whose file did not say

Decode = Callable[[Tensor, Tensor], Tensor]  # codes (B, T, m), valid (B, T) -> (B, C, *input)


class Grid(NamedTuple):
    """The codes of one file on its grid."""

    codes: Tensor  # (length, rest, m): patches along the first axis, all other axes flattened
    valid: Tensor  # (length, rest)


def reconstruct_files(model: Model, codes: Path, out: Path, *, stages: int | None = None) -> list[Path]:
    """Write one file into `out` for every file in `codes`; returns their paths.

    `codes` is what `bridle tokenize` wrote with the same model; `stages` decodes only the first ones.
    """
    stored, wanted = CodesFile(codes), model.fingerprint
    if stored.header.model != wanted:  # they would decode to nonsense
        raise UsageError(
            f"{quoted(codes)}: these codes come from another model (fingerprint {stored.header.model}, this one has "
            f"{wanted}); decode them with the model that made them, or tokenize the files again."
        )
    ending, write = media_writer(model)
    held = len(stored.header.codebook_sizes)
    if stages is not None and not 1 <= stages <= held:
        raise UsageError(f"--stages {stages}: {quoted(codes)} holds the codes of {held} stages; give 1 to {held}.")
    out.mkdir(parents=True, exist_ok=True)
    names = output_names(stored.files, ending)
    written = []
    for (_, columns), name in zip(stored.rows(), names, strict=True):
        path = out / name
        path.parent.mkdir(parents=True, exist_ok=True)
        grid = on_grid(columns["codes"], columns["positions"], model.geometry)
        pieces = decoded_pieces(grid, model.geometry, lambda c, v: model.decode_to_input(c, valid=v, stages=stages))
        with replacing(path) as temporary:
            write(pieces, temporary)
        written.append(path)
    return written


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


def on_grid(codes: NDArray[Any], positions: NDArray[Any], geometry: Geometry) -> Grid:
    """Rows of codes at their places; tokens that are missing, because they were padding, are marked."""
    if len(codes) == 0:
        raise DataError("a file has no codes; tokenize it again.")
    rest = geometry.grid[1:]
    if positions.min() < 0 or (positions[:, 1:] >= np.array(rest, dtype=np.int64)).any():
        raise DataError(f"positions go beyond the grid {list(geometry.grid)} of the model; tokenize the file again.")
    shape = int(positions[:, 0].max()) + 1, *rest
    places = tuple(torch.from_numpy(positions.astype(np.int64)).T)
    grid = torch.zeros(*shape, codes.shape[1], dtype=torch.int64)
    valid = torch.zeros(shape, dtype=torch.bool)
    grid[places] = torch.from_numpy(codes.astype(np.int64))
    valid[places] = True
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
        codes[row, :n], valid[row, :n] = grid.codes[start : start + n], grid.valid[start : start + n]
    return codes.flatten(1, 2), valid.flatten(1)


def media_writer(model: Model) -> tuple[str, Callable[[Iterator[Tensor], Path], None]]:
    """File ending and writer: pictures as PNG, log-mel features as WAV, clips as GIF, other inputs as .npy."""
    if is_spectrogram(model.config):
        return ".wav", partial(write_sound, front=front_end(model.config))
    if modality_of(model.config).is_unit_range:
        return (".png", write_picture) if model.geometry.rank == 2 else (".gif", write_clip)
    return ".npy", write_array


def write_picture(pieces: Iterator[Tensor], path: Path) -> None:
    """(C, H, W) in 0 … 1 as PNG."""
    from PIL import Image

    Image.fromarray(as_bytes(torch.cat(list(pieces), dim=1))).save(path, format="PNG")


def write_clip(pieces: Iterator[Tensor], path: Path) -> None:
    """(C, frames, H, W) in 0 … 1 as an animated GIF."""
    from PIL import Image

    frames = [Image.fromarray(as_bytes(piece[:, t])) for piece in pieces for t in range(piece.shape[1])]
    frames[0].save(path, format="GIF", save_all=True, append_images=frames[1:], duration=1000 // FRAME_RATE, loop=0)


def as_bytes(x: Tensor) -> NDArray[np.uint8]:
    """(C, H, W) in 0 … 1 -> (H, W) or (H, W, 3) bytes."""
    values = (x.clamp(0, 1) * 255).round().byte().cpu().numpy()
    return np.ascontiguousarray(values[0] if len(values) == 1 else values.transpose(1, 2, 0))


def write_array(pieces: Iterator[Tensor], path: Path) -> None:
    """(C, *input) as .npy."""
    with path.open("wb") as file:
        np.save(file, torch.cat(list(pieces), dim=1).cpu().numpy())


def write_sound(pieces: Iterator[Tensor], path: Path, front: LogMel) -> None:
    """(1, frames, mels) log-mel features as 16-bit WAV, some seconds at a time."""
    import soundfile

    with soundfile.SoundFile(path, "w", samplerate=front.sample_rate, channels=1, format="WAV") as file:
        for wave in sound_pieces(pieces, front):
            file.write(wave.clamp(-1, 1).cpu().numpy())


def sound_pieces(pieces: Iterator[Tensor], front: LogMel) -> Iterator[Tensor]:
    """Waveform pieces of feature pieces (1, n, mels); blocks share SOUND_OVERLAP frames, which are cross-faded."""
    shared = SOUND_OVERLAP * front.shift
    fade = torch.linspace(0, 1, shared)
    waiting: Tensor | None = None
    for features, is_last in blocks(pieces):
        wave = invert_logmel(features, front)
        if waiting is not None:
            both = min(shared, len(wave))
            head = waiting[:both] * (1 - fade[:both]) + wave[:both] * fade[:both]
            wave = torch.cat([head, wave[both:]])
        keep = len(wave) if is_last else (len(features) - SOUND_OVERLAP) * front.shift
        yield wave[:keep]
        waiting = wave[keep : keep + shared]


def blocks(pieces: Iterator[Tensor]) -> Iterator[tuple[Tensor, bool]]:
    """Features (n ≤ SOUND_FRAMES, mels) that overlap by SOUND_OVERLAP frames, and whether each is the last."""
    held: Tensor | None = None
    for piece in pieces:
        held = piece[0] if held is None else torch.cat([held, piece[0]])
        while len(held) > SOUND_FRAMES + SOUND_OVERLAP:
            yield held[:SOUND_FRAMES], False
            held = held[SOUND_FRAMES - SOUND_OVERLAP :]
    if held is not None:
        yield held, True
