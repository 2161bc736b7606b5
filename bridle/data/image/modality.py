"""Pictures as a modality."""

from __future__ import annotations

import warnings
from functools import partial
from io import BytesIO
from pathlib import Path

from bridle.config import Config
from bridle.data.file_source import open_splits
from bridle.data.image.source import EXTENSIONS, FORMATS, ImageReader, Images
from bridle.data.inspect.findings import CheckOptions, Facts
from bridle.data.listing.table import DataListing
from bridle.data.modality import Modality, VitInput
from bridle.data.shards.tar_member import Location
from bridle.data.sources import Reader, Splits
from bridle.errors import needs, quoted
from bridle.geometry import Geometry

GREY = ("1", "L", "LA", "I", "I;16", "F")  # modes of pictures without colour

# What MAE and VideoMAE were trained with.
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def open_files(config: Config, found: DataListing) -> Splits:
    """The listed pictures as train and test."""
    images = partial(Images, geometry=config.geometry.build(), augment=config.augment)
    return open_splits(found, images, cache_mb=config.data.cache_mb)


def open_reader(config: Config) -> Reader:
    """Single pictures, each as one window."""
    return ImageReader(geometry=config.geometry.build())


def open_preview(geometry: Geometry) -> Reader:
    """Pictures in the size of a page."""
    return ImageReader(geometry=geometry)


def check_image(path: Location, options: CheckOptions) -> Facts:
    """A picture, decoded whole."""
    with needs("image"):
        from PIL import Image

    with warnings.catch_warnings(record=True) as complaints:
        warnings.simplefilter("always")
        with Image.open(path if isinstance(path, Path) else BytesIO(path.read()), formats=FORMATS) as image:
            image.load()
            shape = (1 if image.mode in GREY else 3, image.height, image.width)
            facts, extrema = Facts("image", size=f"{image.width}×{image.height}", shape=shape), image.getextrema()
    if complaints:
        facts = facts.found("decoder warning", quoted(complaints[0].message))
    pairs = extrema if isinstance(extrema[0], tuple) else [extrema]
    if all(low == high for low, high in pairs):
        facts = facts.found("blank", "all pixels are the same")
    return facts


MODALITIES = (
    Modality(
        name="images",
        kind="image",
        items="images",
        extensions=EXTENSIONS,
        open_files=open_files,
        open_reader=open_reader,
        open_preview=open_preview,
        check_file=check_image,
        is_unit_range=True,
        task="image-feature-extraction",
        vit_input=VitInput(axes=2, channels=None, mean=IMAGENET_MEAN, std=IMAGENET_STD),
    ),
)
