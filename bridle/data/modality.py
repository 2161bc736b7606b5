"""One record for each kind of data: everything that other code needs to know of it, and the registry of all records.

A modality is chosen by `data.source` in a config. No other module compares names of modalities: it asks the record.
`register_modality` adds one from outside the package, see docs/extending.md. Of those inside, SOURCES in
`bridle.config.data_schema` names the module that holds MODALITIES, a tuple of records; it is imported when needed.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

from bridle.config import Config
from bridle.config.data_schema import SOURCES
from bridle.config.schema import add_source
from bridle.config.section import Section
from bridle.data.inspect.findings import CheckOptions, Facts
from bridle.data.listing.table import DataListing
from bridle.data.sources import Reader, Sound, Splits
from bridle.errors import UsageError, quoted
from bridle.geometry import Geometry

if TYPE_CHECKING:
    from torch import Tensor

    from bridle.data.shards.tar_member import Location

Drawing = Literal["line", "picture", "spectrogram", "frames"]
DRAWINGS: dict[int, Drawing] = {1: "line", 2: "picture", 3: "frames"}  # by the number of input axes


class VitInput(NamedTuple):
    """The input that published ViTs of this modality were trained on."""

    axes: int  # of a patch
    channels: int | None  # None: any
    mean: tuple[float, ...]
    std: tuple[float, ...]
    bands: int | None = None  # size of the last axis where inputs are not square


class FrontEnd(Protocol):
    """A torch module that turns a waveform (B, N) into an input without its channel, (B, *input)."""

    sample_rate: int

    def samples(self, frames: int) -> int:
        """N for this many frames."""
        ...

    def __call__(self, waveform: Tensor, /) -> Tensor: ...


class PictureFrontEnd(Protocol):
    """A torch module that turns grey pictures (B, *size) in 0 … 1 into inputs without their channel, (B, *input)."""

    size: tuple[int, int]

    def __call__(self, pixels: Tensor, /) -> Tensor: ...


@dataclass(frozen=True, kw_only=True)
class Modality:
    """A kind of data. One that reads files has `extensions`, `open_files` and `open_reader`."""

    name: str  # the value of data.source
    kind: str  # what one file of it is called
    items: str  # what it is trained on, for model cards and messages: "recordings"
    extensions: tuple[str, ...] = ()  # endings of file names, in lower case, with the dot
    recipe: str = ""  # the recipe for files of one's own; "": it has the name of `kind`
    section: type[Section] | None = None  # the config section of its settings, called like the modality

    # (config, the files with their labels) -> samples for training and evaluation
    open_files: Callable[[Config, DataListing], Splits] | None = None
    # A data set that comes with the package and needs no files.
    open_embedded: Callable[[], Splits] | None = None
    # Single files of any length as windows of the model's input size.
    open_reader: Callable[[Config], Reader] | None = None
    # The same files at a geometry that is good to look at; None: as the model sees them.
    open_preview: Callable[[Geometry], Reader] | None = None
    # Decode one file and say what is wrong with it; may raise anything for a damaged file.
    check_file: Callable[[Location, CheckOptions], Facts] | None = None
    # (config, file, first second, seconds) -> what can be heard there
    read_sound: Callable[[Config, Location, float, float], Sound] | None = None

    # What makes an input of a waveform, as a module that an exported graph can hold.
    open_front_end: Callable[[Config], FrontEnd] | None = None
    # The same for pictures that the model does not see as they are.
    open_picture_front_end: Callable[[Config], PictureFrontEnd] | None = None

    drawing: Drawing | None = None  # how a sample is drawn; None: by its number of axes
    can_be_padded: bool = False  # may a file end before the model's input is full
    is_unit_range: bool = False  # samples are in 0 … 1 as pictures are, so that bytes 0 … 255 are divided by 255
    std_factor: float = 1.0  # data.std is this many standard deviations
    task: str = "feature-extraction"  # pipeline_tag of a model card
    vit_input: VitInput | None = None  # how weights from elsewhere are to be fed

    @property
    def reads_files(self) -> bool:
        """Can it be trained on a user's own files?"""
        return self.open_files is not None

    @property
    def own_recipe(self) -> tuple[str, ...]:
        """Recipe and overrides of a run on a user's own files."""
        return (self.recipe, f"data.source={self.name}") if self.recipe else (self.kind,)

    def drawing_of(self, geometry: Geometry) -> Drawing | None:
        """How samples of this geometry are drawn; None with more axes than a page has."""
        return self.drawing or DRAWINGS.get(geometry.rank)


_records: dict[str, Modality] = {}  # those that were loaded or registered, by name


def register_modality(modality: Modality) -> None:
    """Make a modality known: its name as data.source, its section in configs, its files in every command.

    Registering a name again replaces the record; names of modalities inside the package cannot be taken. UsageError for
    a record that could not work.
    """
    name = quoted(modality.name)
    if not re.fullmatch(r"[a-z][a-z0-9_]*", modality.name):
        raise UsageError(f"modality {name}: a name is made of small letters, digits and _, like ecg.")
    wrong = [ending for ending in modality.extensions if not re.fullmatch(r"\.[^A-Z/]+", ending)]
    if wrong:
        raise UsageError(f"modality {name}: {quoted(wrong[0])} is not an ending in lower case with its dot, like .ecg.")
    if modality.open_embedded is None and (modality.open_files is None or not modality.extensions):
        raise UsageError(f"modality {name}: give open_files and extensions, or open_embedded for data without files.")
    add_source(modality.name, section=modality.section)
    _records[modality.name] = modality


def find_modality(source: str) -> Modality:
    """The record for a value of data.source."""
    if source not in _records:
        for record in importlib.import_module(SOURCES[source].module).MODALITIES:
            _records[record.name] = record
    return _records[source]


def modality_of(config: Config) -> Modality:
    """The record for the data of a config."""
    return find_modality(config.data.source)


def file_modalities() -> tuple[Modality, ...]:
    """All modalities of files. An ending that several of them read belongs to the first."""
    return tuple(record for record in map(find_modality, SOURCES) if record.reads_files)


def file_modality(word: str, *, option: str) -> Modality:
    """The modality of files that a user calls by its name or kind; UsageError naming the option if there is none."""
    known = file_modalities()
    found = next((record for record in known if word in (record.name, record.kind)), None)
    if found is None:
        raise UsageError(f"{option} {quoted(word)}: expected {', '.join(record.kind for record in known)}.")
    return found


def modality_of_file(name: str) -> Modality | None:
    """The modality of a file by the ending of its name; None if no modality reads such files."""
    lower = name.lower()
    return next((record for record in file_modalities() if lower.endswith(record.extensions)), None)


def all_extensions(modalities: Sequence[Modality]) -> tuple[str, ...]:
    """The endings of all these modalities, each once."""
    return tuple(dict.fromkeys(ending for record in modalities for ending in record.extensions))


def settings_of(config: Config) -> dict[str, Section]:
    """The config section of the data's modality, by name; empty where it has none."""
    section = SOURCES[config.data.source].section
    return {} if section is None else {section: getattr(config, section)}
