"""`bridle.pretrain`: a whole run from Python, the same that the command line starts."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset

from bridle import distributed
from bridle.config import Config, is_data, load_config, with_absolute_paths, with_statistics
from bridle.console import ProgressLine
from bridle.data.arrays.memory import (
    Convert,
    DatasetSource,
    is_picture,
    is_sound,
    parted,
    require_indexed,
    understand,
    whole_number,
)
from bridle.data.audio.modality import front_end
from bridle.data.audio.source import CENTRE, Shape, random_start, wave_sample
from bridle.data.build import open_data
from bridle.data.image.source import fitted
from bridle.data.inspect.statistics import data_std
from bridle.data.loading.mixing import mixed
from bridle.data.loading.moments import measure
from bridle.data.modality import modality_of
from bridle.data.sources import Source, Splits
from bridle.errors import ConfigError, DataError, UsageError, quoted
from bridle.evaluate.evaluator import Evaluator, probe_header, probe_settings_of_run
from bridle.evaluate.features import while_training
from bridle.evaluate.probe_command import knn_run, probe_run
from bridle.infer.model import Model, load
from bridle.machine import StopRequest
from bridle.models.build import build_encoder, build_nets
from bridle.models.vit_weights import load_vit
from bridle.propose import choose_config
from bridle.report.page import write_report
from bridle.report.runs import read_run
from bridle.report.token_maps import gallery_of, token_pictures
from bridle.runs.callbacks import Callback, running
from bridle.runs.folder import RunFolder
from bridle.runs.results import Results, read_results
from bridle.runs.results_file import ResultsFile
from bridle.runs.trackers import open_trackers
from bridle.train.algorithm1 import Turn, has_later_tokenizer, interleave, require_shares
from bridle.train.run import Run, locked_by_first, open_machine, require_same_data


class Finished(NamedTuple):
    """A run that is done."""

    folder: Path  # the run directory
    results: Results  # what results.json holds
    was_finished: bool = False  # before this call, which then did nothing
    splits: Splits | None = None  # of a Dataset given from Python, which its folder cannot open

    def __repr__(self) -> str:
        scores = self.results.evaluations[-1].scores if self.results.evaluations else None
        told = "no score" if scores is None or scores.main is None else f"{scores.name} {scores.main:.3f}"
        return f"Finished({str(self.folder)!r}, {len(self.results.evaluations)} iterations, {told})"

    def probe(self, *overrides: str, on: str | None = None) -> Results:
        """Linear probe, as `bridle probe`; overrides such as "probe.shots=[5,10]"."""
        return read_results(probe_run(self.folder, overrides, on=on, splits=self.splits))

    def knn(self, *overrides: str, on: str | None = None) -> Results:
        """k-nearest neighbours, as `bridle knn`."""
        return read_results(knn_run(self.folder, overrides, on=on, splits=self.splits))

    def report(self, out: str | Path | None = None) -> Path:
        """Write the HTML page, as `bridle report`; returns its path."""
        summary = read_run(self.folder)._replace(gallery=gallery_of(self.folder))
        title = f"bridle report: {self.folder.resolve().name}"
        return write_report([summary], out or self.folder / "report.html", title=title)

    def load(self, *, device: str = "auto") -> Model:
        """The trained model."""
        return load(self.folder, device=device)


def pretrain(
    recipe: str | Path | Config,
    *,
    out: str | Path,
    dataset: Dataset[Any] | None = None,
    test_dataset: Dataset[Any] | None = None,
    overrides: Mapping[str, Any] | Sequence[str] = (),
    callbacks: Sequence[Callback] = (),
    command: str | None = None,
    **settings: Any,
) -> Finished:
    """Run Algorithm 1 (or joint training) in directory `out`, or continue the run that is there.

    `recipe` is a recipe's name, a YAML file, or a folder of data for which a recipe is chosen (as by `bridle init`).
    `dataset` is any torch or Hugging Face Dataset. Items are tensors (C, *input), arrays, PIL images, sounds, or
    pairs or dicts of them and a label. The geometry follows the items; sounds and large pictures are fitted to the
    recipe's. `overrides` are dotted keys ({"encoder.depth": 6} or ["encoder.depth=6"]), and top-level keys may be given
    directly: `pretrain("image", out=…, size="tiny", seed=1, quantizer="vq")`.
    """
    if isinstance(recipe, Config) and (overrides or settings):
        raise UsageError("a Config takes no overrides; give the recipe's name, or change the config with model_copy.")
    config = recipe if isinstance(recipe, Config) else _load(recipe, dataset, Path(out), overrides, settings)
    config = with_absolute_paths(config)
    runtime = config.runtime
    with distributed.process_group(device=runtime.device, timeout_minutes=runtime.timeout_minutes):
        finished = _pretrain(config, RunFolder(Path(out)), dataset, test_dataset, callbacks, command)
    return finished if dataset is None else finished._replace(splits=_open(config, dataset, test_dataset))


def _pretrain(
    config: Config,
    folder: RunFolder,
    dataset: Dataset[Any] | None,
    test_dataset: Dataset[Any] | None,
    callbacks: Sequence[Callback],
    command: str | None,
) -> Finished:
    """The run, in one process or in each of several; rank 0 alone writes."""
    if folder.exists():
        config = _complete(config, folder, lambda: _open(config, dataset, test_dataset).train, ProgressLine())
    longer = distributed.done_once(lambda: folder.lengthens(config))
    if not longer and distributed.done_once(lambda: is_finished(folder, config)):
        folder.require_same(config)
        return Finished(folder.path, ResultsFile(folder.results(), probe_header(config)).value, was_finished=True)
    require_shares(config)
    splits = _open(config, dataset, test_dataset)
    if len(splits.train) == 0:
        raise UsageError("the data set is empty.")
    machine = open_machine(config.runtime)
    progress = ProgressLine()
    for note in splits.notes:
        progress.note(note)
    config = _complete(config, folder, lambda: splits.train, progress)
    if config.encoder.weights is not None and not folder.exists():
        load_vit(build_encoder(config), config.encoder.weights)  # weights that do not fit must not leave a run behind
    distributed.done_once(lambda: folder.prepare(config))
    require_same_data(splits.train)
    with locked_by_first(folder), StopRequest().listening() as stop:
        if longer:
            earlier = distributed.done_once(folder.set_aside_results)
            progress.note(f"the run is lengthened; what was measured before is in {earlier}")
        distributed.done_once(lambda: folder.write_settings(config, command=command))
        first = Turn(1, "joint" if config.schedule.mode == "joint" else "encoder")
        nets = build_nets(config, later_tokenizer=has_later_tokenizer(config, first))
        everyone = [*open_trackers(config.log, token_pictures), *callbacks] if distributed.rank() == 0 else []
        run = Run(folder, config, machine, mixed(splits.train, config.augment), nets, stop, progress, everyone)
        bounded = while_training(config, splits)
        results, evaluator = ResultsFile(folder.results(), probe_header(bounded)), None
        if config.probe.enabled:
            probed = probe_settings_of_run(bounded, results, progress)
            evaluator = Evaluator(probed, splits, machine, results, progress)
        with running(everyone, folder.path, config.model_dump(mode="json")):
            interleave(run, results, evaluator)
    return Finished(folder.path, results.value)


def is_finished(folder: RunFolder, config: Config) -> bool:
    """Has the run in `folder` nothing left to do? A damaged last checkpoint has: training goes on before it."""
    last, steps = config.schedule.iterations, config.encoder_phase.steps
    if steps is not None and 0 < folder.steps_done() < min(steps, config.max_steps or steps):
        return False  # it is being lengthened
    if not folder.is_trained(last) or not config.probe.enabled:
        return folder.is_trained(last)
    return folder.results().exists() and read_results(folder.results()).at(last) is not None


def _load(
    recipe: str | Path,
    dataset: Dataset[Any] | None,
    out: Path,
    overrides: Mapping[str, Any] | Sequence[str],
    settings: Mapping[str, Any],
) -> Config:
    changes = _as_overrides(settings)
    changes += _as_overrides(overrides) if isinstance(overrides, Mapping) else list(overrides)
    if dataset is None:
        return choose_config(Path(recipe), out, changes) if is_data(recipe) else load_config(str(recipe), changes)
    follow = ["data.source=dataset", *_geometry_of(dataset, load_config(str(recipe), changes))]
    # What a recipe says of its own data's mean does not hold for this one; and a Dataset may hold locks, open files or
    # GPU memory that a forked worker must not share, so workers are for the caller to ask for.
    return load_config(str(recipe), [*follow, "data.mean=null", "data.std=null", "data.workers=0", *changes])


def _as_overrides(values: Mapping[str, Any]) -> list[str]:
    return [f"{key}={_plain(value)}" for key, value in values.items()]


def _plain(value: Any) -> str:
    """A Python value as an override writes it."""
    if isinstance(value, os.PathLike):
        return str(os.fspath(value))
    if isinstance(value, tuple | list):
        return "[" + ", ".join(_plain(item) for item in value) + "]"
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return str(value)


def _geometry_of(dataset: Dataset[Any], config: Config) -> list[str]:
    """Overrides by which the geometry follows the items of a dataset; says how these are understood.

    Sounds, and pictures of several sizes or larger than the recipe's, are fitted to the recipe's geometry instead.
    """
    items = _first_items(dataset)
    index, item = items[0]
    x, label, how = understand(item)
    given: Any = parted(item).x
    labelled = "without a label" if whole_number(label) is None else "with a label"
    size, found = list(config.geometry.input), list[str]()
    if is_sound(given) and modality_of(config).open_front_end is not None:
        told, found = f"sounds of any rate and length as log-mel features of {size}", ["data.trim=false"]
    elif is_picture(given) and len(size) == 2 and not _one_size(items, size):
        told, found = f"fitted to {size}", [f"geometry.channels={1 if given.mode in ('1', 'L') else 3}"]
    elif isinstance(x, torch.Tensor) and x.ndim >= 2:
        told = f"items of shape {tuple(x.shape)}"
        found = [f"geometry.channels={x.shape[0]}", f"geometry.input={list(x.shape[1:])}"]
    else:
        got = f"an array of shape {tuple(x.shape)}" if hasattr(x, "shape") else type(x).__name__
        raise UsageError(
            f"dataset[{index}] must be a tensor (C, *input), an array, a PIL image or a sound, or a pair or dict of it "
            f"and a label; got {got}."
        )
    ProgressLine().note(f"dataset: {', '.join((*how, told, labelled))}")
    return found


def _one_size(items: Sequence[tuple[int, Any]], size: Sequence[int]) -> bool:
    """Are pictures of one size, and none of its sides longer than the recipe's?"""
    sizes = {getattr(parted(item).x, "size", None) for _, item in items}
    first = sizes.pop()
    return not sizes and first is not None and max(first) <= max(size)


def _first_items(dataset: Dataset[Any]) -> list[tuple[int, Any]]:
    """Those of the first twenty items that can be read, with their places."""
    require_indexed(dataset)
    if len(dataset) == 0:  # type: ignore[arg-type]
        raise UsageError("dataset is empty.")
    problem, found = "", list[tuple[int, Any]]()
    for index in range(min(len(dataset), 20)):  # type: ignore[arg-type]
        try:
            found.append((index, dataset[index]))
        except Exception as error:  # whatever a user's code raises concerns this item only
            problem = f"dataset[{index}] raised {type(error).__name__}: {quoted(error)}"
    if not found:
        raise DataError(f"none of the first items of the dataset can be read; the last one: {problem}.")
    return found


def _convert(config: Config) -> Convert:
    """Pictures and sounds of a dataset as the config's input; what is neither stays as it is."""
    geometry = config.geometry.build()

    def convert(x: Any, generator: torch.Generator | None) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        if is_picture(x) and geometry.rank == 2:
            return fitted(x, geometry=geometry), None
        if is_sound(x) and geometry.rank == 2 and geometry.channels == 1:
            wave = torch.as_tensor(np.array(x["array"]))
            start_at = CENTRE if generator is None else random_start(generator)
            return wave_sample(wave, int(x["sampling_rate"]), Shape(geometry, front_end(config)), start_at)
        return None

    return convert


def _open(config: Config, dataset: Dataset[Any] | None, test_dataset: Dataset[Any] | None) -> Splits:
    if dataset is None:
        return open_data(config)
    source = partial(DatasetSource, shape=config.geometry.build().shape, convert=_convert(config))
    return Splits(source(dataset), None if test_dataset is None else source(test_dataset))


def _complete(config: Config, folder: RunFolder, train: Callable[[], Source], progress: ProgressLine) -> Config:
    """Write into the config what a run must not lose: the measured normalisation."""
    if config.data.mean is not None:
        return config
    if folder.exists():  # measured when the run began
        data = folder.config().data
        if data.mean is None or data.std is None:
            raise ConfigError(
                f"{folder}/config.yaml: data.mean and data.std are missing; the file was changed by hand."
            )
        return with_statistics(config, data.mean, data.std)

    def measured() -> list[list[float]]:
        grid = config.geometry.build().grid
        moments = measure(train(), seed=config.seed, workers=config.data.workers, grid=grid)
        std = data_std(moments, modality_of(config))
        progress.note(
            f"normalisation measured on {moments.count} samples: mean {[round(m, 4) for m in moments.mean]}, "
            f"std {[round(s, 4) for s in std]}"
        )
        return [list(moments.mean), list(std)]

    mean, std = distributed.done_once(measured)
    return with_statistics(config, mean, std)
