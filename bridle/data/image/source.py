"""Images, in files or in tar shards, as a source.

Shapes: one sample is (C, H, W), values in [0, 1], C = 1 (grey) or 3 (RGB); kept pixels (H', W') or (H', W', 3).

Training: a random part of the picture (its area `crop_scale` of the whole, its sides stretched by 3/4 to 4/3),
scaled to H×W by bicubic interpolation, mirrored half of the time, then RandAugment and erasing where asked for.
Evaluation: short side to fit, centre cut out.
"""

from __future__ import annotations

import stat
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from io import BytesIO
from math import ceil, exp, log, sqrt
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from bridle.config.data_schema import AugmentConfig
from bridle.data.file_source import FileSource
from bridle.data.listing.columns import WHOLE, Span
from bridle.data.listing.table import Listing
from bridle.data.loading.augment import change_picture
from bridle.data.loading.watchdog import decoding
from bridle.data.shards.tar_member import Location
from bridle.data.sources import Sample, Window, require_axes
from bridle.errors import DataError, needs, quoted
from bridle.geometry import Geometry

if TYPE_CHECKING:
    from PIL import Image

EXTENSIONS = (".jpg", ".jpeg", ".png", ".webp", ".bmp")
FORMATS = ("JPEG", "PNG", "WEBP", "BMP")  # by content; a closed list keeps away formats that call other programs
JPEGS = ("JPEG", "MPO")
STRETCH = 4 / 3  # a crop is up to this much wider or taller than the sample's own shape
TRIES = 10  # crops drawn before the centre is taken
SHARPER = 2  # a JPEG is decoded at no less than this many times the size that is needed

ORIENTATION = 0x0112  # the EXIF tag; its values from 2 on, and the members of Pillow's Image.Transpose that undo them:
UPRIGHT = ["FLIP_LEFT_RIGHT", "ROTATE_180", "FLIP_TOP_BOTTOM", "TRANSPOSE", "ROTATE_270", "TRANSVERSE", "ROTATE_90"]

Box = tuple[float, float, float, float]  # left, top, right, bottom
Choose = Callable[[tuple[int, int]], Box]  # upright (width, height) -> the part to show


class Images(FileSource):
    """Pictures as samples (C, H, W), each in a file of its own or inside a tar file."""

    def __init__(
        self,
        listing: Listing,
        classes: Sequence[str] | None,
        *,
        geometry: Geometry,
        augment: AugmentConfig | None = None,
        cache_mb: int = 0,
    ) -> None:
        super().__init__(listing, classes, cache_mb=cache_mb)
        self.channels, self.size = channels_and_size(geometry)
        self.augment = augment or AugmentConfig()

    def load(self, index: int, generator: torch.Generator | None) -> Sample:
        if generator is None:
            return Sample(x=self._part(index, partial(centre_box, size=self.size)), label=self.label(index))
        wanted = self.augment
        choose = partial(random_box, size=self.size, scale=wanted.crop_scale, generator=generator)
        x = self._part(index, choose)
        if wanted.flip and torch.rand((), generator=generator) < 0.5:
            x = x.flip(-1)
        return Sample(x=change_picture(x, wanted, generator), label=self.label(index))

    def _part(self, index: int, choose: Choose) -> Tensor:
        path = self.paths[index]
        if self.cache.limit:
            pixels = self.cache.get(index, lambda: read_pixels(path, channels=self.channels, size=self.size))
            if pixels.numel():
                with needs("image"):
                    from PIL import Image

                picture = Image.fromarray(pixels.numpy())
                return scaled(picture, choose(picture.size), channels=self.channels, size=self.size)
        return read_part(path, choose, channels=self.channels, size=self.size)


def channels_and_size(geometry: Geometry) -> tuple[int, tuple[int, int]]:
    """C and (H, W) of a geometry; ConfigError if it is not one of pictures."""
    require_axes(geometry, "pictures", "height", "width", channels=[1, 3])
    return geometry.channels, (geometry.input[0], geometry.input[1])


def read_part(path: Location, choose: Choose, *, channels: int, size: tuple[int, int]) -> Tensor:
    """The part of a picture that `choose` names for its upright (width, height), as (C, H, W) in [0, 1]."""
    with opened(path) as image:
        if image.format not in JPEGS:
            image.load()  # before anything else, so that damage shows; only JPEGs are better decoded late
        width, height = upright_size(image)
        left, top, right, bottom = choose((width, height))
        # A JPEG is decoded much faster at 1/2, 1/4 or 1/8 of its size; ask for more than the part needs to be sharp.
        needed = ceil(SHARPER * size[1] * width / (right - left)), ceil(SHARPER * size[0] * height / (bottom - top))
        image.draft(None, needed[::-1] if orientation(image) >= 5 else needed)
        image.load()
        picture = upright(image)
        across, down = picture.width / width, picture.height / height
        box = left * across, top * down, min(right * across, picture.width), min(bottom * down, picture.height)
        return scaled(plain_mode(picture, channels=channels), box, channels=channels, size=size)


def read_pixels(path: Location, *, channels: int, size: tuple[int, int]) -> Tensor:
    """All pixels of an upright picture, to be kept; none of a JPEG that `read_part` might decode at a reduced size.

    So a sample does not show whether its picture was kept.
    """
    with opened(path) as image:
        width, height = upright_size(image)
        if image.format in JPEGS and min(width / size[1], height / size[0]) >= 2 * SHARPER:
            return torch.empty(0, dtype=torch.uint8)
        image.load()
        return torch.from_numpy(np.array(plain_mode(upright(image), channels=channels)))


@contextmanager
def opened(path: Location) -> Iterator[Image.Image]:
    """A picture with its header read; whatever its decoder says inside the block becomes a DataError."""
    with needs("image"):
        from PIL import Image

    with decoding(path, "an image"), warnings.catch_warnings():
        # Pillow warns of damaged EXIF, and of pictures above 89 megapixels, and refuses those of twice that; the
        # refusal is enough.
        warnings.simplefilter("ignore")
        if isinstance(path, Path) and not stat.S_ISREG(path.stat().st_mode):  # a pipe would wait for a writer
            raise DataError(f"{quoted(path)} is not a file.")
        with Image.open(path if isinstance(path, Path) else BytesIO(path.read()), formats=FORMATS) as image:
            yield image


def scaled(picture: Image.Image, box: Box, *, channels: int, size: tuple[int, int]) -> Tensor:
    """A box of a picture of plain mode as (C, H, W) in [0, 1]."""
    with needs("image"):
        from PIL import Image

    part = picture.resize((size[1], size[0]), Image.Resampling.BICUBIC, box=box)
    x = torch.from_numpy(np.array(part, dtype=np.float32)).div_(255).clamp_(0, 1)  # (H, W) or (H, W, 3)
    return x.expand(channels, -1, -1) if x.dim() == 2 else x.permute(2, 0, 1).contiguous()


def upright_size(image: Image.Image) -> tuple[int, int]:
    """(width, height) once the picture is upright."""
    return image.size[::-1] if orientation(image) >= 5 else image.size


def upright(image: Image.Image) -> Image.Image:
    """The picture turned as the camera was held."""
    with needs("image"):
        from PIL import Image

    turned = orientation(image)
    return image if turned == 1 else image.transpose(Image.Transpose[UPRIGHT[turned - 2]])


def orientation(image: Image.Image) -> int:
    """How the camera was held, 1 to 8, by the EXIF tag; 1 (upright) if there is none."""
    try:
        turned = int(image.getexif().get(ORIENTATION, 1))
    except Exception:  # a good picture with a damaged note about the camera is still a good picture
        return 1
    return turned if 2 <= turned <= 8 else 1


def plain_mode(image: Image.Image, *, channels: int) -> Image.Image:
    """Palette, alpha, CMYK, 1-bit and 16-bit pictures as L, RGB (0 to 255) or F (16-bit grey, scaled to 0 to 255)."""
    with needs("image"):
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


def fitted(image: Image.Image, *, geometry: Geometry) -> Tensor:
    """An opened picture of any size as the sample (C, H, W) that evaluation sees."""
    channels, size = channels_and_size(geometry)
    picture = plain_mode(upright(image), channels=channels)
    return scaled(picture, centre_box(picture.size, size=size), channels=channels, size=size)


class ImageReader:
    """A picture as the one window (C, H, W) that evaluation sees: short side to fit, centre cut out."""

    extensions = EXTENSIONS
    frame_seconds = None
    timed = False  # rows of pixels are not moments

    def __init__(self, *, geometry: Geometry) -> None:
        self.channels, self.size = channels_and_size(geometry)

    def windows(self, path: Location, span: Span = WHOLE) -> Iterator[Window]:
        """The one window of a picture."""
        choose = partial(centre_box, size=self.size)
        yield Window(read_part(path, choose, channels=self.channels, size=self.size), None, 0)
