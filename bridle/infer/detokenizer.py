"""`bridle detokenizer`: train a network from a run's codes back to its inputs, measure it on held-out items, load it.

RUN/detokenizer/iterR/    config.yaml, metrics.jsonl, checkpoints; result.json: the error for every number of stages

The run's own networks are only read. The same command continues an interrupted training.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import log2, log10
from pathlib import Path
from typing import NamedTuple

import torch
from pydantic import BaseModel, ConfigDict
from rich.table import Table

from bridle import distributed
from bridle.config import Config, differences, with_absolute_paths
from bridle.console import ProgressLine, plain_table
from bridle.data.build import open_data
from bridle.data.loading.loader import require_even_shares, sequential
from bridle.data.modality import modality_of
from bridle.data.sources import Source, Splits
from bridle.data.subset import subset_of
from bridle.errors import CheckpointError, ConfigError, UsageError, quoted
from bridle.export.load import Trained, read_trained
from bridle.files import read_json, write_json
from bridle.machine import StopRequest
from bridle.models.build import build_detokenizer
from bridle.models.detokenizer import Detokenizer, prefix_vectors
from bridle.models.tokenizer import Tokenizer
from bridle.nn.patch import patchify
from bridle.runs.checkpoint import load as load_checkpoint
from bridle.runs.folder import RunFolder
from bridle.runs.metrics import tensorboard_if_installed
from bridle.train.algorithm1 import load_modules
from bridle.train.detokenizer import DetokenizerNets, train_detokenizer
from bridle.train.engine import move
from bridle.train.run import Run, locked_by_first, open_machine

RESULT = "result.json"
MAY_CHANGE = (
    "detokenizer.",
    "runtime.",
    "data.root",
    "data.manifest",
    "data.workers",
    "data.cache_mb",
    "data.bad_share",
)
SPECTROGRAM_SCALES = 3  # resolutions at which spectrograms are compared
DECIBEL = 10 / 2.302585092994046  # of one unit of natural logarithm of power
HELD_OUT = 10  # of so many training items one is kept for measuring where there is no test split


class StageError(BaseModel):
    """What is lost when the first `stages` stages are decoded, over all real values of the held-out items."""

    model_config = ConfigDict(frozen=True)

    stages: int
    bits_per_token: float
    explained: float  # 1 − mean squared error / variance of the input
    psnr: float | None = None  # dB, for inputs in 0 … 1
    log_spectral_distance: float | None = None  # dB, for log-mel features


class Reconstruction(BaseModel):
    """What result.json of a detokenizer holds."""

    model_config = ConfigDict(frozen=True)

    iteration: int
    items: int
    held_out: str  # where the measured items come from: test, or train items that were held back
    by_stages: tuple[StageError, ...]


class Held(NamedTuple):
    """Items for training a detokenizer and for measuring it."""

    train: Source
    test: Source
    name: str


def detokenizer_run(folder: Path, overrides: Sequence[str], *, iteration: int | None = None) -> Path:
    """Train the detokenizer of the last finished iteration (or `iteration`), or continue; returns the results file."""
    trained = read_trained(folder, iteration=iteration)
    if trained.own_tokenizer is None:
        raise UsageError(f"{folder}: this model has no tokenizer and so no codes; use a run with loss.target=codes.")
    run = RunFolder(folder)
    config = with_absolute_paths(run.config(overrides))
    for line in differences(with_absolute_paths(run.config()), config):
        if not line.startswith(MAY_CHANGE):
            raise ConfigError(f"{line}: a detokenizer cannot change this; it may change {', '.join(MAY_CHANGE)}.")
    # The detokenizer learns the inputs as they are.
    config = config.model_copy(update={"augment": config.augment.model_copy(update={"enabled": False})})
    out = run.detokenizer(trained.facts.iteration).path
    with distributed.process_group(device=config.runtime.device, timeout_minutes=config.runtime.timeout_minutes):
        require_even_shares(config.detokenizer.batch, distributed.world_size(), key="detokenizer.batch")
        distributed.done_once(partial(prepare, out, config))
        if not distributed.done_once((out / RESULT).is_file):
            with locked_by_first(RunFolder(out)), StopRequest().listening() as stop:
                train_and_measure(out, config, trained, stop)
    return out / RESULT


def prepare(out: Path, config: Config) -> None:
    """Create the folder; UsageError if it holds a detokenizer with other settings."""
    out.mkdir(parents=True, exist_ok=True)
    found = differences(RunFolder(out).config(), config) if RunFolder(out).exists() else []
    changed = [line for line in found if line.startswith(("detokenizer.", "seed"))]
    if changed:
        raise UsageError(
            f"{out} holds a detokenizer with other settings ({'; '.join(changed[:4])}); delete it to train another."
        )


def train_and_measure(out: Path, config: Config, trained: Trained, stop: StopRequest) -> None:
    """Train to the end, then write the error for every number of stages to result.json."""
    tokenizer, iteration = trained.own_tokenizer, trained.facts.iteration
    assert tokenizer is not None
    distributed.done_once(lambda: RunFolder(out).write_settings(config))
    machine, progress = open_machine(config.runtime), ProgressLine()
    held = split_for_measuring(open_data(config))
    callbacks = tensorboard_if_installed(out) if distributed.rank() == 0 else []
    nets = DetokenizerNets(build_detokenizer(config, iteration=iteration), tokenizer)
    run = Run(RunFolder(out), config, machine, held.train, nets, stop, progress, callbacks)
    for callback in callbacks:
        callback.on_start(folder=out, config=config.model_dump(mode="json"))
    try:
        scales = SPECTROGRAM_SCALES if is_spectrogram(config) else 1
        detokenizer = train_detokenizer(run, iteration=iteration, scales=scales)
        with stop.leaving_at_once("the detokenizer is saved, its error is not measured yet."):
            found = measure(detokenizer, tokenizer, held, run, iteration)
        distributed.done_once(lambda: write_json(out / RESULT, found.model_dump(mode="json")))
    finally:
        for callback in callbacks:
            callback.on_end()


def is_spectrogram(config: Config) -> bool:
    """Are the inputs log-mel features?"""
    return modality_of(config).drawing_of(config.geometry.build()) == "spectrogram"


def split_for_measuring(splits: Splits) -> Held:
    """The test split for measuring, or every tenth training item."""
    if splits.test is not None:
        return Held(splits.train, splits.test, "test")
    count = len(splits.train)
    test = list(range(0, count, HELD_OUT))
    train = [i for i in range(count) if i % HELD_OUT] or test
    return Held(subset_of(splits.train, train), subset_of(splits.train, test), "held-out train items")


@torch.no_grad()
def measure(
    detokenizer: Detokenizer, tokenizer: Tokenizer, held: Held, run: Run[DetokenizerNets], iteration: int
) -> Reconstruction:
    """Errors on the first `detokenizer.items` held-out items, for every number of stages."""
    config, device = run.config, run.machine.device
    sizes, patch = config.quantizer.sizes, config.geometry.build().patch
    stds = torch.tensor(config.data.std, device=device)
    std = stds.repeat_interleave(detokenizer.geometry.patch_features // len(stds))  # (F,), features are (C, *patch)
    errors = torch.zeros(len(sizes), dtype=torch.float64)
    scaled = torch.zeros(len(sizes), dtype=torch.float64)
    spread = count = 0.0
    items = min(config.detokenizer.items, len(held.test))
    some, (mean, scale) = subset_of(held.test, list(range(items))), config.data.statistics
    for batch in sequential(some, batch=config.detokenizer.batch, mean=mean, std=scale):  # un-augmented, normalised
        x = move(batch, device)
        patches = patchify(x.x, patch)  # (B, T, F)
        real = torch.ones(patches.shape[:2], dtype=torch.bool, device=device) if x.valid is None else x.valid
        codes = tokenizer.tokenize(x.x, valid=x.valid)
        spread += float(patches[real].double().square().sum())
        count += patches[real].numel()
        for m in range(1, len(sizes) + 1):
            stages = torch.full((len(codes),), m, device=device)
            guess = detokenizer(prefix_vectors(tokenizer.quantizer, codes, stages), stages=stages, valid=x.valid)
            difference = (patchify(guess, patch) - patches)[real].double()
            errors[m - 1] += float(difference.square().sum())
            scaled[m - 1] += float((difference * std).square().sum())
    rows = []
    for m in range(1, len(sizes) + 1):
        squared = float(scaled[m - 1]) / count  # mean squared error in the input's own units
        row = StageError(
            stages=m,
            bits_per_token=sum(log2(size) for size in sizes[:m]),
            explained=1 - float(errors[m - 1]) / spread,
            psnr=-10 * log10(max(squared, 1e-12)) if modality_of(config).is_unit_range else None,
            log_spectral_distance=DECIBEL * squared**0.5 if is_spectrogram(config) else None,
        )
        rows.append(row)
    return Reconstruction(iteration=iteration, items=items, held_out=held.name, by_stages=tuple(rows))


def read_detokenizer(folder: Path, config: Config, iteration: int, *, device: torch.device) -> Detokenizer:
    """The trained detokenizer of a run's iteration; UsageError names the command that trains one."""
    run = RunFolder(folder).detokenizer(iteration)
    ends = run.encoder_checkpoints(ends=True) if (run.path / RESULT).is_file() else []
    if not ends:
        raise UsageError(
            f"{folder}: no detokenizer for the codes of iteration {iteration}; train one with "
            f"`bridle detokenizer {quoted(folder)}`."
        )
    own = run.config()
    detokenizer = build_detokenizer(config.model_copy(update={"detokenizer": own.detokenizer}), iteration=iteration)
    load_modules({"detokenizer": detokenizer}, load_checkpoint(ends[-1]))
    return detokenizer.requires_grad_(False).eval().to(device)


def read_result(path: Path) -> Reconstruction:
    """What was measured of a detokenizer."""
    try:
        return Reconstruction.model_validate(read_json(path))
    except ValueError as error:
        raise CheckpointError(f"{quoted(path)} is damaged; delete it and run `bridle detokenizer` again.") from error


def reconstruction_table(found: Reconstruction) -> Table:
    """The errors as a table for the terminal."""
    table = plain_table("stages", "bits a token", "explained %", "PSNR dB", "log-spectral distance dB")
    for column in table.columns:
        column.justify = "right"
    for row in found.by_stages:
        other = ("–" if value is None else f"{value:.1f}" for value in (row.psnr, row.log_spectral_distance))
        table.add_row(str(row.stages), f"{row.bits_per_token:g}", f"{100 * row.explained:.1f}", *other)
    table.caption = f"{found.items} {'test items' if found.held_out == 'test' else found.held_out}"
    return table
