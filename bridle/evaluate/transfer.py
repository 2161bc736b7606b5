"""`--on RECIPE`: score a run's encoder on another data set than the one it was trained on.

Data, input size, front end, fine-tuning and probe settings are the recipe's; the networks are the run's. Patches must
agree. On another grid positions are interpolated (the paper's ESC-50 column: 512 frames where AudioSet has 1,024).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from bridle import distributed
from bridle.config import Config, differences, load_config, with_absolute_paths, with_statistics
from bridle.config.data_schema import SOURCES
from bridle.console import ProgressLine
from bridle.data.build import open_data
from bridle.data.inspect.statistics import data_std
from bridle.data.loading.moments import measure
from bridle.data.modality import modality_of, settings_of
from bridle.errors import ConfigError
from bridle.models.encoder import Encoder

# What belongs to the networks and how they were trained.
OF_THE_RUN = (
    *("size", "encoder", "decoder", "estimator", "tokenizer", "quantizer", "loss", "schedule"),
    *("encoder_phase", "tokenizer_phase", "augment"),
)
MAY_CHANGE = ("data.", "geometry.input")  # and the settings of modalities


def require_unchanged(before: Config, after: Config, allowed: tuple[str, ...], *, reason: str) -> None:
    """ConfigError with a `reason` if other settings than the `allowed` ones have changed."""
    for line in differences(with_absolute_paths(before), with_absolute_paths(after)):
        if not line.startswith(allowed):
            raise ConfigError(f"{line}: {reason}; only {', '.join(allowed)} may change.")


def on_other_data(trained: Config, recipe: str, overrides: Sequence[str], *, may_change: tuple[str, ...]) -> Config:
    """The config that judges networks of `trained` on the data of a recipe, with overrides on the recipe."""
    plain, other = load_config(recipe), with_absolute_paths(load_config(recipe, overrides))
    allowed = (*may_change, *MAY_CHANGE, *(f"{entry.section}." for entry in SOURCES.values() if entry.section))
    require_unchanged(plain, other, allowed, reason="the networks are the run's")
    ours, theirs = trained.geometry, other.geometry
    if (ours.channels, ours.patch) != (theirs.channels, theirs.patch):
        raise ConfigError(
            f"--on {recipe}: its patches are {list(theirs.patch)} of {theirs.channels} channel(s), the run's "
            f"{list(ours.patch)} of {ours.channels}; an encoder takes only its own kind of patch."
        )
    seed = other.seed if any(change.startswith("seed=") for change in overrides) else trained.seed
    kept = {name: getattr(trained, name) for name in OF_THE_RUN}
    joined = other.model_copy(update={**kept, "seed": seed})
    try:  # again as a whole: a block that is probed, say, must exist in this encoder
        return Config.model_validate(joined.model_dump())
    except ValidationError as error:
        raise ConfigError(f"--on {recipe}: {error.errors()[0]['msg'].removeprefix('Value error, ')}.") from None


def with_measured_statistics(config: Config) -> Config:
    """The config with the data's mean and deviation, measured where the recipe does not say them (collective)."""
    if config.data.mean is not None:
        return config

    def measured() -> list[list[float]]:
        grid = config.geometry.build().grid
        moments = measure(open_data(config).train, seed=config.seed, workers=config.data.workers, grid=grid)
        return [list(moments.mean), list(data_std(moments, modality_of(config)))]

    mean, std = distributed.done_once(measured)
    return with_statistics(config, mean, std)


def fitted_to(encoder: Encoder, config: Config, progress: ProgressLine | None = None) -> Encoder:
    """The encoder, taking inputs of the config's size."""
    geometry = config.geometry.build()
    if geometry != encoder.geometry:
        if progress is not None:
            progress.note(f"positions interpolated from grid {encoder.geometry.grid} to {geometry.grid}")
        encoder.change_grid(geometry)
    return encoder


def results_name(name: str, on: str | None) -> str:
    """probe.json, or of another data set probe-esc50.json."""
    return name if on is None else f"{Path(name).stem}-{Path(on).stem}.json"


def other_inputs(config: Config) -> dict[str, Any]:
    """What makes inputs of another data set's items, for protocols."""
    sections = {"geometry": config.geometry, **settings_of(config)}
    inputs = {name: section.model_dump(mode="json") for name, section in sections.items()}
    return {**inputs, "mean": list(config.data.mean or ()), "std": list(config.data.std or ())}
