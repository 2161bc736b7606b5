"""Images in folders as a source.

Shapes: one sample is (C, H, W), values in [0, 1], C = 1 (grey) or 3 (RGB).

Pretraining: a random part of the picture (its area `crop_scale` of the whole, its sides stretched by 3/4 to 4/3),
scaled to H×W by bicubic interpolation, and mirrored half of the time. Evaluation: short side to fit, centre cut out.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from math import ceil, exp, log, sqrt
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

ORIENTATION = 0x0112  # the EXIF tag
TURNS = {  # what turns a picture upright, names of Pillow's Image.Transpose
    2: "FLIP_LEFT_RIGHT",
    3: "ROTATE_180",
    4: "FLIP_TOP_BOTTOM",
    5: "TRANSPOSE",
    6: "ROTATE_270",
    7: "TRANSVERSE",
    8: "ROTATE_90",
}

Box = tuple[float, float, float, float]  # left, top, right, bottom
Choose = Callable[[tuple[int, int]], Box]  # upright (width, height) -> the part to show


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
        def choose(picture: tuple[int, int]) -> Box:
            if generator is None:
                return centre_box(picture, size=self.size)
            return random_box(picture, size=self.size, scale=self.crop_scale, generator=generator)

        x = read_part(self.paths[index], choose, channels=self.channels, size=self.size)
        if generator is not None and self.flip and torch.rand((), generator=generator) < 0.5:
            x = x.flip(-1)
        return Sample(x=x, label=None if self.labels is None else self.labels[index])

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


def read_image(path: Path, *, channels: int, size: tuple[int, int]) -> Tensor:
    """The centre of one picture as (C, H, W) in [0, 1]."""
    return read_part(path, partial(centre_box, size=size), channels=channels, size=size)


def read_part(path: Path, choose: Choose, *, channels: int, size: tuple[int, int]) -> Tensor:
    """The part of a picture that `choose` names for its upright (width, height), as (C, H, W) in [0, 1]."""
    from PIL import Image

    try:
        with warnings.catch_warnings():
            # Pillow warns of damaged EXIF, and of pictures above 89 megapixels, and refuses those of twice that; the
            # refusal is enough.
            warnings.simplefilter("ignore")
            with Image.open(path, formats=FORMATS) as image:
                return cut_out(image, choose, channels=channels, size=size)
    except Exception as error:  # decoders meet damaged files with errors of every type
        raise DataError(f"{quoted(path)} cannot be read as an image: {reason(error)}.") from error


def cut_out(image: Image.Image, choose: Choose, *, channels: int, size: tuple[int, int]) -> Tensor:
    """Decode an opened picture and scale the chosen part of it."""
    from PIL import Image

    if image.format not in ("JPEG", "MPO"):
        image.load()  # before anything else, so that damage shows; only JPEGs are better decoded late
    turned = orientation(image)
    width, height = image.size[::-1] if turned >= 5 else image.size  # upright
    left, top, right, bottom = choose((width, height))
    # A JPEG can be decoded at 1/2, 1/4 or 1/8 of its size, much faster; ask for twice what the part needs to be sharp.
    needed = (ceil(2 * size[1] * width / (right - left)), ceil(2 * size[0] * height / (bottom - top)))
    image.draft(None, needed[::-1] if turned >= 5 else needed)
    image.load()
    upright = image.transpose(Image.Transpose[TURNS[turned]]) if turned in TURNS else image
    across, down = upright.width / width, upright.height / height
    box = left * across, top * down, min(right * across, upright.width), min(bottom * down, upright.height)
    part = plain_mode(upright, channels=channels).resize((size[1], size[0]), Image.Resampling.BICUBIC, box=box)
    x = torch.from_numpy(np.array(part, dtype=np.float32)).div_(255).clamp_(0, 1)  # (H, W) or (H, W, 3)
    return x.expand(channels, -1, -1) if x.dim() == 2 else x.permute(2, 0, 1).contiguous()


def orientation(image: Image.Image) -> int:
    """How the camera was held, 1 to 8, by the EXIF tag; 1 (upright) if there is none."""
    try:
        return int(image.getexif().get(ORIENTATION, 1))
    except Exception:  # a good picture with a damaged note about the camera is still a good picture
        return 1


def reason(error: Exception) -> str:
    """One line for a decoder's error."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    name = type(error).__name__
    return "not a JPEG, PNG, WebP or BMP file" if name == "UnidentifiedImageError" else f"{name}: {quoted(error)}"


def plain_mode(image: Image.Image, *, channels: int) -> Image.Image:
    """Palette, alpha, CMYK, 1-bit and 16-bit pictures as L, RGB (0 to 255) or F (16-bit grey, scaled to 0 to 255)."""
    from PIL import Image

    if image.mode.startswith("I"):  # 16 bits per pixel; Pillow's own conversion would cut everything above 255
        return Image.fromarray(np.asarray(image, dtype=np.float32) * np.float32(255 / 65535))
    if image.has_transparency_data:
        picture = image.convert("RGBA")
        white = Image.new("RGBA", picture.size, (255, 255, 255, 255))  # what is transparent shows the page behind it
        image = Image.alpha_composite(white, picture)
    return image.convert("L" if channels == 1 or image.mode in ("L", "1") else "RGB")


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
