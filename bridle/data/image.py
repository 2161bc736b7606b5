"""Images in folders as a source.

Shapes: one sample is (C, H, W), values in [0, 1], C = 1 (grey) or 3 (RGB).

Pretraining: a random part of the picture (its area `crop_scale` of the whole, its sides stretched by 3/4 to 4/3),
scaled to H×W by bicubic interpolation, and mirrored half of the time. Evaluation: short side to fit, centre cut out.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from math import exp, log, sqrt
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from bridle.data.folders import find_splits, printable
from bridle.data.sources import Sample, Splits
from bridle.errors import ConfigError, DataError, quoted
from bridle.geometry import Geometry

if TYPE_CHECKING:
    from PIL import Image

EXTENSIONS = (".jpg", ".jpeg", ".png", ".webp", ".bmp")
FORMATS = ("JPEG", "PNG", "WEBP", "BMP")  # by content; a closed list keeps away formats that call other programs
STRETCH = 4 / 3  # a crop is up to this much wider or taller than the sample's own shape
TRIES = 10  # crops drawn before the centre is taken

Box = tuple[float, float, float, float]  # left, top, right, bottom


class ImageFolder:
    """Image files as samples (C, H, W)."""

    def __init__(
        self,
        *,
        paths: Sequence[Path],
        labels: Sequence[int] | None,
        classes: Sequence[str] | None,
        channels: int,
        size: tuple[int, int],
        crop_scale: tuple[float, float] = (0.2, 1.0),
        flip: bool = True,
    ) -> None:
        if channels not in (1, 3):
            raise ConfigError(f"geometry.channels is {channels}; images have 1 channel (grey) or 3 (RGB).")
        if not 0 < crop_scale[0] <= crop_scale[1] <= 1:
            raise ConfigError(f"crop_scale {list(crop_scale)} must be two growing shares of the area in (0, 1].")
        self.paths, self.labels, self.classes = paths, labels, classes
        self.channels, self.size = channels, size
        self.crop_scale, self.flip = crop_scale, flip

    def __len__(self) -> int:
        return len(self.paths)

    def load(self, index: int, generator: torch.Generator | None) -> Sample:
        image = open_image(self.paths[index], channels=self.channels)
        if generator is None:
            x = resize(image, centre_box(image.size, size=self.size), size=self.size)
        else:
            box = random_box(image.size, size=self.size, scale=self.crop_scale, generator=generator)
            x = resize(image, box, size=self.size)
            if self.flip and torch.rand((), generator=generator) < 0.5:
                x = x.flip(-1)
        label = None if self.labels is None else self.labels[index]
        return Sample(x=x.expand(self.channels, -1, -1), label=label)  # a grey picture is the same in every channel

    def describe(self, index: int) -> str:
        return printable(self.paths[index])


def open_images(
    root: str | os.PathLike[str],
    *,
    geometry: Geometry,
    crop_scale: tuple[float, float] = (0.2, 1.0),
    flip: bool = True,
) -> Splits:
    """The images below `root` as train and test, see `folders`."""
    if geometry.rank != 2:
        raise ConfigError(f"geometry.input {list(geometry.input)} is not a height and a width; images need two sizes.")
    found = find_splits(root, extensions=EXTENSIONS)
    train, test = (
        None
        if listing is None
        else ImageFolder(
            paths=listing.paths,
            labels=listing.labels,
            classes=found.classes,
            channels=geometry.channels,
            size=(geometry.input[0], geometry.input[1]),
            crop_scale=crop_scale,
            flip=flip,
        )
        for listing in (found.train, found.test)
    )
    assert train is not None
    return Splits(train=train, test=test)


def open_image(path: Path, *, channels: int) -> Image.Image:
    """The decoded picture, upright, in mode L, RGB (0..255) or F (16-bit grey, scaled to 0..255)."""
    from PIL import Image, ImageOps

    try:
        with warnings.catch_warnings():
            # Pillow warns of pictures above 89 megapixels and refuses those of twice that; the refusal is enough.
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            with Image.open(path, formats=FORMATS) as image:
                image.load()
                return plain_mode(ImageOps.exif_transpose(image), channels=channels)
    except Exception as error:  # decoders meet damaged files with errors of every type
        raise DataError(f"{quoted(path)} cannot be read as an image: {reason(error)}.") from error


def reason(error: Exception) -> str:
    """One line for a decoder's error."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    name = type(error).__name__
    return "not a JPEG, PNG, WebP or BMP file" if name == "UnidentifiedImageError" else f"{name}: {quoted(error)}"


def plain_mode(image: Image.Image, *, channels: int) -> Image.Image:
    """Palette, alpha, CMYK, 1-bit and 16-bit pictures as L, RGB or F."""
    from PIL import Image

    if image.mode.startswith("I"):  # 16 bits per pixel; Pillow's own conversion would cut everything above 255
        return Image.fromarray(np.asarray(image, dtype=np.float32) * np.float32(255 / 65535))
    if image.has_transparency_data:
        picture = image.convert("RGBA")
        white = Image.new("RGBA", picture.size, (255, 255, 255, 255))  # what is transparent shows the page behind it
        image = Image.alpha_composite(white, picture)
    if image.mode in ("L", "1") or channels == 1:
        return image.convert("L")
    return image.convert("RGB")


def resize(image: Image.Image, box: Box, *, size: tuple[int, int]) -> Tensor:
    """The part `box` of the picture as (1 or 3, H, W) in [0, 1]."""
    from PIL import Image

    part = image.resize((size[1], size[0]), Image.Resampling.BICUBIC, box=box)
    x = torch.from_numpy(np.array(part, dtype=np.float32)).div_(255).clamp_(0, 1)  # (H, W) or (H, W, 3)
    return x[None] if x.dim() == 2 else x.permute(2, 0, 1).contiguous()


def centre_box(picture: tuple[int, int], *, size: tuple[int, int]) -> Box:
    """The largest centred box of the shape H:W in a picture of (width, height)."""
    width, height = picture
    scale = min(width / size[1], height / size[0])
    w, h = min(size[1] * scale, width), min(size[0] * scale, height)
    left, top = (width - w) / 2, (height - h) / 2
    return left, top, min(left + w, width), min(top + h, height)


def random_box(
    picture: tuple[int, int], *, size: tuple[int, int], scale: tuple[float, float], generator: torch.Generator
) -> Box:
    """A box of random area, shape and place; the centre box if none of the draws fits into the picture."""
    width, height = picture
    draws = torch.rand(TRIES + 1, 2, generator=generator, dtype=torch.float64).tolist()
    for area, stretch in draws[:-1]:
        pixels = width * height * (scale[0] + area * (scale[1] - scale[0]))
        shape = size[1] / size[0] * exp((2 * stretch - 1) * log(STRETCH))  # width : height
        w, h = sqrt(pixels * shape), sqrt(pixels / shape)
        if w <= width and h <= height:
            left, top = draws[-1][0] * (width - w), draws[-1][1] * (height - h)
            return left, top, min(left + w, width), min(top + h, height)
    return centre_box(picture, size=size)
