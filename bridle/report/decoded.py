"""What codes look and sound like: samples rebuilt from 1 … M stages side by side, and single codes decoded alone.

Shapes: a sample is (C, *input), a picture (H, W, 4), codes (N, T, M), Dq the code width.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from bridle.config import Config
from bridle.data.audio.inversion import invert_logmel
from bridle.data.audio.modality import front_end
from bridle.data.sources import Sample
from bridle.evaluate.reconstruction.measure import is_spectrogram
from bridle.evaluate.reconstruction.rate import Codec
from bridle.geometry import Geometry
from bridle.report.sample_pictures import Canvas, Picture, data_uri, sound_uri

PICTURE = 320  # pixels, the longest side
SOUND_BYTES, CODE_BYTES = 96_000, 16_000
CODE_FRAMES = 48  # of the sound of a single code


class Rebuilt(NamedTuple):
    """A picture of a sample, and its sound where it has one."""

    caption: str
    picture: str
    sound: str = ""


class SideBySide(NamedTuple):
    """A sample, and what is left of it after decoding."""

    name: str
    label: str
    versions: list[Rebuilt]


class CodeAlone(NamedTuple):
    """A code decoded without a sample."""

    picture: str
    sound: str = ""


class Decoder:
    """Draws and plays what a codec decodes."""

    def __init__(self, config: Config, codec: Codec, canvas: Canvas) -> None:
        self.codec, self.canvas = codec, canvas
        self.front = front_end(config) if is_spectrogram(config) else None

    def versions(self, sample: Sample, sound: str) -> list[Rebuilt]:
        """The sample itself (its sound is given), what inverting its features makes of it, and 1 … M stages."""
        found = [Rebuilt("original", self._picture(sample.x), sound)]
        if self.front is not None:
            heard = self._sound(self.codec.real(sample.x, sample.valid), SOUND_BYTES)
            found.append(Rebuilt("mel inversion, no codes", self._picture(sample.x), heard))
        codes, valid = self.codec.codes(sample), None if sample.valid is None else sample.valid[None]
        for m in range(1, self.codec.stages + 1):
            x = self.codec.decode(codes, m, valid)[0]
            heard = self._sound(self.codec.real(x, sample.valid), SOUND_BYTES) if self.front is not None else ""
            found.append(Rebuilt(f"{m} stage{'s' if m > 1 else ''}", self._picture(x), heard))
        return found

    @torch.no_grad()
    def alone(self, code: int, m: int, earlier: Tensor) -> CodeAlone:
        """Code `code` of stage m (from 0) at every token, on top of the mean vector of the `earlier` stages (Dq,).

        The picture is the patch in the middle; of later stages it shows the change against the earlier ones, stretched
        to the whole range of values.
        """
        vector = self.codec.tokenizer.quantizer.code_vectors()[m][code]
        x = self._decoded(earlier + vector, m + 1)
        shown = x
        if m > 0:
            low, high = self.canvas.limits
            change = x - self._decoded(earlier, m)
            shown = (low + high) / 2 + change * (high - low) / (2 * change.abs().max().clamp_min(1e-9))
        box = self.canvas.boxes[middle_token(self.codec.geometry)]
        picture = data_uri(self.canvas.draw(shown)[box], longest=PICTURE)
        return CodeAlone(picture, self._sound(x[:, :CODE_FRAMES], CODE_BYTES) if self.front is not None else "")

    def _decoded(self, vector: Tensor, stages: int) -> Tensor:
        """(C, *input) with the same sum (Dq,) of `stages` code vectors at every token."""
        q = vector.expand(1, self.codec.geometry.tokens, -1)
        return self.codec.own_units(self.codec.detokenizer(q, stages=torch.tensor([stages])))[0]

    def _picture(self, x: Tensor) -> str:
        return data_uri(self.canvas.draw(x), longest=PICTURE)

    def _sound(self, x: Tensor, limit: int) -> str:
        """(1, frames, mels) as a sound, as many frames as fit into `limit` bytes."""
        assert self.front is not None
        frames = max(1, (limit // 2 - self.front.window) // self.front.shift)
        wave = invert_logmel(x[0, :frames], self.front)
        return sound_uri(wave, rate=self.front.sample_rate, limit=limit)


def middle_token(geometry: Geometry) -> int:
    """The token nearest to the middle of the grid."""
    return int(np.ravel_multi_index([n // 2 for n in geometry.grid], geometry.grid))


def place_map(counts: Tensor, geometry: Geometry, canvas: Canvas, color: tuple[int, ...]) -> Picture:
    """How often a code stands at each place (T,), as the opacity of its colour; of clips the sum over time."""
    grid = counts.double().reshape(geometry.grid)
    grid = grid.sum(0) if geometry.rank == 3 else grid[None] if geometry.rank == 1 else grid
    seen = (grid / grid.max().clamp_min(1e-9)).numpy()
    if canvas.kind == "spectrogram":
        seen = seen.T[::-1]  # time to the right, low pitches below
    picture = np.empty((*seen.shape, 4), np.uint8)
    picture[..., :3] = color
    picture[..., 3] = (40 + 215 * seen).round()  # places without the code stay faintly visible
    return picture
