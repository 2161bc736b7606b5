"""The data sets that come with the package, as modalities: training needs no files.

A model of them reads files like any other: grey pictures, clips and recordings, at the size it was trained on.
"""

from __future__ import annotations

from bridle.config import Config
from bridle.data.audio import modality as audio
from bridle.data.audio.logmel import LogMelGraph
from bridle.data.embedded.sets import (
    DigitFrontEnd,
    DigitReader,
    digits,
    moving_digits,
    moving_patterns,
    patterns,
    sounds,
)
from bridle.data.image import modality as image
from bridle.data.modality import Modality
from bridle.data.sources import Reader
from bridle.data.video.source import Decoding, VideoReader


def open_digit_reader(config: Config) -> Reader:
    """Pictures of one digit as the embedded digits are."""
    return DigitReader(geometry=config.geometry.build())


def open_clip_reader(config: Config) -> Reader:
    """Videos with all their frames, as the embedded clips have them."""
    return VideoReader(Decoding(config.geometry.build(), 1, None, config.video.timeout))


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
        open_reader=open_clip_reader,
        can_be_padded=True,
        is_unit_range=True,
    ),
    Modality(
        name="patterns",
        kind="image",
        items="generated 32×32 pictures of patterns on photographs that come with the package",
        open_embedded=patterns,
        open_reader=image.open_reader,
        open_preview=image.open_preview,
        is_unit_range=True,
        task="image-feature-extraction",
    ),
    Modality(
        name="moving-patterns",
        kind="video",
        items="generated clips of changing patterns on photographs that come with the package",
        open_embedded=moving_patterns,
        open_reader=open_clip_reader,
        can_be_padded=True,
        is_unit_range=True,
    ),
    Modality(
        name="sounds",
        kind="audio",
        items="generated sounds that come with the package",
        open_embedded=sounds,
        open_reader=audio.open_reader,
        read_sound=audio.read_sound,
        open_front_end=lambda config: LogMelGraph(audio.front_end(config)),
        drawing="spectrogram",
        can_be_padded=True,
    ),
)
