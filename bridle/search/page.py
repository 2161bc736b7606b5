"""The hits of a search as one HTML page without scripts: pictures, spectrograms with sound, or frames.

What is shown is what the model saw first of a file: its first window. A file that is gone or unreadable since it was
indexed is named with the reason, in place of a picture.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from bridle.data.listing.items import Item
from bridle.data.loading.worker_pool import map_in_order
from bridle.data.modality import modality_of
from bridle.data.sources import Reader, Sound
from bridle.errors import DataError
from bridle.geometry import Geometry
from bridle.infer.model import Model
from bridle.report.page import publish_page, render_page
from bridle.report.sample_pictures import Canvas, data_uri, limits_of, sound_uri
from bridle.report.token_maps import CRISP, Shown
from bridle.search.query import Found, Index

THUMBNAIL, LONGEST = 160, 320  # pixels of a picture, and of other drawings' longer side
SOUND_BYTES, SOUND_SECONDS = 200_000, 20.0  # the shorter of the two; 6 s at 16 kHz


class Seen(NamedTuple):
    """The first window of a file and its sound, or why there is none."""

    x: Tensor | None
    problem: str = ""
    sound: Sound | None = None


def write_page(index: Index, found: Sequence[Found], path: Path) -> Path:
    """Write the page about some queries, all of it or nothing."""
    sight = Sight(index.model)
    items = [[Item(one.query), *(hit.entry.item for hit in one.hits)] for one in found]
    seen = map_in_order(sight.look, itertools.chain.from_iterable(items), workers=1, records=(Seen, Sound))
    shown = {
        "title": "Similar files",
        "intro": f"{len(index):,} files searched with the model of run {index.model.config.name}.",
        "answers": [_answer(sight, index, *each, seen) for each in zip(found, items, strict=True)],
        "wide": sight.is_wide,
        "crisp": sight.is_crisp,
    }
    publish_page(render_page("hits.html", shown), path)
    return path


def _answer(sight: Sight, index: Index, found: Found, items: list[Item], looks: Iterator[Seen]) -> dict[str, object]:
    """A query and its hits, as the template shows them; labels of the query where it is in the collection."""
    labels = next((entry.labels for entry in index.items if entry.is_file(found.query)), ())
    seen = list(itertools.islice(looks, len(items)))
    query, *pictures = sight.draw(items, seen)
    hits = [
        picture._replace(
            label=", ".join(hit.entry.labels),
            score=hit.score,
            same=bool(set(labels) & set(hit.entry.labels)) if labels else None,
        )
        for picture, hit in zip(pictures, found.hits, strict=True)
    ]
    problems = [one.problem for one in seen if one.problem]
    return {"query": query._replace(label=", ".join(labels)), "by": found.by, "hits": hits, "problems": problems}


class Sight:
    """Reads files with a model's own reader and draws what it gives."""

    def __init__(self, model: Model) -> None:
        self.reader: Reader = model.reader
        self.config, modality = model.config, modality_of(model.config)
        self.geometry = model.geometry
        if modality.open_preview is not None:  # in colour, and larger than a small model sees them
            size = (THUMBNAIL, THUMBNAIL)
            self.geometry = Geometry(channels=3, input=size, patch=size)
            self.reader = modality.open_preview(self.geometry)
        self.kind = modality.drawing_of(self.geometry)
        self.is_crisp = self.kind == "picture" and min(self.geometry.input) <= CRISP
        long_enough = self.kind == "spectrogram" and model.geometry.input[0] > 128
        self.is_wide = self.kind in ("line", "frames") or long_enough

    def look(self, item: Item) -> Seen:
        """Decode a file, in a worker."""
        try:
            return Seen(next(item.windows(self.reader)).x, sound=self._sound(item))
        except (DataError, OSError, StopIteration) as error:
            return Seen(None, f"{item.name}: {error}")

    def draw(self, items: Sequence[Item], seen: Sequence[Seen]) -> list[Shown]:
        """All with the same limits of brightness, so that they can be compared."""
        there = [one.x for one in seen if one.x is not None]
        canvas = None
        if there and self.kind is not None:
            limits = limits_of(torch.stack(there), self.kind)
            canvas = Canvas(self.geometry, kind=self.kind, limits=limits)
        return [
            Shown(
                item.name,
                "",
                "" if one.x is None or canvas is None else data_uri(canvas.draw(one.x), longest=LONGEST),
                "" if one.sound is None else sound_uri(one.sound.wave, rate=one.sound.rate, limit=SOUND_BYTES),
            )
            for item, one in zip(items, seen, strict=True)
        ]

    def _sound(self, item: Item) -> Sound | None:
        read_sound = modality_of(self.config).read_sound
        if read_sound is None:
            return None
        start, end = item.span
        seconds = SOUND_SECONDS if end is None else min(SOUND_SECONDS, end - start)
        try:
            return read_sound(self.config, item.location, start, seconds)
        except DataError:
            return None  # its picture is shown; only the player is missing
