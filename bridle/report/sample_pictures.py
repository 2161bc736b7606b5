"""A sample as a picture a person can look at, and the place of every token in it.

Shapes: a sample x is (C, *input); a picture (H, W, 4) uint8, red, green, blue, alpha; T tokens in row-major order.

    one axis      a line over time, patches side by side
    two axes      the picture itself; a spectrogram lies on its side, time to the right and low pitches below
    three axes    the first frame of every group of frames that makes up a patch, in rows
"""

from __future__ import annotations

import base64
import colorsys
import io
import itertools
import math

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from bridle.data.modality import Drawing
from bridle.errors import needs
from bridle.geometry import Geometry

Picture = NDArray[np.uint8]  # (H, W, 4)
Box = tuple[slice, slice]  # where a token is in the picture: its rows and columns

LINE_HEIGHT, LINE_WIDTH = 72, 480
FRAMES_IN_ROW = 8
TINT = 0.55  # of a token's colour in its patch; the rest is the picture in grey
OPAQUE_ENOUGH = 64  # pixels on both sides above which a picture without gaps is stored as JPEG


def limits_of(x: Tensor, kind: Drawing) -> tuple[float, float]:
    """The values drawn darkest and brightest of samples (N, C, *input).

    0 and 1 where pictures keep to it, else what 99 % of all values lie within.
    """
    values = x.float().flatten()
    values = values[:: max(1, len(values) // 1_000_000)]
    if kind in ("picture", "frames") and float(values.min()) >= 0 and float(values.max()) <= 1:
        return 0.0, 1.0
    low, high = np.percentile(values.numpy(), [0.5, 99.5])
    return float(low), float(max(high, low + 1e-6))


class Canvas:
    """Draws samples of one geometry; `boxes` tells where each token is."""

    def __init__(self, geometry: Geometry, *, kind: Drawing, limits: tuple[float, float]) -> None:
        self.geometry, self.kind, self.limits = geometry, kind, limits
        self.boxes = _boxes(geometry, kind)
        self.height, self.width = (max(box[axis].stop for box in self.boxes) for axis in (0, 1))

    def draw(self, x: Tensor) -> Picture:
        """(C, *input) -> (H, W, 4)."""
        low, high = self.limits
        values = ((x.float().numpy() - low) / (high - low)).clip(0, 1)
        if self.kind == "line":
            return _line(values, self.height, self.width)
        if self.kind == "spectrogram":
            with needs("report"):
                from matplotlib import colormaps

            # (frames, mels) -> (mels, frames), low pitches below
            return np.asarray(colormaps["magma"](values.mean(0).T[::-1], bytes=True))
        colored = values if len(values) == 3 else np.repeat(values.mean(0, keepdims=True), 3, axis=0)
        colored = (255 * colored + 0.5).astype(np.uint8)  # (3, *input)
        if self.kind == "picture":
            return _opaque(np.moveaxis(colored, 0, -1))
        out = np.zeros((self.height, self.width, 4), np.uint8)
        gt, gh, gw = self.geometry.grid
        _, height, width = self.geometry.input
        for t in range(gt):
            top, left = (side.start for side in self.boxes[t * gh * gw])  # the frame's first patch is its corner
            frame = np.moveaxis(colored[:, t * self.geometry.patch[0]], 0, -1)
            out[top : top + height, left : left + width] = _opaque(frame)
        return out

    def tint(self, picture: Picture, colors: NDArray[np.uint8], valid: Tensor | None) -> Picture:
        """The picture in grey with every token's patch in its colour (T, 3); padding is left faint."""
        out = picture.copy()
        for t, box in enumerate(self.boxes):
            patch = out[box]
            if valid is not None and not bool(valid[t]):
                patch[..., 3] = patch[..., 3] // 4
                continue
            # What is empty in a line drawing counts as light, so that the line itself stays visible.
            seen = patch[..., 3:] > 0
            grey = np.where(seen, patch[..., :3].mean(-1, keepdims=True), 210)
            patch[..., :3] = (TINT * colors[t] + (1 - TINT) * grey + 0.5).astype(np.uint8)
            patch[..., 3] = 255
        return out

    def strip(self, patches: list[tuple[Picture, int]]) -> Picture:
        """Some tokens' patches side by side, each given as its picture and its token."""
        cut = [picture[self.boxes[token]] for picture, token in patches]
        gap = np.zeros((cut[0].shape[0], max(1, cut[0].shape[1] // 8), 4), np.uint8)
        return np.concatenate([part for patch in cut for part in (patch, gap)][:-1], axis=1)


def _boxes(geometry: Geometry, kind: Drawing) -> list[Box]:
    places = itertools.product(*(range(n) for n in geometry.grid))
    if kind == "line":
        width = max(2, LINE_WIDTH // geometry.tokens)
        return [_box(0, i * width, LINE_HEIGHT, width) for (i,) in places]
    if kind == "frames":
        _, height, width = geometry.input
        _, ph, pw = geometry.patch
        gap = max(1, width // 12)
        corners = [divmod(t, FRAMES_IN_ROW) for t in range(geometry.grid[0])]
        return [
            _box(corners[t][0] * (height + gap) + i * ph, corners[t][1] * (width + gap) + j * pw, ph, pw)
            for t, i, j in places
        ]
    p, q = geometry.patch
    if kind == "spectrogram":
        return [_box(geometry.input[1] - (j + 1) * q, i * p, q, p) for i, j in places]
    return [_box(i * p, j * q, p, q) for i, j in places]


def _box(top: int, left: int, height: int, width: int) -> Box:
    return slice(top, top + height), slice(left, left + width)


def _line(values: NDArray[np.float32], height: int, width: int) -> Picture:
    """(C, length) in 0 … 1 as one line per channel, dark on nothing."""
    out = np.zeros((height, width, 4), np.uint8)
    columns = np.linspace(0, values.shape[1] - 1, width + 1)
    for n, channel in enumerate(values[:6]):
        at = np.interp(columns, np.arange(len(channel)), channel)
        rows = ((1 - at) * (height - 3) + 1).round().astype(int)
        shade = 60 + 22 * n
        for x, (a, b) in enumerate(itertools.pairwise(rows)):
            out[min(a, b) : max(a, b) + 2, x] = (shade, shade + 15, shade + 35, 255)
    return out


def _opaque(colored: NDArray[np.uint8]) -> Picture:
    return np.concatenate([colored, np.full((*colored.shape[:2], 1), 255, np.uint8)], axis=-1)


def code_colors(vectors: Tensor) -> NDArray[np.uint8]:
    """A colour (K, 3) for every code vector (K, Dq): neighbours in the codebook's main plane get similar hues.

    The hue is the rank of the angle in the plane of the first two principal components, so that hues are used evenly;
    the lightness is the rank along the third.
    """
    points = vectors.double().numpy()
    points = points - points.mean(0)
    _, _, axes = np.linalg.svd(points, full_matrices=False)
    # The sign of a component is arbitrary: its largest entry is made positive.
    axes = axes[:3] * np.sign(axes[:3][np.arange(len(axes[:3])), np.abs(axes[:3]).argmax(1)])[:, None]
    seen = np.zeros((len(points), 3))
    seen[:, : len(axes)] = points @ axes.T
    K = len(points)
    hue = np.arctan2(seen[:, 1], seen[:, 0]).argsort(kind="stable").argsort(kind="stable") / K
    light = 0.38 + 0.30 * seen[:, 2].argsort(kind="stable").argsort(kind="stable") / max(1, K - 1)
    colors = [colorsys.hls_to_rgb(h, s, 0.72) for h, s in zip(hue.tolist(), light.tolist(), strict=True)]
    return (255 * np.array(colors) + 0.5).astype(np.uint8)


def data_uri(picture: Picture, *, longest: int) -> str:
    """The picture, made smaller where a side is longer than `longest`, as the address of an <img>."""
    with needs("report"):
        from PIL import Image

    height, width = picture.shape[:2]
    image = Image.fromarray(picture, "RGBA")
    shrink = longest / max(height, width)
    if shrink < 1:
        image = image.resize((max(1, round(width * shrink)), max(1, round(height * shrink))), Image.Resampling.BOX)
    out = io.BytesIO()
    if bool((picture[..., 3] == 255).all()) and min(image.size) > OPAQUE_ENOUGH:
        image.convert("RGB").save(out, "JPEG", quality=88)
        return _address("image/jpeg", out)
    image.save(out, "PNG", optimize=True)
    return _address("image/png", out)


def sound_uri(wave: Tensor, *, rate: int, limit: int) -> str:
    """A waveform (N,) in ±1 as the address of an <audio>: 16-bit WAV, cut where it would exceed `limit` bytes."""
    import wave as wav

    kept = wave[: (limit - 44) // 2].clamp(-1, 1)
    out = io.BytesIO()
    with wav.open(out, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes((kept.numpy() * math.nextafter(32768, 0)).astype("<i2").tobytes())
    return _address("audio/wav", out)


def _address(kind: str, content: io.BytesIO) -> str:
    return f"data:{kind};base64,{base64.b64encode(content.getvalue()).decode()}"
