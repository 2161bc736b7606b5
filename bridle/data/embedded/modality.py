"""The data sets that come with the package, as modalities: they need no files."""

from __future__ import annotations

from bridle.config import Config
from bridle.data.embedded.sets import DigitReader, digits, moving_digits, sounds
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
        name="sounds",
        kind="audio",
        items="generated sounds that come with the package",
        open_embedded=sounds,
        drawing="spectrogram",
    ),
)
