"""The one place where a config becomes a data set, or a reader of single files."""

from __future__ import annotations

from bridle.config import Config
from bridle.data.listing.layouts import find_data
from bridle.data.loading.loader import load_checked, reads_files
from bridle.data.modality import modality_of
from bridle.data.sources import Reader, Source, Splits
from bridle.errors import ConfigError, DataError, UsageError


def open_data(config: Config) -> Splits:
    """The data set of a config; its samples have the shape the geometry says, or a ConfigError tells how to mend it."""
    data, modality = config.data, modality_of(config)
    if modality.open_embedded is not None:
        splits = modality.open_embedded()
        shape, wanted = tuple(splits.train.load(0, None).x.shape), config.geometry.build().shape
        if shape != wanted:
            raise ConfigError(f"geometry.input: {wanted} given, but the embedded {data.source} are {shape}.")
        return splits
    if modality.open_files is None:
        raise UsageError(
            "this run was trained on a Dataset given from Python, which a command cannot open; "
            "its results are in results.json."
        )
    if data.root is None and data.manifest is None:
        raise ConfigError(f"data.root: recipe {config.name!r} needs the folder of your data; give data.root=PATH.")
    found = find_data(
        root=data.root,
        manifest=data.manifest,
        layout=data.layout,
        extensions=modality.extensions,
        test_fold=data.test_fold,
        segments=data.segments,
        columns=data.columns,
    )
    return modality.open_files(config, found)


def open_reader(config: Config) -> Reader:
    """Reads files of the kind a config was trained on, of any length or size."""
    modality = modality_of(config)
    if modality.open_reader is None:
        raise UsageError(
            f"a model trained on {modality.name!r} knows no kind of file; give arrays to its tokenize or encode "
            "instead."
        )
    return modality.open_reader(config)


def is_labelled(source: Source) -> bool:
    """Does every sample have a label, as far as can be told without reading them all?"""
    if source.labels is not None or reads_files(source):  # a file itself has no label
        return source.labels is not None
    try:
        return load_checked(source, 0, None).label is not None
    except DataError:
        return False
