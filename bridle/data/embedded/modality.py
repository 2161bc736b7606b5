"""The data sets that come with the package, as modalities: they need no files."""

from __future__ import annotations

from bridle.config import Config
from bridle.data.embedded.sets import (
    DigitFrontEnd,
    DigitReader,
    digits,
    moving_digits,
    moving_patterns,
    patterns,
    sounds,
)
from bridle.data.modality import Modality
from bridle.data.sources import Reader


def open_digit_reader(config: Config) -> Reader:
    """Pictures of one digit as the embedded digits are."""
    return DigitReader(geometry=config.geometry.build())


MODALITIES = (
    Modality(
        name="digits",
        kind="image",
        items="16×16 digit images that come with the package (scikit-learn's digits)",
        open_embedded=digits,
        open_reader=open_digit_reader,
        open_picture_front_end=lambda _: DigitFrontEnd(),
        is_unit_range=True,
        task="image-feature-extraction",
    ),
    Modality(
        name="moving-digits",
        kind="video",
        items="generated clips of moving digits that come with the package",
        open_embedded=moving_digits,
        is_unit_range=True,
    ),
    Modality(
        name="patterns",
        kind="image",
        items="generated 32×32 pictures of patterns on photographs that come with the package",
        open_embedded=patterns,
        is_unit_range=True,
        task="image-feature-extraction",
    ),
    Modality(
        name="moving-patterns",
        kind="video",
        items="generated clips of changing patterns on photographs that come with the package",
        open_embedded=moving_patterns,
        is_unit_range=True,
    ),
    Modality(
        name="sounds",
        kind="audio",
        items="generated sounds that come with the package",
        open_embedded=sounds,
        drawing="spectrogram",
    ),
)
