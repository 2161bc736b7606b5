"""`bridle detokenizer`: train a network from a run's codes back to its inputs, measure it on held-out items.

RUN/detokenizer/iterR/    config.yaml, metrics.jsonl, checkpoints; result.json: the error for every number of stages

The run's own networks are only read. The same command continues an interrupted training.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from rich.table import Table

from bridle import distributed
from bridle.config import Config, differences, with_absolute_paths
from bridle.console import ProgressLine, plain_table
from bridle.data.build import open_data
from bridle.data.loading.loader import require_even_shares
from bridle.errors import UsageError
from bridle.evaluate.reconstruction.measure import is_spectrogram, measure_errors, split_for_measuring
from bridle.evaluate.transfer import require_unchanged
from bridle.export.trained import Trained, read_trained
from bridle.machine import StopRequest
from bridle.models.build import build_detokenizer
from bridle.runs.callbacks import running
from bridle.runs.folder import RunFolder
from bridle.runs.reconstruction import RESULT, Reconstruction
from bridle.runs.results import write_record
from bridle.runs.trackers import open_trackers
from bridle.train.detokenizer_phase import DetokenizerNets, train_detokenizer
from bridle.train.run import Run, locked_by_first, open_machine

OWN = ("detokenizer.", "max_steps")  # settings of a detokenizer
MAY_CHANGE = (
    *(*OWN, "runtime."),
    *("data.root", "data.manifest", "data.workers", "data.cache_mb", "data.bad_share"),
)
SPECTROGRAM_SCALES = 3  # resolutions at which spectrograms are compared


def detokenizer_run(folder: Path, overrides: Sequence[str], *, iteration: int | None = None) -> Path:
    """Train the detokenizer of the last finished iteration (or `iteration`), or continue; returns the results file.

    A detokenizer that is there continues with its own settings unless overrides name some.
    """
    trained = read_trained(folder, iteration=iteration)
    if trained.own_tokenizer is None:
        raise UsageError(f"{folder}: this model has no tokenizer and so no codes; use a run with loss.target=codes.")
    run = RunFolder(folder)
    config = with_absolute_paths(run.config(overrides))
    require_unchanged(run.config(), config, MAY_CHANGE, reason="a detokenizer cannot change this")
    # The detokenizer learns the inputs as they are.
    config = config.model_copy(update={"augment": config.augment.model_copy(update={"enabled": False})})
    held = run.detokenizer(trained.facts.iteration)
    if held.exists() and not any(word.startswith(OWN) for word in overrides):
        own = held.config()
        config = config.model_copy(update={"detokenizer": own.detokenizer, "max_steps": own.max_steps})
    out = held.path
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
    changed = [line for line in found if line.startswith((*OWN, "seed"))]
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
    callbacks = open_trackers(config.log) if distributed.rank() == 0 else []
    nets = DetokenizerNets(build_detokenizer(config, iteration=iteration), tokenizer)
    run = Run(RunFolder(out), config, machine, held.train, nets, stop, progress, callbacks)
    with running(callbacks, out, config.model_dump(mode="json")):
        scales = SPECTROGRAM_SCALES if is_spectrogram(config) else 1
        detokenizer = train_detokenizer(run, iteration=iteration, scales=scales)
        with stop.leaving_at_once("the detokenizer is saved, its error is not measured yet."):
            found = measure_errors(detokenizer, tokenizer, held, config, iteration=iteration, device=machine.device)
        distributed.done_once(lambda: write_record(out / RESULT, found))


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
