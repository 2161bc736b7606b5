"""Recipes and configs: what a run is, checked before anything is spent."""

from bridle.config.load import (
    differences,
    dump_config,
    is_data,
    load_config,
    read_config,
    recipe_names,
    with_absolute_paths,
    with_statistics,
)
from bridle.config.schema import Config

__all__ = [
    "Config",
    "differences",
    "dump_config",
    "is_data",
    "load_config",
    "read_config",
    "recipe_names",
    "with_absolute_paths",
    "with_statistics",
]
